"""Which core a machine computes on.

When a program's machines are as many as a host's cores or more, each computes on a core of its own choosing in turn,
for the length of a run. Left to itself the scheduler moves them about, and on a busy host lets three share a core while
another is idle. On a quiet host it made no measurable difference. A host with cores to spare is left alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

_thread = threading.local()


def core_for(place: int, machines: int, cores: Sequence[int]) -> int | None:
    """The core for machine number ``place`` of ``machines`` on this host; None: any."""
    return cores[place % len(cores)] if 1 < len(cores) <= machines else None


def move_to(core: int | None) -> None:
    """Keep the calling thread on a core from now on; it does nothing else than runs. None, or a core that is not
    there any more: any will do.
    """
    if core is not None and getattr(_thread, "core", None) != core:
        _thread.core = core
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})
