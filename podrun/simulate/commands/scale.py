"""``podrun scale MODEL``: what a larger POD gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.documents import check_outputs_writable, write_output
from podrun.core.errors import UsageError


@click.command(
    "podrun scale",
    context_settings=HELP_OPTIONS,
    epilog="""\b
    Examples:
      podrun scale model.onnx --pods pod16..pod64k --plan model.plan.json
      podrun scale model.plan.json --pods pod64,pod256,pod64k""",
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--pods", default="pod16..pod64k", metavar="A..B|A,B", help="Which PODs [pod16..pod64k].")
@click.option("--micro-batch", type=int, default=1, metavar="N", help="Samples of a replica at once [1].")
@click.option("--accumulation", type=int, default=1, metavar="N", help="Micro-batches to a batch [1].")
@click.option("--ipus-per-replica", type=int, default=1, metavar="N", help="Pipeline stages [1].")
@click.option("--plan", type=click.Path(path_type=Path), metavar="FILE", help="Keep the plan of the model.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures."
)
def scale_verb(
    model: Path,
    pods: str,
    micro_batch: int,
    accumulation: int,
    ipus_per_replica: int,
    plan: Path | None,
    json_file: Path | None,
) -> int:
    """Step time, efficiency and throughput after failures on PODs of any size.

    MODEL is an ONNX file, whose work is counted once, or a plan that --plan has kept.
    """
    from podrun.simulate.scaling import (
        FailureCosts,
        pods_named,
        points_json,
        read_scale_plan,
        scale_points,
        shown_points,
        write_scale_plan,
    )

    names = pods_named(pods)
    _check_replica(ipus_per_replica, names)
    if min(micro_batch, accumulation, ipus_per_replica) < 1:
        raise UsageError("a batch has at least one sample, on at least one IPU", hint="--micro-batch 1")
    check_outputs_writable(plan, json_file)
    if model.suffix == ".json":
        work, micro_batch = read_scale_plan(model)
    else:
        from podrun.estimate.answer import work_of_model
        from podrun.estimate.layout import ProgramLayout

        layout = ProgramLayout(micro_batch, accumulation, ipus_per_replica)
        work = work_of_model(model, "pod1024", layout)
    if plan is not None:
        write_scale_plan(plan, work, micro_batch)
    points = scale_points(work, micro_batch, names)
    click.echo(shown_points(points))
    if json_file is not None:
        text = json.dumps(points_json(points, FailureCosts()), indent=1)
        write_output(json_file, text + "\n")
    return 0


def _check_replica(ipus: int, pods: Sequence[str]) -> None:
    """Raise UsageError, before a model is read, for a replica that does not divide the smallest of the PODs."""
    from podrun.simulate.scaling import SIZES

    smallest = min(pods, key=lambda name: SIZES[name])
    if ipus > 0 and SIZES[smallest] % ipus:
        raise UsageError(
            f"{ipus} IPUs per replica do not divide the {SIZES[smallest]} IPUs of {smallest}",
            hint=f"Give a power of two up to {SIZES[smallest]}, or larger PODs (--pods pod64..pod64k).",
        )
