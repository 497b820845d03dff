"""Coming without waiting: ranks say that they are there and go on; one of them waits for all.

Every rank has a count of how often it has come, which it alone writes. Unlike the words of a meeting
(`podrun.collectives.meeting`) counts only grow, so it does not matter how far ahead of the one who waits the others
are. Who waits long sleeps on a bell, which whoever comes last rings.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from podrun.collectives import native
from podrun.collectives.board import Board
from podrun.collectives.futex import Futex, address_of
from podrun.collectives.memory import Segment

_BELL, _ASLEEP, _COUNTS = 0, 64, 128


def arrivals_bytes(ranks: int) -> int:
    """What the arrivals of so many ranks take."""
    return _COUNTS + 8 * ranks


class Arrivals:
    """One rank's side. The last rank waits; `come` on the others and `wait` there belong together, one for one."""

    def __init__(self, segment: Segment, board: Board) -> None:
        view = memoryview(segment.map)
        self._board = board
        self._count = 0
        self._counts = view[_COUNTS : _COUNTS + 8 * board.ranks].cast("Q")
        self._asleep = view[_ASLEEP : _ASLEEP + 8].cast("Q")
        self._bell = Futex(address_of(segment.map) + _BELL)
        order = native.module.fence if native.module is not None else board.meetings.fence or os.sched_yield
        self._stored: Callable[[], object] = order
        """What has a rank's stores in memory before its next loads, which x86 too may do first."""

    def come(self) -> None:
        """Say that this rank has come once more. Raises what ended the group, if anything has."""
        self._board.check()
        self._count += 1
        self._board.order()  # what this rank wrote is there before it comes
        self._counts[self._board.rank] = self._count
        self._stored()  # and it has come before it looks whether it is the last, and awaited
        if self._asleep[0] and self._all_here():
            self._bell.value = (self._bell.value + 1) & 0xFFFFFFFF
            self._bell.wake()

    def wait(self, what: bytes, timeout: float) -> None:
        """Come once more, and wait until every rank has as often. Raises what ended the group otherwise."""
        self._board.check()
        self._count += 1
        self._counts[self._board.rank] = self._count
        if not self._all_here():
            self._asleep[0] = 1
            self._stored()  # the mark is in memory before the counts are looked at again
            try:
                self._board.wait_until(self._all_here, self._missing, self._bell, what, timeout)
            finally:
                self._asleep[0] = 0
        self._board.order()  # what others wrote is read after their counts were

    def _all_here(self) -> bool:
        return min(self._counts) >= self._count

    def _missing(self) -> list[int]:
        return [rank for rank, count in enumerate(self._counts) if count < self._count]
