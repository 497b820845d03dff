"""When Python's garbage collector need not look: while libraries are imported and while programs are prepared.

A full collection looks at every object that can refer to others. JAX, Ray and podrun consist of some hundred thousand
of them, which stay as long as the process, so it takes a twentieth of a second and finds next to nothing. Garbage of
the user's program is still collected: young objects meanwhile, old ones afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_NEVER = 1 << 30
"""A threshold of the garbage collector that is not reached."""


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector while large libraries are imported: it finds next to nothing and takes a tenth of
    the time (JAX 0.07 s, Ray 0.07 s). What was imported is old from then on, so only full collections look at it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # What somebody has frozen stays so.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """Collect garbage among young objects only, while programs are prepared: a full collection looks at all that JAX
    consists of (0.06 s), and finds next to nothing.
    """
    _fewer_collections.begin()
    try:
        yield
    finally:
        _fewer_collections.end()


class _FewerCollections:
    """Counts who wants no full collections, so that the threshold comes back with the last of them, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = gc.get_threshold()

    def begin(self) -> None:
        """Turn full collections off, for one more who wants none."""
        with self._lock:
            if not self._count:
                self._before = gc.get_threshold()
                gc.set_threshold(*self._before[:2], _NEVER)
            self._count += 1

    def end(self) -> None:
        """Turn full collections on again if nobody else wants none."""
        with self._lock:
            self._count -= 1
            if not self._count:
                now = gc.get_threshold()
                if now[2] == _NEVER:  # Else the program has chosen another one meanwhile, which stays.
                    gc.set_threshold(*now[:2], self._before[2])


_fewer_collections = _FewerCollections()


def freeze_and_collect() -> None:
    """Collect garbage again, but not among the objects that exist now, which stay."""
    gc.freeze()
    gc.enable()
