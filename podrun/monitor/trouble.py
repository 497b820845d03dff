"""What is wrong with an IPU and what makes it usable again, for tables and JSON alike."""

from __future__ import annotations

from dataclasses import dataclass

from podrun.monitor.source import Device
from podrun.telemetry import NO_ERRORS, UNRECOVERABLE


@dataclass(frozen=True, slots=True)
class Trouble:
    """``action``: the SDK's name of the recovery action, or None where none helps. ``remedy``: what to type."""

    state: str
    action: str | None
    remedy: str


def trouble_of(partition: str, device: Device) -> Trouble | None:
    """What is wrong with a device of a partition; None if it is usable."""
    ipu, agent = device.ipu, device.machine.agent_id
    replaced = f"vipu-admin restart agent {agent}, then vipu reset partition {partition}"
    if device.machine.state in ("lost", "no answer"):
        return Trouble(f"machine {device.machine.state}", None, replaced)
    if not ipu.has_error:
        return None
    if ipu.error_state == UNRECOVERABLE:
        return Trouble(ipu.error_state, None, replaced)
    if ipu.error_state == NO_ERRORS:
        state = f"link down to {', '.join(map(str, ipu.links_down))}"
        action: str | None = ipu.recovery_action or "PARTITION_RESET"
    else:
        state, action = ipu.error_state, ipu.recovery_action
    return Trouble(state, action, _remedy(action, partition, device))


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
