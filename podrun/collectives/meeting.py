"""The barrier: how the ranks of a host meet, in shared memory, without an atomic instruction.

Every rank has one 64-bit word, which it alone writes: how many meetings it has come to and a digest of what it
came for. All have come, for the same thing, iff all words are equal: one comparison of a few bytes. There are
two sets of words, used in turn, because a fast rank may be one meeting ahead of a slow reader; it cannot be two
ahead, for it would have to have met that reader in between.

A meeting may have something to be done before all go on (`Meetings.meet_and_close`): who comes last does it.

Waiting is looking again, and giving up the core at every look: hosts are oversubscribed, and what a rank waits
for is often another rank that wants this core. That way a rank gets on with one switch of the core, and nobody
has to wake anybody: a meeting of 8 processes on 2 cores takes 5 us, where falling asleep and being woken took
180. Who waits longer than `_SPIN` sleeps on the board's bell, and says so, for who comes last to ring it.

On its way to memory a rank's word may miss that another fell asleep in the same few nanoseconds; sleep is in
slices, so that costs one slice, never a hang.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from podrun.collectives.errors import MismatchError

if TYPE_CHECKING:
    from podrun.collectives.board import Board

LABEL_BYTES = 192
"""Size of a label: its text, cut, and a digest of the whole."""
DIGEST_BYTES = 16
_WORD = 8
_LINE = 64
_COUNT_BITS = 24  # meetings are counted modulo this many bits; stale words are two meetings old
_DIGEST_BITS = 64 - _COUNT_BITS
_SPIN = 1e-3  # seconds of looking for each rank of a core: longer than a sleeper takes to wake on a busy host
_QUICK_LOOKS = 16  # looks before the core is given up, where every rank has one of its own
_MOST_DIGESTS = 4096


def label_text(raw: bytes) -> str:
    """What a label says, for messages."""
    return raw[: LABEL_BYTES - DIGEST_BYTES].rstrip(b"\0").decode(errors="replace")


def meeting_bytes(ranks: int) -> int:
    """What the words, the sleepers' marks, who closes a meeting and the labels of so many ranks take."""
    return 3 * _words_bytes(ranks) + 2 * _LINE + 2 * LABEL_BYTES * ranks


