"""Arenas that a piece updates where they lie.

An update reads weights and optimizer state and writes them anew. XLA writes a result over an operand that is handed
over to it, but only where the memory is XLA's own; elsewhere it makes new memory for each result, which then has to be
copied into the arena. So the memory of such an arena is asked from XLA once, and handed over and taken back in every
batch. Everybody else reads it where it lies, as any arena.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from podrun.device.program.operands import Array
from podrun.errors import InternalError
from podrun.executable import Computation


class Resident:
    """Memory of a ``dtype`` that a ``jax.Device`` owns, for a piece that takes it in a ``shape``.

    Between `lend` and `take` it is the piece's. Whoever holds `memory` keeps it alive.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: Any) -> None:
        import jax
        import jax.numpy as jnp

        with jax.enable_x64(True), jax.default_device(device):
            self._array: Any = jnp.zeros(shape, dtype).block_until_ready()
        self._address = self._array.unsafe_buffer_pointer()
        self._dtype = dtype
        self.__array_interface__ = {
            "version": 3,
            "data": (self._address, False),
            "shape": (math.prod(shape) * dtype.itemsize,),
            "typestr": "|u1",
        }

    @property
    def memory(self) -> Array:
        """What it holds, flat, to read and to write."""
        return np.asarray(self).view(self._dtype)

    def lend(self) -> Any:
        """The ``jax.Array`` for a piece that may write over it."""
        return self._array

    def take(self, result: Any) -> None:
        """The piece's result, which lies where the operand lay.

        Raises InternalError if XLA put it elsewhere, although the piece was compiled not to.
        """
        self._array = result
        if result.unsafe_buffer_pointer() != self._address:
            raise InternalError("XLA moved an arena that it was to update in place")


def updated_in_place(computation: Computation, arenas: Mapping[str, str], own: Set[str]) -> dict[int, int]:
    """Positions of operands that the piece may write over, each with that of the result which takes its place.

    ``arenas``: the arena behind each buffer name that has one. ``own``: names that mean a whole arena in memory of this
    machine's own, which no collective's result ever stands for. A piece that reads parts of an arena beside the
    whole may not write over it.
    """
    found: dict[int, int] = {}
    behind = [arenas.get(name) for name in computation.inputs]
    written = [arenas.get(name) for name in computation.outputs]
    for position, name in enumerate(computation.inputs):
        alone = name in own and behind.count(arenas[name]) == written.count(arenas[name]) == 1
        if alone and name in computation.outputs:
            found[position] = computation.outputs.index(name)
    return found
