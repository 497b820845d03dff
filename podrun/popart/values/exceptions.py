"""PopART's exceptions, as classes of podrun's own tree too.

The tree is the SDK's (popart_exception over popart_runtime_error, poplar_exception over poplar_runtime_error and the
rest). Each class also derives from the podrun class of the same meaning, so code that knows either catches it, and
``args[0]`` is the plain message in both. `surfaced` turns the errors of lower rooms raise into these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

from podrun.core import errors as podrun_errors
from podrun.core.error_codec import fields_of
from podrun.core.errors import Fault, PodrunError, PoplarError, RecoveryAction

__all__ = [
    "OutOfMemoryException",
    "RecoveryAction",
    "popart_exception",
    "popart_internal_exception",
    "popart_runtime_error",
    "poplar_application_runtime_error",
    "poplar_exception",
    "poplar_recoverable_runtime_error",
    "poplar_runtime_error",
    "poplar_stream_memory_allocation_error",
    "poplar_system_runtime_error",
    "poplar_unknown_runtime_error",
    "poplar_unrecoverable_runtime_error",
    "poplibs_exception",
    "surfaced",
    "surfacing",
    "translate",
]


class popart_exception(PodrunError):
    """The program asks PopART for something impossible or unknown; the message says what and where."""

    fault = Fault.USER
    exit_code = 2


class popart_internal_exception(popart_exception, podrun_errors.InternalError):
    """A state that PopART should never reach; in podrun this is a bug to report."""

    fault = Fault.INTERNAL
    exit_code = 1


class popart_runtime_error(popart_exception):
    """A call that is wrong at the moment it is made: sizes or names of step data, missing weights."""


class popart_unimplemented(popart_exception, podrun_errors.UnimplementedError):
    """A popart_exception for what PopART has and podrun does not have yet."""

    fault = Fault.UNIMPLEMENTED


class popart_unsupported(popart_exception, podrun_errors.UnsupportedError):
    """A popart_exception for what podrun refuses by intent."""

    fault = Fault.UNSUPPORTED


class poplibs_exception(PodrunError):
    """Kept for handlers written for the SDK: the libraries below are not there, so podrun never raises it."""


class poplar_exception(PoplarError):
    """An error that the emulated IPU system reports (PopART's name for poplar_error)."""


class poplar_runtime_error(poplar_exception, podrun_errors.PoplarRuntimeError):
    """Something went wrong while a program was loaded or run."""

    type_name = "runtime_error"


class poplar_application_runtime_error(poplar_runtime_error, podrun_errors.ApplicationRuntimeError):
    """The program is wrong or uses the system wrongly."""

    fault = Fault.USER
    type_name = "application_runtime_error"


class poplar_system_runtime_error(poplar_runtime_error, podrun_errors.SystemRuntimeError):
    """The system failed, not the program."""

    type_name = "system_runtime_error"


class poplar_recoverable_runtime_error(poplar_system_runtime_error, podrun_errors.RecoverableRuntimeError):
    """Likely transient: ``recoveryAction`` makes the system usable again."""

    type_name = "recoverable_runtime_error"

    @property
    def recoveryAction(self) -> RecoveryAction:
        """What to do: IPU_RESET, LINK_RESET, PARTITION_RESET or FULL_RESET."""
        return self.recovery_action


class poplar_unrecoverable_runtime_error(
    poplar_system_runtime_error, podrun_errors.UnrecoverableRuntimeError
):
    """Likely to persist: take the machine out of service."""

    type_name = "unrecoverable_runtime_error"


class poplar_unknown_runtime_error(poplar_system_runtime_error, podrun_errors.UnknownRuntimeError):
    """Could be either: try the recovery actions from the mildest up."""

    type_name = "unknown_runtime_error"


class poplar_stream_memory_allocation_error(poplar_exception, podrun_errors.StreamMemoryAllocationError):
    """The streams of a program do not fit the memory for host exchange. (PopART has no name of its own for it.)"""

    type_name = "stream_memory_allocation_error"


class OutOfMemoryError:
    """How a compilation ended, for programs that ask instead of catching `OutOfMemoryException`; this one did not run
    out of memory.
    """

    def isSuccessful(self) -> bool:
        """Always True: a failure raises an exception instead."""
        return True

    def getSummaryReport(self) -> str:
        """Always empty: nothing failed to fit."""
        return ""

    def getProfilePath(self) -> str:
        """Always empty: there is no memory report."""
        return ""


class OutOfMemoryException(popart_exception, podrun_errors.GraphMemoryAllocationError):
    """The program does not fit the tiles; raised by prepareDevice and compileAndExport."""

    type_name = "graph_memory_allocation_error"

    @property
    def error(self) -> str:
        """The message, under the name that the SDK gives it."""
        return self.message

    def getSummaryReport(self) -> str:
        """What did not fit, as text."""
        return self.message

    def getProfilePath(self) -> str:
        """Path of the memory report, or empty."""
        return self.profile_path


_MEANINGS: tuple[tuple[type[PodrunError], type[PodrunError]], ...] = (
    # The first match wins, so the most special classes come first.
    (podrun_errors.GraphMemoryAllocationError, OutOfMemoryException),
    (podrun_errors.RecoverableRuntimeError, poplar_recoverable_runtime_error),
    (podrun_errors.UnrecoverableRuntimeError, poplar_unrecoverable_runtime_error),
    (podrun_errors.UnknownRuntimeError, poplar_unknown_runtime_error),
    (podrun_errors.SystemRuntimeError, poplar_system_runtime_error),
    (podrun_errors.ApplicationRuntimeError, poplar_application_runtime_error),
    (podrun_errors.PoplarRuntimeError, poplar_runtime_error),
    (podrun_errors.StreamMemoryAllocationError, poplar_stream_memory_allocation_error),
    (podrun_errors.PoplarError, poplar_exception),
    (podrun_errors.UnimplementedError, popart_unimplemented),
    (podrun_errors.UnsupportedError, popart_unsupported),
    (podrun_errors.CallError, popart_runtime_error),
    (podrun_errors.UsageError, popart_exception),
    (podrun_errors.InternalError, popart_internal_exception),
)
"""Classes of podrun's errors, and PopART's of the same meaning."""


def incompatible(method: str, why: str) -> TypeError:
    """The error of a call with arguments of other types than the method takes, as pybind11 words it."""
    return TypeError(f"{method}(): incompatible function arguments. {why}")


def translate(error: PodrunError) -> PodrunError:
    """The PopART exception with the same meaning as ``error``; PopART's own errors come back unchanged."""
    if isinstance(error, (popart_exception, poplar_exception)):
        return error
    for kind, ours in _MEANINGS:
        if isinstance(error, kind):
            fields = {name: getattr(error, name) for name in fields_of(ours)}
            return ours(error.message, hint=error.hint, **fields)
    return error


@contextmanager
def surfaced() -> Iterator[None]:
    """Raise every error of lower rooms inside as PopART's exception of the same meaning, with its cause."""
    try:
        yield
    except PodrunError as error:
        ours = translate(error)
        if ours is error:
            raise
        raise ours from error


C = TypeVar("C", bound=type)


def surfacing(kind: C) -> C:
    """Class decorator: errors of lower rooms leave every method as PopART's exceptions (`surfaced`)."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType):
            setattr(kind, name, _translating(member))
        elif isinstance(member, property) and member.fget is not None:
            setter = None if member.fset is None else _translating(member.fset)
            setattr(kind, name, property(_translating(member.fget), setter, member.fdel, member.__doc__))
    return kind


def _translating(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        with surfaced():
            return function(*args, **kwargs)

    return call
