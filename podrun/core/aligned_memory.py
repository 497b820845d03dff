"""Arrays that begin at a multiple of `ALIGNMENT` bytes, which XLA's CPU client reads in place instead of copying them.

NumPy's own arrays begin at multiples of 16 bytes. Whatever may become an operand of a compiled piece is therefore
allocated here: variables, arenas, streams, elements of feeds and what replicas exchange.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from podrun.core.executable import Array

LARGE = 1 << 20
"""Bytes from which on zeros come from the kernel, not from the heap."""
ALIGNMENT = 64
"""Bytes."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array whose address is a multiple of `ALIGNMENT`."""
    return _aligned(np.empty, shape, dtype)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array of zeros whose address is a multiple of `ALIGNMENT`. Pages that are never written take no memory."""
    return _aligned(_untouched if math.prod(shape) * dtype.itemsize >= LARGE else np.zeros, shape, dtype)


def aligned_stack(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of one shape and dtype as ``[len(parts), *shape]``, whose address is a multiple of `ALIGNMENT`.

    ValueError if the shapes differ.
    """
    return np.stack(parts, out=aligned_empty((len(parts), *parts[0].shape), parts[0].dtype))


def is_aligned(array: np.ndarray) -> bool:
    """Whether XLA reads an array in place: its elements lie in order, without gaps, at a multiple of `ALIGNMENT`."""
    return array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0


class ScratchArrays:
    """Aligned arrays that are kept by key and used again, such as the memory that a stream's elements pass through."""

    def __init__(self) -> None:
        self._arrays: dict[Hashable, Array] = {}

    def array(self, key: Hashable, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The array of a key, with the values of its last use; a new one for another shape or dtype."""
        known = self._arrays.get(key)
        if known is None or known.shape != shape or known.dtype != dtype:
            known = self._arrays[key] = aligned_empty(shape, dtype)
        return known


def _aligned(make: Callable[..., Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    raw = make(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size].view(dtype).reshape(shape)


def _untouched(size: int, dtype: type) -> Array:
    """Bytes that are zero because the kernel gave them so, in huge pages where it has any.

    A large arena is touched in a fraction of the time. Where the process keeps freed memory, ``np.zeros`` clears some
    of that.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype)
