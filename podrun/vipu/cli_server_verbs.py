"""`vipu-server stop`, `check` and `repair`: servers of this user on this host, and their state files."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podrun.core.errors import DeadlineError, NotFoundError, UsageError

if TYPE_CHECKING:
    from podrun.core.cluster import Cluster
    from podrun.vipu.discovery import ServiceEntry
    from podrun.vipu.state_repair import StateDiagnosis

_STATE_OPTIONS = (
    click.option("--cluster", default="pod16", metavar="NAME|FILE", help="POD of the file [pod16]."),
    click.option(
        "--state-file", type=click.Path(path_type=Path), metavar="FILE", help="The file [that of the POD]."
    ),
)
STOP_SECONDS = 60.0
"""Longest wait for a server to end in order."""


@click.command("stop")
@click.option("--port", type=click.IntRange(1, 65535), help="The server at this port [the only one].")
@click.option("--cluster", metavar="NAME", help="The server of this POD.")
def stop_server(port: int | None, cluster: str | None) -> int:
    """Stop a server, or end the machines that a killed server left. Partitions stay in the state file."""
    from podrun.vipu.discovery import VIPU_SERVER, Registry
    from podrun.vipu.keeper import end_keeper, keepers

    registry = Registry()
    registry.sweep()
    servers = [entry for entry in registry.entries() if entry.kind == VIPU_SERVER]
    owned = {entry.pod for entry in servers}
    left = [entry for entry in keepers(registry) if entry.pod not in owned]
    entry = choose([*servers, *left], port, cluster)
    if entry.kind == VIPU_SERVER:
        _stop(entry)
        for keeper in keepers(registry):
            if entry.pod and keeper.pod == entry.pod:  # Of a server that left its machines.
                end_keeper(keeper)
        click.echo(f"the server of {entry.cluster} at port {entry.port} has ended")
    else:
        end_keeper(entry)
        click.echo(
            f"the machines of {entry.cluster}, which a server at port {entry.last_port} left, have ended"
        )
    return 0


def choose(entries: list[ServiceEntry], port: int | None, cluster: str | None) -> ServiceEntry:
    """The one server, or keeper without a server, that is meant. Raises NotFoundError or UsageError."""
    found = [
        entry
        for entry in entries
        if port in (None, entry.port or entry.last_port) and cluster in (None, entry.cluster)
    ]
    if len(found) == 1:
        return found[0]
    known = [f"{e.cluster} at port {e.port or e.last_port}" for e in found or entries]
    if not found:
        asked = f" at port {port}" if port else f" of {cluster}" if cluster else ""
        raise NotFoundError(
            f"this user runs no V-IPU server{asked} on this host, and none has left machines",
            hint=f"There are: {', '.join(known)}." if known else "vipu --server-version shows what answers.",
        )
    raise UsageError(f"there are several servers: {', '.join(known)}", hint="Name one: --port PORT")


def _stop(entry: ServiceEntry) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(entry.owner.pid, signal.SIGTERM)
        os.kill(entry.owner.pid, signal.SIGCONT)  # It may be stopped.
    end = time.monotonic() + STOP_SECONDS
    while entry.owner.alive:
        if time.monotonic() >= end:
            raise DeadlineError(
                f"the server at port {entry.port} (process {entry.owner.pid}) has not ended in {STOP_SECONDS:g} s",
                hint=f"Kill it, then end its machines: kill -9 {entry.owner.pid}; vipu-server stop --port {entry.port}",
            )
        time.sleep(0.05)


def _with_state_options(command: Callable[..., int]) -> Callable[..., int]:
    for option in _STATE_OPTIONS:
        command = option(command)
    return command


@click.command("check")
@_with_state_options
def check_state(cluster: str, state_file: Path | None) -> int:
    """Say what is wrong with a state file, and what a repair would do. Exit code 1 if there is anything."""
    path, found, _ = _diagnosis(cluster, state_file)
    _tell(path, found)
    if found.problems:
        click.echo(f"Repair it: vipu-server repair --cluster {cluster} --state-file {path} --yes")
    return 1 if found.problems else 0


@click.command("repair")
@_with_state_options
@click.option("--yes", is_flag=True, help="Do it; without this option only say what would be done.")
def repair_state(cluster: str, state_file: Path | None, yes: bool) -> int:
    """Keep of a damaged state file what holds together. The old file stays beside it under another name."""
    from podrun.vipu.state_repair import repair

    path, found, pod = _diagnosis(cluster, state_file)
    _tell(path, found)
    if not found.problems:
        return 0
    if not yes:
        click.echo("Nothing was changed; with --yes it is.")
        return 1
    backup = repair(path, pod, found)
    click.echo(f"repaired; the file as it was: {backup}")
    return 0


def _diagnosis(cluster: str, state_file: Path | None) -> tuple[Path, StateDiagnosis, Cluster]:
    from podrun.core.cluster import load_cluster
    from podrun.vipu.state_repair import diagnose, read_rows
    from podrun.vipu.store import default_state_file

    pod = load_cluster(cluster)
    path = state_file or default_state_file(pod.name)
    return path, diagnose(pod, read_rows(path)), pod


def _tell(path: Path, found: StateDiagnosis) -> None:
    for problem in found.problems:
        click.echo(f"{problem.what}: {problem.action}")
    kept = found.kept
    click.echo(
        f"{path}: {len(found.problems)} problems; it keeps {len(kept.partitions)} partitions, "
        f"{len(kept.plans.queue)} queued requests"
    )
