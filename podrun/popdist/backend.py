"""The life of popdist's host backend, and running a function on some instances.

The SDK's backend is MPI, registered once, initialised once, finalised once. Here instances need no backend
to know who they are, and meet for collectives at the first one; so these calls keep the SDK's order and its errors,
and finalising leaves the others. `init` may be called any number of times.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Set
from typing import Any, TypeVar

from podrun.core.errors import UnimplementedError
from podrun.popdist import collectives, core
from podrun.popdist.core import popdist_error

T = TypeVar("T")


class _Backend:
    """Registered, initialised, finalised: in this order, each once."""

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
    """Refused: a compiled backend cannot be loaded; the default one is all there is."""
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
    collectives.instances.close()
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


def execute_on_instances(instances: Set[int], func: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
    """Run ``func`` on these instances, with collectives among them alone; gives its result there and None elsewhere.

    popdist_error for an instance that does not exist.
    """
    count = core.getNumInstances()
    wrong = sorted(index for index in instances if not 0 <= index < count)
    if wrong:
        raise popdist_error(f"There is no instance {wrong[0]}: instances are 0 to {count - 1}.")
    if core.getInstanceIndex() not in instances:
        return None
    with collectives.instances.only(instances):
        return func(*args, **kwargs)
