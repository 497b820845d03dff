"""Which core a machine computes on.

When a program's machines are as many as a host's cores or more, each computes on a core of its own choosing in turn,
for the length of a run. Left to itself the scheduler moves them about and lets three share a core while another is
idle: with four machines on two cores a step then takes half as long again. A host with cores to spare is left alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence


def core_for(place: int, machines: int, cores: Sequence[int]) -> int | None:
    """The core for machine number ``place`` of ``machines`` on this host; None: any."""
    return cores[place % len(cores)] if 1 < len(cores) <= machines else None


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Keep the calling thread on a core meanwhile. A core that is not there any more is no error: any will do then."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)