def _words_bytes(ranks: int) -> int:
    return -(-_WORD * ranks // _LINE) * _LINE


class Meetings:
    """One rank's side of the board's meetings; `meet` is the barrier. ``at``: where they lie in the board."""

    def __init__(self, board: Board, at: int) -> None:
        self._board = board
        self._ranks = ranks = board.ranks
        self._map = board.segment.map
        view = memoryview(board.segment.map)
        step = _words_bytes(ranks)
        self._windows = [slice(at + side * step, at + side * step + _WORD * ranks) for side in (0, 1)]
        self._words = [view[window].cast("Q") for window in self._windows]
        self._asleep_window = slice(at + 2 * step, at + 2 * step + ranks)
        self._asleep = view[self._asleep_window]
        self._nobody = bytes(ranks)
        closing = at + 3 * step
        self._done_windows = [
            slice(closing + side * _LINE, closing + side * _LINE + _WORD) for side in (0, 1)
        ]
        self._closing = [
            view[window.start : window.start + 2 * _WORD].cast("Q") for window in self._done_windows
        ]
        start, size = closing + 2 * _LINE, LABEL_BYTES * ranks
        self._labels = [view[start + side * size : start + (side + 1) * size] for side in (0, 1)]
        self._shown = [b"", b""]
        self._digests: dict[bytes, int] = {}
        self._count = 0
        cores = len(os.sched_getaffinity(0))
        self._spin = _SPIN * max(1, ranks // cores)
        self._quick_looks = range(_QUICK_LOOKS if ranks <= cores else 0)
        self._spins: bool | None = None

    def meet(self, what: bytes, timeout: float) -> None:
        """Wait until every rank has come to this meeting with the same label; raises what ended the group
        otherwise.
        """
        side, word = self._arrive(what)
        everyone = word * self._ranks
        window = self._windows[side]
        if self._map[window] != everyone and not self._look(window, everyone):
            self._sleep(side, lambda: self._map[window] == everyone, what, timeout)
        if self._map[self._asleep_window] != self._nobody:
            self._board.ring(self._count)

    def meet_and_close(self, what: bytes, timeout: float, work: Callable[[], None]) -> None:
        """As `meet`, and one rank, the last to come if it can be told, does ``work`` alone before all go on.

        Who does it holds the board's lock, so that there is only one; if it dies, the lock is free again.
        """
        side, word = self._arrive(what)
        everyone, window, done = word * self._ranks, self._windows[side], self._done_windows[side]
        shared = self._map

        def closed() -> bool:
            if shared[done] == word:
                return True
            return shared[window] == everyone and self._close(side, word, work)

        if not closed():
            os.sched_yield()  # two who come at once may each miss the other's word; not after this
            if not closed() and not self._look(done, word):
                self._sleep(side, closed, what, timeout)
        if shared[self._asleep_window] != self._nobody:
            self._board.ring(self._count)

    def _arrive(self, what: bytes) -> tuple[int, bytes]:
        """Write down that this rank has come, and what for; the set of words, and this rank's."""
        board = self._board
        if board.failed[0] or board.closed:
            board.check()
        count = self._count = self._count + 1
        side = count & 1
        if self._shown[side] is not what:
            at = board.rank * LABEL_BYTES
            self._labels[side][at : at + LABEL_BYTES] = what
            self._shown[side] = what
        digest = self._digests.get(what)
        if digest is None:
            digest = self._digest(what)
        word = (count << _DIGEST_BITS | digest) & 0xFFFFFFFFFFFFFFFF
        self._words[side][board.rank] = word
        return side, word.to_bytes(_WORD, sys.byteorder)

    def _close(self, side: int, word: bytes, work: Callable[[], None]) -> bool:
        """Do the meeting's work, unless another rank is at it or has done it; whether it is done."""
        closing, board = self._closing[side], self._board
        if not board.take_lock():
            return False
        try:
            if self._map[self._done_windows[side]] != word:
                closing[1] = board.rank
                work()
                closing[0] = int.from_bytes(word, sys.byteorder)
        finally:
            board.give_back_lock()
        return True

    def _digest(self, what: bytes) -> int:
        if len(self._digests) >= _MOST_DIGESTS:
            self._digests.clear()
        made = int.from_bytes(what[-DIGEST_BYTES : -DIGEST_BYTES + _DIGEST_BITS // 8], "little")
        self._digests[what] = made
        return made

    def _look(self, window: slice, wanted: bytes) -> bool:
        """Look for a while until the words are as wanted; False: it takes longer."""
        if not self._spins and (self._spins is not None or not self._may_spin()):
            return False
        shared, now, give_up = self._map, time.monotonic, os.sched_yield
        for _ in self._quick_looks:
            if shared[window] == wanted:
                return True
        limit = now() + self._spin
        while now() < limit:
            give_up()
            if shared[window] == wanted:
                return True
        return False

    def _sleep(self, side: int, done: Callable[[], bool], what: bytes, timeout: float) -> None:
        """Sleep until the meeting is over. Raises MismatchError if all have come, but not for one thing."""
        words, mine = self._words[side], self._count & (1 << _COUNT_BITS) - 1

        def missing() -> list[int]:
            late = [rank for rank, word in enumerate(words) if word >> _DIGEST_BITS != mine]
            return late or [self._closing[side][1]]

        def ready() -> bool:
            if done():
                return True
            came = list(words)
            if any(word != came[0] for word in came) and all(word >> _DIGEST_BITS == mine for word in came):
                self._mismatch(side)
            return False

        self._asleep[self._board.rank] = 1
        os.sched_yield()  # a system call: the mark is in memory before the words are looked at again
        try:
            self._board.sleep_until(ready, missing, self._board.bell, what, timeout)
        finally:
            self._asleep[self._board.rank] = 0

    def may_spin(self) -> bool:
        """Whether no other rank is a thread of this process: spinning would keep the GIL from it."""
        return self._may_spin() if self._spins is None else self._spins

    def _may_spin(self) -> bool:
        alone, all_here = self._board.alone_in_process()
        if all_here or not alone:
            self._spins = alone
        return alone

    def _mismatch(self, side: int) -> NoReturn:
        labels = bytes(self._labels[side])
        said: dict[str, list[int]] = {}
        for rank in range(self._ranks):
            text = label_text(labels[rank * LABEL_BYTES : (rank + 1) * LABEL_BYTES])
            said.setdefault(text, []).append(self._board.names[rank])
        parts = [f"rank {', '.join(map(str, who))} called {text}" for text, who in said.items()]
        self._board.fail_with(
            MismatchError(
                "ranks of one group called different collectives: " + "; ".join(parts),
                hint="All ranks must call the same collectives, on equal arenas, in the same order.",
            )
        )
