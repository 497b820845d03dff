"""Every error podrun raises, the table of IPU error codes, and errors as plain data.

Two families under one root:

* `PodrunError`: podrun's own commands and services. Says whose fault it is, what happened where, and what to type next.
* `PoplarError`: what a real IPU system reports to the program that runs on it. The tree, the names, the codes and the
  recovery actions follow the SDK's, so recovery code written against the SDK works here.

The PopART front end re-exports these under PopART's names (``poplar_recoverable_runtime_error`` and the rest).

**Errors between processes.** `error_to_dict` writes any `PodrunError`: its class and the classes it derives from by
name, message, hint, exit code, whose fault it is, and its fields. A field is a keyword-only parameter of the class's
constructor that the error keeps as an attribute of the same name (``rank``, ``recovery_action``, ``cause``).
`error_from_dict` finds the class among the subclasses of `PodrunError` that this process has loaded. Where the class is
not loaded, the error arrives as its nearest loaded base, with the name of its class in the message and its own exit
code and fault. Nothing received is evaluated: names are looked up among error classes, and values are checked against
the annotations of the constructor.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar, TypeVar

from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.core.fault_spec import FaultSpec


class Fault(enum.Enum):
    """Whose fault an error is."""

    USER = "user"
    """The user's program, options or files: fix them."""
    UNSUPPORTED = "unsupported"
    """Refused by intent: podrun will not model this."""
    UNIMPLEMENTED = "unimplemented"
    """Not there as yet."""
    SYSTEM = "system"
    """The emulated hardware or the host: follow the recovery action."""
    INTERNAL = "internal"
    """podrun itself. Report it."""


class PodrunError(Exception):
    """Root of everything podrun raises on purpose.

    ``args[0]`` is the plain message: one or more sentences saying what happened where. ``hint`` says what to do next,
    with the command to type; it is printed on a line of its own. ``exit_code`` is what a command ends with.
    ``location``: where in the user's program, innermost first, if that is known apart from the message.
    """

    fault = Fault.INTERNAL
    location: ClassVar[str] = ""
    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class InputMismatch(ValueError):
    """An operator's complaint about its inputs or attributes; the node's name and its inputs are put before it."""


class UsageError(PodrunError):
    """A command line, configuration or argument that cannot be right. Nothing was started; exit code 2."""

    fault = Fault.USER
    exit_code = 2


class CallError(UsageError):
    """A call that is wrong at the moment it is made: sizes or names of a run's data, weights that were not sent."""


class ConfigError(UsageError):
    """A file with wrong content. The message names the file, the key, the line and what was expected."""


class NotFoundError(UsageError):
    """A named thing does not exist: a partition, a cluster, a script. The message lists the existing ones."""


class MissingPackageError(NotFoundError, ModuleNotFoundError):
    """A package that is needed now is not installed: one of an extra of podrun, or Ray."""


class ConflictError(UsageError):
    """A thing exists already or is in use: a partition of that name, IPUs, a port."""


class ExistsError(ConflictError):
    """A thing of that name exists already."""


class ExhaustedError(ConflictError):
    """A valid request that others' use makes impossible now; it can succeed when they are done."""


class DeniedError(UsageError):
    """The caller may not do that: it concerns another user's things, or needs an administrator."""


class UnsupportedError(PodrunError):
    """Refused by intent (see the README's table of what is exact, modelled, refused)."""

    fault = Fault.UNSUPPORTED
    exit_code = 2


class UnimplementedError(PodrunError):
    """What podrun does not do yet; the message names what is missing."""

    fault = Fault.UNIMPLEMENTED
    exit_code = 2


class ServiceError(PodrunError):
    """A podrun service did not answer, or answered that it failed."""

    fault = Fault.SYSTEM


class DeadlineError(ServiceError):
    """A wait reached its deadline; the message names who is missing and how long the wait was."""


class SilentMachineError(ServiceError):
    """A machine of a partition gives no answer: it is gone, or its process is stopped."""


