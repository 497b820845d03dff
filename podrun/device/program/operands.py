"""Arrays that XLA reads where they lie.

`Operands` hands out one lasting zero-copy ``jax.Array`` for each aligned view of memory that changes. That is sound
because a Computation is waited for before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
"""Any NumPy array."""
ALIGNMENT = 64
"""Bytes; XLA's CPU client uses a buffer in place only from this alignment on."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array that starts at a multiple of 64 bytes."""
    return _aligned(np.empty, shape, dtype)


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array of zeros that starts at a multiple of 64 bytes; pages that nothing is written to take no memory."""
    return _aligned(np.zeros, shape, dtype)


def _aligned(make: Callable[..., Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = make(size + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size].view(dtype).reshape(shape)


class Operands:
    """The arrays made so far, by the memory that they lie over."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Array, Any]] = {}

    def over(self, view: Array) -> Any:
        """The lasting zero-copy jax.Array over ``view``, or ``view`` itself (XLA then copies) if it is not aligned."""
        address = view.ctypes.data
        key = hash((address, view.shape, view.dtype.num))
        known = self._made.get(key)
        if known is not None and known[0].ctypes.data == address and known[0].shape == view.shape:
            return known[1]
        operand: Any = view
        if address % ALIGNMENT == 0 and view.size and view.flags.c_contiguous:
            operand = _zero_copy(view)
        self._made[key] = (view, operand)
        return operand


def _zero_copy(view: Array) -> Any:
    import jax

    try:
        array = jax.dlpack.from_dlpack(view, copy=False)
    except (
        Exception
    ):  # dtypes that DLPack does not know, such as the small floats: XLA takes a copy each time.
        return view
    return array if array.unsafe_buffer_pointer() == view.ctypes.data else view
