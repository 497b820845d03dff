"""The devices of a partition: what each IPU reports, the IPUs of a device id, and the remedy for an error.

Pure. Device ids count single IPUs first, then pairs, then quads, up to the whole partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from podrun.core.errors import NotFoundError
from podrun.core.telemetry import NO_ANSWER, NO_ERRORS, UNRECOVERABLE, IpuReport, MachineReport

if TYPE_CHECKING:
    from podrun.vipu.types import IpuofConfig, PartitionInfo


@dataclass(frozen=True, slots=True)
class Device:
    """One IPU as tools print it. ``id`` counts through the partitions shown; ``number`` is its IPU#."""

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


# --- device ids -------------------------------------------------------------------------------------------------


def device_sets(ipus: int, reconfigurable: bool) -> list[tuple[int, ...]]:
    """The IPUs of each device id in a partition of ``ipus`` IPUs.

    A reconfigurable partition has 2N - 1 devices: N single IPUs, N/2 pairs, ..., the whole. Any other has its single
    IPUs and the whole.
    """
    sets: list[tuple[int, ...]] = [(i,) for i in range(ipus)]
    size = 2 if reconfigurable else ipus
    while 1 < size <= ipus:
        sets += [tuple(range(first, first + size)) for first in range(0, ipus, size)]
        size *= 2
    return sets


def ipus_of_device(device: int, ipus: int, reconfigurable: bool) -> tuple[int, ...]:
    """The IPUs of one device id. Raises NotFoundError with the range of ids."""
    sets = device_sets(ipus, reconfigurable)
    if not 0 <= device < len(sets):
        raise NotFoundError(
            f"no such device set id: '{device}'",
            hint=f"Ids of this partition are 0 to {len(sets) - 1}: gc-info -l",
        )
    return sets[device]


# --- attributes -------------------------------------------------------------------------------------------------


def attributes_of(view: View) -> list[dict[str, str]]:
    """Attributes of every IPU of a partition, in device order: id and target first, the rest by name."""
    from podrun.vipu.device_attributes import hardware_attributes, live_attributes, partition_attributes

    result = []
    for device in view.devices:
        values = hardware_attributes(device.machine, device.number) | live_attributes(device.ipu)
        values |= partition_attributes(view.info, device.ipu.partition_ipu, device.host)
        if device.machine.state == "lost":
            values["ipu error state"] = "machine lost"
        result.append({"id": str(device.id), "target": "Fabric"} | dict(sorted(values.items())))
    return result


# --- errors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why an IPU is not usable. ``action``: the SDK's name of the recovery action, or None if none helps; ``remedy``:
    what to type."""

    state: str
    action: str | None
    remedy: str


def diagnose(partition: str, device: Device) -> Diagnosis | None:
    """The diagnosis of a device of a partition; None if it is usable."""
    ipu, agent = device.ipu, device.machine.agent_id
    replace_machine = f"vipu-admin restart agent {agent}, then vipu reset partition {partition}"
    if device.machine.state in ("lost", NO_ANSWER):
        return Diagnosis(f"machine {device.machine.state}", None, replace_machine)
    if not ipu.has_error:
        return None
    if ipu.error_state == UNRECOVERABLE:
        return Diagnosis(ipu.error_state, None, replace_machine)
    if ipu.error_state == NO_ERRORS:
        state = f"link down to {', '.join(map(str, ipu.links_down))}"
        action: str | None = ipu.recovery_action or "PARTITION_RESET"
    else:
        state, action = ipu.error_state, ipu.recovery_action
    return Diagnosis(state, action, _remedy(action, partition, device))


def _remedy(action: str | None, partition: str, device: Device) -> str:
    """The recovery action with the command to type."""
    commands = {
        "IPU_RESET": f"gc-reset -d {device.id}, or load the program again",
        "PARTITION_RESET": f"vipu reset partition {partition}",
        "FULL_RESET": f"vipu-admin power-cycle agent {device.machine.agent_id}",
    }
    if action is None:
        return "see the application's error"
    return f"{action}: {commands[action]}" if action in commands else action
