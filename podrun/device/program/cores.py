"""Which core a machine computes on, and when.

When a program's machines are as many as a host's cores or more, each computes on one core: machines with a process of
their own in turn, so that a pipeline's stages fill all cores, and where processes are shared a process on each. Left to
itself the scheduler moves them about, and on a busy host lets three share a core while another is idle. On a quiet host
it made no measurable difference. A host with cores to spare is left alone.

Machines that share a process and a core take turns: one piece, or one slice of a reduction, at a time. Otherwise all
would be under way at once, each with its working set to bring back into the cache, and each addition with the
interpreter's lock to win back. A turn is never held while a machine waits for others.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

Turn = AbstractContextManager[object]
"""Held while a machine computes."""
ANY_TIME: Turn = nullcontext()
"""Nobody waits for another."""
_thread = threading.local()
_turns: dict[int, threading.Lock] = {}
_adding = threading.Lock()


def core_for(place: int, machines: int, cores: Sequence[int], *, shared: bool = False) -> int | None:
    """The core for machine number ``place`` of ``machines`` on this host; None: any. ``shared``: processes are, by
    neighbours."""
    if not 1 < len(cores) <= machines:
        return None
    return cores[place * len(cores) // machines] if shared else cores[place % len(cores)]


def turn_on(core: int | None) -> Turn:
    """The turn of this process's machines on a core; None, any core: nobody waits for another."""
    if core is None:
        return ANY_TIME
    with _adding:
        return _turns.setdefault(core, threading.Lock())


def for_each(machines: int, processes: int) -> bool:
    """Whether there is a core for each machine of a job and each host process that runs it."""
    return machines + processes <= len(os.sched_getaffinity(os.getpid()))


def move_to(core: int | None) -> None:
    """Keep the calling thread on a core from now on; it does nothing else than runs. None, or a core that is not
    there any more: any will do.
    """
    if core is not None and getattr(_thread, "core", None) != core:
        _thread.core = core
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})
