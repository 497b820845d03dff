"""``podrun simulate JOBS``: what a queue does to the jobs of a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS, FiniteNumber, PodName, seconds_range
from podrun.core.documents import check_outputs_writable, write_output
from podrun.core.errors import UsageError
from podrun.simulate.counted_pool import POLICIES
from podrun.simulate.traces.reading import MAX_BROKEN, READERS

if TYPE_CHECKING:
    from podrun.simulate.queue_report import SimulateRequest


@click.command(
    "podrun simulate",
    context_settings=HELP_OPTIONS,
    epilog="""\b
    Examples:
      podrun simulate KTH-SP2.swf --processors 100 --policy easy
      podrun simulate jobs.csv --pod pod128 --scale 0.6 --json figures.json
      podrun simulate --generate jobs=2000,mean-gap-s=300,largest=64 --pod pod64""",
)
@click.argument("jobs", required=False, type=click.Path(path_type=Path))
@click.option("--processors", type=int, metavar="N", help="A pool of N processors that are only counted.")
@click.option("--pod", type=PodName(), metavar="NAME", help="podrun's own allocator and queue on a POD.")
@click.option(
    "--policy", type=click.Choice([*POLICIES, "podrun"]), help="Who is next [easy; podrun with --pod]."
)
@click.option(
    "--start",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Go on from a POD as it is: its partitions and its queue (vipu capture FILE).",
)
@click.option(
    "--serve",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Let a scheduler of your own serve the jobs on a virtual POD, over gRPC (0: a free port).",
)
@click.option(
    "--conformance",
    metavar="COMMAND",
    help="Say which rules a scheduler of your own breaks on a virtual POD.",
)
@click.option(
    "--patience",
    type=seconds_range(0.1),
    default=30.0,
    metavar="SECONDS",
    help="How long your scheduler may be silent [30].",
)
@click.option(
    "--scale", type=FiniteNumber(), default=1.0, metavar="S", help="Arrivals in S of their time [1]."
)
@click.option("--format", type=click.Choice(list(READERS)), help="Of JOBS [by its name and first line].")
@click.option("--clairvoyant", is_flag=True, help="As if everybody asked for the time that the job takes.")
@click.option("--generate", metavar="KEY=VALUE,...", help="Draw jobs instead of reading them.")
@click.option("--write-swf", type=click.Path(path_type=Path), metavar="FILE", help="Write the jobs drawn.")
@click.option(
    "--max-broken",
    type=FiniteNumber(),
    default=MAX_BROKEN,
    metavar="SHARE",
    help=f"Most lines that may make no sense [{MAX_BROKEN}].",
)
@click.option("--seed", type=int, default=1, metavar="N", help="Of all that is drawn [1].")
@click.option("--users", is_flag=True, help="Print the users, heaviest first.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures."
)
def simulate_verb(**options: Any) -> int:
    """Says how long the jobs of a log wait, on counted processors or on a POD under podrun's own allocator.

    JOBS: a log in Standard Workload Format, of sacct, Philly, Helios, Acme or Alibaba, or a table with the columns
    submit_s, run_s and size.
    """
    from podrun.simulate.queue_report import SimulateRequest, run_request, shown_figures, shown_users

    request = SimulateRequest(**options)
    check_outputs_writable(request.json_file, request.write_swf)
    if request.conformance is not None:
        return _judge(request)
    _check(request)
    report, warnings, users = run_request(request)
    for warning in warnings:
        click.echo(f"podrun simulate: {warning}", err=True)
    click.echo(shown_figures(report), nl=False)
    if request.users:
        click.echo(shown_users(users), nl=False)
    if request.json_file is not None:
        write_output(request.json_file, json.dumps(report, indent=1) + "\n")
    return 0


def _judge(request: SimulateRequest) -> int:
    """Judge a scheduler, by default on a POD16."""
    if request.jobs or request.generate or request.start or request.processors or request.serve is not None:
        raise UsageError("the conformance suite has its own jobs", hint='--conformance "COMMAND" --pod pod16')
    from podrun.core.cluster_file import load_cluster
    from podrun.simulate.conformance import conformance_run

    pod = load_cluster(request.pod or "pod16", simulated=True)
    report, code = conformance_run(
        request.conformance or "", pod, request.patience, lambda text: click.echo(text, nl=False)
    )
    if request.json_file is not None:
        write_output(request.json_file, json.dumps(report, indent=1) + "\n")
    return code


def _check(request: SimulateRequest) -> None:
    """Raise UsageError for options that contradict each other."""
    without_jobs = request.jobs is None and request.generate is None
    if (request.jobs is None) == (request.generate is None) and not (without_jobs and request.start):
        raise UsageError("one log is needed", hint="podrun simulate JOBS, or --generate jobs=1000")
    if request.start is not None and (request.processors is not None or request.pod is not None):
        raise UsageError(
            f"{request.start} says which POD it is", hint="Leave out --pod and --processors with --start."
        )
    if request.start is None and (request.processors is None) == (request.pod is None):
        raise UsageError(
            "either counted processors or a POD is needed",
            hint="--processors 128 --policy easy, or --pod pod128",
        )
    if request.processors is not None and request.processors < 1:
        raise UsageError(f"a pool of {request.processors} processors runs nothing", hint="--processors 128")
    if request.processors is not None and request.policy == "podrun":
        raise UsageError("podrun's own queue places partitions on a POD", hint="--pod pod128")
    if (request.pod or request.start) and request.policy not in (None, "podrun"):
        raise UsageError(
            f"a POD is served by podrun's own queue, not by {request.policy}",
            hint=f"--processors 128 --policy {request.policy}",
        )
    if request.serve is not None and request.pod is None:
        raise UsageError("a scheduler serves a POD", hint="podrun simulate JOBS --pod pod64 --serve 0")
    if not 0 < request.scale < float("inf"):
        raise UsageError(f"arrivals cannot be scaled by {request.scale:g}", hint="--scale 0.6")
    if not 0 <= request.max_broken <= 1:
        raise UsageError(f"{request.max_broken:g} is no share", hint="--max-broken 0.05")
