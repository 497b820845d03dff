"""``podrun chaos``: what failures cost a job of a POD, and which knob matters most."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS, FiniteNumber, PodName
from podrun.core.documents import check_outputs_writable, write_output
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.simulate.campaign_setup import CampaignSetup
    from podrun.simulate.chaos_report import Replication

MOST_REPLICATIONS = 100_000
"""Their mean is known to a third of a percent of their spread then."""


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """The options of a command line."""

    pod: str
    days: float
    rates: str
    policy: Path | None
    ipus: int | None
    spares: int | None
    seed: int
    replications: int
    sweep: tuple[str, ...]
    tornado: bool
    workers: int
    json_file: Path | None
    incidents: Path | None
    html: Path | None
    replay: Path | None
    fit: tuple[Path, ...]


@click.command(
    "podrun chaos",
    context_settings=HELP_OPTIONS,
    epilog="""\b
    Examples:
      podrun chaos --pod pod64 --days 30 --rates llama3
      podrun chaos --pod pod64k --rates rsc1 --replications 20 --sweep spares=0,16,64
      podrun chaos --pod pod256 --rates rates.yaml --tornado --html campaign.html""",
)
@click.option("--pod", type=PodName(), default="pod64", metavar="NAME", help="The POD; pod64k too [pod64].")
@click.option("--days", type=FiniteNumber(), default=30.0, metavar="N", help="How long [30].")
@click.option("--rates", default="llama3", metavar="NAME|FILE", help="A preset or a rates.yaml [llama3].")
@click.option("--policy", type=click.Path(path_type=Path), metavar="FILE", help="Restarts and checkpoints.")
@click.option("--ipus", type=int, metavar="N", help="IPUs of the job [all].")
@click.option("--spares", type=int, metavar="N", help="Fresh machines on the shelf [16].")
@click.option("--seed", type=int, default=1, metavar="N", help="Of the first replication [1].")
@click.option(
    "--replications",
    type=click.IntRange(1, MOST_REPLICATIONS),
    default=1,
    metavar="N",
    help="With seeds one after the other [1].",
)
@click.option("--sweep", multiple=True, metavar="KNOB=A,B,...", help="Again with each value of a knob.")
@click.option("--tornado", is_flag=True, help="Each knob at half and at twice its value.")
@click.option(
    "--workers", type=click.IntRange(0), default=0, metavar="N", help="Processes [as many as cores]."
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures."
)
@click.option("--incidents", type=click.Path(path_type=Path), metavar="FILE", help="Write incidents.jsonl.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with pictures.")
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A launch's record, or its incidents, beside their twin.",
)
@click.option(
    "--fit",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --replay: records of launches that show how long what takes.",
)
def chaos_verb(**options: Any) -> int:
    """Lets a POD fail in virtual time, and says what its failures cost a job: useful time, where the rest went,
    spares, incidents; each with an interval of 95 %.

    Failures are answered by podrun's own recovery, allocator and checkpoint policy.
    """
    request = ChaosRequest(**options)
    setup = setup_of(request)
    check_outputs_writable(request.json_file, request.incidents, request.html)
    if request.fit and request.replay is None:
        raise UsageError("--fit goes with --replay", hint="podrun chaos --replay RECORD --fit OTHER_RECORD")
    if request.replay is not None:
        return _replay(request, request.replay, setup)
    report, first = run_chaos(request, setup)
    _write(request, report, first)
    return 0


def _replay(request: ChaosRequest, file: Path, setup: CampaignSetup) -> int:
    """A launch beside its twin: of a whole record with times, of incidents alone without."""
    from podrun.launcher.plan import begins_with
    from podrun.record.events import FIRST_BYTES

    if begins_with(file, FIRST_BYTES):
        from podrun.simulate.launch_twin import launch_beside_twin, shown_launch_twin

        twin = launch_beside_twin(file, request.fit, setup)
        text = shown_launch_twin(twin)
    else:
        from podrun.simulate.twin import replayed, shown_twin

        twin = replayed(file, setup)
        text = shown_twin(twin)
    click.echo(text, nl=False)
    if request.json_file is not None:
        write_output(request.json_file, json.dumps(twin, indent=1) + "\n")
    return 0


def setup_of(request: ChaosRequest) -> CampaignSetup:
    """What is simulated. Raises PodrunError for what cannot be."""
    from podrun.core.cluster_file import load_cluster
    from podrun.simulate.campaign_setup import CampaignSetup
    from podrun.simulate.chaos_setup import check_setup, with_policy
    from podrun.simulate.rates import read_rates

    setup = CampaignSetup(load_cluster(request.pod, simulated=True), read_rates(request.rates), request.days)
    if request.policy is not None:
        setup = with_policy(setup, request.policy)
    if request.ipus is not None:
        setup = replace(setup, ipus=request.ipus)
    if request.spares is not None:
        if request.spares < 0:
            raise UsageError(f"{request.spares} spares are none", hint="--spares 16")
        setup = replace(setup, spares=request.spares)
    check_setup(setup)
    return setup


def run_chaos(request: ChaosRequest, setup: CampaignSetup) -> tuple[dict[str, Any], Replication]:
    """The report of a request, and its first replication with incidents."""
    from podrun.simulate.chaos_report import campaign_report, replicate, sweep_rows, tornado_rows
    from podrun.simulate.chaos_setup import KNOBS, check_setup, parse_sweep

    sweeps = [parse_sweep(text) for text in request.sweep]
    for knob, values in sweeps:
        for value in values:
            check_setup(KNOBS[knob](setup, value))
    seeds = range(request.seed, request.seed + request.replications)
    runner = _Workers(request.workers)
    first = replicate(setup, request.seed, incidents=True)
    rest = list(runner([(setup, seed) for seed in seeds[1:]]))
    report = campaign_report(setup, request.seed, [first, *rest])
    report["sweeps"] = [sweep_rows(setup, knob, values, seeds, runner) for knob, values in sweeps]
    if request.tornado:
        report["tornado"] = tornado_rows(setup, seeds, runner)
    return report, first


class _Workers:
    """Runs replications in processes of its own, or here if there is one."""

    def __init__(self, workers: int) -> None:
        import os

        self.workers = workers or len(os.sched_getaffinity(0))

    def __call__(self, tasks: Sequence[tuple[CampaignSetup, int]]) -> Iterator[Replication]:
        from podrun.simulate.chaos_report import replicate, run_here

        count = min(self.workers, len(tasks))
        if count < 2:
            yield from run_here(tasks)
            return
        from concurrent.futures import ProcessPoolExecutor

        setups = [setup for setup, _ in tasks]
        with ProcessPoolExecutor(count) as pool:
            yield from pool.map(replicate, setups, [seed for _, seed in tasks])


def _write(request: ChaosRequest, report: dict[str, Any], first: Replication) -> None:
    from podrun.simulate.chaos_report import incident_lines, shown_report

    click.echo(shown_report(report), nl=False)
    if request.json_file is not None:
        write_output(request.json_file, json.dumps(report, indent=1) + "\n")
    if request.incidents is not None:
        write_output(request.incidents, incident_lines(first.incidents))
    if request.html is not None:
        from podrun.simulate.chaos_page import chaos_page

        write_output(request.html, chaos_page(report))
