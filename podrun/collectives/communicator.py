"""Collectives on ordinary NumPy arrays: the public face of this room, over any kind of group.

A `Communicator` wraps one rank's `Group`. Arrays may have any shape and lie in any memory; they are copied through the
group's memory in pieces. Results are the caller's own copies. To avoid copies, use the group's arenas directly::

    comm = Communicator(group)
    total = comm.all_reduce(x)                    # a new array; comm.all_reduce(x, out=x) works in place
    everyone = comm.all_gather(x)                 # [size, *x.shape]
    swapped = comm.all_to_all(pieces)             # pieces[k] goes to rank k
    comm.broadcast(x, root=0)                     # in place
    half = comm.split([[0, 1], [2, 3]])           # a communicator of my part

All ranks must give arrays of one shape and dtype; otherwise all get a MismatchError that says which rank gave what.
Every sum is taken in rank order, half types in float32.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podrun.collectives.arithmetic import check_reduction, reduce_into
from podrun.collectives.group import (
    EXCHANGE_BYTES,
    ByteArray,
    Group,
    MismatchError,
    Movement,
    MovementKind,
    Token,
    as_bytes,
)
from podrun.collectives.rendezvous import create, create_within, join_group
from podrun.core.errors import UsageError
from podrun.core.executable import Array, Reduction
from podrun.core.layout import slice_of

PIECE_BYTES = 4 * 1024 * 1024
"""Larger arrays are reduced in pieces of this size in bytes, through one arena for each dtype."""
_SMALL_BYTES = 16 * 1024
_TOKEN_BYTES = 1024


class Communicator:
    """One rank's collectives on arrays. See the module docstring. Used by one thread at a time."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    # --- Reductions -----------------------------------------------------------------------------------------

    def all_reduce(
        self, array: Array, reduction: Reduction = Reduction.SUM, *, out: Array | None = None
    ) -> Array:
        """The arrays of all ranks combined, for every rank. ``out`` may be ``array`` itself."""
        check_reduction(array.dtype, reduction)
        result = self._result(array, array.shape, out)
        flat, into = _apart(array, result).reshape(-1), result.reshape(-1)
        if reduction is Reduction.LOCAL or self.size == 1:
            into[:] = flat
        elif array.nbytes <= _SMALL_BYTES:
            parts = self._gather_all(flat, f"all_reduce({_spec(array)}, {reduction.value})")
            reduce_into(into, [part.view(array.dtype) for part in parts], reduction)
        else:
            self._reduce_pieces(flat, into, reduction)
        return result

    def reduce_scatter(
        self, array: Array, reduction: Reduction = Reduction.SUM, *, out: Array | None = None
    ) -> Array:
        """The combination of all ranks' ``array[rank]``: the first axis has one entry for each rank."""
        self._check_leading_axis(array, "reduce_scatter")
        check_reduction(array.dtype, reduction)
        result = self._result(array, array.shape[1:], out)
        if reduction is Reduction.LOCAL or self.size == 1:
            result[...] = array[self.rank]
        else:
            whole = np.empty(array.size, array.dtype)
            self._reduce_pieces(np.ascontiguousarray(array).reshape(-1), whole, reduction)
            result.reshape(-1)[:] = whole[slice_of(self.rank, self.size, array.size)]
        return result

    def _reduce_pieces(self, flat: Array, into: Array, reduction: Reduction) -> None:
        count = max(1, PIECE_BYTES // flat.itemsize)
        name = f"pieces of {flat.dtype.name}"
        piece = self.group.allocate(name, flat.dtype.name, count)
        for start in range(0, flat.size, count):
            used = min(count, flat.size - start)
            piece[:used] = flat[start : start + used]
            into[start : start + used] = self.group.all_reduce(name, reduction, count=used)

    # --- Moving data ----------------------------------------------------------------------------------------

    def all_gather(self, array: Array, *, out: Array | None = None) -> Array:
        """The arrays of all ranks, stacked in rank order."""
        result = self._result(array, (self.size, *array.shape), out)
        self._move(MovementKind.ALL_GATHER, array, result, range(self.size))
        return result

    def all_to_all(self, array: Array, *, out: Array | None = None) -> Array:
        """Entry *k* of the result is entry ``rank`` of rank *k*'s array: the first axis has one entry for each rank."""
        self._check_leading_axis(array, "all_to_all")
        result = self._result(array, array.shape, out)
        self._move(MovementKind.ALL_TO_ALL, array, result, range(self.size))
        return result

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Copy the root's array into every rank's array, in place; returns it."""
        self._check_root(root)
        if self.size > 1:
            at_root = self.rank == root
            taken = None if at_root else self._result(array, array.shape, array)[np.newaxis]
            self._move(MovementKind.BROADCAST, array, taken, [] if at_root else [root], root)
        return array

    def gather(self, array: Array, root: int = 0, *, out: Array | None = None) -> Array | None:
        """The arrays of all ranks, stacked in rank order, on the root; None elsewhere."""
        self._check_root(root)
        at_root = self.rank == root
        result = self._result(array, (self.size, *array.shape), out) if at_root else None
        self._move(MovementKind.GATHER, array, result, range(self.size) if at_root else [], root)
        return result

    def scatter(self, array: Array | None, out: Array, root: int = 0) -> Array:
        """``out`` becomes entry ``rank`` of the root's array (None elsewhere); returns it."""
        self._check_root(root)
        posted = array if self.rank == root and array is not None else np.empty((0, *out.shape), out.dtype)
        if self.rank == root and (posted.shape != (self.size, *out.shape) or posted.dtype != out.dtype):
            raise UsageError(
                f"scatter needs {_spec(out)} for each of {self.size} ranks, stacked, at its root, not {_spec(posted)}"
            )
        taken = self._result(out, out.shape, out)[np.newaxis]
        self._move(MovementKind.SCATTER, posted, taken, [root], root, spec=_spec(out))
        return out

    def send(self, array: Array, dest: int, tag: int = 0) -> None:
        """Send to one rank, which calls `receive` with the same tag."""
        self.group.send(np.ascontiguousarray(array), dest, tag)

    def receive(self, out: Array, source: int, tag: int = 0) -> Array:
        """Fill ``out`` with what ``source`` sent; returns it."""
        self.group.receive(self._result(out, out.shape, out), source, tag)
        return out

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self.group.barrier()

    def _gather_all(self, flat: Array, what: str) -> list[ByteArray]:
        return self.group.exchange(
            as_bytes(flat), Movement(MovementKind.ALL_GATHER, flat.nbytes, detail=what)
        )

    def _move(
        self,
        kind: MovementKind,
        array: Array,
        result: Array | None,
        sources: Sequence[int],
        root: int = 0,
        *,
        spec: str | None = None,
    ) -> None:
        """Carry out a movement in rounds, each with as many bytes of every piece as a rank may post.

        ``result[i]`` is filled with the piece from ``sources[i]``.
        """
        pieces = self.size if kind in (MovementKind.ALL_TO_ALL, MovementKind.SCATTER) else 1
        contribution = as_bytes(_apart(array, result)).reshape(pieces, array.nbytes // pieces)
        rows = len(sources)
        taken = None if result is None else as_bytes(result).reshape(rows, result.nbytes // rows)
        whole = taken.shape[1] if taken is not None else contribution.shape[1]
        step = EXCHANGE_BYTES // pieces
        detail = spec or _spec(array)
        for start in range(0, whole, step):
            size = min(step, whole - start)
            posted = contribution[:, start : start + size].reshape(-1)
            movement = Movement(kind, size, root, f"{detail} from byte {start}" if start else detail)
            received = self.group.exchange(posted, movement)
            if taken is not None:
                for row, source in enumerate(sources):
                    taken[row, start : start + size] = received[source]

    # --- Groups ---------------------------------------------------------------------------------------------

    def split(self, groups: Sequence[Sequence[int]]) -> Communicator | None:
        """A communicator of that one of the disjoint ``groups`` of ranks which has this rank; None if none has.

        All ranks call this with the same groups. Sums in a group are taken in the order in which it lists its ranks.
        """
        plain = rank_groups(groups, self.size)
        mine = next((group for group in plain if self.rank in group), None)
        part: Group | None = None
        token: Token = {}
        if mine and mine[0] == self.rank:
            part, token = create_within(self.group, mine)
        note = np.frombuffer(json.dumps(token).encode().ljust(_TOKEN_BYTES), np.uint8)
        try:
            tokens = self._gather_all(note, f"split({plain})")
        except BaseException:
            if part is not None:
                part.close()
            raise
        if mine is None:
            return None
        if part is None:
            part = join_group(json.loads(tokens[mine[0]].tobytes()), mine.index(self.rank))
        return Communicator(part)

    def abort(self, error: Mapping[str, Any]) -> None:
        """See `Group.abort`."""
        self.group.abort(error)

    def close(self) -> None:
        """Leave the group, and release what it holds."""
        self.group.close()

    def _result(self, array: Array, shape: tuple[int, ...], out: Array | None) -> Array:
        if out is None:
            return np.empty(shape, array.dtype)
        if (
            out.shape != shape
            or out.dtype != array.dtype
            or not out.flags.c_contiguous
            or not out.flags.writeable
        ):
            raise UsageError(
                f"out must be a writable contiguous {array.dtype.name}{list(shape)}, "
                f"not {out.dtype.name}{list(out.shape)}"
            )
        return out

    def _check_leading_axis(self, array: Array, operation: str) -> None:
        if array.ndim < 1 or array.shape[0] != self.size:
            raise UsageError(
                f"{operation} needs an array with one entry for each of {self.size} ranks on its first axis, "
                f"not {_spec(array)}"
            )

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise UsageError(f"there is no rank {root} in a group of {self.size}")


def rank_groups(groups: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """The groups as plain lists. Raises MismatchError if they overlap, are empty, or name ranks that do not exist."""
    try:
        plain = [[operator.index(rank) for rank in group] for group in groups]
    except TypeError as error:
        raise MismatchError(
            f"groups are lists of lists of ranks, not {groups!r}"[:300],
            hint="As in split([[0, 1], [2, 3]]).",
        ) from error
    seen: dict[int, int] = {}
    for index, group in enumerate(plain):
        if not group:
            raise MismatchError(f"group {index} of {len(plain)} is empty")
        for rank in group:
            if not 0 <= rank < size:
                raise MismatchError(f"group {index} names rank {rank}; there are ranks 0 to {size - 1}")
            if rank in seen:
                raise MismatchError(
                    f"rank {rank} is in group {seen[rank]} and in group {index}",
                    hint="Groups must not overlap.",
                )
            seen[rank] = index
    return plain


def _apart(array: Array, result: Array | None) -> Array:
    """A contiguous array that is the result itself or does not overlap it, so that no piece is lost."""
    contiguous = np.ascontiguousarray(array)
    if result is None or not np.may_share_memory(contiguous, result):
        return contiguous
    itself = contiguous.shape == result.shape and contiguous.ctypes.data == result.ctypes.data
    return contiguous if itself else contiguous.copy()


def _spec(array: Array) -> str:
    kind = array.dtype.name if array.dtype.isnative else f"byte-swapped {array.dtype.name}"
    return f"{kind}{list(array.shape)}"


__all__ = ["Communicator", "create", "join_group", "rank_groups"]
