"""What a session raises, as PopTorch's exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from podrun.core.errors import Fault, PodrunError, PoplarError
from podrun.poptorch.errors import Error, RecoverableError, UnrecoverableError
from podrun.session.exceptions import popart_internal_exception

_doing: list[str] = []
"""What the program is doing, outermost first."""


@contextmanager
def translated(doing: str = "") -> Iterator[None]:
    """Raise Error, RecoverableError or UnrecoverableError for what a session raises inside. ``doing``: what is done,
    for the error's ``location``."""
    if doing:
        _doing.append(doing)
    try:
        yield
    except Error:
        raise
    except PodrunError as error:
        if error.fault is Fault.INTERNAL and not isinstance(error, popart_internal_exception):
            raise
        raise _error_of(error) from error
    finally:
        if doing:
            _doing.pop()


def _error_of(error: PodrunError) -> Error:
    where, hint = "\n".join(reversed(_doing)), error.hint or ""
    if not isinstance(error, PoplarError):
        kind = "popart_internal_exception" if error.fault is Fault.INTERNAL else "popart_exception"
        return Error(error.message, hint=hint, location=where, type=kind)
    name = type(error).__name__
    action = getattr(error, "recovery_action", None)
    if action is not None:
        return RecoverableError(
            error.message, recovery_action=getattr(action, "value", str(action)), hint=hint, location=where
        )
    kind = f"poplar_{error.type_name}"
    if error.type_name in ("unrecoverable_runtime_error", "unknown_runtime_error"):
        return UnrecoverableError(error.message, hint=hint, location=where, type=kind)
    if name == "OutOfMemoryException":
        kind = "poplar_graph_memory_allocation_error"
    return Error(error.message, hint=hint, location=where, type=kind)
