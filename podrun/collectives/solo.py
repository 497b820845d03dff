"""The group of one rank: it exchanges nothing, so every result is the rank's own buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrun.collectives.arithmetic import check_reduction
from podrun.collectives.group import (
    DEFAULT_TIMEOUT,
    Array,
    ByteArray,
    GroupPlace,
    Movement,
    check_arena,
    check_peer,
    first_elements,
    unknown_arena,
    wrong_kind,
)
from podrun.collectives.group_errors import ClosedError, GroupError, MismatchError
from podrun.core.error_codec import error_from_dict
from podrun.core.executable import Reduction, numpy_dtype

_ALIGNMENT = 64


def aligned_zeros(dtype: str, size: int) -> Array:
    """``size`` zeros that start at a multiple of 64 bytes, so that XLA can use them without a copy."""
    kind = numpy_dtype(dtype)
    raw = np.zeros(size * kind.itemsize + _ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + size * kind.itemsize].view(kind)


class SoloGroup:
    """See the module docstring, and `podrun.collectives.group.Group` for what each call promises."""

    rank = 0
    size = 1
    host_ranks: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        self._arenas: dict[str, tuple[str, Array]] = {}
        self._error: dict[str, Any] | None = None
        self._closed = False

    def allocate(self, arena: str, dtype: str, size: int) -> Array:
        return self._arena(arena, "allocated", dtype, size)

    def shared(self, arena: str, dtype: str, size: int) -> Array:
        return self._arena(arena, "shared", dtype, size)

    def _arena(self, arena: str, kind: str, dtype: str, size: int) -> Array:
        self._check()
        check_arena(arena, dtype, size)
        text = f"{kind} {dtype}[{size}]"
        if arena not in self._arenas:
            self._arenas[arena] = (text, aligned_zeros(dtype, size))
        known, array = self._arenas[arena]
        if known != text:
            raise MismatchError(
                f"arena {arena!r} was requested as {known} and then as {text}",
                hint="Request an arena with the same kind, dtype and size each time.",
            )
        return array

    def reduce_scatter(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        settle: bool = True,
        count: int | None = None,
    ) -> Array:
        return self._reduce(arena, "reduce_scatter", reduction, count)

    def all_reduce(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        count: int | None = None,
        in_place: bool = False,
    ) -> Array:
        return self._reduce(arena, "all_reduce", reduction, count)

    def all_gather(self, arena: str) -> Array:
        return self._find(arena)[1]

    def exchange(self, posted: ByteArray, pattern: Movement) -> list[ByteArray]:
        self._check()
        offset, nbytes = pattern.part(0, 0)
        return [posted[offset : offset + nbytes].copy()]

    def send(self, array: Array, dest: int, tag: int = 0) -> None:
        check_peer(0, 1, dest, "send to")

    def receive(self, out: Array, source: int, tag: int = 0) -> None:
        check_peer(0, 1, source, "receive from")

    def place_for(self, ranks: Sequence[int]) -> GroupPlace:
        return GroupPlace(DEFAULT_TIMEOUT)

    def barrier(self) -> None:
        self._check()

    def abort(self, error: Mapping[str, Any]) -> None:
        self._error = self._error or dict(error)

    def close(self) -> None:
        self._closed = True
        self._arenas.clear()

    def _reduce(self, arena: str, operation: str, reduction: Reduction, count: int | None) -> Array:
        text, array = self._find(arena)
        if text.startswith("shared"):
            raise wrong_kind(arena, operation)
        check_reduction(array.dtype, reduction)
        return array[: first_elements(arena, array.size, count)]

    def _find(self, arena: str) -> tuple[str, Array]:
        self._check()
        if arena not in self._arenas:
            raise unknown_arena(arena, list(self._arenas))
        return self._arenas[arena]

    def _check(self) -> None:
        if self._error is not None:
            raise error_from_dict(self._error, unknown=GroupError)
        if self._closed:
            raise ClosedError("this group was closed", hint="Make a new group.")
