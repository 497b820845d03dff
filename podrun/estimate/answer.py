"""The estimates that a command line asks for: its options are checked, its model is read, and one layout or many are
estimated.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from podrun.core.environment import PODRUN_PROGRESS, environment
from podrun.core.errors import ConfigError, UsageError
from podrun.core.program_files import as_program
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import reporting
from podrun.costmodel.batch import BatchWork
from podrun.costmodel.report_checks import check_planned
from podrun.costmodel.target import System, system
from podrun.estimate.layout import ProgramLayout, check_layout
from podrun.estimate.model import Choices, Estimate, estimate, planned_batch, scan
from podrun.estimate.tracing import ModelSource, OnnxModel, load_onnx_file, trace_model

_TRAINING = ("accumulation", "recompute", "optimizer", "state_off_chip", "shard_state", "global_batch")
"""Options that have a meaning only in training."""


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """The options of a command line; None: not given."""

    model: Path
    arguments: tuple[str, ...]
    input: tuple[str, ...]
    target: str
    train: bool
    micro_batch: int | None
    accumulation: int | None
    global_batch: int | None
    ipus_per_replica: int | None
    recompute: bool
    optimizer: str | None
    state_off_chip: bool
    shard_state: bool
    strict: bool
    available_memory_proportion: float
    partials_type: str
    scan: bool
    top: int | None
    format: str


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


def _model(request: EstimateRequest) -> ModelSource:
    """The model of a file or folder."""
    text = os.fspath(request.model)
    path, name = (text, "") if Path(text).exists() else text.rpartition(":")[::2]
    chosen = Path(path or text)
    if chosen.is_dir() and (chosen / "saved_model.pb").is_file():
        _serve_tensorflow(chosen)
        from podrun.tensorflow.execution import estimating as tensorflow_models

        return tensorflow_models.saved_model_source(chosen, request.input)
    if chosen.suffix != ".py":
        if request.input or request.arguments:
            raise UsageError(
                "--input and arguments after -- are for files of Python and SavedModels",
                hint="An ONNX file says its inputs itself: leave them out.",
            )
        return OnnxModel(load_onnx_file(request.model))
    if not chosen.is_file():
        raise ConfigError(f"there is no file {chosen}", hint=f"Look for one: ls {chosen.parent}")
    return _model_of_program(request, chosen, name)


def _model_of_program(request: EstimateRequest, path: Path, name: str) -> ModelSource:
    """The model that a file of Python defines by a name, or that its program uses first."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if not name and _imports("popart", text) and "poptorch" not in text:
        raise UsageError(
            f"{path} is a PopART program, whose model exists while it runs",
            hint=f"podrun profile {path} runs it and reports the same. Or save its model, and estimate that: "
            "builder.saveModelProto('model.onnx')",
        )
    if _imports("tensorflow|tf_keras|keras", text) and not _imports("poptorch|torch", text):
        _serve_tensorflow(path)
        from podrun.tensorflow.execution import estimating as tensorflow_models

        if name:
            return tensorflow_models.keras_source(path, name, request.input, train=request.train)
        return tensorflow_models.first_step_source(path, request.arguments, train=request.train)
    from podrun.poptorch.compile import estimating as torch_models

    if name:
        return torch_models.module_source(path, name, request.input)
    return torch_models.program_source(path, request.arguments, train=request.train)


def _serve_tensorflow(path: Path) -> None:
    """Import TensorFlow as programs of podrun have it. ConfigError where there is none that podrun knows."""
    try:
        with as_program(path):
            importlib.import_module("tensorflow")
    except ImportError as error:
        raise ConfigError(str(error), hint="pip install 'podrun[tensorflow]'") from None


def _imports(names: str, text: str) -> bool:
    """Whether a program imports one of these packages (a pattern)."""
    pattern = rf"^\s*(from\s+({names})\b|import\b[^#\n]*\b({names})\b)"
    return re.search(pattern, text, re.MULTILINE) is not None


def _estimates(request: EstimateRequest, target: System, layout: ProgramLayout) -> list[Estimate]:
    model = _model(request)
    accumulation: int | None = getattr(model, "accumulation", None)  # Of sources that are programs.
    if request.accumulation is None and accumulation and not request.scan:
        layout = replace(layout, accumulation=accumulation)
    if request.micro_batch is None:
        layout = replace(layout, micro_batch=model.micro_batch or 1)
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
