"""The barrier: how the ranks of a host meet, in shared memory, without an atomic instruction.

Every rank has one 64-bit word, which it alone writes: how many meetings it has come to and a digest of what it
came for. All have come, for the same thing, iff all words are equal: one comparison of a few bytes. There are
two sets of words, used in turn, because a fast rank may be one meeting ahead of a slow reader; it cannot be two
ahead, for it would have to have met that reader in between. So a count modulo 4 tells a word from a stale one, and
what a rank writes and what it wants to see can be made beforehand, once for each label (`Turn`): a meeting of
processes costs its Python, and there should be little of it. The group's failure and the marks of those who sleep
lie between the two sets, so that one comparison tells that all have come, none sleeps and nothing has failed. Where
podrun was built with its C module (`podrun.collectives.native`), that much of a meeting is one call of it.

Waiting is looking again, and giving up the core at every look: hosts are oversubscribed, and what a rank waits
for is often another rank that wants this core. That way a rank gets on with one switch of the core, and nobody
has to wake anybody: a meeting of 8 processes on 2 cores takes 5 us, where falling asleep and being woken took
180. Who waits longer than `_SPIN` sleeps on the board's bell, and says so, for who comes last to ring it.

On its way to memory a rank's word may miss that another fell asleep in the same few nanoseconds; sleep is in
slices, so that costs one slice, never a hang. Processors that reorder stores are told not to, by the C module or a
fence (`podrun.collectives.fence`).
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from podrun.collectives import fence, native
from podrun.collectives.errors import different_collectives

if TYPE_CHECKING:
    from podrun.collectives._meeting import Meeting
    from podrun.collectives.board import Board

LABEL_BYTES = 192
"""Size of a label: its text, cut, and a digest of the whole."""
DIGEST_BYTES = 16
_WORD = 8
_LINE = 64
_PHASES = 4  # meetings are counted modulo this many; stale words are two meetings old
_CAME = 4  # set in the word of a meeting: fresh memory is nobody's word
_TAG_BITS = 3
_DIGEST_OF_WORD = 7  # bytes
_SPIN = 1e-3  # seconds of looking for each rank of a core: longer than a sleeper takes to wake on a busy host
_QUICK_LOOKS = 100  # looks before the core is given up, where every rank has one of its own
_MOST_LABELS = 4096


class Turn(NamedTuple):
    """One rank's part in every fourth meeting under a label."""

    own: memoryview
    """This rank's word in shared memory."""
    word: int
    """What it writes there when it comes."""
    window: slice
    """Where all words, the failure and the sleepers' marks are in shared memory,"""
    everyone: bytes
    """and what they are when all have come, nothing has failed and nobody sleeps."""
    words: slice
    """All words alone."""
    came: bytes
    """What they are when all have come."""


def label_text(raw: bytes) -> str:
    """What a label says, for messages."""
    return raw[: LABEL_BYTES - DIGEST_BYTES].rstrip(b"\0").decode(errors="replace")


def _word_of(label: bytes, phase: int) -> int:
    """A rank's word for a meeting under a label."""
    digest = label[LABEL_BYTES - DIGEST_BYTES :][:_DIGEST_OF_WORD]
    return int.from_bytes(digest, "little") << _TAG_BITS | _CAME | phase


