"""`vipu-server stop`: ends a server, or the machines that a killed one left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

import click

from podrun.core.errors import DeadlineError, NotFoundError, UsageError

if TYPE_CHECKING:
    from podrun.partition.host.discovery import ServiceEntry


STOP_SECONDS = 60.0
"""Longest wait for a server to end in order."""


@click.command("stop")
@click.option("--port", type=click.IntRange(1, 65535), help="The server at this port [the only one].")
@click.option("--cluster", metavar="NAME", help="The server of this POD.")
def stop_server(port: int | None, cluster: str | None) -> int:
    """Stop a server, or end the machines that a killed server left. Partitions stay in the state file."""
    from podrun.partition.host.discovery import VIPU_SERVER, Registry
    from podrun.partition.machines.keeper import end_keeper, keepers

    registry = Registry()
    registry.sweep()
    servers = [entry for entry in registry.entries() if entry.kind == VIPU_SERVER]
    owned = {entry.pod for entry in servers}
    left = [entry for entry in keepers(registry) if entry.pod not in owned]
    entry = choose_server([*servers, *left], port, cluster)
    if entry.kind == VIPU_SERVER:
        _stop_process(entry)
        for keeper in keepers(registry):
            if entry.pod and keeper.pod == entry.pod:  # The entry of a server that left its machines.
                end_keeper(keeper)
        click.echo(f"the server of {entry.cluster} at port {entry.port} has ended")
    else:
        end_keeper(entry)
        click.echo(
            f"the machines of {entry.cluster}, which a server at port {entry.last_port} left, have ended"
        )
    return 0


def choose_server(entries: list[ServiceEntry], port: int | None, cluster: str | None) -> ServiceEntry:
    """The one server, or keeper without a server, that the options name. Raises NotFoundError or UsageError."""
    matching = [
        entry
        for entry in entries
        if port in (None, entry.port or entry.last_port) and cluster in (None, entry.cluster)
    ]
    if len(matching) == 1:
        return matching[0]
    known = [f"{e.cluster} at port {e.port or e.last_port}" for e in matching or entries]
    if not matching:
        asked = f" at port {port}" if port else f" of {cluster}" if cluster else ""
        raise NotFoundError(
            f"this user runs no V-IPU server{asked} on this host, and none has left machines",
            hint=f"There are: {', '.join(known)}." if known else "vipu --server-version shows what answers.",
        )
    raise UsageError(f"there are several servers: {', '.join(known)}", hint="Name one: --port PORT")


def _stop_process(entry: ServiceEntry) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(entry.owner.pid, signal.SIGTERM)
        os.kill(entry.owner.pid, signal.SIGCONT)  # The process may be stopped (SIGSTOP).
    end = time.monotonic() + STOP_SECONDS
    while entry.owner.alive:
        if time.monotonic() >= end:
            raise DeadlineError(
                f"the server at port {entry.port} (process {entry.owner.pid}) has not ended in {STOP_SECONDS:g} s",
                hint=f"Kill it, then end its machines: kill -9 {entry.owner.pid}; vipu-server stop --port {entry.port}",
            )
        time.sleep(0.05)
