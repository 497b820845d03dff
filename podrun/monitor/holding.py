"""Holding IPUs: how the test tools get at a device of the active partition, as any program does.

`hold` attaches over IPUoF, exclusively and at once, and lets go whatever happens. What the IPUs then run are programs
written by hand (`podrun.monitor.tool_programs`).
"""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from podrun.cluster import LinkTopology, ladder_links
from podrun.errors import ApplicationRuntimeError

if TYPE_CHECKING:
    from podrun.device.connection import Connection, IpuRange
    from podrun.device.target import Chip
    from podrun.monitor.source import View

NAMES = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True, slots=True)
class Bench:
    """The active partition, as a tool finds it, and how to reach its IPUs."""

    view: View
    environ: dict[str, str]

    @property
    def chip(self) -> Chip:
        """The kind of IPU."""
        from podrun.device.target import chip

        return chip(self.view.config.attributes["Target"])

    @property
    def domain_ipus(self) -> int:
        """IPUs of the partition in each IPU-Link domain."""
        return self.view.info.size // self.view.info.num_ilds

    @property
    def topology(self) -> LinkTopology:
        """How its IPU-Links run."""
        return LinkTopology(self.view.config.attributes["IPU-Link Topology"])

    def links(self) -> list[tuple[int, int]]:
        """Its IPU-Links, as pairs of IPUs in the partition, lower first."""
        size = self.domain_ipus
        return [
            link
            for first in range(0, self.view.info.size, size)
            for link in ladder_links(size, self.topology, first)
        ]

    def ipus_of(self, device: int) -> IpuRange:
        """The IPUs behind a device id. Raises NotFoundError naming the ids there are."""
        from podrun.device.connection import IpuRange
        from podrun.monitor.device_ids import ipus_of_device

        ipus = ipus_of_device(device, self.view.info.size, self.view.info.reconfigurable)
        return IpuRange(ipus[0], len(ipus))

    def smallest_with(self, ipus: tuple[int, ...]) -> IpuRange:
        """The IPUs of the smallest device that holds all of ``ipus``: what has to be attached to use them together."""
        from podrun.device.connection import IpuRange
        from podrun.monitor.device_ids import device_sets

        sets = device_sets(self.view.info.size, self.view.info.reconfigurable)
        members = min((s for s in sets if set(ipus) <= set(s)), key=len)
        return IpuRange(members[0], len(members))


def find_bench(api_host: str | None, api_port: int | None) -> Bench:
    """The active partition of the service that options, environment or discovery name.

    Raises ConflictError if several services could be meant, NotFoundError if there is no partition.
    """
    from podrun.monitor.source import connect, on_stderr, views

    with connect(api_host, api_port, say=on_stderr, one=True) as client:
        view = views(client)[0]
        where = {
            "IPUOF_VIPU_API_HOST": client.host,
            "IPUOF_VIPU_API_PORT": str(client.port),
            "IPUOF_VIPU_API_PARTITION_ID": view.info.name,
        }
    return Bench(view, {**os.environ, **where})


@contextlib.contextmanager
def hold(
    bench: Bench, ipus: IpuRange, *, job: IpuRange | None = None, name: str = ""
) -> Iterator[Connection]:
    """A connection that holds ``ipus``, alone; ``job``: the range of a program that others take part in.

    Raises ApplicationRuntimeError with what is in the way: who holds them, or what is broken and what repairs it.
    """
    from podrun.device.connection import AttachRequest
    from podrun.device.ipuof import connect

    connection = connect(bench.environ)
    try:
        request = AttachRequest(job or ipus, ipus, os.getpid(), _user(), " ".join([name, *sys.argv[1:]]))
        refusal = connection.try_attach(request)
        if refusal is not None:
            raise ApplicationRuntimeError(
                f"Failed to attach to device: {refusal}", hint="gc-monitor shows who uses the IPUs."
            )
        yield connection
    finally:
        connection.close()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A user id without a name, as containers have it.
        return str(os.getuid())


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--api-host and --api-port, as a decorator."""
    options = [
        click.option("--api-host", "-H", metavar="HOST", help="Server [environment, else a running one]."),
        click.option("--api-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of the server."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def strings(value: Any) -> Any:
    """The same JSON with every number and truth value as a string, as the SDK's test tools print them."""
    if isinstance(value, dict):
        return {key: strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strings(item) for item in value]
    if value is None:
        return "N/A"
    return str(value).lower() if isinstance(value, bool) else str(value)
