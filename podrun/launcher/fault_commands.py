"""``podrun faults`` and ``podrun inject``: what is planned on a running job, what has struck, and new faults for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.errors import ConflictError, NotFoundError, ServiceError, UsageError
from podrun.core.terminal import table
from podrun.partition.commands.groups import HELP_OPTIONS, SuggestingGroup, json_text

if TYPE_CHECKING:
    from podrun.core.telemetry import MachineReport
    from podrun.partition.client.vipu_client import VipuClient

TIMEOUT_S = 10.0
_JOB = "JOB is a partition, or the process id of podrun or of one of its instances."


@contextmanager
def job_at(job: str, host: str | None, port: int | None) -> Iterator[tuple[VipuClient, str]]:
    """The server and the partition of a job. Raises NotFoundError, ConflictError if several could be meant."""
    from podrun.partition.client.vipu_client import VipuClient

    found: list[tuple[str, int, bool, str]] = []
    names: list[str] = []
    for where, number, own, pid in _servers(host, port):
        with VipuClient(where, number, TIMEOUT_S, own=own) as client:
            try:
                partitions = client.list_partitions()
            except ServiceError:
                continue
            for info in partitions:
                names.append(info.name)
                if (
                    not job
                    or job in (info.name, pid)
                    or (job.isdecimal() and _holds(client, info.name, int(job)))
                ):
                    found.append((where, number, own, info.name))
    if not found:
        listed = ", ".join(sorted(names)) or "none"
        raise NotFoundError(
            f"there is no job {job}" if job else "no job is running",
            hint=f"Partitions: {listed}. Start one: podrun --num-replicas 16 train.py",
        )
    if len(found) > 1:
        listed = ", ".join(sorted(name for *_, name in found))
        raise ConflictError(f"several jobs could be meant: {listed}", hint=f"Name one of them. {_JOB}")
    where, number, own, name = found[0]
    with VipuClient(where, number, TIMEOUT_S, own=own) as client:
        yield client, name


def _servers(host: str | None, port: int | None) -> list[tuple[str, int, bool, str]]:
    """The servers to ask: address, whether the server has to prove that it is this user's, and the process id of its
    owner.
    """
    from podrun.partition.commands.which_server import find_server
    from podrun.partition.host.discovery import Registry

    if host is None and port is None:
        entries = [entry for entry in Registry().entries() if entry.port]
        if entries:
            return [(entry.host, entry.port, True, str(entry.owner.pid)) for entry in entries]
    where = find_server(host, port)
    return [(where.host, where.port, where.own, "")]


def _holds(client: VipuClient, name: str, pid: int) -> bool:
    """True iff a process holds IPUs of a partition."""
    return any(
        ipu.process is not None and ipu.process.pid == pid
        for report in client.machine_reports(name)
        for ipu in report.ipus
    )


def _server_options(command: Any) -> Any:
    command = click.option("--api-port", type=click.IntRange(1, 65535), help="Its port; 8090.")(command)
    return click.option(
        "--api-host", help="Host of the V-IPU server; by default that of the job is looked for."
    )(command)


_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object with a schema version.")


@click.group("faults", cls=SuggestingGroup, context_settings=HELP_OPTIONS)
def faults() -> None:
    """Faults of a running job: what is planned and what has struck; kinds and the schema of plans."""


@faults.command("list")
@click.argument("job", default="")
@_server_options
@_JSON
def list_faults(job: str, api_host: str | None, api_port: int | None, as_json: bool) -> None:
    """List the faults that have still to strike. JOB is a partition or a process id."""
    from podrun.faults import parse_fault

    with job_at(job, api_host, api_port) as (client, name):
        planned = {text: parse_fault(text) for r in client.machine_reports(name) for text in r.planned_faults}
    rows = [(spec.text, spec.launch or "the job that runs, or the next") for spec in planned.values()]
    if as_json:
        click.echo(json_text("planned", [{"fault": text, "launch": launch} for text, launch in rows]))
    elif rows:
        click.echo(table(("Fault", "Hits"), rows))
    else:
        click.echo(f"No fault is planned on partition {name}.")


@faults.command("cancel")
@click.argument("job")
@click.argument("texts", nargs=-1, metavar="[FAULT]...")
@_server_options
def cancel_faults(job: str, texts: Sequence[str], api_host: str | None, api_port: int | None) -> None:
    """Take faults of JOB off the plan: the named ones, or all."""
    with job_at(job, api_host, api_port) as (client, name):
        gone = client.cancel_faults(name, texts)
    click.echo(f"Cancelled on partition {name}: {', '.join(gone) or 'nothing was planned'}.")


@faults.command("history")
@click.argument("job", default="")
@_server_options
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
        click.echo(table(("Time", "Machine", "Batch", "Fault"), shown))
    else:
        click.echo(f"No fault has struck partition {name}.")


def history_of(reports: Sequence[MachineReport]) -> list[dict[str, Any]]:
    """The faults that struck the machines of a partition, by time."""
    found = [{**entry, "machine": report.agent_id} for report in reports for entry in report.struck_faults]
    return sorted(found, key=lambda entry: (entry["time_s"], entry["machine"]))


@faults.command("kinds")
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
    click.echo(table(("Target", "Kind", "Error, or what it does", "Recovery action, or settings"), rows))


@faults.command("check")
@click.argument("plan", type=click.Path(dir_okay=False, path_type=Path))
def check_plan(plan: Path) -> None:
    """Read a fault plan, and print its faults in their short forms."""
    from podrun.faults import read_plan

    for spec in read_plan(plan):
        click.echo(spec.text)


@faults.command("schema")
def print_schema() -> None:
    """Print the JSON schema of fault plans."""
    import json

    from podrun.faults import plan_schema

    click.echo(json.dumps(plan_schema(), indent=2))


@click.command("inject", context_settings=HELP_OPTIONS)
@click.argument("job")
@click.argument("texts", nargs=-1, required=True, metavar="FAULT...")
@_server_options
def inject(job: str, texts: Sequence[str], api_host: str | None, api_port: int | None) -> None:
    """Plan faults on JOB while it runs, as in: podrun inject mine ipu:5@batch=+10:tile-parity

    JOB is a partition, or the process id of podrun or of one of its instances. batch=+N counts from now on.
    """
    from podrun.faults import parse_fault

    specs = [parse_fault(text) for text in texts]
    with job_at(job, api_host, api_port) as (client, name):
        client.inject_faults(name, specs)
    click.echo(f"Planned on partition {name}: {', '.join(spec.text for spec in specs)}.")


def main(verb: str, words: Sequence[str]) -> int:
    """Run ``podrun faults`` or ``podrun inject``; the exit code. Raises PodrunError."""
    command = inject if verb == "inject" else faults
    try:
        command.main(args=list(words), prog_name=f"podrun {verb}", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        message = error.format_message()
        raise UsageError(message[:1].lower() + message[1:], hint=f"podrun {verb} --help") from error
    except click.Abort:
        sys.stderr.write("interrupted\n")
        return 130
    return 0
