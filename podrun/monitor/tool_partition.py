"""The partition that a test tool uses, and how it attaches to IPUs, as any program does.

`attach` takes IPUs over IPUoF, exclusively and at once, and always releases them. They run programs written by hand
(`podrun.monitor.tool_programs`).
"""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from podrun.core.access import OWN_SERVER
from podrun.core.cluster import LinkTopology, ladder_links
from podrun.core.environment import environment
from podrun.core.errors import ApplicationRuntimeError

if TYPE_CHECKING:
    from podrun.core.layout import IpuRange
    from podrun.costmodel.target import Chip
    from podrun.device.connection import Connection
    from podrun.monitor.devices import View


@dataclass(frozen=True, slots=True)
class ToolPartition:
    """The active partition, and the environment in which IPUoF reaches its IPUs."""

    view: View
    environ: dict[str, str]

    @property
    def chip(self) -> Chip:
        """The kind of IPU."""
        from podrun.costmodel.target import chip

        return chip(self.view.config.attributes["Target"])

    @property
    def domain_ipus(self) -> int:
        """IPUs of the partition in each IPU-Link domain."""
        return self.view.info.size // self.view.info.num_ilds

    @property
    def topology(self) -> LinkTopology:
        """The topology of its IPU-Links."""
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
        """The IPUs of a device id. Raises NotFoundError with the range of ids."""
        from podrun.core.layout import IpuRange
        from podrun.monitor.devices import ipus_of_device

        ipus = ipus_of_device(device, self.view.info.size, self.view.info.reconfigurable)
        return IpuRange(ipus[0], len(ipus))

    def smallest_with(self, ipus: tuple[int, ...]) -> IpuRange:
        """The IPUs of the smallest device with all of ``ipus``, which must be attached to use them together."""
        from podrun.core.layout import IpuRange
        from podrun.monitor.devices import device_sets

        sets = device_sets(self.view.info.size, self.view.info.reconfigurable)
        members = min((s for s in sets if set(ipus) <= set(s)), key=len)
        return IpuRange(members[0], len(members))


def find_partition(api_host: str | None, api_port: int | None) -> ToolPartition:
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
            OWN_SERVER: "1" if client.own else "",
        }
    return ToolPartition(view, {**environment(), **where})


@contextlib.contextmanager
def attach(
    partition: ToolPartition, ipus: IpuRange, *, job: IpuRange | None = None, name: str = ""
) -> Iterator[Connection]:
    """A connection with exclusive use of ``ipus``; ``job``: all IPUs of a program that other processes share.

    Raises ApplicationRuntimeError with the reason: who holds the IPUs, or what is broken and what repairs it.
    """
    from podrun.device.connection import AttachRequest, connect

    connection = connect(partition.environ)
    try:
        launch = partition.environ.get("PODRUN_LAUNCH_ID", "")
        command = " ".join([name, *sys.argv[1:]])
        request = AttachRequest(job or ipus, ipus, os.getpid(), _user(), command, launch)
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
    except (KeyError, OSError):  # The user id has no name, as in some containers.
        return str(os.getuid())


def strings(value: Any) -> Any:
    """The same JSON with every number and truth value as a string, as the SDK's test tools print it."""
    if isinstance(value, dict):
        return {key: strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strings(item) for item in value]
    if value is None:
        return "N/A"
    return str(value).lower() if isinstance(value, bool) else str(value)
