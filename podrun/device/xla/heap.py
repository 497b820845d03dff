"""What the C library does with memory that large pieces free.

A training step takes and frees hundreds of megabytes. glibc hands blocks of that size back to the kernel at once, which
then gives every page anew, zeroed, to the next step: 44,000 page faults for a step of MobileNet at batch 16, a quarter
of its time. Here the process keeps what a step freed for the next one, and gives it back when a program is unloaded.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

KEPT = 1 << 30
"""Bytes: greater blocks, and what is free beyond so much at the heap's end, go back to the kernel at once."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h


@functools.cache
def keep_freed_memory() -> bool:
    """From now on, for the whole process. False where the C library has no such setting (it is not glibc)."""
    return all(_mallopt(name, KEPT) for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))


def use_one_heap() -> bool:
    """Let threads that start later take memory from the heap of the first one: those of their own hold no block above
    64 MB. For processes that do nothing but compute. Heaps that threads have already stay: podrun's own Ray, whose
    processes have threads before they have machines, gives them ``MALLOC_ARENA_MAX=1`` instead."""
    return _mallopt(_ARENA_MAX, 1)


def give_back() -> None:
    """Return free memory to the kernel, if it is being kept."""
    if keep_freed_memory.cache_info().currsize and keep_freed_memory():
        _libc().malloc_trim(0)


def _mallopt(name: int, value: int) -> bool:
    set_option = getattr(_libc(), "mallopt", None)
    return set_option is not None and bool(set_option(name, value))


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)
