"""Which instance this process is, as ``horovod.popart`` and ``horovod.torch`` both answer it.

Horovod answers only after ``init``. Its calls start and end nothing but that: instances connect at their first
collective, and the backend (`podrun.popdist.backends`) ends with the process.

Source of names and errors: Horovod's documentation of its basic calls.
"""

from __future__ import annotations

from podrun.core.environment import OMPI_COMM_WORLD_LOCAL_SIZE, environment
from podrun.popdist import backends, core


class _State:
    """Whether the program has called `init`."""

    up = False


def init(*args: object, **kwargs: object) -> None:
    """Start. May be called again."""
    _State.up = True
    backends.init()


def shutdown() -> None:
    """End: the calls below raise ValueError again."""
    _State.up = False


def is_initialized() -> bool:
    """True iff started."""
    return _State.up


def check_started() -> None:
    """Raise ValueError before `init`."""
    if not _State.up:
        raise ValueError("Horovod has not been initialized; use hvd.init().")


def size() -> int:
    """Number of instances. ValueError before `init`."""
    check_started()
    return core.getNumInstances()


def rank() -> int:
    """This instance among all. ValueError before `init`."""
    check_started()
    return core.getInstanceIndex()


def local_size() -> int:
    """Number of instances on this host. ValueError before `init`."""
    check_started()
    return instances_on_host()


def local_rank() -> int:
    """This instance among those of its host. ValueError before `init`."""
    check_started()
    return core.getLocalInstanceIndex()


def instances_on_host() -> int:
    """Number of instances on this host; 1 outside of ``podrun``."""
    return int(environment().get(OMPI_COMM_WORLD_LOCAL_SIZE, "1"))
