"""``podrun faults``: what is planned on a running job, what has struck, and the kinds of faults."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import HELP_OPTIONS, SuggestingGroup, json_text
from podrun.core.terminal import text_table
from podrun.launcher.running_jobs import job_at, job_server_options

if TYPE_CHECKING:
    from podrun.core.telemetry import MachineReport


_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object with a schema version.")


@click.group("podrun faults", cls=SuggestingGroup, context_settings=HELP_OPTIONS)
def faults_verb() -> None:
    """Faults of a running job: what is planned and what has struck; kinds and the schema of plans."""


@faults_verb.command("list")
@click.argument("job", default="")
@job_server_options
@_JSON
def list_faults(job: str, api_host: str | None, api_port: int | None, as_json: bool) -> None:
    """List the faults that have still to strike. JOB is a partition or a process id."""
    from podrun.core.telemetry import planned_in

    with job_at(job, api_host, api_port) as (client, name):
        planned = planned_in(client.machine_reports(name))
    rows = [(spec.text, spec.launch or "the job that runs, or the next") for spec in planned]
    if as_json:
        click.echo(json_text("planned", [{"fault": text, "launch": launch} for text, launch in rows]))
    elif rows:
        click.echo(text_table(("Fault", "Hits"), rows))
    else:
        click.echo(f"No fault is planned on partition {name}.")


@faults_verb.command("cancel")
@click.argument("job")
@click.argument("texts", nargs=-1, metavar="[FAULT]...")
@job_server_options
def cancel_planned(job: str, texts: Sequence[str], api_host: str | None, api_port: int | None) -> None:
    """Take faults of JOB off the plan: the named ones, or all."""
    with job_at(job, api_host, api_port) as (client, name):
        gone = client.cancel_faults(name, texts)
    click.echo(f"Cancelled on partition {name}: {', '.join(gone) or 'nothing was planned'}.")


@faults_verb.command("history")
@click.argument("job", default="")
@job_server_options
@_JSON
def fault_history(job: str, api_host: str | None, api_port: int | None, as_json: bool) -> None:
    """List the faults that have struck, oldest first. JOB is a partition or a process id."""
    with job_at(job, api_host, api_port) as (client, name):
        struck = history_of(client.machine_reports(name))
    if as_json:
        click.echo(json_text("struck", struck))
    elif struck:
        shown = [
            (
                time.strftime("%H:%M:%S", time.localtime(e["time_s"])),
                e["machine"],
                str(e["batch"]),
                e["fault"],
            )
            for e in struck
        ]
        click.echo(text_table(("Time", "Machine", "Batch", "Fault"), shown))
    else:
        click.echo(f"No fault has struck partition {name}.")


def history_of(reports: Sequence[MachineReport]) -> list[dict[str, Any]]:
    """The faults that struck the machines of a partition, by time."""
    from podrun.core.telemetry import strike_in_words

    strikes = [
        {**strike_in_words(entry), "machine": report.agent_id}
        for report in reports
        for entry in report.struck_faults
    ]
    return sorted(strikes, key=lambda entry: (entry["time_s"], entry["machine"]))


@faults_verb.command("kinds")
def fault_kinds() -> None:
    """List all targets and kinds, with their settings."""
    from podrun.faults import DISTURBANCES, EFFECTS

    rows = [
        (
            target,
            kind,
            effect.error.type_name,
            effect.action.value if effect.action else "replace or start again",
        )
        for (target, kind), effect in EFFECTS.items()
    ]
    for (target, kind), disturbance in DISTURBANCES.items():
        names = [
            f"{name}={'...' if s.default is None else s.default}" for name, s in disturbance.settings.items()
        ]
        rows.append(
            (target, kind, disturbance.does, ",".join([*names, *(["for="] if disturbance.lasts else [])]))
        )
    click.echo(text_table(("Target", "Kind", "Error, or what it does", "Recovery action, or settings"), rows))


@faults_verb.command("check")
@click.argument("plan", type=click.Path(dir_okay=False, path_type=Path))
def check_plan(plan: Path) -> None:
    """Read a fault plan, and print its faults in their short forms."""
    from podrun.faults import read_plan

    for spec in read_plan(plan):
        click.echo(spec.text)


@faults_verb.command("schema")
def print_schema() -> None:
    """Print the JSON schema of fault plans."""
    import json

    from podrun.faults import plan_schema

    click.echo(json.dumps(plan_schema(), indent=2))
