"""Memory that the ranks of one host share, by name: arenas, and what a group keeps beside them.

Whichever rank asks for a name first makes its memory and enters it into the board's table; the others open it
from there. Whoever asks for other memory under a name than the first, on whatever rank, ends the group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from podrun.collectives.arithmetic import check_reduction
from podrun.collectives.board import Board
from podrun.collectives.errors import HostLimitError, MismatchError, RankLostError, for_rank
from podrun.collectives.group import (
    Array,
    ByteArray,
    check_arena,
    first_elements,
    unknown_arena,
    wrong_kind,
)
from podrun.collectives.memory import Segment, pages
from podrun.executable import Reduction, numpy_dtype


@dataclass(frozen=True, slots=True)
class Arena:
    """An arena as one rank sees it: all ranks' rows (none if shared) and the one row that all read. ``text``:
    its kind, dtype and size, for labels and messages."""

    rows: tuple[Array, ...]
    whole: Array
    text: str


def reducible(
    operation: str, name: str, arena: Arena, reduction: Reduction, count: int | None
) -> tuple[int, str]:
    """How many elements a reduction over an arena is about, and what to call it in labels and messages.

    Raises UsageError if the arena is shared, cannot be reduced so, or has fewer than ``count`` elements.
    """
    if not arena.rows:
        raise wrong_kind(name, operation)
    check_reduction(arena.whole.dtype, reduction)
    used = first_elements(name, arena.whole.size, count)
    part = f"[:{count}]" if count is not None else ""
    return used, f"{operation}({name!r}{part}: {arena.text}, {reduction.value})"


class HostMemory:
    """What one rank has of its host's memory. ``board``: with the table of what there is."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._arenas: dict[str, Arena] = {}
        self._segments: list[Segment] = []

    def arena(self, name: str, dtype: str, size: int, *, kind: str) -> Arena:
        """An arena of ``size`` elements: a row for each rank and one for results if its ``kind`` is
        "allocated", one row if it is "shared".

        Raises UsageError for what no arena can be, MismatchError (on all ranks) if it is there otherwise.
        """
        text = f"{kind} {dtype}[{size}]"
        known = self._arenas.get(name)
        if known is None:
            check_arena(name, dtype, size)
            rows = self._board.ranks + 1 if kind == "allocated" else 1
            segment = self.segment(name, text, size * numpy_dtype(dtype).itemsize, rows)
            known = self._arenas[name] = _mapped(segment, text, dtype, size)
        elif known.text != text:
            self._refuse(name, text, known.text, self._board.rank)
        return known

    def find(self, name: str) -> Arena:
        """An arena that this rank has asked for. Raises UsageError if it has not, or what ended the group."""
        found = self._arenas.get(name)
        if found is None:
            self._board.check()
            raise unknown_arena(name, list(self._arenas))
        return found

    def row_sets(self, name: str, text: str, nbytes: int, *, sets: int, ranks: int) -> list[list[ByteArray]]:
        """``sets`` times ``ranks`` rows of ``nbytes`` (whole pages) each, for ranks of this host or of more."""
        segment = self.segment(name, text, nbytes, sets * ranks)
        rows = [segment.array(np.dtype(np.uint8), nbytes, at) for at in range(0, segment.nbytes, nbytes)]
        return [rows[at : at + ranks] for at in range(0, len(rows), ranks)]

    def segment(self, name: str, text: str, nbytes: int, rows: int) -> Segment:
        """Memory for ``rows`` rows of ``nbytes``, each of whole pages: made by whichever rank asks first,
        opened by the others. Raises HostLimitError, on all ranks, where a host has no room for it."""
        try:
            with for_rank(self._board.names[self._board.rank]):
                return self._made_or_opened(name, text, pages(nbytes) * rows)
        except HostLimitError as error:
            self._board.fail_with(error)

    def _made_or_opened(self, name: str, text: str, size: int) -> Segment:
        entry: dict[str, Any] | None
        with self._board.editing_arenas() as table:
            entry = table.get(name)
            if entry is None:
                segment = Segment.create(f"arena-{name}", size)
                self._segments.append(segment)  # stays open for the others
                table[name] = {"text": text, "pid": os.getpid(), "fd": segment.fd, "rank": self._board.rank}
                return segment
        if entry["text"] != text:
            self._refuse(name, text, entry["text"], entry["rank"])
        try:
            segment = Segment.open(entry["pid"], entry["fd"])
        except OSError as error:
            holder = self._board.names[entry["rank"]]
            self._board.fail_with(
                RankLostError(
                    f"rank {holder} (process {entry['pid']}), which holds arena {name!r}, is gone: {error.strerror}",
                    rank=holder,
                    hint="Close this group, replace the rank and make a new group.",
                )
            )
        segment.close()  # the mapping stays
        if segment.nbytes != size:
            self._refuse(name, text, f"{segment.nbytes} bytes", entry["rank"])
        return segment

    def _refuse(self, name: str, mine: str, theirs: str, rank: int) -> NoReturn:
        names = self._board.names
        self._board.fail_with(
            MismatchError(
                f"rank {names[self._board.rank]} asked for arena {name!r} as {mine}, rank {names[rank]} as {theirs}",
                hint="All ranks must ask for an arena with the same kind, dtype and size.",
            )
        )

    def close(self) -> None:
        """Let go of it; arrays handed out stay valid. Idempotent."""
        self._arenas.clear()
        while self._segments:
            self._segments.pop().close()


def _mapped(segment: Segment, text: str, dtype: str, size: int) -> Arena:
    kind = numpy_dtype(dtype)
    step = pages(size * kind.itemsize)
    rows = [segment.array(kind, size, at) for at in range(0, segment.nbytes, step)]
    return Arena(tuple(rows[:-1]), rows[-1], text)
