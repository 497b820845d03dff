"""``podrun estimate MODEL --target pod16 --train``: fit, throughput and bottleneck without running."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from podrun.core.environment import environment
from podrun.core.errors import ConfigError, PodrunError, UsageError
from podrun.core.terminal import reporting
from podrun.costmodel.cost import check_planned
from podrun.costmodel.target import System, system
from podrun.estimate.layout import ProgramLayout, check_layout
from podrun.estimate.model import Choices, Estimate, estimate, scan
from podrun.estimate.tracing import OnnxModel, load_model, trace
from podrun.report.document import Parser
from podrun.report.text import counted, printable, size, unit_of_time

SCHEMA = "podrun.estimate"
SCHEMA_VERSION = 2
DOES_NOT_FIT = 1
"""Exit code of a model, a program or a profile that does not fit the tiles; bad input is 2."""
ROWS = 10
MODULES_SHOWN = 8
_TRAINING = ("accumulation", "recompute", "optimizer", "state_off_chip", "shard_state", "global_batch")
"""Options that have a meaning only in training."""


def show(found: Estimate) -> str:
    """One estimate as text."""
    layout, total = found.layout, sum(found.seconds.values())
    unit, of = unit_of_time(total)
    lines = [
        f"{'Training' if found.training else 'Inference'}: {found.samples_per_second:,.0f} samples/s on "
        f"{counted(found.replicas, 'replica')} of "
        f"{counted(layout.ipus_per_replica, 'IPU')}, micro-batch {layout.micro_batch}, accumulation "
        f"{layout.accumulation} (batch of {found.samples:,} samples)"
        + (", recomputing" if layout.recompute else ""),
        f"Fullest tile {size(found.max_tile_bytes)} of {size(found.tile_bytes)}: "
        + ("fits" if found.fits else "DOES NOT FIT"),
        f"One batch {total * of:,.3f} {unit}; bottleneck: {found.bottleneck}",
    ]
    lines += [f"  {n:<15}{s * of:>12,.3f} {unit} {s / total:>6.1%}" for n, s in found.seconds.items() if s]
    if waits := found.waiting_seconds:
        lines.append(
            f"  {waits * of:,.3f} {unit} of host: the wait around a run of one batch. Batches of one run follow "
            f"one another at {found.samples_per_second_in_a_run:,.0f} samples/s"
        )
    lines += _ipus(found)
    lines += _modules(found)
    lines += [f"Bounded, no planner: {name} x {entry['count']}" for name, entry in found.bounds.items()]
    return "\n".join(
        printable(line) for line in [*lines, "Modelled, not measured: podrun help fidelity says how well."]
    )


def _ipus(found: Estimate) -> list[str]:
    lines = [f"{'IPU':>5}{'layers':>8}{'cycles':>14}{'fullest tile':>14}  largest contents"]
    for number, ipu in enumerate(found.ipus):
        ranked = sorted(ipu.bytes_by_content.items(), key=lambda item: (-item[1], item[0]))
        held = ", ".join(f"{name.replace('_', ' ')} {size(octets)}" for name, octets in ranked[:3] if octets)
        lines.append(f"{number:>5}{ipu.layers:>8}{ipu.cycles:>14,}{size(ipu.max_tile_bytes):>14}  {held}")
        if len(found.ipus) > 1:
            lines.append(f"{'':13}{ipu.first_layer} ... {ipu.last_layer}")
    return lines


def _modules(found: Estimate) -> list[str]:
    """The modules that take most cycles; empty for a model with fewer than two modules."""
    if len(found.modules) < 2:
        return []
    total = sum(cycles for _, cycles, _ in found.modules) or 1
    ranked = sorted(found.modules, key=lambda item: -item[1])[:MODULES_SHOWN]
    return [f"{'cycles':>13}{'share':>8}{'weights':>12}  module (of {len(found.modules)})"] + [
        f"{cycles:>13,}{cycles / total:>8.1%}{size(weights):>12}  {name or '(the model itself)'}"
        for name, cycles, weights in ranked
    ]


def table(found: Sequence[Estimate], top: int) -> str:
    """The best layouts of a scan, and the best one in full. Of a layout with and without recomputation the better one
    is listed.
    """
    lines = [
        f"{'micro':>6}{'accum':>7}{'IPUs':>6}{'recompute':>11}{'batch':>9}{'samples/s':>13}{'fullest tile':>14}  "
        "fits  bottleneck"
    ]
    best: dict[ProgramLayout, Estimate] = {}
    for one in found:
        best.setdefault(replace(one.layout, recompute=False), one)
    for one in [*best.values()][:top]:
        layout = one.layout
        lines.append(
            f"{layout.micro_batch:>6}{layout.accumulation:>7}{layout.ipus_per_replica:>6}"
            f"{'yes' if layout.recompute else 'no':>11} {one.samples:>8,} {one.samples_per_second:>12,.0f}"
            f"{size(one.max_tile_bytes):>14}  {'yes' if one.fits else 'no':<4}  {one.bottleneck}"
        )
    return "\n".join([*lines, "", f"Best of {len(found)}:", show(found[0])])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = Parser(
        prog="podrun estimate",
        description="Fit, throughput and bottleneck of a model on a POD, without running it.",
        epilog="Examples:\n"
        "  podrun estimate model.onnx --target pod16 --train --micro-batch 16\n"
        "  podrun estimate train.py --train --scan -- --epochs 1\n"
        "  podrun estimate net.py:Net --input 8x3x32x32",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add(
        "model",
        type=Path,
        help="an ONNX file; a PyTorch program (train.py), of which the first model that it compiles is taken; or a "
        "module in a file of Python (net.py:NAME). The first dimension of inputs is the batch",
    )
    add(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE",
        help="of a module, once for each: 8x3x32x32 or 4x128:int64",
    )
    add(
        "--target",
        default="pod16",
        metavar="NAME",
        help="a machine or POD: pod16, bow-pod64, ipu-m2000 ... (default: %(default)s); another chip supposed: "
        "pod16:tiles=2944,tile_kib=312 (also clock_ghz, exchange_bytes, link_gbps)",
    )
    add("--train", action="store_true", help="training; otherwise inference")
    _add_layout(add)
    add("--strict", action="store_true", help="refuse equations that no tile planner knows")
    _add_products(add)
    add("--scan", action="store_true", help="try layouts and list the best; options that are given stay")
    add("--top", type=int, metavar="N", help=f"rows of a scan (default: {ROWS})")
    add("--format", choices=("text", "json"), default="text", help="of the answer (default: %(default)s)")
    made.set_defaults(arguments=[])
    return made


def _add_layout(add: Callable[..., object]) -> None:
    """How the program lies on the system."""
    add(
        "--micro-batch",
        type=int,
        metavar="N",
        help="samples of a replica at once (default: what the model is written for)",
    )
    add("--accumulation", type=int, metavar="N", help="micro-batches to a weight update (default: 1)")
    add("--global-batch", type=int, metavar="N", help="samples to a weight update, for --scan")
    add("--ipus-per-replica", type=int, metavar="N", help="pipeline stages (default: 1)")
    add("--recompute", action="store_true", help="recompute activations in the backward pass")
    add("--optimizer", metavar="NAME", help="sgd, momentum, lars, adam or lamb (default: momentum)")
    add("--state-off-chip", action="store_true", help="optimizer state in streaming memory")
    add(
        "--shard-state",
        action="store_true",
        help="optimizer state cut over replicas (replicated tensor sharding)",
    )


def _add_products(add: Callable[..., object]) -> None:
    """How products are planned on the tiles."""
    add(
        "--available-memory-proportion",
        type=float,
        default=0.6,
        metavar="SHARE",
        help="of tile memory that a product may take while it runs, above 0 up to 1 (default: %(default)s)",
    )
    add(
        "--partials-type",
        choices=("float16", "float32"),
        default="float16",
        help="type of a product's partial sums on the tiles (default: %(default)s)",
    )


def answer(options: argparse.Namespace) -> list[Estimate]:
    """The estimates that a command line asks for, best first. Raises PodrunError."""
    _check_options(options)
    target = system(options.target)
    layout = ProgramLayout(
        1 if options.micro_batch is None else options.micro_batch,
        1 if options.accumulation is None else options.accumulation,
        1 if options.ipus_per_replica is None else options.ipus_per_replica,
        options.recompute,
        options.optimizer or "momentum",
        options.state_off_chip,
        options.shard_state,
        options.partials_type,
        options.available_memory_proportion,
    )
    check_layout(target, layout)
    found = _found(options, target, layout)
    if options.strict:
        check_planned([found[0].bounds])
    return found


def _check_options(options: argparse.Namespace) -> None:
    """Raise UsageError for options that exclude each other, or would have no effect."""
    for name in ("top", "global_batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be at least 1, not {value}", hint=f"As in --{option} 16.")
    if options.top is not None and not options.scan:
        raise UsageError("--top goes with --scan", hint="Add --scan, or leave it out.")
    if options.global_batch is not None and (not options.scan or not options.train):
        raise UsageError("--global-batch goes with --scan and --train", hint="Else give --accumulation.")
    if options.global_batch is not None and options.accumulation is not None:
        raise UsageError("--global-batch and --accumulation exclude each other", hint="Keep one of them.")
    alone = [f"--{name.replace('_', '-')}" for name in _TRAINING if getattr(options, name)]
    if alone and not options.train:
        raise UsageError(f"{alone[0]} means nothing in inference", hint="Add --train, or leave it out.")


def _model(options: argparse.Namespace) -> tuple[Any, int | None]:
    """The model of a file, and the micro-batch that it is written for."""
    text = os.fspath(options.model)
    path, name = (text, "") if Path(text).is_file() else text.rpartition(":")[::2]
    if not (path or text).endswith(".py"):
        if options.input or options.arguments:
            raise UsageError(
                "--input and arguments after -- are for files of Python",
                hint="An ONNX file says its inputs itself: leave them out.",
            )
        model = OnnxModel(load_model(options.model))
        return model, model.micro_batch
    if not Path(path or text).is_file():
        raise ConfigError(f"there is no file {path or text}", hint=f"Look for one: ls {Path(path).parent}")
    if not name and _is_popart(Path(path or text)):
        raise UsageError(
            f"{path or text} is a PopART program, whose model exists while it runs",
            hint=f"podrun profile {path or text} runs it and reports the same. Or save its model, and estimate that: "
            "builder.saveModelProto('model.onnx')",
        )
    from podrun.poptorch import estimating

    if name:
        source = estimating.module_source(Path(path), name, options.input)
    else:
        source = estimating.program_source(Path(path), options.arguments, train=options.train)
    return source, source.micro_batch


def _is_popart(path: Path) -> bool:
    text = path.read_text(encoding="utf-8", errors="replace")
    return (
        re.search(r"^\s*(from\s+popart\b|import\b[^#\n]*\bpopart\b)", text, re.MULTILINE) is not None
        and "poptorch" not in text
    )


def _found(options: argparse.Namespace, target: System, layout: ProgramLayout) -> list[Estimate]:
    model, own = _model(options)
    if options.accumulation is None and getattr(model, "accumulation", None) and not options.scan:
        layout = replace(layout, accumulation=model.accumulation)
    if options.micro_batch is None:
        layout = replace(layout, micro_batch=own or 1)
    if not options.scan:
        with _progress("tracing the model"):
            traced = trace(model, target.chip, layout, train=options.train)
            return [estimate(traced, target, layout, train=options.train)]
    anything = Choices()
    choices = Choices(
        sorted({*anything.micro_batches, layout.micro_batch})
        if options.micro_batch is None
        else (options.micro_batch,),
        anything.accumulations if options.accumulation is None else (options.accumulation,),
        options.global_batch,
        None if options.ipus_per_replica is None else (options.ipus_per_replica,),
        (True,) if options.recompute else (False, True),
    )
    with _progress("trying layouts"):
        return scan(model, target, layout, choices, train=options.train)


def _progress(what: str) -> contextlib.AbstractContextManager[None]:
    """The live line of a terminal while a model is traced and layouts are tried; nothing elsewhere."""
    if sys.stderr is None or environment().get("PODRUN_PROGRESS") == "off":
        return contextlib.nullcontext()
    return reporting(what, sys.stderr, log_after=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: returns 0, `DOES_NOT_FIT` if not even the best layout fits, or 2 for bad input."""
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        at = words.index("--") if "--" in words else len(words)
        options = parser().parse_args(words[:at])
        options.arguments = words[at + 1 :]
        found = answer(options)
    except PodrunError as error:
        print(f"podrun: error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 2
    if options.format == "json":
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "target": options.target,
            "training": options.train,
            "estimates": [one.to_dict() for one in found[: options.top or ROWS]],
        }
        print(json.dumps(document, indent=1))
    else:
        print(table(found, options.top or ROWS) if options.scan else show(found[0]))
    if found[0].fits:
        return 0
    print(f"hint: {_to_fit(options)}", file=sys.stderr)
    return DOES_NOT_FIT


def _to_fit(options: argparse.Namespace) -> str:
    """What to try for a model that does not fit."""
    if not options.scan:
        return "--scan tries layouts and lists those that fit."
    ways = ["a POD with more IPUs (--target)", "fewer samples at once (--micro-batch)"]
    return f"No layout that was tried fits. Try {' or '.join(ways)}" + (
        ", or --state-off-chip." if options.train and not options.state_off_chip else "."
    )
