"""Tensors in memory that a host process shares with machines on its host (`podrun.core.shared_region`).

The host process hands regions over (`podrun.device.service.handover`). This module checks everything that it states
about tensors in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import numpy_dtype
from podrun.device.program.xla_memory import ALIGNMENT, Array


def tensor_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a tensor by its name; ApplicationRuntimeError for none of fixed size, such as Python
    objects.
    """
    try:
        kind = numpy_dtype(name)
    except (TypeError, AttributeError) as error:
        raise ApplicationRuntimeError(f"there is no dtype {name!r}") from error
    if kind.hasobject or kind.itemsize == 0 or kind.names is not None or kind.subdtype is not None:
        raise ApplicationRuntimeError(f"tensors cannot have dtype {name!r}")
    return kind


def view(data: Array, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
    """The tensor at ``offset`` of ``data`` (bytes). Raises ApplicationRuntimeError if it does not
    lie inside.
    """
    kind = tensor_dtype(dtype)
    if any(size < 0 for size in shape):
        raise ApplicationRuntimeError(f"a tensor cannot have shape {list(shape)}")
    size = kind.itemsize
    for extent in shape:  # Python integers: a hostile shape cannot overflow.
        size *= extent
    if offset < 0 or offset % kind.itemsize or offset + size > data.size:
        raise ApplicationRuntimeError(
            f"a tensor {dtype}{list(shape)} at byte {offset} does not lie in its {data.size} bytes of memory"
        )
    return data[offset : offset + size].view(kind).reshape(shape)


def lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Aligned offsets for pieces of ``sizes`` bytes, one after the other, and the bytes of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
