"""What each kind of fault does: `EFFECTS` has the error class, code, recovery action and words it comes back as.

The classes follow the SDK's error model: application errors leave tiles stopped until the program is loaded
again; recoverable ones name the action that helps; unrecoverable ones mean that the machine has to go.
"""

from __future__ import annotations

from collections.abc import Mapping

from podrun.core.errors import (
    ApplicationRuntimeError,
    ErrorCode,
    GraphMemoryAllocationError,
    PoplarError,
    RecoverableRuntimeError,
    RecoveryAction,
    StreamMemoryAllocationError,
    UnknownRuntimeError,
    UnrecoverableRuntimeError,
)
from podrun.core.fault_kinds import DISTURBANCES
from podrun.core.ipu_states import IpuErrorState
from podrun.core.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of one kind of fault.

    ``action`` makes the target usable again: for every class but recoverable ones it is what the reference recommends,
    and it is not part of the error. None: no action helps, the machine has to be replaced. ``state`` is what monitor
    tools show of the IPUs afterwards (None: nothing is left). ``message`` is filled with ``a`` and ``b`` (the
    indices), ``batch`` and ``partition``.
    """

    error: type[PoplarError]
    code: ErrorCode
    action: RecoveryAction | None
    state: IpuErrorState | None
    message: str


def _tile(code: ErrorCode, exception: str, state: IpuErrorState) -> Effect:
    """A tile exception: application error, cleared by loading the program again."""
    message = f"Tiles in excepted state: IPU {{a}}: {exception} in batch {{batch}}"
    return Effect(ApplicationRuntimeError, code, RecoveryAction.IPU_RESET, state, message)


EFFECTS: Mapping[tuple[str, str], Effect] = {
    ("ipu", "tile-parity"): Effect(
        RecoverableRuntimeError,
        ErrorCode.MEMORY_ERROR,
        RecoveryAction.IPU_RESET,
        IpuErrorState.TILE_PARITY,
        "Memory parity error on a tile of IPU {a} in batch {batch}; the contents of its memory are lost",
    ),
    ("ipu", "soft-error"): Effect(
        RecoverableRuntimeError,
        ErrorCode.IPUSOFTERR,
        RecoveryAction.IPU_RESET,
        IpuErrorState.SOC_SOFT_ERROR,
        "CIUERRVR.IPUSOFTERR error on IPU {a} in batch {batch}",
    ),
    ("ipu", "exchange-error"): Effect(
        RecoverableRuntimeError,
        ErrorCode.EXCHANGE_ERROR,
        RecoveryAction.IPU_RESET,
        IpuErrorState.EXCHANGE_ERROR,
        "Exchange error on IPU {a} in batch {batch}",
    ),
    ("ipu", "tile-exception"): _tile(
        ErrorCode.INVALID_ADDRESS, "TEXCPT_INVALID_ADDR", IpuErrorState.TILE_EXCEPTION
    ),
    ("ipu", "trap"): _tile(ErrorCode.TRAP, "TEXCPT_DBG_TRAP", IpuErrorState.TRAP),
    ("ipu", "invalid-operation"): _tile(
        ErrorCode.FLOATING_POINT_INVALID_OPERATION,
        "TEXCPT_FP_INV",
        IpuErrorState.INVALID_OPERATION,
    ),
    ("ipu", "divide-by-zero"): _tile(
        ErrorCode.FLOATING_POINT_DIVIDE_BY_ZERO,
        "TEXCPT_FP_DIV0",
        IpuErrorState.DIVIDE_BY_ZERO,
    ),
    ("ipu", "overflow"): _tile(ErrorCode.FLOATING_POINT_OVERFLOW, "TEXCPT_FP_OFLO", IpuErrorState.OVERFLOW),
    ("ipu", "bank-conflict"): _tile(
        ErrorCode.TILE_MEMORY_BANK_CONFLICT,
        "TEXCPT_MEM_BANK_CONFLICT",
        IpuErrorState.BANK_CONFLICT,
    ),
    ("ipu", "exchange-configuration"): _tile(
        ErrorCode.INVALID_EXCHANGE_CONFIGURATION, "TEXCPT_EXERR", IpuErrorState.EXCHANGE_CONFIGURATION
    ),
    ("ipu", "invalid-operand"): _tile(
        ErrorCode.INVALID_OPERAND, "TEXCPT_INVALID_OPERAND", IpuErrorState.INVALID_OPERAND
    ),
    ("ipu", "invalid-program-counter"): _tile(
        ErrorCode.INVALID_PROGRAM_COUNTER, "TEXCPT_INVALID_PC", IpuErrorState.INVALID_PROGRAM_COUNTER
    ),
    ("ipu", "invalid-instruction"): _tile(
        ErrorCode.INVALID_INSTRUCTION, "TEXCPT_INVALID_INSTR", IpuErrorState.INVALID_INSTRUCTION
    ),
    ("ipu", "host-sync-timeout"): Effect(
        UnknownRuntimeError,
        ErrorCode.HOST_SYNC_TIMEOUT,
        RecoveryAction.IPU_RESET,
        IpuErrorState.HOST_SYNC_TIMEOUT,
        "IPUDevice: still waiting for host sync. IPU {a} did not come to it in batch {batch}",
    ),
    ("ipu", "sync-timeout"): Effect(
        UnknownRuntimeError,
        ErrorCode.UNKNOWN,
        RecoveryAction.IPU_RESET,
        IpuErrorState.SYNC_TIMEOUT,
        "IPU {a} did not come to a synchronisation of the IPUs in batch {batch}",
    ),
    ("ipu", "unknown"): Effect(
        UnknownRuntimeError,
        ErrorCode.UNKNOWN,
        RecoveryAction.FULL_RESET,
        IpuErrorState.UNKNOWN,
        "IPU {a} stopped in batch {batch} for an unknown reason",
    ),
    ("ipu", "out-of-memory"): Effect(
        GraphMemoryAllocationError,
        ErrorCode.NONE,
        None,
        None,
        "Out of memory: Cannot fit all variable data onto one or more tiles of IPU {a}",
    ),
    ("machine", "out-of-memory"): Effect(
        StreamMemoryAllocationError,
        ErrorCode.NONE,
        None,
        None,
        "Out of memory. A single stream does not fit into bufferIndex 0 on IPU-M2000 {a}",
    ),
    ("link", "down"): Effect(
        RecoverableRuntimeError,
        ErrorCode.LINK_DOWN,
        RecoveryAction.PARTITION_RESET,
        IpuErrorState.LINK_DOWN,
        "IPU-Link between IPU {a} and IPU {b} went down in batch {batch}",
    ),
    ("gw-link", "down"): Effect(
        RecoverableRuntimeError,
        ErrorCode.LINK_DOWN,
        RecoveryAction.PARTITION_RESET,
        IpuErrorState.GW_LINK_DOWN,
        "GW-Link between the gateways of IPU-M2000 {a} and IPU-M2000 {b} went down in batch {batch}",
    ),
    ("link", "flapping"): Effect(
        RecoverableRuntimeError,
        ErrorCode.LINK_DOWN,
        RecoveryAction.PARTITION_RESET,
        None,
        "IPU-Link between IPU {a} and IPU {b} went down in batch {batch} and came up again",
    ),
    ("network", "partitioned"): Effect(
        UnknownRuntimeError,
        ErrorCode.HOST_SYNC_TIMEOUT,
        None,
        None,
        "IPUDevice: still waiting for host sync. IPU-M2000 {a} and IPU-M2000 {b} did not reach each "
        "other over the network in batch {batch}",
    ),
    ("instance-network", "partitioned"): Effect(
        UnknownRuntimeError,
        ErrorCode.HOST_SYNC_TIMEOUT,
        None,
        None,
        "IPUDevice: still waiting for host sync. Instance {a} and instance {b} did not reach each "
        "other over the network in batch {batch}",
    ),
    ("machine", "connection-lost"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.HOST_LINK_DOWN,
        None,
        None,
        "fabric_atomic_increment_hsp_register could not be completed: Fabric error: connection not established "
        "(CONNECTION_KILL), machine {a} of the partition, in batch {batch}; the machine answers others",
    ),
    ("machine", "gateway-lost"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.HOST_LINK_DOWN,
        RecoveryAction.FULL_RESET,
        IpuErrorState.GATEWAY_LOST,
        "The gateway of IPU-M2000 {a} stopped answering in batch {batch}; hosts and streaming memory are out of reach",
    ),
    ("machine", "streaming-memory"): Effect(
        RecoverableRuntimeError,
        ErrorCode.MEMORY_ERROR,
        RecoveryAction.PARTITION_RESET,
        IpuErrorState.STREAMING_MEMORY,
        "Uncorrectable error in the streaming memory of IPU-M2000 {a} in batch {batch}; what it held is lost",
    ),
    ("machine", "power"): Effect(
        RecoverableRuntimeError,
        ErrorCode.UNKNOWN,
        RecoveryAction.FULL_RESET,
        IpuErrorState.POWER,
        "IPU-M2000 {a} reported a power fault in batch {batch}; its IPUs do not answer",
    ),
    ("machine", "unrecoverable"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.UNKNOWN,
        None,
        IpuErrorState.UNRECOVERABLE,
        "IPU-M2000 {a} failed in batch {batch} with an error that is likely to persist",
    ),
    ("machine", "lost"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.HOST_LINK_DOWN,
        None,
        IpuErrorState.MACHINE_LOST,
        "IPU-M2000 {a} was lost in batch {batch}",
    ),
    ("host", "lost"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.HOST_LINK_DOWN,
        None,
        IpuErrorState.MACHINE_LOST,
        "Host {a} of the partition was lost in batch {batch}, and all its machines with it",
    ),
}
"""Effects by target and kind."""


def kinds_of(target: str) -> tuple[str, ...]:
    """The kinds of faults of a target."""
    return tuple(kind for where, kind in (*EFFECTS, *DISTURBANCES) if where == target)
