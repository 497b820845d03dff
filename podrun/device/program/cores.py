"""Which core a machine computes on, and the locks of machines that share a core.

If a program has at least as many machines on a host as there are cores, each machine computes on one core: machines
with a process of their own take cores in turn, and neighbours that share a process take the same core. A busy host's
scheduler may otherwise put three machines on one core while another core is idle; on a quiet host it makes no
measurable difference. On a host with more cores than machines nothing is pinned.

Machines that share a process and a core compute one piece, or one slice of a reduction, at a time, under a `CoreLock`.
Without it all of them would be active at once, each with a working set to bring back into the cache and with Python's
interpreter lock to wait for. A machine never holds the lock while it waits for other machines.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

CoreLock = AbstractContextManager[object]
"""Held while a machine computes."""
NO_CORE_LOCK: CoreLock = nullcontext()
"""For a machine that shares its core with none of its process."""
_thread = threading.local()
_locks: dict[int, threading.Lock] = {}
_adding = threading.Lock()


def choose_core(place: int, machines: int, cores: Sequence[int], *, shared: bool = False) -> int | None:
    """The core for machine number ``place`` of ``machines`` on this host; None: do not pin it. ``shared``: neighbours
    share processes."""
    if not 1 < len(cores) <= machines:
        return None
    return cores[place * len(cores) // machines] if shared else cores[place % len(cores)]


def core_lock_of(core: int | None) -> CoreLock:
    """The lock of this process's machines on a core; `NO_CORE_LOCK` for machines that are not pinned."""
    if core is None:
        return NO_CORE_LOCK
    with _adding:
        return _locks.setdefault(core, threading.Lock())


def has_core_for_each_process(machines: int, processes: int) -> bool:
    """Whether there is a core for each machine of a job and each host process that runs it."""
    return machines + processes <= len(os.sched_getaffinity(os.getpid()))


def pin_thread_to(core: int | None) -> None:
    """Keep the calling thread on a core. Does nothing for None, or if the core has gone."""
    if core is not None and getattr(_thread, "core", None) != core:
        _thread.core = core
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})
