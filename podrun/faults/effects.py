"""What each kind of fault does: `EFFECTS` has the error class, code, recovery action and words it comes back as.

The classes follow the SDK's error model: application errors leave tiles stopped until the program is loaded
again; recoverable ones name the action that helps; unrecoverable ones mean that the machine has to go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
        "IPUDevice: still waiting for host sync. IPU {a} did not come to it in batch {batch}",
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
        "Out of memory. A single stream does not fit into bufferIndex 0 on IPU-M2000 {a}",
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
        "IPUDevice: still waiting for host sync. IPU-M2000 {a} and IPU-M2000 {b} did not reach each "
        "other over the network in batch {batch}",
    ),
    ("instance-network", "partitioned"): Effect(
        UnknownRuntimeError,
        ErrorCode.HOST_SYNC_TIMEOUT,
        None,
        "",
        "IPUDevice: still waiting for host sync. Instance {a} and instance {b} did not reach each "
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
