"""Jobs that run: the server and the partition behind a partition's name or a process id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from podrun.core.errors import ConflictError, NotFoundError, ServiceError
from podrun.core.telemetry import attached_processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from podrun.partition.client.vipu_client import VipuClient


TIMEOUT_S = 10.0
JOB_HELP = "JOB is a partition, or the process id of podrun or of one of its instances."


@contextmanager
def job_at(job: str, host: str | None, port: int | None) -> Iterator[tuple[VipuClient, str]]:
    """The server and the partition of a job. Raises NotFoundError, ConflictError if several could be meant."""
    from podrun.partition.client.vipu_client import VipuClient

    jobs: list[tuple[str, int, bool, str]] = []
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
                    jobs.append((where, number, own, info.name))
    if not jobs:
        listed = ", ".join(sorted(names)) or "none"
        raise NotFoundError(
            f"there is no job {job}" if job else "no job is running",
            hint=f"Partitions: {listed}. Start one: podrun --num-replicas 16 train.py",
        )
    if len(jobs) > 1:
        listed = ", ".join(sorted(name for *_, name in jobs))
        raise ConflictError(f"several jobs could be meant: {listed}", hint=f"Name one of them. {JOB_HELP}")
    where, number, own, name = jobs[0]
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
    held = attached_processes(client.machine_reports(name))
    return any(process.pid == pid for process in held.values())


def job_server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options ``--api-host`` and ``--api-port`` of a click command."""
    command = click.option("--api-port", type=click.IntRange(1, 65535), help="Its port; 8090.")(command)
    return click.option(
        "--api-host", help="Host of the V-IPU server; by default that of the job is looked for."
    )(command)
