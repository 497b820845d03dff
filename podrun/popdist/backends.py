"""The life of popdist's backend: registered, initialised and finalised once each, in this order.

The SDK's backend is MPI. Here instances need none to know who they are, and connect at the first collective: these
calls keep the SDK's order and its errors, and finalising leaves the others. `init` may be called any number of times.
"""

from __future__ import annotations

import atexit

from podrun.core.errors import UnimplementedError
from podrun.popdist.collectives import instance_groups
from podrun.popdist.core import popdist_error


class _Backend:
    """States of the backend: registered, initialised, finalised, in this order and each once."""

    def __init__(self) -> None:
        self.registered = False
        self.initialised = False


_backend = _Backend()


def registerDefaultBackend() -> None:
    """Register the backend. popdist_error if one is registered already."""
    if _backend.registered:
        raise popdist_error("A popdist backend is registered already.")
    _backend.registered = True


def registerBackend(path: str) -> None:
    """Refused: a compiled backend cannot be loaded; only the default one exists."""
    raise UnimplementedError(
        f"the popdist backend {path!r} is compiled for the SDK and cannot be loaded here",
        hint="Call popdist.init() instead.",
    )


def initializeBackend() -> None:
    """Initialise the registered backend. popdist_error out of order."""
    if not _backend.registered:
        raise popdist_error("No popdist backend is registered: call registerDefaultBackend() first.")
    if _backend.initialised:
        raise popdist_error("The popdist backend is initialised already.")
    _backend.initialised = True


def isBackendInitialized() -> bool:
    """True iff the backend is initialised."""
    return _backend.initialised


def finalizeBackend() -> None:
    """End the backend. popdist_error if it was not initialised."""
    if not _backend.initialised:
        raise popdist_error("The popdist backend is not initialised, so it cannot be finalised.")
    instance_groups.close()
    _backend.initialised = _backend.registered = False


def init() -> None:
    """Register and initialise the default backend; the process's end finalises it. May be called again."""
    if _backend.initialised:
        return
    if not _backend.registered:
        registerDefaultBackend()
    initializeBackend()
    atexit.register(_finalize_at_exit)


def _finalize_at_exit() -> None:
    if _backend.initialised:
        finalizeBackend()
