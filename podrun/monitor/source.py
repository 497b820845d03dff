"""Finds the server and the active partition, and fetches what they report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podrun.cluster import ipu_number
from podrun.errors import NotFoundError
from podrun.telemetry import IpuReport, MachineReport

if TYPE_CHECKING:
    from podrun.partition.client import VipuClient
    from podrun.partition.types import IpuofConfig, PartitionInfo

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Device:
    """One IPU with what tools print of it. ``id`` counts on over partitions; ``number`` is its IPU#."""

    id: int
    host: str
    number: int
    machine: MachineReport
    ipu: IpuReport


@dataclass(frozen=True, slots=True)
class View:
    """A partition and its IPUs, by device id."""

    info: PartitionInfo
    config: IpuofConfig
    reports: tuple[MachineReport, ...]
    devices: tuple[Device, ...]
    active: bool
    """True iff it is the partition tools act on by default."""


def connect(host: str | None = None, port: int | None = None) -> VipuClient:
    """A client of the server that options, environment or discovery name."""
    from podrun.partition.cli_common import find_server
    from podrun.partition.client import VipuClient

    where = find_server(host, port, partition=os.environ.get("IPUOF_VIPU_API_PARTITION_ID"))
    return VipuClient(where.host, where.port, TIMEOUT_S)


def active_partition(
    partitions: Sequence[PartitionInfo], environ: Mapping[str, str] | None = None
) -> PartitionInfo | None:
    """The partition tools act on: IPUOF_VIPU_API_PARTITION_ID, else the first by name, or None if there is
    none.

    Raises NotFoundError if the environment names one that is not there.
    """
    env = os.environ if environ is None else environ
    wanted = env.get("IPUOF_VIPU_API_PARTITION_ID")
    if not wanted:
        return partitions[0] if partitions else None
    for info in partitions:
        if info.name == wanted:
            return info
    names = ", ".join(info.name for info in partitions) or "none"
    raise NotFoundError(
        f"there is no partition {wanted!r}, which IPUOF_VIPU_API_PARTITION_ID names",
        hint=f"Partitions: {names}. Or: unset IPUOF_VIPU_API_PARTITION_ID",
    )


def no_partition() -> NotFoundError:
    """The error of tools that need a partition when there is none."""
    return NotFoundError(
        "no active partition",
        hint="Create one: vipu create partition NAME --size N. Or run something with podrun.",
    )


def views(client: VipuClient, *, everything: bool = False) -> list[View]:
    """The active partition, and with ``everything`` the others after it. Raises NotFoundError if there is
    none.
    """
    partitions = client.list_partitions()
    active = active_partition(partitions)
    if active is None:
        raise no_partition()
    chosen = [active] + ([info for info in partitions if info is not active] if everything else [])
    hosts = {agent.agent_id: agent.host for agent in client.list_agents()}
    result: list[View] = []
    first = 0
    for info in chosen:
        result.append(_view(client, info, hosts, first, info is active))
        first += info.size
    return result


def _view(
    client: VipuClient, info: PartitionInfo, hosts: Mapping[str, str], first: int, active: bool
) -> View:
    reports = tuple(client.machine_reports(info.name))
    configs = [client.ipuof_config(info.name, gcd) for gcd in range(info.num_gcds)]
    numbers = {device.partition_ipu: device.ipu_number for config in configs for device in config.devices}
    devices = tuple(
        Device(
            id=first + ipu.partition_ipu,
            host=hosts.get(report.agent_id, report.agent_id),
            number=numbers.get(ipu.partition_ipu, ipu_number(ipu.ipu)),
            machine=report,
            ipu=ipu,
        )
        for report in reports
        for ipu in report.ipus
    )
    return View(info, configs[0], reports, devices, active)


def attributes_of(view: View) -> list[dict[str, str]]:
    """Attributes of every IPU of a partition, by device: id and target first, the rest by name."""
    from podrun.partition.attributes import hardware_attributes, live_attributes, partition_attributes

    result = []
    for device in view.devices:
        values = hardware_attributes(device.machine, device.number) | live_attributes(device.ipu)
        values |= partition_attributes(view.info, device.ipu.partition_ipu, device.host)
        if device.machine.state == "lost":
            values["ipu error state"] = "machine lost"
        result.append({"id": str(device.id), "target": "Fabric"} | dict(sorted(values.items())))
    return result
