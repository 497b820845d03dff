"""PopTorch's exceptions: ``poptorch.Error`` and the errors of an IPU system; a session's errors become these."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from podrun.core.errors import Fault, GraphMemoryAllocationError, InternalError, PodrunError, PoplarError

LONGEST_MESSAGE = 80
"""Lines of a message; a longer one goes to a file."""
LONG_MESSAGES = "poptorch_error.log"


class Error(PodrunError):
    """A thing that PopTorch cannot do with a model, or an error while it ran.

    ``message``: what happened. ``type``: the part that reports it (``poptorch_py_error``: the front end;
    ``popart_exception``; ``poplar_...``). ``location``: what the program was doing, innermost first.
    """

    type: ClassVar[str] = "poptorch_py_error"
    location: ClassVar[str] = ""
    fault = Fault.USER

    def __init__(self, message: str = "", *, hint: str = "", location: str = "", type: str = "") -> None:
        super().__init__(_shortened(message))
        self.advice = hint
        if location:
            self.location = location  # type: ignore[misc]
        if type:
            self.type = type  # type: ignore[misc]

    def _lines(self) -> list[str]:
        lines = [f"'{self.type}': {self.message}"]
        lines += [f"  in {line}" for line in self.location.splitlines()]
        return lines + ([f"  {self.advice}"] if self.advice else [])

    def __str__(self) -> str:
        return "\n".join(self._lines())


class ArgumentError(Error, AssertionError):
    """An argument or a value of an option that cannot be right. It is an AssertionError too, as the SDK's are."""


class RecoverableError(Error):
    """An error after which the model can run again. ``recovery_action`` says what must happen before: IPU_RESET,
    LINK_RESET, PARTITION_RESET or FULL_RESET.
    """

    type: ClassVar[str] = "poplar_recoverable_runtime_error"
    fault = Fault.SYSTEM

    def __init__(
        self,
        message: str = "",
        *,
        recovery_action: str = "IPU_RESET",
        hint: str = "",
        location: str = "",
        type: str = "",
    ) -> None:
        super().__init__(message, hint=hint, location=location, type=type)
        self.recovery_action = recovery_action

    def _lines(self) -> list[str]:
        first, *rest = super()._lines()
        return [first, f"  Recovery action: {self.recovery_action}", *rest]


class UnrecoverableError(Error):
    """An error after which the IPUs cannot be used until they are repaired."""

    type: ClassVar[str] = "poplar_unrecoverable_runtime_error"
    fault = Fault.SYSTEM


def _shortened(message: str) -> str:
    """The message itself; if it is too long to read in a terminal, the name of a file with its whole text."""
    lines = message.splitlines()
    if len(lines) <= LONGEST_MESSAGE:
        return message
    path = Path(LONG_MESSAGES).resolve()
    try:
        path.write_text(message, encoding="utf-8")
    except OSError:
        return "\n".join([*lines[:LONGEST_MESSAGE], f"... and {len(lines) - LONGEST_MESSAGE} lines more"])
    return f"{lines[0]}\nThe whole message has {len(lines)} lines: {path}"


def createPoptorchError(msg: str) -> Error:
    """An Error of the front end, to raise."""
    return Error(msg)


class TestErrorType(enum.Enum):
    """Errors that `throw_test_error` raises, for tests of programs that handle them."""

    __test__ = False
    Poptorch = "poptorch_cpp_error"
    Popart = "popart_exception"
    PopartInternal = "popart_internal_exception"
    Poplibs = "poplibs_exception"
    PoplarUnrecoverable = "poplar_unrecoverable_runtime_error"
    PoplarUnknown = "poplar_unknown_runtime_error"
    PoplarRecoverableFullReset = "poplar_recoverable_runtime_error"
    PoplarLinkError = "poplar_link_error"


def throw_test_error(kind: TestErrorType) -> None:
    """Raise the error of a kind."""
    message = "This is a test of error handling"
    if kind is TestErrorType.PoplarRecoverableFullReset:
        raise RecoverableError(message, recovery_action="FULL_RESET")
    if kind in (TestErrorType.PoplarUnrecoverable, TestErrorType.PoplarUnknown):
        raise UnrecoverableError(message, type=kind.value)
    raise Error(message, type=kind.value)


_doing: list[str] = []
"""The actions that the program is in, outermost first."""


@contextmanager
def translated(doing: str = "") -> Iterator[None]:
    """Raise a session's errors inside the context as Error, RecoverableError or UnrecoverableError. ``doing``: the
    action, for the error's ``location``.
    """
    if doing:
        _doing.append(doing)
    try:
        yield
    except Error:
        raise
    except PodrunError as error:
        if error.fault is Fault.INTERNAL and not isinstance(error, InternalError):
            raise
        raise _error_of(error) from error
    finally:
        if doing:
            _doing.pop()


_SETTINGS = {
    "weightTensorLocationSettings": "options.TensorLocations.setWeightLocation",
    "optimizerStateTensorLocationSettings": "options.TensorLocations.setOptimizerLocation",
    "accumulatorTensorLocationSettings": "options.TensorLocations.setAccumulatorLocation",
    "autoRecomputation": 'options._Popart.set("autoRecomputation", 1)',
    "compute in FLOAT16": "compute in float16 (model.half())",
}
"""What changes of an out-of-memory error's hint are called in PopTorch."""


_LOAD_AGAIN = re.compile(r"Load the program again( \(prepareDevice[^)]*\))?( before the next run)?")
_CALL_AGAIN = "Bring back saved weights (load_state_dict), then call the model again: this loads the program"


def _error_of(error: PodrunError) -> Error:
    where, hint = "\n".join(reversed(_doing)), error.hint or ""
    if not isinstance(error, PoplarError):
        kind = "popart_internal_exception" if error.fault is Fault.INTERNAL else "popart_exception"
        return Error(error.message, hint=hint, location=where, type=kind)
    hint = _LOAD_AGAIN.sub(_CALL_AGAIN, hint)
    action = getattr(error, "recovery_action", None)
    if action is not None:
        return RecoverableError(
            error.message, recovery_action=getattr(action, "value", str(action)), hint=hint, location=where
        )
    kind = f"poplar_{error.type_name}"
    if error.type_name in ("unrecoverable_runtime_error", "unknown_runtime_error"):
        return UnrecoverableError(error.message, hint=hint, location=where, type=kind)
    if isinstance(error, GraphMemoryAllocationError):
        for setting, ours in _SETTINGS.items():
            hint = hint.replace(setting, ours)
    return Error(error.message, hint=hint, location=where, type=kind)
