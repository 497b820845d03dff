"""What each kind of fault does: `EFFECTS` has the error class, code, recovery action and words it comes back as.

The classes follow the SDK's error model: application errors leave tiles stopped until the program is loaded
again; recoverable ones name the action that helps; unrecoverable ones mean that the machine has to go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podrun.core.errors import (
    ApplicationRuntimeError,
    ErrorCause,
    ErrorCode,
    GraphMemoryAllocationError,
    PoplarError,
    RecoverableRuntimeError,
    RecoveryAction,
    StreamMemoryAllocationError,
    UnknownRuntimeError,
    UnrecoverableRuntimeError,
)

if TYPE_CHECKING:
    from podrun.faults.spec import FaultSpec


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one kind of fault.

    ``action`` makes the target usable again: for every class but recoverable ones it is what the reference recommends,
    and it is not part of the error. None: no action helps, the machine has to be replaced. ``state`` is the phrase that
    monitor tools show. ``message`` is filled with ``a`` and ``b`` (the indices), ``batch`` and ``partition``.
    """

    error: type[PoplarError]
    code: ErrorCode
    action: RecoveryAction | None
    state: str
    message: str


def _tile(code: ErrorCode, exception: str, state: str) -> Effect:
    """A tile exception: application error, cleared by loading the program again."""
    message = f"Tiles in excepted state: IPU {{a}}: {exception} in batch {{batch}}"
    return Effect(ApplicationRuntimeError, code, RecoveryAction.IPU_RESET, state, message)


