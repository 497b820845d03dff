"""Memory that the ranks of one host share, by name: arenas and further regions of a group.

The first rank that requests a name creates its memory and enters it into the board's table; the others open it from
there. A rank that requests other memory under the same name ends the group with a MismatchError.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from podrun.collectives.arithmetic import check_reduction
from podrun.collectives.board import GroupBoard
from podrun.collectives.group import (
    Array,
    ByteArray,
    check_arena,
    first_elements,
    unknown_arena,
    wrong_kind,
)
from podrun.collectives.group_errors import HostLimitError, MismatchError, RankLostError, for_rank
from podrun.collectives.linux import create_region, open_region, pages
from podrun.core.executable import Reduction, numpy_dtype
from podrun.core.shared_region import SharedRegion


@dataclass(frozen=True, slots=True)
class MappedArena:
    """An arena as one rank sees it: the rows of all ranks (none if shared) and the one row that all read.

    ``text``: its kind, dtype and size, for labels and messages.
    """

    rows: tuple[Array, ...]
    whole: Array
    text: str


def reducible(
    operation: str, name: str, arena: MappedArena, reduction: Reduction, count: int | None
) -> tuple[int, str]:
    """The number of elements that a reduction over an arena uses, and its text for labels and messages.

    Raises UsageError if the arena is shared or has fewer than ``count`` elements, UnsupportedError if its dtype cannot
    be reduced.
    """
    if not arena.rows:
        raise wrong_kind(name, operation)
    check_reduction(arena.whole.dtype, reduction)
    used = first_elements(name, arena.whole.size, count)
    part = f"[:{count}]" if count is not None else ""
    return used, f"{operation}({name!r}{part}: {arena.text}, {reduction.value})"


class HostMemory:
    """One rank's view of the memory of its host's ranks, whose table is on the ``board``."""

    def __init__(self, board: GroupBoard) -> None:
        self._board = board
        self._arenas: dict[str, MappedArena] = {}
        self._regions: list[SharedRegion] = []

    def arena(self, name: str, dtype: str, size: int, *, kind: str) -> MappedArena:
        """An arena of ``size`` elements: a row for each rank and one for results if its ``kind`` is "allocated", one
        row if it is "shared".

        Raises UsageError for a name, dtype or size that no arena can have, MismatchError (on all ranks) if the arena
        exists with another kind, dtype or size.
        """
        text = f"{kind} {dtype}[{size}]"
        known = self._arenas.get(name)
        if known is None:
            check_arena(name, dtype, size)
            rows = self._board.ranks + 1 if kind == "allocated" else 1
            region = self.region(name, text, size * numpy_dtype(dtype).itemsize, rows)
            known = self._arenas[name] = _mapped(region, text, dtype, size)
        elif known.text != text:
            self._refuse(name, text, known.text, self._board.rank)
        return known

    def find(self, name: str) -> MappedArena:
        """An arena that this rank has requested. Raises UsageError if it has not, or the error that ended the group."""
        found = self._arenas.get(name)
        if found is None:
            self._board.check()
            raise unknown_arena(name, list(self._arenas))
        return found

    def row_sets(self, name: str, text: str, nbytes: int, *, sets: int, ranks: int) -> list[list[ByteArray]]:
        """``sets`` times ``ranks`` rows of ``nbytes`` (whole pages) each, for ranks of this host or of more."""
        region = self.region(name, text, nbytes, sets * ranks)
        rows = [region.array(np.dtype(np.uint8), nbytes, at) for at in range(0, region.nbytes, nbytes)]
        return [rows[at : at + ranks] for at in range(0, len(rows), ranks)]

    def region(self, name: str, text: str, nbytes: int, rows: int) -> SharedRegion:
        """A region of ``rows`` rows of ``nbytes``, each of whole pages: the first rank creates it, the others open it.

        Raises HostLimitError, on all ranks, if a host has no memory or file for it.
        """
        try:
            with for_rank(self._board.names[self._board.rank]):
                return self._made_or_opened(name, text, pages(nbytes) * rows)
        except HostLimitError as error:
            self._board.fail_with(error)

    def _made_or_opened(self, name: str, text: str, size: int) -> SharedRegion:
        entry: dict[str, Any] | None
        with self._board.editing_arenas() as table:
            entry = table.get(name)
            if entry is None:
                region = create_region(f"arena-{name}", size)
                self._regions.append(region)  # stays open, so that the others can open it
                table[name] = {"text": text, "pid": os.getpid(), "fd": region.fd, "rank": self._board.rank}
                table[name]["inode"] = region.name.inode
                return region
        if entry["text"] != text:
            self._refuse(name, text, entry["text"], entry["rank"])
        try:
            region = open_region(entry["pid"], entry["fd"], entry["inode"])
        except OSError as error:
            holder = self._board.names[entry["rank"]]
            self._board.fail_with(
                RankLostError(
                    f"rank {holder} (process {entry['pid']}), which holds arena {name!r}, is gone: {error.strerror}",
                    rank=holder,
                    hint="Close this group, replace the rank and make a new group.",
                )
            )
        region.close()  # the mapping stays
        if region.nbytes != size:
            self._refuse(name, text, f"{region.nbytes} bytes", entry["rank"])
        return region

    def _refuse(self, name: str, mine: str, theirs: str, rank: int) -> NoReturn:
        names = self._board.names
        self._board.fail_with(
            MismatchError(
                f"rank {names[self._board.rank]} requested arena {name!r} as {mine}, rank {names[rank]} as {theirs}",
                hint="All ranks must request an arena with the same kind, dtype and size.",
            )
        )

    def close(self) -> None:
        """Close all regions; arrays that were returned stay valid. Idempotent."""
        self._arenas.clear()
        while self._regions:
            self._regions.pop().close()


def _mapped(region: SharedRegion, text: str, dtype: str, size: int) -> MappedArena:
    kind = numpy_dtype(dtype)
    step = pages(size * kind.itemsize)
    rows = [region.array(kind, size, at) for at in range(0, region.nbytes, step)]
    return MappedArena(tuple(rows[:-1]), rows[-1], text)
