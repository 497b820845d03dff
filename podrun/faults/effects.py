"""What each kind of fault does: the error class, code, recovery action and words it comes back as.

The classes follow the SDK's error model: application errors leave tiles stopped until the program is loaded
again; recoverable ones name the action that helps; unrecoverable ones mean that the machine has to go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podrun.errors import (
    ApplicationRuntimeError,
    ErrorCode,
    PoplarError,
    RecoverableRuntimeError,
    RecoveryAction,
    UnknownRuntimeError,
    UnrecoverableRuntimeError,
)

if TYPE_CHECKING:
    from podrun.faults.spec import FaultSpec


@dataclass(frozen=True, slots=True)
class Effect:
    """One kind of fault.

    ``action`` makes the target usable again: for every class but recoverable ones it is what the reference
    recommends, and it is not part of the error. None: nothing does, the machine has to be replaced. ``state``
    is the phrase that monitor tools show. ``message`` is filled with ``a`` and ``b`` (the indices), ``step``
    and ``partition``.
    """

    error: type[PoplarError]
    code: ErrorCode
    action: RecoveryAction | None
    state: str
    message: str


def _tile(code: ErrorCode, exception: str, state: str) -> Effect:
    """A tile exception: application error, cleared by loading the program again."""
    message = f"Tiles in excepted state: IPU {{a}}: {exception} in step {{step}}"
    return Effect(ApplicationRuntimeError, code, RecoveryAction.IPU_RESET, state, message)


EFFECTS: Mapping[tuple[str, str], Effect] = {
    ("ipu", "tile-parity"): Effect(
        RecoverableRuntimeError,
        ErrorCode.MEMORY_ERROR,
        RecoveryAction.IPU_RESET,
        "tile parity error",
        "Memory parity error on a tile of IPU {a} in step {step}; the contents of its memory are lost",
    ),
    ("ipu", "soft-error"): Effect(
        RecoverableRuntimeError,
        ErrorCode.IPUSOFTERR,
        RecoveryAction.IPU_RESET,
        "SoC soft error",
        "CIUERRVR.IPUSOFTERR error on IPU {a} in step {step}",
    ),
    ("ipu", "exchange-error"): Effect(
        RecoverableRuntimeError,
        ErrorCode.EXCHANGE_ERROR,
        RecoveryAction.IPU_RESET,
        "exchange error",
        "Exchange error on IPU {a} in step {step}",
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
    ("ipu", "unknown"): Effect(
        UnknownRuntimeError,
        ErrorCode.UNKNOWN,
        RecoveryAction.FULL_RESET,
        "unknown error",
        "IPU {a} stopped in step {step} for an unknown reason",
    ),
    ("link", "down"): Effect(
        RecoverableRuntimeError,
        ErrorCode.LINK_DOWN,
        RecoveryAction.PARTITION_RESET,
        "IPU-Link down",
        "IPU-Link between IPU {a} and IPU {b} went down in step {step}",
    ),
    ("machine", "power"): Effect(
        RecoverableRuntimeError,
        ErrorCode.UNKNOWN,
        RecoveryAction.FULL_RESET,
        "power fault",
        "IPU-M2000 {a} reported a power fault in step {step}; its IPUs do not answer",
    ),
    ("machine", "unrecoverable"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.UNKNOWN,
        None,
        "unrecoverable error",
        "IPU-M2000 {a} failed in step {step} with an error that is likely to persist",
    ),
    ("machine", "lost"): Effect(
        UnrecoverableRuntimeError,
        ErrorCode.HOST_LINK_DOWN,
        None,
        "machine lost",
        "IPU-M2000 {a} was lost in step {step}",
    ),
}
"""Effects by target and kind."""


def describe_kinds() -> str:
    """All targets and kinds in one line, for messages and help."""
    return ", ".join(
        f"{target}:{'A-B' if target == 'link' else 'N'}@step=S:{kind}" for target, kind in EFFECTS
    )


def error_for(spec: FaultSpec, *, partition: str = "") -> PoplarError:
    """The error that the fault raises, in every process of the program; ``partition`` goes into the hint."""
    effect = EFFECTS[spec.target.value, spec.kind]
    a, b = spec.indices[0], spec.indices[-1]
    message = effect.message.format(a=a, b=b, step=spec.step)
    where = f"{spec.target.value} {'-'.join(map(str, spec.indices))}"
    hint = recovery_hint(effect.action, spec.indices, spec.target.value, partition)
    if effect.error is RecoverableRuntimeError:
        assert effect.action is not None
        return RecoverableRuntimeError(
            message, recovery_action=effect.action, code=effect.code, where=where, hint=hint
        )
    return effect.error(message, code=effect.code, where=where, hint=hint)


def recovery_hint(
    action: RecoveryAction | None, indices: tuple[int, ...], target: str, partition: str = ""
) -> str:
    """What to type to get the target back."""
    name = partition or "NAME"
    match action:
        case RecoveryAction.IPU_RESET:
            return f"Load the program again, or reset the IPU: gc-reset -d {indices[0]}"
        case RecoveryAction.PARTITION_RESET | RecoveryAction.LINK_RESET:
            return f"End the program and reset the partition: vipu reset partition {name}"
        case RecoveryAction.FULL_RESET:
            agent = "its machine" if target != "machine" else f"machine {indices[0]}"
            return (
                f"Power-cycle {agent} (vipu-admin power-cycle agent ID; gc-monitor names it), "
                f"then: vipu reset partition {name}"
            )
        case None:
            return (
                f"Replace the machine (vipu-admin restart agent ID; gc-monitor names it), "
                f"then: vipu reset partition {name}"
            )