def _marks_bytes(ranks: int) -> int:
    return -(-ranks // _WORD) * _WORD


def _window_bytes(ranks: int) -> int:
    """Two sets of words with the failure and the marks between them."""
    return -(-(2 * _WORD * ranks + _WORD + _marks_bytes(ranks)) // _LINE) * _LINE


def meeting_bytes(ranks: int) -> int:
    """What words, failure, sleepers' marks and labels of so many ranks take."""
    return _window_bytes(ranks) + 2 * LABEL_BYTES * ranks


class Meetings(native.Counts):
    """One rank's side of the board's meetings; `meet` is the barrier. ``at``: where they lie in the board, at the
    start of a line.
    """

    def __init__(self, board: Board, at: int) -> None:
        super().__init__()
        self.native = native.module
        """The C module, by which a meeting where all goes well is one call, or None. Ranks may differ in it."""
        self.fence = fence.here()
        """What keeps stores and loads in order; None: this processor does."""
        self.order: fence.Fence = self.fence or fence.nothing
        self._board = board
        self._ranks = ranks = board.ranks
        self.map = board.segment.map
        """The board's shared memory."""
        self._view = view = memoryview(board.segment.map)
        self._failed_at = middle = at + _WORD * ranks
        self.failed = view[middle : middle + _WORD].cast("Q")
        """Not 0: the group has failed."""
        marks = middle + _WORD
        self._asleep_window = slice(marks, marks + _marks_bytes(ranks))
        self._asleep = view[self._asleep_window]
        self._nobody = bytes(_marks_bytes(ranks))
        self._starts = (at, self._asleep_window.stop)
        self._words = [view[start : start + _WORD * ranks].cast("Q") for start in self._starts]
        start, size = at + _window_bytes(ranks), LABEL_BYTES * ranks
        self._labels = [view[start + side * size : start + (side + 1) * size] for side in (0, 1)]
        self._turns: dict[bytes, tuple[Turn, ...]] = {}
        self._native_meetings: dict[bytes, Meeting] = {}
        cores = len(os.sched_getaffinity(0))
        self.spin = _SPIN * max(1, ranks // cores)
        self.quick_looks = _QUICK_LOOKS if ranks <= cores else 0

    def turns(self, what: bytes) -> tuple[Turn, ...]:
        """This rank's part in meetings under a label, by their count modulo 4."""
        made = self._turns.get(what)
        if made is None:
            if len(self._turns) >= _MOST_LABELS:
                self._turns.clear()
            made = self._turns[what] = tuple(self._turn(what, phase) for phase in range(_PHASES))
        return made

    def _turn(self, what: bytes, phase: int) -> Turn:
        side, word, rank = phase & 1, _word_of(what, phase), self._board.rank
        start, came = self._starts[side], word.to_bytes(_WORD, sys.byteorder) * self._ranks
        words = slice(start, start + len(came))
        quiet = bytes(_WORD) + self._nobody  # nothing has failed, nobody sleeps
        return Turn(
            own=self._words[side][rank : rank + 1],
            word=word,
            window=slice(words.stop - len(came) - side * len(quiet), words.stop + (1 - side) * len(quiet)),
            everyone=quiet + came if side else came + quiet,
            words=words,
            came=came,
        )

    def native_meeting(self, what: bytes) -> Meeting:
        """`meet` under a label as one native call with the timeout. Only where `native` is there."""
        made = self._native_meetings.get(what)
        if made is None:
            if len(self._native_meetings) >= _MOST_LABELS:
                self._native_meetings.clear()
            turns = tuple((t.words.start, t.window.start, t.word, t.everyone) for t in self.turns(what))
            place = (self._failed_at, self._board.rank, self._ranks)
            made = self._native_meetings[what] = self.native.Meeting(
                self, self.map, *place, what, self.wait, turns
            )
        return made

    def meet(self, what: bytes, timeout: float) -> None:
        """Wait until every rank has come to this meeting with the same label; raises what ended the group
        otherwise.
        """
        if self.native is not None:
            (self._native_meetings.get(what) or self.native_meeting(what))(timeout)
            return
        if self.fence is not None:
            self._meet_fenced(what, timeout, self.fence)
            return
        turns = self._turns.get(what) or self.turns(what)
        count = self.count = self.count + 1
        own, word, window, everyone, *_ = turns[count & 3]
        own[0] = word
        if self.map[window] != everyone:
            self.wait(what, timeout)

    def _meet_fenced(self, what: bytes, timeout: float, fence: fence.Fence) -> None:
        """`meet` where the processor does not keep stores and loads in order."""
        self.count += 1
        own, word, window, everyone, *_ = self.turns(what)[self.count & 3]
        fence()  # what this rank wrote is there before it comes,
        own[0] = word
        fence()  # it has come before it looks,
        if self.map[window] != everyone:
            self.wait(what, timeout)
        fence()  # and it has looked before it reads what others wrote

    def wait(self, what: bytes, timeout: float) -> None:
        """The rest of a meeting that this rank has come to: not all are there, or somebody sleeps, or the group has
        failed.
        """
        turn = self.turns(what)[self.count & 3]
        self._board.check()
        if not self._look(turn.words, turn.came):
            self._sleep(turn, what, timeout)
        self.order()
        self._board.check()  # who fails the group and comes nevertheless did so before
        self.wake_sleepers()

    def wake_sleepers(self) -> None:
        """Ring for those who sleep, if any do."""
        if self.map[self._asleep_window] != self._nobody:
            self._board.ring(self.count)

    def _look(self, window: slice, wanted: bytes) -> bool:
        """Look for a while until the words are as wanted; False: it takes longer."""
        shared, now, give_up = self.map, time.monotonic, os.sched_yield
        if shared[window] == wanted:
            return True
        if not self.may_spin():
            return False
        for _ in range(self.quick_looks):
            if shared[window] == wanted:
                return True
        limit = now() + self.spin
        while now() < limit:
            give_up()
            if shared[window] == wanted:
                return True
        return False

    def _sleep(self, turn: Turn, what: bytes, timeout: float) -> None:
        """Sleep until the meeting is over. Raises MismatchError if all have come, but not for one thing."""
        side, phase, rank = self.count & 1, self.count & (_PHASES - 1), self._board.rank
        words, labels = self._words[side], self._labels[side]
        labels[rank * LABEL_BYTES : (rank + 1) * LABEL_BYTES] = what  # only who waits is asked what for

        def missing(came: list[int]) -> list[int]:
            """Who has not come; if all have, but not for one thing: who has not said what for."""
            if came.count(turn.word) == len(came):
                return []
            late = [r for r, word in enumerate(came) if word & (_CAME | _PHASES - 1) != _CAME | phase]
            return late or [r for r, word in enumerate(came) if word != _word_of(self._label(side, r), phase)]

        def ready() -> bool:
            came = list(words)  # once: ranks come at any moment
            all_came = came.count(turn.word) == len(came)
            if not all_came and not missing(came):
                self._mismatch(side)
            return all_came

        self._asleep[rank] = 1
        (self.fence or os.sched_yield)()  # the mark is in memory before the words are looked at again
        try:
            self._board.sleep_until(ready, lambda: missing(list(words)), self._board.bell, what, timeout)
        finally:
            self._asleep[rank] = 0

    def may_spin(self) -> bool:
        """Whether no other rank is a thread of this process: spinning would keep the GIL from it."""
        if self.spins == native.UNKNOWN:
            alone, all_here = self._board.alone_in_process()
            if all_here or not alone:
                self.spins = native.ALONE if alone else native.NOT_ALONE
            return alone
        return self.spins == native.ALONE

    def _label(self, side: int, rank: int) -> bytes:
        return bytes(self._labels[side][rank * LABEL_BYTES : (rank + 1) * LABEL_BYTES])

    def _mismatch(self, side: int) -> NoReturn:
        texts = (label_text(self._label(side, rank)) for rank in range(self._ranks))
        self._board.fail_with(different_collectives(*zip(self._board.names, texts, strict=True)))
