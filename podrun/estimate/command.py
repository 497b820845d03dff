"""``podrun estimate MODEL --target pod16 --train``: fit, throughput and bottleneck without running."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from podrun.device.target import System, system
from podrun.device.tiles.strict import check_planned
from podrun.errors import ConfigError, PodrunError, UsageError
from podrun.estimate.layouts import ACCUMULATIONS, scan
from podrun.estimate.model import Estimate, Layout, check_layout, estimate, model_batch, trace

if TYPE_CHECKING:
    import onnx

SCHEMA = "podrun.estimate"
SCHEMA_VERSION = 2
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


def load_model(path: Path) -> onnx.ModelProto:
    """The ONNX model in a file.

    Raises:
        ConfigError: there is no such file, or it holds no model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise ConfigError(f"there is no file {path}", hint=f"Look for one: ls {path.parent}")
    try:
        model = onnx.load(str(path))
    except (DecodeError, onnx.checker.ValidationError, OSError, ValueError) as error:
        raise ConfigError(f"{path} holds no ONNX model that can be read: {error}") from error
    if not model.graph.node:
        raise ConfigError(f"{path} holds no ONNX model: its graph has no operators")
    return model


def show(found: Estimate) -> str:
    """One estimate as text."""
    layout, total = found.layout, sum(found.seconds.values())
    lines = [
        f"{found.samples_per_second:,.0f} samples/s on {found.replicas} replicas of "
        f"{layout.ipus_per_replica} IPU(s), micro-batch {layout.micro_batch}, accumulation "
        f"{layout.accumulation} (batch of {found.samples:,} samples)"
        + (", recomputing" if layout.recompute else ""),
        f"Fullest tile {found.max_tile_bytes:,} of {found.tile_bytes:,} B: "
        + ("fits" if found.fits else "DOES NOT FIT"),
        f"One batch {total * 1e3:,.3f} ms; bottleneck: {found.bottleneck}",
    ]
    lines += [f"  {n:<15}{s * 1e3:>12,.3f} ms {s / total:>6.1%}" for n, s in found.seconds.items() if s]
    lines += _ipus(found)
    lines += [f"Bounded, no planner: {name} x {entry['count']}" for name, entry in found.bounds.items()]
    return "\n".join([*lines, "Modelled, not measured: see docs/fidelity.md."])


def _ipus(found: Estimate) -> list[str]:
    lines = [f"{'IPU':>5}{'layers':>8}{'cycles':>14}{'tile B':>10}  largest contents"]
    for number, ipu in enumerate(found.ipus):
        ranked = sorted(ipu.bytes_by_content.items(), key=lambda item: (-item[1], item[0]))
        held = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in ranked[:3] if size)
        lines.append(f"{number:>5}{ipu.layers:>8}{ipu.cycles:>14,}{ipu.max_tile_bytes:>10,}  {held}")
        if len(found.ipus) > 1:
            lines.append(f"{'':13}{ipu.first_layer} ... {ipu.last_layer}")
    return lines


def table(found: Sequence[Estimate], top: int) -> str:
    """The best layouts of a scan, and the best of them in full."""
    lines = [
        f"{'micro':>6}{'accum':>7}{'IPUs':>6}{'recompute':>11}{'batch':>9}{'samples/s':>13}{'tile B':>11}  "
        "fits  "
        "bottleneck"
    ]
    for one in found[:top]:
        layout = one.layout
        lines.append(
            f"{layout.micro_batch:>6}{layout.accumulation:>7}{layout.ipus_per_replica:>6}"
            f"{'yes' if layout.recompute else 'no':>11}{one.samples:>9,}{one.samples_per_second:>13,.0f}"
            f"{one.max_tile_bytes:>11,}  {'yes' if one.fits else 'no':<4}  {one.bottleneck}"
        )
    return "\n".join([*lines, "", f"Best of {len(found)}:", show(found[0])])


class _Parser(argparse.ArgumentParser):
    """argparse that raises as podrun does."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="podrun estimate --help lists all options.")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(prog="podrun estimate", description=__doc__, allow_abbrev=False)
    made.add_argument("model", type=Path, help="an ONNX file; the first dimension of inputs is the batch")
    made.add_argument("--target", default="pod16", help="a machine or POD: pod16, bow-pod64, ipu-m2000 ...")
    made.add_argument("--train", action="store_true", help="training; otherwise inference")
    made.add_argument(
        "--micro-batch",
        type=int,
        help="samples of a replica at once (default: what the model is written for)",
    )
    made.add_argument("--accumulation", type=int, help="micro-batches to a weight update (default: 1)")
    made.add_argument("--global-batch", type=int, help="samples to a weight update, for --scan")
    made.add_argument(
        "--ipus-per-replica", type=int, default=1, help="pipeline stages (default: %(default)s)"
    )
    made.add_argument("--recompute", action="store_true", help="recompute activations in the backward pass")
    made.add_argument(
        "--optimizer", default="momentum", help="sgd, momentum, lars, adam, lamb (default: %(default)s)"
    )
    made.add_argument("--state-off-chip", action="store_true", help="optimizer state in streaming memory")
    made.add_argument(
        "--shard-state",
        action="store_true",
        help="optimizer state cut over replicas (replicated tensor sharding)",
    )
    made.add_argument("--strict", action="store_true", help="refuse equations that no tile planner knows")
    made.add_argument("--available-memory-proportion", type=float, default=0.6)
    made.add_argument("--partials-type", choices=("float16", "float32"), default="float16")
    made.add_argument("--scan", action="store_true", help="try layouts and list the best")
    made.add_argument("--top", type=int, default=10, help="rows of a scan (default: %(default)s)")
    made.add_argument("--format", choices=("text", "json"), default="text")
    return made


def answer(options: argparse.Namespace) -> list[Estimate]:
    """The estimates that a command line asks for, best first. Raises PodrunError."""
    if options.top < 1:
        raise UsageError(f"--top must be at least 1, not {options.top}")
    if options.global_batch is not None and (not options.scan or not options.train):
        raise UsageError("--global-batch goes with --scan and --train", hint="Else give --accumulation.")
    if options.global_batch is not None and options.accumulation is not None:
        raise UsageError("--global-batch and --accumulation exclude each other", hint="Keep one of them.")
    target = system(options.target)
    layout = Layout(
        1 if options.micro_batch is None else options.micro_batch,
        1 if options.accumulation is None else options.accumulation,
        options.ipus_per_replica,
        options.recompute,
        options.optimizer,
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


def _found(options: argparse.Namespace, target: System, layout: Layout) -> list[Estimate]:
    model = load_model(options.model)
    own = model_batch(model)
    if options.micro_batch is None:
        layout = replace(layout, micro_batch=own or 1)
    if not options.scan:
        traced = trace(model, target.chip, layout, train=options.train)
        return [estimate(traced, target, layout, train=options.train)]
    return scan(
        model,
        target,
        layout,
        train=options.train,
        micro_batches=sorted({*MICRO_BATCHES, layout.micro_batch})
        if options.micro_batch is None
        else (options.micro_batch,),
        accumulations=ACCUMULATIONS if options.accumulation is None else (options.accumulation,),
        global_batch=options.global_batch,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Answer; 0, or 2 for bad input."""
    try:
        options = parser().parse_args(argv)
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
            "estimates": [one.to_dict() for one in found[: options.top]],
        }
        print(json.dumps(document, indent=1))
    else:
        print(table(found, options.top) if options.scan else show(found[0]))
    return 0
