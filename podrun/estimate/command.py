"""``python -m podrun.estimate MODEL --target pod16 --train``: fit, throughput and bottleneck without running."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.device.target import system
from podrun.errors import ConfigError, PodrunError
from podrun.estimate.model import Estimate, Layout, estimate, scan, trace

if TYPE_CHECKING:
    import onnx


def load_model(path: Path) -> onnx.ModelProto:
    """The ONNX model in a file.

    Raises:
        ConfigError: there is no such file, or it holds no model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        return onnx.load(str(path))
    except DecodeError as error:
        raise ConfigError(f"{path} holds no ONNX model: {error}") from error


def show(found: Estimate) -> str:
    """One estimate as text."""
    layout, total = found.layout, sum(found.seconds.values())
    lines = [
        f"{found.samples_per_second:,.0f} samples/s on {found.replicas} replicas of {layout.ipus_per_replica} IPU(s), "
        f"micro-batch {layout.micro_batch}, accumulation {layout.accumulation}"
        + (", recomputing" if layout.recompute else ""),
        f"Fullest tile {found.max_tile_bytes:,} of {found.tile_bytes:,} B: "
        + ("fits" if found.fits else "DOES NOT FIT"),
        f"One batch {total * 1e3:,.3f} ms; most of it: {found.bottleneck}",
    ]
    lines += [f"  {n:<12}{s * 1e3:>12,.3f} ms {s / total:>6.1%}" for n, s in found.seconds.items() if s]
    lines += [f"Bounded, no planner: {name} x {entry['count']}" for name, entry in found.bounds.items()]
    return "\n".join([*lines, "Modelled, not measured: see docs/fidelity.md."])


def table(found: Sequence[Estimate], top: int) -> str:
    """The best layouts of a scan."""
    lines = [
        f"{'micro':>6}{'accum':>7}{'IPUs':>6}{'recompute':>11}{'samples/s':>14}{'tile B':>10}  fits  bottleneck"
    ]
    for one in found[:top]:
        layout = one.layout
        lines.append(
            f"{layout.micro_batch:>6}{layout.accumulation:>7}{layout.ipus_per_replica:>6}"
            f"{'yes' if layout.recompute else 'no':>11}{one.samples_per_second:>14,.0f}{one.max_tile_bytes:>10,}"
            f"  {'yes ' if one.fits else 'no  '}  {one.bottleneck}"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="podrun estimate", description=__doc__)
    made.add_argument("model", type=Path)
    made.add_argument("--target", default="pod16", help="a machine or POD: pod16, bow-pod64, ipu-m2000 ...")
    made.add_argument("--train", action="store_true", help="training; otherwise inference")
    made.add_argument("--micro-batch", type=int, default=1)
    made.add_argument("--accumulation", type=int, default=1)
    made.add_argument("--global-batch", type=int, help="samples per weight update, for --scan")
    made.add_argument("--ipus-per-replica", type=int, default=1)
    made.add_argument("--recompute", action="store_true")
    made.add_argument("--optimizer", default="momentum")
    made.add_argument("--state-off-chip", action="store_true")
    made.add_argument("--available-memory-proportion", type=float, default=0.6)
    made.add_argument("--partials-type", choices=("float16", "float32"), default="float16")
    made.add_argument("--scan", action="store_true", help="try layouts and list the best")
    made.add_argument("--top", type=int, default=10)
    made.add_argument("--format", choices=("text", "json"), default="text")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Answer; 0, or 2 for bad input."""
    options = parser().parse_args(argv)
    layout = Layout(
        options.micro_batch,
        options.accumulation,
        options.ipus_per_replica,
        options.recompute,
        options.optimizer,
        options.state_off_chip,
        options.partials_type,
        options.available_memory_proportion,
    )
    try:
        target, model = system(options.target), load_model(options.model)
        if options.scan:
            found = scan(model, target, layout, train=options.train, global_batch=options.global_batch)
        else:
            found = [
                estimate(
                    trace(model, target.chip, layout, train=options.train),
                    target,
                    layout,
                    train=options.train,
                )
            ]
    except PodrunError as error:
        print(f"error: {error}" + (f"\n{error.hint}" if error.hint else ""), file=sys.stderr)
        return 2
    if options.format == "json":
        print(
            json.dumps({"version": 1, "estimates": [one.to_dict() for one in found[: options.top]]}, indent=1)
        )
    elif options.scan:
        print(table(found, options.top))
    else:
        print(show(found[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
