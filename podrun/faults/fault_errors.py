"""The error that a fault raises, its cause as a value, and the hint that names the next command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.errors import (
    ApplicationRuntimeError,
    ErrorCause,
    GraphMemoryAllocationError,
    PoplarError,
    RecoverableRuntimeError,
    RecoveryAction,
    Remains,
    present,
)

if TYPE_CHECKING:
    from podrun.core.fault_spec import FaultSpec
from podrun.core.fault_effects import EFFECTS

NOTHING_BROKEN = (
    "Nothing stays broken: start the program again, or let podrun do it (podrun --max-restarts 3)."
)
ENDS_WITH_LAUNCH = (
    "The partition ends with this launch: start it again. With --max-restarts 3 podrun recovers by itself."
)
SUPERVISED = "PODRUN_SUPERVISED"
"""Variable that ``podrun`` sets for instances that it starts again after errors (``--max-restarts``)."""


def hint_in_launch(error: PoplarError, environ: Mapping[str, str]) -> str | None:
    """The hint of an error as the program of a launch prints it: it does not recommend what the launch does already."""
    nothing = error.cause is not None and error.cause.remains is Remains.NOTHING
    if not nothing or not environ.get(SUPERVISED):
        return error.hint
    return "podrun recovers by itself, and starts the program again while --max-restarts allows it."


def error_for(
    spec: FaultSpec, *, partition: str = "", agent: str = "", batch: int | None = None
) -> PoplarError:
    """The error that the fault raises, in every process of the program. ``partition`` and ``agent`` go into the hint;
    ``batch``: the batch in which it struck, if the fault does not name one.
    """
    effect = EFFECTS[spec.target.value, spec.kind]
    a, b = spec.indices[0], spec.indices[-1]
    struck = spec.batch if batch is None else batch
    message = effect.message.format(a=a, b=b, batch=struck)
    tile = spec.setting("tile", None)
    if tile is not None:
        message = message.replace(f"IPU {a}", f"tile {tile} of IPU {a}", 1)
    where = f"{spec.target.value} {'-'.join(map(str, spec.indices))}"
    harmless = not effect.state and effect.action is None
    hint = NOTHING_BROKEN
    if not harmless:
        hint = recovery_hint(effect.action, effect.error, where, partition, agent)
    over = harmless or ends_with_launch(effect.action, effect.error, partition)
    cause = replace(cause_of(spec, struck), remains=Remains.NOTHING if over else Remains.UNKNOWN)
    if effect.error is GraphMemoryAllocationError:
        return GraphMemoryAllocationError(message, where=where, cause=cause, hint=hint)
    if effect.error is RecoverableRuntimeError:
        action = present(effect.action, "a recoverable error names its recovery action")
        return RecoverableRuntimeError(
            message, recovery_action=action, code=effect.code, where=where, cause=cause, hint=hint
        )
    return effect.error(message, code=effect.code, where=where, cause=cause, hint=hint)


def cause_of(spec: FaultSpec, batch: int | None = None) -> ErrorCause:
    """The cause of an error that a fault raised in ``batch``."""
    target = spec.target.value
    return ErrorCause(
        fault=replace(spec, launch=""),
        batch=batch,
        ipus=spec.indices if target in ("ipu", "link") else (),
        machine=spec.indices[0] if target == "machine" else None,
        instances=spec.indices if target in ("instance", "instance-network") else (),
    )


OF_A_LAUNCH = re.compile(r"podrun-\d+")
"""Names of partitions that podrun makes for one launch and removes at its end."""


def ends_with_launch(action: RecoveryAction | None, error: type[PoplarError], partition: str) -> bool:
    """True iff what is broken goes with the partition of the launch, and loading the program again does not mend it."""
    by_loading = action is RecoveryAction.IPU_RESET or issubclass(error, ApplicationRuntimeError)
    return not by_loading and OF_A_LAUNCH.fullmatch(partition) is not None


def recovery_hint(
    action: RecoveryAction | None,
    error: type[PoplarError],
    where: str,
    partition: str = "",
    agent: str = "",
    *,
    attached: bool = True,
) -> str:
    """What to do next, with the command to type. ``where``: as `PoplarError.where` says it; ``partition``: empty for
    machines inside the process; ``agent``: of the machine concerned, if it is known; ``attached``: whether the program
    holds the IPUs, and so can load again.
    """
    load = "Load the program again (prepareDevice)"
    lasting = partition and not OF_A_LAUNCH.fullmatch(partition)
    if action is RecoveryAction.IPU_RESET or issubclass(error, ApplicationRuntimeError):
        number = where.partition(" ")[2]
        if not attached and partition:
            return f"Reset it: gc-reset -d {number}"
        if attached:
            return f"{load}; after the program has ended: gc-reset -d {number}" if lasting else f"{load}."
    if not partition:
        return "Start the program again: its machines are in its own process."
    if not lasting:
        return ENDS_WITH_LAUNCH
    named = agent or "AGENT"
    find = "" if agent else " (gc-monitor names the agent)"
    reset = f"vipu reset partition {partition}"
    match action:
        case RecoveryAction.PARTITION_RESET | RecoveryAction.LINK_RESET:
            return f"End the program and reset the partition: {reset}"
        case RecoveryAction.FULL_RESET:
            return f"Power-cycle the machine{find}: vipu-admin power-cycle agent {named}, then: {reset}"
    return f"Replace the machine{find}: vipu-admin restart agent {named}, then: {reset}"