class LostAnswerError(ServiceError):
    """A request reached its service, and the answer was lost: it may have been carried out."""


class InternalError(PodrunError):
    """A state that should be impossible. Please report it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(
            message, hint=hint or "This is a bug in podrun: please report it with the lines above."
        )


_Value = TypeVar("_Value")


def present(value: _Value | None, what: str) -> _Value:
    """A value that is never None here. ``what``: the sentence that would be untrue. Raises InternalError."""
    if value is None:
        raise InternalError(f"podrun relies on this, and it does not hold: {what}")
    return value


# --- What the emulated system reports ---------------------------------------------------------------------------------


class RecoveryAction(enum.Enum):
    """What makes the system usable again after a recoverable error (the SDK's enum)."""

    IPU_RESET = "IPU_RESET"
    """Reset the IPU and load its memory again: reload the engine, or ``gc-reset -d ID``."""
    LINK_RESET = "LINK_RESET"
    """Retrain IPU-Links (systems that are not Pods)."""
    PARTITION_RESET = "PARTITION_RESET"
    """Reset the partition, which retrains its links: ``vipu reset partition NAME``."""
    FULL_RESET = "FULL_RESET"
    """Power-cycle the machine: ``vipu-admin power-cycle agent ID``."""


class ErrorCode(enum.Enum):
    """poplar::ErrorCode: what went wrong at the lowest level. Values follow the SDK's order."""

    NONE = 0
    """No cause is known, or none is needed."""
    UNKNOWN = 1
    """The system does not know what went wrong."""
    TRAP = 2
    """A program stopped itself on a tile."""
    FLOATING_POINT_INVALID_OPERATION = 3
    """An operation without a result, such as 0/0, with exceptions switched on."""
    FLOATING_POINT_DIVIDE_BY_ZERO = 4
    """A division by zero, with exceptions switched on."""
    FLOATING_POINT_OVERFLOW = 5
    """A result too large for its type, with exceptions switched on."""
    TILE_MEMORY_BANK_CONFLICT = 6
    """Two accesses to one bank of a tile's memory at once."""
    INVALID_EXCHANGE_CONFIGURATION = 7
    """An exchange that a tile was set up for wrongly."""
    INVALID_ADDRESS = 8
    """An access outside a tile's memory."""
    INVALID_OPERAND = 9
    """An instruction with an operand that it cannot take."""
    INVALID_PROGRAM_COUNTER = 10
    """A jump to where no instruction can be."""
    INVALID_INSTRUCTION = 11
    """An instruction that does not exist."""
    EXCHANGE_ERROR = 12
    """Data between tiles was lost or changed."""
    MEMORY_ERROR = 13
    """Memory lost its contents: a parity error."""
    IPUSOFTERR = 14
    """A soft error that an IPU noticed in itself."""
    LINK_DOWN = 15
    """A link between IPUs or machines went down."""
    HOST_LINK_DOWN = 16
    """The connection between host and machine went down."""
    HOST_SYNC_TIMEOUT = 17
    """Somebody waited too long for host or IPUs."""

    @property
    def is_tile_exception(self) -> bool:
        """True iff tiles stopped because of what the program did; loading it again clears that."""
        return ErrorCode.TRAP.value <= self.value <= ErrorCode.INVALID_INSTRUCTION.value


class Remains(enum.Enum):
    """What of a failure is left for the next program: decides what a hint may recommend."""

    UNKNOWN = "unknown"
    NOTHING = "nothing once the launch has ended"
    LOST_MACHINE = "the machine is gone"


@dataclass(frozen=True, slots=True)
class ErrorCause:
    """What brought an error about, as a value: programs and podrun itself ask it instead of reading the message.

    ``fault``: the planned fault that struck, without the launch; None if none did. ``batch``: the batch of the program
    in which it struck. ``ipus``: partition indices of the IPUs that failed. ``machine``: the index in the partition of
    the machine that is gone. ``instances``: those that ended or cannot be reached. ``tensor``: the buffer whose values
    stopped the tiles. ``remains``: what is left for the next program.
    """

    fault: FaultSpec | None = None
    batch: int | None = None
    ipus: tuple[int, ...] = ()
    machine: int | None = None
    instances: tuple[int, ...] = ()
    tensor: str = ""
    remains: Remains = Remains.UNKNOWN


class PoplarError(PodrunError):
    """poplar_error: the root of all errors that the emulated system and its runtime report.

    ``code`` is the ErrorCode; ``where`` names the IPU, machine or link, or is empty. ``cause``: see `ErrorCause`; None
    if nobody knows.
    """

    fault = Fault.SYSTEM
    type_name = "poplar_error"

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode = ErrorCode.NONE,
        where: str = "",
        cause: ErrorCause | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.where = where
        self.cause = cause

    @property
    def type(self) -> str:
        """The SDK's name of the class, as Poplar's own ``type`` field gives it."""
        return self.type_name


class InvalidOptionError(PoplarError):
    """invalid_option: an engine, target or report option that does not exist or cannot have that value."""

    fault = Fault.USER
    exit_code = 2
    type_name = "invalid_option"


class GraphMemoryAllocationError(PoplarError):
    """graph_memory_allocation_error: the program does not fit the tiles. ``profile_path`` names the report, if any."""

    fault = Fault.USER
    type_name = "graph_memory_allocation_error"

    def __init__(
        self,
        message: str,
        *,
        profile_path: str = "",
        where: str = "",
        cause: ErrorCause | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, where=where, cause=cause, hint=hint)
        self.profile_path = profile_path


class StreamMemoryAllocationError(PoplarError):
    """stream_memory_allocation_error: the streams of a program do not fit the memory for host exchange."""

    type_name = "stream_memory_allocation_error"


class PoplarRuntimeError(PoplarError):
    """runtime_error: something went wrong while a program was loaded or run."""

    type_name = "runtime_error"


class ApplicationRuntimeError(PoplarRuntimeError):
    """application_runtime_error: the program is wrong or uses the API wrongly. Reload the engine after fixing it."""

    fault = Fault.USER
    type_name = "application_runtime_error"


class TakenBy(enum.Enum):
    """What takes the IPUs of a partition away from the processes that hold them; the values say it in words."""

    NEW_PLACE = "its machine was configured anew"
    PARTITION_RESET = "the partition was reset"
    POWER_CYCLE = "the machine was power-cycled"
    REMOVAL = "the partition was removed"
    MOVE = "the partition was moved to other machines"


class IpusTakenError(ApplicationRuntimeError):
    """The process holds its IPUs no longer: a partition reset or a power cycle took them away."""


class FailedAssertionError(ApplicationRuntimeError):
    """An assertion of a program in a file was false. The IPUs keep what they hold: the next run is not concerned."""


class SystemRuntimeError(PoplarRuntimeError):
    """system_runtime_error: the system failed, not the program."""

    type_name = "system_runtime_error"


class RecoverableRuntimeError(SystemRuntimeError):
    """recoverable_runtime_error: likely transient; ``recovery_action`` makes the system usable again."""

    type_name = "recoverable_runtime_error"

    def __init__(
        self,
        message: str,
        *,
        recovery_action: RecoveryAction,
        code: ErrorCode = ErrorCode.UNKNOWN,
        where: str = "",
        cause: ErrorCause | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, where=where, cause=cause, hint=hint)
        self.recovery_action = recovery_action


class UnrecoverableRuntimeError(SystemRuntimeError):
    """unrecoverable_runtime_error: likely to persist; take the machine out of service."""

    type_name = "unrecoverable_runtime_error"


class UnknownRuntimeError(SystemRuntimeError):
    """unknown_runtime_error: could be either; try the recovery actions from the mildest up."""

    type_name = "unknown_runtime_error"