EFFECTS: Mapping[tuple[str, str], Effect] = {
    ("ipu", "tile-parity"): Effect(
        RecoverableRuntimeError,
        ErrorCode.MEMORY_ERROR,
        RecoveryAction.IPU_RESET,
        "tile parity error",
        "Memory parity error on a tile of IPU {a} in batch {batch}; the contents of its memory are lost",
    ),
    ("ipu", "soft-error"): Effect(
        RecoverableRuntimeError,
        ErrorCode.IPUSOFTERR,
        RecoveryAction.IPU_RESET,
        "SoC soft error",
        "CIUERRVR.IPUSOFTERR error on IPU {a} in batch {batch}",
    ),
    ("ipu", "exchange-error"): Effect(
        RecoverableRuntimeError,
        ErrorCode.EXCHANGE_ERROR,
        RecoveryAction.IPU_RESET,
        "exchange error",
        "Exchange error on IPU {a} in batch {batch}",
    ),
    ("ipu", "tile-exception"): _tile(ErrorCode.INVALID_ADDRESS, "TEXCPT_INVALID_ADDR", "tile exception"),
    ("ipu", "trap"): _tile(ErrorCode.TRAP, "TEXCPT_DBG_TRAP", "tile exception (trap)"),
    ("ipu", "invalid-operation"): _tile(
        ErrorCode.FLOATING_POINT_INVALID_OPERATION,
        "TEXCPT_FP_INV",
        "floating-point exception (invalid operation)",
    ),
    ("ipu", "divide-by-zero"): _tile(
        ErrorCode.FLOATING_POINT_DIVIDE_BY_ZERO,
        "TEXCPT_FP_DIV0",
        "floating-point exception (division by zero)",
    ),
    ("ipu", "overflow"): _tile(
        ErrorCode.FLOATING_POINT_OVERFLOW, "TEXCPT_FP_OFLO", "floating-point exception (overflow)"
    ),
    ("ipu", "bank-conflict"): _tile(
        ErrorCode.TILE_MEMORY_BANK_CONFLICT,
        "TEXCPT_MEM_BANK_CONFLICT",
        "tile exception (memory bank conflict)",
    ),
    ("ipu", "exchange-configuration"): _tile(
        ErrorCode.INVALID_EXCHANGE_CONFIGURATION, "TEXCPT_EXERR", "tile exception (exchange configuration)"
    ),
    ("ipu", "invalid-operand"): _tile(
        ErrorCode.INVALID_OPERAND, "TEXCPT_INVALID_OPERAND", "tile exception (operand)"
    ),
    ("ipu", "invalid-program-counter"): _tile(
        ErrorCode.INVALID_PROGRAM_COUNTER, "TEXCPT_INVALID_PC", "tile exception (program counter)"
    ),
    ("ipu", "invalid-instruction"): _tile(
        ErrorCode.INVALID_INSTRUCTION, "TEXCPT_INVALID_INSTR", "tile exception (instruction)"
    ),
    ("ipu", "host-sync-timeout"): Effect(
        UnknownRuntimeError,
        ErrorCode.HOST_SYNC_TIMEOUT,
        RecoveryAction.IPU_RESET,
        "host sync timeout",
        "IPUDevice: still waiting for host sync after: 300 seconds. IPU {a} did not come to it in batch {batch}",
    ),
    ("ipu", "sync-timeout"): Effect(
        UnknownRuntimeError,
        ErrorCode.UNKNOWN,
        RecoveryAction.IPU_RESET,
        "sync timeout",
        "IPU {a} did not come to a synchronisation of the IPUs in batch {batch}",
    ),
    ("ipu", "unknown"): Effect(
        UnknownRuntimeError,
        ErrorCode.UNKNOWN,
        RecoveryAction.FULL_RESET,
        "unknown error",
        "IPU {a} stopped in batch {batch} for an unknown reason",
    ),
    ("ipu", "out-of-memory"): Effect(
        GraphMemoryAllocationError,
        ErrorCode.NONE,
        None,
        "",
        "Out of memory: Cannot fit all variable data onto one or more tiles of IPU {a}",
    ),
    ("machine", "out-of-memory"): Effect(
        StreamMemoryAllocationError,
        ErrorCode.NONE,
        None,
        "",
        "Out of memory. Single stream of length 268435456 in bufferIndex 0, on IPU-M2000 {a}",
    ),
    ("link", "down"): Effect(
        RecoverableRuntimeError,
        ErrorCode.LINK_DOWN,
        RecoveryAction.PARTITION_RESET,
        "IPU-Link down",
        "IPU-Link between IPU {a} and IPU {b} went down in batch {batch}",
    ),
    ("gw-link", "down"): Effect(
        RecoverableRuntimeError,
        ErrorCode.LINK_DOWN,
        RecoveryAction.PARTITION_RESET,
        "GW-Link down",
        "GW-Link between the gateways of IPU-M2000 {a} and IPU-M2000 {b} went down in batch {batch}",
    ),
    ("link", "flapping"): Effect(
        RecoverableRuntimeError,
        ErrorCode.LINK_DOWN,
        RecoveryAction.PARTITION_RESET,
        "",
        "IPU-Link between IPU {a} and IPU {b} went down in batch {batch} and came up again",
    ),
    ("network", "partitioned"): Effect(
        UnknownRuntimeError,
        ErrorCode.HOST_SYNC_TIMEOUT,
        None,
        "",
        "IPUDevice: still waiting for host sync after: 300 seconds. IPU-M2000 {a} and IPU-M2000 {b} did not reach each "
        "other over the network in batch {batch}",
    ),
    ("instance-network", "partitioned"): Effect(
        UnknownRuntimeError,
        ErrorCode.HOST_SYNC_TIMEOUT,
        None,
        "",
        "IPUDevice: still waiting for host sync after: 300 seconds. Instance {a} and instance {b} did not reach each "
        "other over the network in batch {batch}",
    ),
    ("machine", "connection-lost"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.HOST_LINK_DOWN,
        None,
        "",
        "fabric_atomic_increment_hsp_register could not be completed: Fabric error: connection not established "
        "(CONNECTION_KILL), machine {a} of the partition, in batch {batch}; the machine answers others",
    ),
    ("machine", "gateway-lost"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.HOST_LINK_DOWN,
        RecoveryAction.FULL_RESET,
        "gateway lost",
        "The gateway of IPU-M2000 {a} stopped answering in batch {batch}; hosts and streaming memory are out of reach",
    ),
    ("machine", "streaming-memory"): Effect(
        RecoverableRuntimeError,
        ErrorCode.MEMORY_ERROR,
        RecoveryAction.PARTITION_RESET,
        "streaming memory error",
        "Uncorrectable error in the streaming memory of IPU-M2000 {a} in batch {batch}; what it held is lost",
    ),
    ("machine", "power"): Effect(
        RecoverableRuntimeError,
        ErrorCode.UNKNOWN,
        RecoveryAction.FULL_RESET,
        "power fault",
        "IPU-M2000 {a} reported a power fault in batch {batch}; its IPUs do not answer",
    ),
    ("machine", "unrecoverable"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.UNKNOWN,
        None,
        "unrecoverable error",
        "IPU-M2000 {a} failed in batch {batch} with an error that is likely to persist",
    ),
    ("machine", "lost"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.HOST_LINK_DOWN,
        None,
        "machine lost",
        "IPU-M2000 {a} was lost in batch {batch}",
    ),
    ("host", "lost"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.HOST_LINK_DOWN,
        None,
        "machine lost",
        "Host {a} of the partition was lost in batch {batch}, and all its machines with it",
    ),
}
"""Effects by target and kind."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A parameter of a disturbance: its type, its default (None: it must be given), and the smallest and largest value
    of a number.
    """

    type: type[int] | type[float] | type[str]
    default: int | float | str | None
    least: float = 0.0
    most: float = 1e9


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A fault that raises no error by itself: it shows in results, times, processes or answers. ``lasts``: it may be
    given a number of batches (``for``). ``settings``: its parameters. ``does``: in words.
    """

    does: str
    settings: Mapping[str, Setting]
    lasts: bool = False


_FACTOR = {"factor": Setting(float, 1.01, 1.0, 1e6)}
_SECONDS = {"seconds": Setting(float, 1.0, 0.0, 3600.0)}
_LOSS = {"loss": Setting(float, 0.01, 0.0, 0.99)}

DISTURBANCES: Mapping[tuple[str, str], Disturbance] = {
    ("ipu", "corrected-parity"): Disturbance("corrects a parity error and counts it", {}),
    ("ipu", "corrupt"): Disturbance(
        "flips a bit of a variable, silently",
        {"tensor": Setting(str, None), "element": Setting(int, 0), "bit": Setting(int, 0, 0, 63)},
    ),
    ("ipu", "slow"): Disturbance("computes slower by a factor, in modelled time", _FACTOR, lasts=True),
    ("ipu", "throttled"): Disturbance(
        "computes at a lower clock, in modelled time", {"mhz": Setting(float, None, 1.0, 1e5)}, lasts=True
    ),
    ("ipu", "stream-stall"): Disturbance("waits for the host's data", _SECONDS),
    ("link", "degraded"): Disturbance(
        "runs with fewer of its 8 lanes, or repeats a share of its packets, in modelled time",
        {"lanes": Setting(int, 8, 1, 8), "error-rate": Setting(float, 0.0, 0.0, 0.99)},
        lasts=True,
    ),
    ("machine", "slow"): Disturbance("computes slower by a factor, in modelled time", _FACTOR, lasts=True),
    ("machine", "paused"): Disturbance("does and answers nothing for a time", _SECONDS),
    ("machine", "heartbeats-dropped"): Disturbance(
        "does not answer the partition service and monitors for a time, and works on", _SECONDS
    ),
    ("network", "delayed"): Disturbance("carries nothing between two machines for a time", _SECONDS),
    ("network", "lossy"): Disturbance("loses a share of packets, which are sent again", _LOSS),
    ("instance-network", "delayed"): Disturbance(
        "carries nothing between two instances for a time", _SECONDS
    ),
    ("instance-network", "lossy"): Disturbance("loses a share of packets, which are sent again", _LOSS),
    ("disk", "full"): Disturbance(
        "takes so many bytes of a checkpoint of an instance, and no more", {"bytes": Setting(int, 0, 0, 1e15)}
    ),
    ("instance", "killed"): Disturbance("kills the host process", {}),
    ("instance", "hung"): Disturbance("stops the host process for a time", _SECONDS),
    ("service", "slow"): Disturbance("answers the request late", _SECONDS),
    ("service", "answer-lost"): Disturbance("carries out the request, and the answer is lost", {}),
    ("service", "twice"): Disturbance("is given the request twice", {}),
    ("service", "killed"): Disturbance("ends after it has committed the request", {}),
}
"""Faults without an error of their own, by target and kind."""

EVENTS = ("load", "read", "partition-reset")
"""Events of a machine, besides batches, at which a fault may strike: it loads a program, gives weights to the host (as
a checkpoint needs), or is reset with its partition.
"""
CHECKPOINT_WRITE = "checkpoint-write"
COLLECTIVE = "collective"
PROGRAM_EVENTS = (CHECKPOINT_WRITE, COLLECTIVE)
"""Events of an instance at which faults may strike: it writes its part of a checkpoint to the disk, or takes part in a
collective of instances (``popdist``).
"""
REQUESTS = (
    "CreatePartition",
    "ResetPartition",
    "RemovePartition",
    "PowerCycleAgent",
    "RestartAgent",
    "GetPartition",
)
"""Requests to the partition service at which a fault of ``service`` may strike."""


def events_of(target: str, kind: str) -> tuple[str, ...]:
    """The events at which a fault of a kind may strike."""
    if target == "service":
        return REQUESTS
    if target in ("instance", "disk"):
        return (CHECKPOINT_WRITE,)
    if target == "instance-network":
        return (COLLECTIVE,)
    found: tuple[str, ...] = ("load",) if kind == "out-of-memory" else EVENTS
    if kind == "corrupt":
        found = ("read",)  # The memory is empty when a program is loaded or a partition reset.
    if (target, kind) in DISTURBANCES and DISTURBANCES[target, kind].lasts:
        found = ("load", "read")  # The effect lasts until the program is loaded again, so a reset ends it.
    if WHERE[target] == "A-B":
        found = tuple(
            event for event in found if event != "read"
        )  # The host reads over no link between machines.
    return found


def strikes_in_batches(target: str, kind: str) -> bool:
    """Whether a fault of a kind may strike in a batch, not only at events."""
    return target not in ("service", "disk") and kind != "out-of-memory"


def settings_of(target: str, kind: str) -> Mapping[str, Setting]:
    """The parameters of a kind."""
    found = DISTURBANCES.get((target, kind))
    return {} if found is None else found.settings


def kinds_of(target: str) -> tuple[str, ...]:
    """The kinds of faults of a target."""
    return tuple(kind for where, kind in (*EFFECTS, *DISTURBANCES) if where == target)


WHERE: Mapping[str, str] = {
    "ipu": "N",
    "link": "A-B",
    "gw-link": "A-B",
    "network": "A-B",
    "instance-network": "A-B",
    "machine": "N",
    "host": "N",
    "instance": "N",
    "disk": "N",
    "service": "vipu",
}
"""Targets, and how each is numbered."""


NOTHING_BROKEN = (
    "Nothing stays broken: start the program again, or let podrun do it (podrun --max-restarts 3)."
)
ENDS_WITH_LAUNCH = (
    "The partition ends with this launch: start it again. With --max-restarts 3 podrun recovers by itself."
)
SUPERVISED = "PODRUN_SUPERVISED"
"""Variable that ``podrun`` sets for instances that it starts again after errors (``--max-restarts``)."""


def hint_in_launch(hint: str | None, environ: Mapping[str, str]) -> str | None:
    """The hint of an error as the program of a launch prints it: it does not recommend what the launch does already."""
    if hint not in (NOTHING_BROKEN, ENDS_WITH_LAUNCH) or not environ.get(SUPERVISED):
        return hint
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
    where, cause = f"{spec.target.value} {'-'.join(map(str, spec.indices))}", cause_of(spec, struck)
    hint = recovery_hint(effect.action, effect.error, where, partition, agent)
    if not effect.state and effect.action is None:
        hint = NOTHING_BROKEN
    if effect.error is GraphMemoryAllocationError:
        return GraphMemoryAllocationError(message, where=where, cause=cause, hint=hint)
    if effect.error is RecoverableRuntimeError:
        assert effect.action is not None
        return RecoverableRuntimeError(
            message, recovery_action=effect.action, code=effect.code, where=where, cause=cause, hint=hint
        )
    return effect.error(message, code=effect.code, where=where, cause=cause, hint=hint)


def cause_of(spec: FaultSpec, batch: int | None = None) -> ErrorCause:
    """The cause of an error that a fault raised in ``batch``."""
    target = spec.target.value
    return ErrorCause(
        fault=spec.text,
        batch=batch,
        ipus=spec.indices if target in ("ipu", "link") else (),
        machine=spec.indices[0] if target == "machine" else None,
        instances=spec.indices if target in ("instance", "instance-network") else (),
    )


OF_A_LAUNCH = re.compile(r"podrun-\d+")
"""Names of partitions that podrun makes for one launch and removes at its end."""


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
