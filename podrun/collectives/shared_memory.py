"""The group of ranks on one host, over shared memory: processes, threads of one process, or both mixed.

Zero-copy. Every rank's gradients lie in one segment, one row per rank and one for the result; rank *m*
reduces slice
*m* of all rows, in rank order, into the result row, which all ranks read where it lies. A reduction costs
each rank one pass over its slice and two meetings on the `Board`; an all-gather of a shared arena is one
meeting and no copy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podrun.collectives.arithmetic import check_reduction, reduce_into
from podrun.collectives.board import Board, label
from podrun.collectives.errors import MismatchError, RankLostError, describe
from podrun.collectives.group import Array, check_arena, slice_of, unknown_arena, wrong_kind
from podrun.collectives.memory import Segment, pages
from podrun.errors import PodrunError
from podrun.executable import Reduction, numpy_dtype

_BARRIER = label("barrier")


@dataclass(frozen=True, slots=True)
class _Arena:
    """An arena as this rank sees it: all ranks' rows (none if shared) and the one row that all read."""

    rows: tuple[Array, ...]
    whole: Array
    text: str


class SharedMemoryGroup:
    """See the module docstring, and `podrun.collectives.group.Group` for what each call promises."""

    def __init__(self, board: Board, timeout: float) -> None:
        self._board = board
        self._timeout = timeout
        self._rank = board.rank
        self._size = board.ranks
        self._arenas: dict[str, _Arena] = {}
        self._segments: list[Segment] = []
        self._labels: dict[tuple[str, str, Reduction | None], bytes] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def host_ranks(self) -> tuple[int, ...]:
        return tuple(range(self._size))

    # --- Arenas ---------------------------------------------------------------------------------------------

    def allocate(self, arena: str, dtype: str, size: int) -> Array:
        return self._arena(arena, dtype, size, kind="allocated").rows[self._rank]

    def shared(self, arena: str, dtype: str, size: int) -> Array:
        return self._arena(arena, dtype, size, kind="shared").whole

    def _arena(self, arena: str, dtype: str, size: int, *, kind: str) -> _Arena:
        check_arena(arena, size)
        text = f"{kind} {dtype}[{size}]"
        known = self._arenas.get(arena)
        if known is None:
            segment = self._segment(
                arena, text, dtype, size, rows=self._size + 1 if kind == "allocated" else 1
            )
            known = self._arenas[arena] = self._map(segment, text, dtype, size)
        elif known.text != text:
            self._refuse(arena, text, known.text, self._rank)
        return known

    def _map(self, segment: Segment, text: str, dtype: str, size: int) -> _Arena:
        kind = numpy_dtype(dtype)
        step = pages(size * kind.itemsize)
        rows = [segment.array(kind, size, at) for at in range(0, segment.nbytes, step)]
        return _Arena(tuple(rows[:-1]), rows[-1], text)

    def _segment(self, arena: str, text: str, dtype: str, size: int, *, rows: int) -> Segment:
        """The arena's memory: made by whichever rank asks first, opened by the others."""
        nbytes = pages(size * numpy_dtype(dtype).itemsize) * rows
        entry: dict[str, Any] | None
        with self._board.editing_arenas() as table:
            entry = table.get(arena)
            if entry is None:
                segment = Segment.create(f"arena-{arena}", nbytes)
                self._segments.append(segment)  # stays open for the others
                table[arena] = {"text": text, "pid": os.getpid(), "fd": segment.fd, "rank": self._rank}
                return segment
        if entry["text"] != text:
            self._refuse(arena, text, entry["text"], entry["rank"])
        try:
            segment = Segment.open(entry["pid"], entry["fd"])
        except OSError as error:
            self._fail(
                RankLostError(
                    f"rank {entry['rank']} (process {entry['pid']}), which holds arena {arena!r}, is gone: "
                    f"{error.strerror}",
                    rank=entry["rank"],
                    hint="Close this group, replace the rank and make a new group.",
                )
            )
            raise self._board.failure() or error from error
        segment.close()  # the mapping stays
        if segment.nbytes != nbytes:
            self._refuse(arena, text, f"{segment.nbytes} bytes", entry["rank"])
        return segment

    def _refuse(self, arena: str, mine: str, theirs: str, rank: int) -> None:
        self._fail(
            MismatchError(
                f"rank {self._rank} asked for arena {arena!r} as {mine}, rank {rank} as {theirs}",
                hint="All ranks must ask for an arena with the same kind, dtype and size.",
            )
        )
        raise self._board.failure() or RuntimeError

    def _fail(self, error: PodrunError) -> None:
        self._board.fail(describe(error))

    # --- Collectives ----------------------------------------------------------------------------------------

    def reduce_scatter(
        self, arena: str, reduction: Reduction = Reduction.SUM, *, settle: bool = True
    ) -> Array:
        found = self._reducible(arena, "reduce_scatter", reduction)
        own = slice_of(self._rank, self._size, found.whole.size)
        if reduction is Reduction.LOCAL:
            return found.rows[self._rank][own]
        self._meet("reduce_scatter", arena, reduction, found)
        result = found.whole[own]
        reduce_into(result, [row[own] for row in found.rows], reduction)
        if settle:
            self._meet("end of reduce_scatter", arena, reduction, found)
        return result

    def all_reduce(self, arena: str, reduction: Reduction = Reduction.SUM) -> Array:
        found = self._reducible(arena, "all_reduce", reduction)
        if reduction is Reduction.LOCAL:
            return found.rows[self._rank]
        self._meet("all_reduce", arena, reduction, found)
        own = slice_of(self._rank, self._size, found.whole.size)
        reduce_into(found.whole[own], [row[own] for row in found.rows], reduction)
        self._meet("end of all_reduce", arena, reduction, found)
        return found.whole

    def all_gather(self, arena: str) -> Array:
        found = self._find(arena)
        self._meet("all_gather", arena, None, found)
        if found.rows:
            own = slice_of(self._rank, self._size, found.whole.size)
            found.whole[own] = found.rows[self._rank][own]
            self._meet("end of all_gather", arena, None, found)
        return found.whole

    def barrier(self) -> None:
        self._board.meet(_BARRIER, self._timeout)

    def abort(self, error: Mapping[str, Any]) -> None:
        self._board.fail(error)

    def close(self) -> None:
        self._board.close()
        self._arenas.clear()
        while self._segments:
            self._segments.pop().close()

    def _reducible(self, arena: str, operation: str, reduction: Reduction) -> _Arena:
        found = self._find(arena)
        if not found.rows:
            raise wrong_kind(arena, operation)
        check_reduction(found.whole.dtype, reduction)
        return found

    def _find(self, arena: str) -> _Arena:
        found = self._arenas.get(arena)
        if found is None:
            failure = self._board.failure()
            raise failure if failure is not None else unknown_arena(arena, list(self._arenas))
        return found

    def _meet(self, operation: str, arena: str, reduction: Reduction | None, found: _Arena) -> None:
        key = (operation, arena, reduction)
        text = self._labels.get(key)
        if text is None:
            how = f", {reduction.value}" if reduction else ""
            text = self._labels[key] = label(f"{operation}({arena!r}: {found.text}{how})")
        self._board.meet(text, self._timeout)
