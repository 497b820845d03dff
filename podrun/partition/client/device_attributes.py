"""Device attributes of IPUs as the tools print them: strings under the names of the real attributes.

An unknown reading prints as ``N/A``; an unknown attribute of an attached process is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from podrun import __version__
from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import IpuReport, MachineReport
from podrun.partition.state.values import PartitionInfo

HEXOPT_BYTES = 268435456
HEXOATT_BYTES = (32 << 30) - (8 << 20) - HEXOPT_BYTES
"""Stream and remote-buffer windows of one IPU of an IPU-M2000: together 32 GiB less 8 MiB, as in published dumps."""
NOT_KNOWN = "N/A"


@dataclass(frozen=True, slots=True)
class IpuAttributes:
    """Attributes of one IPU; ``ipu`` is its IPU#."""

    agent: str
    ipu: int
    values: Mapping[str, str]


def reading(value: float | None, form: str) -> str:
    """A reading with its unit, or N/A."""
    return NOT_KNOWN if value is None else form.format(value)


def start_time_text(seconds: float | None) -> str | None:
    """When a process started, ISO 8601 basic, UTC: ``20211122T224648Z``."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y%m%dT%H%M%SZ")


def hardware_attributes(report: MachineReport, number: int) -> dict[str, str]:
    """Attributes of IPU# ``number`` of a machine that do not depend on its use."""
    bow = report.target == "bow"
    return {
        "board ipu index": str(number),
        "board serial number": board_serial(report.serial, number),
        "board type": "M2000",
        "board variant": "Bow-2000" if bow else "M2000",
        "clock": "1850MHz" if bow else "1330MHz",
        "driver version": report.versions.get("driver", __version__),
        "firmware version": report.versions.get("ICU firmware", __version__),
        "gateway software version": report.versions.get("IPU-M software", __version__),
        "graph streaming": "true",
        "hexoatt total size (bytes)": str(HEXOATT_BYTES),
        "hexopt total size (bytes)": str(HEXOPT_BYTES),
        "ipu architecture": "ipu2",
        "ipuof server version": report.versions.get("IPUoF server", __version__),
        "link speed": "16 GT/s",
        "link width": "8",
        "pci id": str(number),
        "remote buffers supported": "1",
        "average board temp": reading(report.board_temperature_c, "{:.1f} C"),
        "total board power": reading(report.board_power_w, "{:.1f} W"),
    }


def live_attributes(ipu: IpuReport) -> dict[str, str]:
    """Attributes that change: readings of an IPU, and the process that holds it."""
    values = {
        "average die temp": reading(ipu.die_temperature_c, "{:.1f} C"),
        "ipu error state": ipu.error_state.value,
        "ipu power": reading(ipu.power_w, "{:.1f} W"),
        "ipu utilisation": reading(ipu.utilisation_percent, "{:.2f}%"),
        "ipu utilisation (session)": reading(ipu.utilisation_session_percent, "{:.2f}%"),
        "link correctable error count": reading(ipu.link_correctable_errors, "{:d}"),
    }
    if ipu.clock_mhz is not None:
        values["clock"] = f"{ipu.clock_mhz:.0f}MHz"
    if ipu.process is not None:
        process = ipu.process
        values["user executable"] = process.command
        values["user name"] = process.user
        values["user process id"] = str(process.pid)
        started = start_time_text(process.start_time_s)
        if started is not None:
            values["process start time"] = started
    return values


def board_serial(serial: str, number: int) -> str:
    """Serial number of the board of IPU# ``number``, from the machine's (that of its first board)."""
    head, _, tail = serial.partition(".")
    return f"{head}.{1 + number // 2:04d}.{tail.partition('.')[2]}" if tail else serial


def ipu_attributes(
    reports: Iterable[MachineReport], numbers: Mapping[tuple[str, int], int]
) -> list[IpuAttributes]:
    """Attributes of every IPU of the POD, by agent and IPU#: those of the hardware, and for IPUs of partitions also
    those that change. ``numbers``: the IPU# of each partition's IPUs, by the partition's name and the index there."""
    values: dict[tuple[str, int], dict[str, str]] = {}
    for report in reports:
        for number in range(IPUS_PER_MACHINE):
            values.setdefault((report.agent_id, number), hardware_attributes(report, number))
        for ipu in report.ipus:
            held = numbers.get((report.partition, ipu.partition_ipu))
            if held is not None:
                values[report.agent_id, held] |= live_attributes(ipu)
    return [
        IpuAttributes(agent, number, dict(sorted(own.items()))) for (agent, number), own in values.items()
    ]


def partition_attributes(info: PartitionInfo, routing_id: int, host: str) -> dict[str, str]:
    """Attributes that an IPU has from its partition; ``routing_id`` is its index there."""
    return {
        "ipuof host": host,
        "ipuof partition id": info.name,
        "ipuof routing id": str(routing_id),
        "ipuof routing type": info.ild_routing,
        "number of replicas": "1",
        "partition sync type": info.sync_type.value,
        "reconfigurable partition": str(info.reconfigurable).lower(),
    }
