"""``podrun estimate MODEL --target pod16 --train``: fit, throughput and bottleneck without running.

The command line alone: what reads models is imported when there is one to read, so that --help and a shell's completion
answer at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS, FiniteNumber, PodName, run_command
from podrun.core.errors import PodrunError
from podrun.core.terminal import show_error

if TYPE_CHECKING:
    from podrun.estimate.answer import EstimateRequest

SCHEMA = "podrun.estimate"
SCHEMA_VERSION = 2
DOES_NOT_FIT = 1
"""Exit code of a model, a program or a profile that does not fit the tiles."""
BAD_INPUT = 2
ROWS = 10


def _layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How the program lies on the system."""
    options = [
        click.option(
            "--micro-batch",
            type=int,
            metavar="N",
            help="Samples of a replica at once [what the model is written for].",
        ),
        click.option("--accumulation", type=int, metavar="N", help="Micro-batches to a weight update [1]."),
        click.option("--global-batch", type=int, metavar="N", help="Samples to a weight update, for --scan."),
        click.option("--ipus-per-replica", type=int, metavar="N", help="Pipeline stages [1]."),
        click.option("--recompute", is_flag=True, help="Recompute activations in the backward pass."),
        click.option("--optimizer", metavar="NAME", help="sgd, momentum, lars, adam or lamb [momentum]."),
        click.option("--state-off-chip", is_flag=True, help="Optimizer state in streaming memory."),
        click.option(
            "--shard-state",
            is_flag=True,
            help="Optimizer state cut over replicas (replicated tensor sharding).",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _product_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How products are planned on the tiles."""
    options = [
        click.option(
            "--available-memory-proportion",
            type=FiniteNumber(),
            default=0.6,
            metavar="SHARE",
            help="Of tile memory that a product may take while it runs, above 0 up to 1 [0.6].",
        ),
        click.option(
            "--partials-type",
            type=click.Choice(["float16", "float32"]),
            default="float16",
            help="Type of a product's partial sums on the tiles [float16].",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command(
    "podrun estimate",
    context_settings=HELP_OPTIONS,
    epilog="""\b
    Examples:
      podrun estimate model.onnx --target pod16 --train --micro-batch 16
      podrun estimate train.py --train --scan -- --epochs 1
      podrun estimate net.py:Net --input 8x3x32x32""",
)
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS...]")
@click.option(
    "--input",
    multiple=True,
    metavar="SHAPE",
    help="Of a module or model, once for each: 8x3x32x32 or 4x128:int64.",
)
@click.option(
    "--target",
    type=PodName(),
    default="pod16",
    metavar="NAME",
    help="A machine or POD: pod16, bow-pod64, ipu-m2000 ... [pod16]; another chip supposed: "
    "pod16:tiles=2944,tile_kib=312 (also clock_ghz, exchange_bytes, link_gbps).",
)
@click.option("--train", is_flag=True, help="Training; otherwise inference.")
@_layout_options
@click.option("--strict", is_flag=True, help="Refuse equations that no tile planner knows.")
@_product_options
@click.option("--scan", is_flag=True, help="Try layouts and list the best; options that are given stay.")
@click.option("--top", type=int, metavar="N", help=f"Rows of a scan [{ROWS}].")
@click.option("--format", type=click.Choice(["text", "json"]), default="text", help="Of the answer [text].")
def estimate_command(**options: Any) -> int:
    """Fit, throughput and bottleneck of a model on a POD, without running it.

    MODEL is an ONNX file; the folder of a SavedModel; a PyTorch or TensorFlow program (train.py), of which the first
    model that it compiles is taken; or a torch module or Keras model in a file of Python (net.py:NAME). The first
    dimension of inputs is the batch. What follows -- are arguments of a program.
    """
    from podrun.estimate.answer import EstimateRequest, answer
    from podrun.estimate.text import estimate_text, scan_table

    request = EstimateRequest(**options)
    try:
        estimates = answer(request)
    except (
        PodrunError
    ) as error:  # Whatever its exit code elsewhere: 1 means here that the model does not fit.
        show_error("podrun estimate", error)
        return BAD_INPUT
    if request.format == "json":
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "target": request.target,
            "training": request.train,
            "estimates": [one.to_dict() for one in estimates[: request.top or ROWS]],
        }
        print(json.dumps(document, indent=1))
    else:
        print(scan_table(estimates, request.top or ROWS) if request.scan else estimate_text(estimates[0]))
    if estimates[0].fits:
        return 0
    print(f"hint: {_to_fit(request)}", file=sys.stderr)
    return DOES_NOT_FIT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: returns 0, `DOES_NOT_FIT` if not even the best layout fits, or `BAD_INPUT`."""
    return run_command(estimate_command, argv)


def _to_fit(request: EstimateRequest) -> str:
    """What to try for a model that does not fit."""
    if not request.scan:
        return "--scan tries layouts and lists those that fit."
    ways = ["a POD with more IPUs (--target)", "fewer samples at once (--micro-batch)"]
    return f"No layout that was tried fits. Try {' or '.join(ways)}" + (
        ", or --state-off-chip." if request.train and not request.state_off_chip else "."
    )
