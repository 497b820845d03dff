"""The estimates that a command line asks for: its options are checked, its model is read, and one layout or many are
estimated.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from podrun.core.environment import PODRUN_PROGRESS, environment
from podrun.core.errors import ConfigError, UsageError
from podrun.core.terminal import reporting
from podrun.costmodel.batch import BatchWork
from podrun.costmodel.cost import check_planned
from podrun.costmodel.target import System, system
from podrun.estimate.command import EstimateRequest
from podrun.estimate.layout import ProgramLayout, check_layout
from podrun.estimate.model import Choices, Estimate, estimate, planned_batch, scan
from podrun.estimate.tracing import OnnxModel, load_onnx_file, trace_model

_TRAINING = ("accumulation", "recompute", "optimizer", "state_off_chip", "shard_state", "global_batch")
"""Options that have a meaning only in training."""


def answer(request: EstimateRequest) -> list[Estimate]:
    """The estimates that a command line asks for, best first. Raises PodrunError."""
    _check_options(request)
    target = system(request.target)
    layout = ProgramLayout(
        1 if request.micro_batch is None else request.micro_batch,
        1 if request.accumulation is None else request.accumulation,
        1 if request.ipus_per_replica is None else request.ipus_per_replica,
        request.recompute,
        request.optimizer or "momentum",
        request.state_off_chip,
        request.shard_state,
        request.partials_type,
        request.available_memory_proportion,
    )
    check_layout(target, layout)
    estimates = _estimates(request, target, layout)
    if request.strict:
        check_planned([estimates[0].bounds])
    return estimates


def work_of_model(path: Path, target: str, layout: ProgramLayout) -> BatchWork:
    """The work of a training batch of an ONNX file on a system. Raises PodrunError."""
    model, chosen = OnnxModel(load_onnx_file(path)), system(target)
    check_layout(chosen, layout)
    return planned_batch(trace_model(model, chosen.chip, layout, train=True), chosen, layout, train=True)


def _check_options(request: EstimateRequest) -> None:
    """Raise UsageError for options that exclude each other, or would have no effect."""
    for name in ("top", "global_batch"):
        value = getattr(request, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be at least 1, not {value}", hint=f"As in --{option} 16.")
    if request.top is not None and not request.scan:
        raise UsageError("--top goes with --scan", hint="Add --scan, or leave it out.")
    if request.global_batch is not None and (not request.scan or not request.train):
        raise UsageError("--global-batch goes with --scan and --train", hint="Else give --accumulation.")
    if request.global_batch is not None and request.accumulation is not None:
        raise UsageError("--global-batch and --accumulation exclude each other", hint="Keep one of them.")
    alone = [f"--{name.replace('_', '-')}" for name in _TRAINING if getattr(request, name)]
    if alone and not request.train:
        raise UsageError(f"{alone[0]} means nothing in inference", hint="Add --train, or leave it out.")


def _model(request: EstimateRequest) -> tuple[Any, int | None]:
    """The model of a file, and the micro-batch that it is written for."""
    text = os.fspath(request.model)
    path, name = (text, "") if Path(text).is_file() else text.rpartition(":")[::2]
    if not (path or text).endswith(".py"):
        if request.input or request.arguments:
            raise UsageError(
                "--input and arguments after -- are for files of Python",
                hint="An ONNX file says its inputs itself: leave them out.",
            )
        model = OnnxModel(load_onnx_file(request.model))
        return model, model.micro_batch
    if not Path(path or text).is_file():
        raise ConfigError(f"there is no file {path or text}", hint=f"Look for one: ls {Path(path).parent}")
    if not name and _is_popart(Path(path or text)):
        raise UsageError(
            f"{path or text} is a PopART program, whose model exists while it runs",
            hint=f"podrun profile {path or text} runs it and reports the same. Or save its model, and estimate that: "
            "builder.saveModelProto('model.onnx')",
        )
    from podrun.poptorch.compile import estimating

    if name:
        source = estimating.module_source(Path(path), name, request.input)
    else:
        source = estimating.program_source(Path(path), request.arguments, train=request.train)
    return source, source.micro_batch


def _is_popart(path: Path) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    return (
        re.search(r"^\s*(from\s+popart\b|import\b[^#\n]*\bpopart\b)", text, re.MULTILINE) is not None
        and "poptorch" not in text
    )


def _estimates(request: EstimateRequest, target: System, layout: ProgramLayout) -> list[Estimate]:
    model, own = _model(request)
    if request.accumulation is None and getattr(model, "accumulation", None) and not request.scan:
        layout = replace(layout, accumulation=model.accumulation)
    if request.micro_batch is None:
        layout = replace(layout, micro_batch=own or 1)
    if not request.scan:
        with _progress("tracing the model"):
            traced = trace_model(model, target.chip, layout, train=request.train)
            return [estimate(traced, target, layout, train=request.train)]
    anything = Choices()
    choices = Choices(
        sorted({*anything.micro_batches, layout.micro_batch})
        if request.micro_batch is None
        else (request.micro_batch,),
        anything.accumulations if request.accumulation is None else (request.accumulation,),
        request.global_batch,
        None if request.ipus_per_replica is None else (request.ipus_per_replica,),
        (True,) if request.recompute else (False, True),
    )
    with _progress("trying layouts"):
        return scan(model, target, layout, choices, train=request.train)


def _progress(what: str) -> contextlib.AbstractContextManager[None]:
    """The live line of a terminal while a model is traced and layouts are tried; nothing elsewhere."""
    if sys.stderr is None or environment().get(PODRUN_PROGRESS) == "off":
        return contextlib.nullcontext()
    return reporting(what, sys.stderr, log_after=None)
