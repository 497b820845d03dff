"""Every error podrun raises, and the table of IPU error codes.

Two families under one root:

* `PodrunError`: podrun's own commands and services. Says whose fault it is, what happened where, and what to type next.
* `PoplarError`: what a real IPU system reports to the program that runs on it. The tree, the names, the codes and the
  recovery actions follow the SDK's, so recovery code written against the SDK works here.

The PopART front end re-exports these under PopART's names (``poplar_recoverable_runtime_error`` and the rest).
"""

from __future__ import annotations

import enum


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
    """podrun itself: report it."""


class PodrunError(Exception):
    """Root of everything podrun raises on purpose.

    ``args[0]`` is the plain message: one or more sentences saying what happened where. ``hint`` says what to do next,
    with the command to type; it is printed on a line of its own. ``exit_code`` is what a command ends with.
    """

    fault = Fault.INTERNAL
    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class UsageError(PodrunError):
    """A command line, configuration or argument that cannot be right. Nothing was started; exit code 2."""

    fault = Fault.USER
    exit_code = 2


class ConfigError(UsageError):
    """A file that does not say what it should: names the file, the key, the line and what was expected."""


class NotFoundError(UsageError):
    """Something named does not exist: a partition, a cluster, a script. Lists what does."""


class ConflictError(UsageError):
    """Something is there already or in use: a partition of that name, IPUs, a port."""


class ExistsError(ConflictError):
    """There is one of that name already."""


class ExhaustedError(ConflictError):
    """What is asked for is right, but others have it: it can be had when they are done."""


class DeniedError(UsageError):
    """The caller may not do that: it is another user's, or needs an administrator."""


class UnsupportedError(PodrunError):
    """Refused by intent (see the README's table of what is exact, modelled, refused)."""

    fault = Fault.UNSUPPORTED
    exit_code = 2


class UnimplementedError(PodrunError):
    """Not there as yet; names what is missing."""

    fault = Fault.UNIMPLEMENTED
    exit_code = 2


class ServiceError(PodrunError):
    """A podrun service did not answer, or answered that it failed."""

    fault = Fault.SYSTEM


class DeadlineError(ServiceError):
    """A wait ended without what was waited for; names who is missing and how long was waited."""


class InternalError(PodrunError):
    """A state that cannot be. Please report it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(
            message, hint=hint or "This is a bug in podrun: please report it with the lines above."
        )


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
    UNKNOWN = 1
    TRAP = 2
    FLOATING_POINT_INVALID_OPERATION = 3
    FLOATING_POINT_DIVIDE_BY_ZERO = 4
    FLOATING_POINT_OVERFLOW = 5
    TILE_MEMORY_BANK_CONFLICT = 6
    INVALID_EXCHANGE_CONFIGURATION = 7
    INVALID_ADDRESS = 8
    INVALID_OPERAND = 9
    INVALID_PROGRAM_COUNTER = 10
    INVALID_INSTRUCTION = 11
    EXCHANGE_ERROR = 12
    MEMORY_ERROR = 13
    IPUSOFTERR = 14
    LINK_DOWN = 15
    HOST_LINK_DOWN = 16
    HOST_SYNC_TIMEOUT = 17


class PoplarError(PodrunError):
    """poplar_error: the root of what the emulated system and its runtime report.

    ``code`` is the ErrorCode; ``where`` names the IPU, machine or link, or is empty.
    """

    fault = Fault.SYSTEM
    type_name = "poplar_error"

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode = ErrorCode.NONE,
        where: str = "",
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.where = where

    @property
    def type(self) -> str:
        """The SDK's name of the class, as Poplar's own ``type`` field gives it."""
        return self.type_name


class InvalidOptionError(PoplarError):
    """invalid_option: an engine, target or report option that does not exist or cannot have that value."""

    fault = Fault.USER
    type_name = "invalid_option"


class GraphMemoryAllocationError(PoplarError):
    """graph_memory_allocation_error: the program does not fit the tiles. ``profile_path`` names the report, if any."""

    fault = Fault.USER
    type_name = "graph_memory_allocation_error"

    def __init__(
        self, message: str, *, profile_path: str = "", where: str = "", hint: str | None = None
    ) -> None:
        super().__init__(message, where=where, hint=hint)
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


class IpusTakenError(ApplicationRuntimeError):
    """The process holds its IPUs no more: a reset of the partition or a power cycle took them away."""


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
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, where=where, hint=hint)
        self.recovery_action = recovery_action


class UnrecoverableRuntimeError(SystemRuntimeError):
    """unrecoverable_runtime_error: likely to persist; take the machine out of service."""

    type_name = "unrecoverable_runtime_error"


class UnknownRuntimeError(SystemRuntimeError):
    """unknown_runtime_error: could be either; try the recovery actions from the mildest up."""

    type_name = "unknown_runtime_error"
