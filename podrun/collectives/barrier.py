"""The barrier: how the ranks of a host wait for each other in shared memory, without an atomic instruction.

Every rank has one 64-bit word, which it alone writes: the number of barriers it has arrived at (modulo 4) and a digest
of the barrier's label. All ranks have arrived, with the same label, iff all words are equal: one comparison of a few
bytes. There are two sets of words, used in turn, because a fast rank may be one barrier ahead of a slow reader. It
cannot be two ahead, because the barrier between needs that reader. So a count modulo 4 tells a current word from a
stale one, and what a rank writes and compares can be prepared once for each label (`BarrierPhase`). The group's failure
word and the marks of sleeping ranks lie between the two sets, so that one comparison shows that all ranks have arrived,
none sleeps and nothing has failed. With the C module (`podrun.collectives.linux`) that much of a barrier is one call.

A waiting rank reads the words again and again and yields the core after each read: hosts often have fewer cores than
ranks, and the awaited rank may need this core. That takes one switch of the core and wakes nobody: a barrier of 8
processes on 2 cores takes 5 us, where sleeping and being woken took 180. A rank that waits longer than `_SPIN` marks
itself as asleep and sleeps on the board's doorbell, which the last rank to arrive rings.

The last rank may miss that another fell asleep within the same few nanoseconds. Ranks sleep in slices, so that costs
one slice and never a hang. On processors that reorder stores, the C module or a fence keeps them in order.

`ArrivalCounter` is the other half: ranks report that they have arrived and go on, and only the last rank waits.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from podrun.collectives import linux
from podrun.collectives.group import different_collectives
from podrun.collectives.linux import Futex
from podrun.core.errors import PodrunError
from podrun.core.shared_region import SharedRegion

if TYPE_CHECKING:
    from podrun.collectives._collectives import Barrier

LABEL_BYTES = 192
"""Size of a label in bytes: its text, cut to fit, and a digest of the whole text."""
DIGEST_BYTES = 16
_WORD = 8
_LINE = 64
_PHASES = 4  # barriers are counted modulo this number; stale words are two barriers old
_ARRIVED = 4  # set in every word, so that fresh memory is not a word
_TAG_BITS = 3
_DIGEST_OF_WORD = 7  # bytes
_SPIN = 1e-3  # seconds of spinning for each rank per core: longer than a sleeper takes to wake on a busy host
_QUICK_LOOKS = 100  # reads before yielding the core, where every rank has a core of its own
_MOST_LABELS = 4096


class BarrierBoard(Protocol):
    """What barriers need of the board (`podrun.collectives.board.GroupBoard`)."""

    rank: int
    ranks: int
    names: Sequence[int]
    region: SharedRegion
    doorbell: Futex
    order: linux.Fence
    barriers: Barriers

    def check(self) -> None: ...

    def ring(self, barrier: int) -> None: ...

    def alone_in_process(self) -> tuple[bool, bool]: ...

    def fail_with(self, error: PodrunError) -> NoReturn: ...

    def wait_until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        doorbell: Futex,
        what: bytes,
        timeout: float,
    ) -> None: ...

    def sleep_until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        doorbell: Futex,
        what: bytes,
        timeout: float,
    ) -> None: ...


class BarrierPhase(NamedTuple):
    """What one rank writes and compares in every fourth barrier with a label."""

    own: memoryview
    """This rank's word in shared memory."""
    word: int
    """The value that it writes there on arrival."""
    window: slice
    """Where the words, the failure word and the sleepers' marks lie in shared memory."""
    everyone: bytes
    """The bytes of `window` when all ranks have arrived, nothing has failed and no rank sleeps."""
    words: slice
    """Where the words lie in shared memory."""
    arrived: bytes
    """The bytes of `words` when all ranks have arrived."""


def label_text(raw: bytes) -> str:
    """The text of a label, for messages."""
    return raw[: LABEL_BYTES - DIGEST_BYTES].rstrip(b"\0").decode(errors="replace")


def _word_of(label: bytes, count: int) -> int:
    """The word that every rank writes for a barrier with a label."""
    digest = label[LABEL_BYTES - DIGEST_BYTES :][:_DIGEST_OF_WORD]
    return int.from_bytes(digest, "little") << _TAG_BITS | _ARRIVED | count


def _marks_bytes(ranks: int) -> int:
    return -(-ranks // _WORD) * _WORD


def _window_bytes(ranks: int) -> int:
    """Two sets of words with the failure and the marks between them."""
    return -(-(2 * _WORD * ranks + _WORD + _marks_bytes(ranks)) // _LINE) * _LINE


def barrier_bytes(ranks: int) -> int:
    """Size in bytes of the words, the failure word, the sleepers' marks and the labels of ``ranks`` ranks."""
    return _window_bytes(ranks) + 2 * LABEL_BYTES * ranks


class Barriers(linux.Counts):
    """One rank's side of all barriers of a board. ``at``: offset of their memory in the board, a multiple of 64."""

    def __init__(self, board: BarrierBoard, at: int) -> None:
        super().__init__()
        self.native = linux.c_module
        """The C module, or None. Ranks with and without it work in one group."""
        self.fence = linux.fence_here()
        """The fence that keeps stores and loads in order; None if this processor needs none."""
        self.order: linux.Fence = self.fence or linux.no_fence
        self._board = board
        self._ranks = ranks = board.ranks
        self.map = board.region.map
        """The board's shared memory."""
        self._view = view = memoryview(board.region.map)
        self._failed_at = middle = at + _WORD * ranks
        self.failed = view[middle : middle + _WORD].cast("Q")
        """Length of the error that ended the group; 0 while the group works."""
        marks = middle + _WORD
        self._asleep_window = slice(marks, marks + _marks_bytes(ranks))
        self._asleep = view[self._asleep_window]
        self._nobody = bytes(_marks_bytes(ranks))
        self._starts = (at, self._asleep_window.stop)
        self._words = [view[start : start + _WORD * ranks].cast("Q") for start in self._starts]
        start, size = at + _window_bytes(ranks), LABEL_BYTES * ranks
        self._labels = [view[start + side * size : start + (side + 1) * size] for side in (0, 1)]
        self._phases: dict[bytes, tuple[BarrierPhase, ...]] = {}
        self._native_barriers: dict[bytes, Barrier] = {}
        cores = len(os.sched_getaffinity(0))
        self.spin = _SPIN * max(1, ranks // cores)
        self.quick_looks = _QUICK_LOOKS if ranks <= cores else 0

    def phases(self, what: bytes) -> tuple[BarrierPhase, ...]:
        """What this rank writes and compares in barriers with a label, by the barriers' count modulo 4."""
        known = self._phases.get(what)
        if known is None:
            if len(self._phases) >= _MOST_LABELS:
                self._phases.clear()
            known = self._phases[what] = tuple(self._phase(what, number) for number in range(_PHASES))
        return known

    def _phase(self, what: bytes, number: int) -> BarrierPhase:
        side, word, rank = number & 1, _word_of(what, number), self._board.rank
        start, arrived = self._starts[side], word.to_bytes(_WORD, sys.byteorder) * self._ranks
        words = slice(start, start + len(arrived))
        quiet = bytes(_WORD) + self._nobody  # nothing has failed, nobody sleeps
        return BarrierPhase(
            own=self._words[side][rank : rank + 1],
            word=word,
            window=slice(words.stop - len(arrived) - side * len(quiet), words.stop + (1 - side) * len(quiet)),
            everyone=quiet + arrived if side else arrived + quiet,
            words=words,
            arrived=arrived,
        )

    def native_barrier(self, what: bytes) -> Barrier:
        """`arrive_and_wait` for one label as one native call that takes the timeout. Needs the C module."""
        barrier = self._native_barriers.get(what)
        if barrier is None:
            if len(self._native_barriers) >= _MOST_LABELS:
                self._native_barriers.clear()
            phases = tuple((t.words.start, t.window.start, t.word, t.everyone) for t in self.phases(what))
            place = (self._failed_at, self._board.rank, self._ranks)
            barrier = self._native_barriers[what] = self.native.Barrier(
                self, self.map, *place, what, self.wait, phases
            )
        return barrier

    def arrive_and_wait(self, what: bytes, timeout: float) -> None:
        """Wait until every rank has arrived at this barrier with the same label.

        Raises the error that ended the group if it has failed, RankMissingError after ``timeout`` seconds.
        """
        if self.native is not None:
            (self._native_barriers.get(what) or self.native_barrier(what))(timeout)
            return
        if self.fence is not None:
            self._arrive_fenced(what, timeout, self.fence)
            return
        phases = self._phases.get(what) or self.phases(what)
        count = self.count = self.count + 1
        own, word, window, everyone, *_ = phases[count & 3]
        own[0] = word
        if self.map[window] != everyone:
            self.wait(what, timeout)

    def _arrive_fenced(self, what: bytes, timeout: float, fence: linux.Fence) -> None:
        """`arrive_and_wait` for processors that do not keep stores and loads in order."""
        self.count += 1
        own, word, window, everyone, *_ = self.phases(what)[self.count & 3]
        fence()  # what this rank wrote takes effect before its word
        own[0] = word
        fence()  # the word takes effect before the others' words are read
        if self.map[window] != everyone:
            self.wait(what, timeout)
        fence()  # the others' words are read before the data that they wrote

    def wait(self, what: bytes, timeout: float) -> None:
        """Finish a barrier in which some rank is missing or asleep, or after which the group has failed."""
        phase = self.phases(what)[self.count & 3]
        self._board.check()
        if not self._spin_until(phase.words, phase.arrived):
            self._sleep(phase, what, timeout)
        self.order()
        self._board.check()  # a rank that fails the group and arrives has failed it before its word
        self.wake_sleepers()

    def wake_sleepers(self) -> None:
        """Ring the doorbell if any rank sleeps."""
        if self.map[self._asleep_window] != self._nobody:
            self._board.ring(self.count)

    def _spin_until(self, window: slice, wanted: bytes) -> bool:
        """Spin until the words are as wanted; False if that takes too long."""
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

    def _sleep(self, phase: BarrierPhase, what: bytes, timeout: float) -> None:
        """Sleep until the barrier is over. Raises MismatchError if the ranks arrived with different labels."""
        side, count, rank = self.count & 1, self.count & (_PHASES - 1), self._board.rank
        words, labels = self._words[side], self._labels[side]
        labels[rank * LABEL_BYTES : (rank + 1) * LABEL_BYTES] = what  # read only when labels differ

        def missing(arrived: list[int]) -> list[int]:
            """Ranks that have not arrived; if all have, with different labels: those whose label is not written yet."""
            if arrived.count(phase.word) == len(arrived):
                return []
            late = [
                r for r, word in enumerate(arrived) if word & (_ARRIVED | _PHASES - 1) != _ARRIVED | count
            ]
            return late or [
                r for r, word in enumerate(arrived) if word != _word_of(self._label(side, r), count)
            ]

        def ready() -> bool:
            arrived = list(words)  # read once: ranks may arrive at any moment
            all_arrived = arrived.count(phase.word) == len(arrived)
            if not all_arrived and not missing(arrived):
                self._mismatch(side)
            return all_arrived

        self._asleep[rank] = 1
        (self.fence or os.sched_yield)()  # the mark takes effect before the words are read again
        try:
            self._board.sleep_until(ready, lambda: missing(list(words)), self._board.doorbell, what, timeout)
        finally:
            self._asleep[rank] = 0

    def may_spin(self) -> bool:
        """Whether no other rank is a thread of this process; spinning would keep the GIL from it."""
        if self.spins == linux.UNKNOWN:
            alone, all_here = self._board.alone_in_process()
            if all_here or not alone:
                self.spins = linux.ALONE if alone else linux.NOT_ALONE
            return alone
        return self.spins == linux.ALONE

    def _label(self, side: int, rank: int) -> bytes:
        return bytes(self._labels[side][rank * LABEL_BYTES : (rank + 1) * LABEL_BYTES])

    def _mismatch(self, side: int) -> NoReturn:
        texts = (label_text(self._label(side, rank)) for rank in range(self._ranks))
        self._board.fail_with(different_collectives(*zip(self._board.names, texts, strict=True)))


_DOORBELL, _ASLEEP, _COUNTS = 0, 64, 128


def arrival_counter_bytes(ranks: int) -> int:
    """Size in bytes of the memory of an `ArrivalCounter` of ``ranks`` ranks."""
    return _COUNTS + 8 * ranks


class ArrivalCounter:
    """One rank's side of arrivals that only the last rank waits for.

    Every rank has a count of its arrivals, which it alone writes. Counts only grow, so ranks may be any number of
    arrivals ahead of the one that waits. For every `arrive` of each other rank, the last rank calls `wait` once.
    """

    def __init__(self, region: SharedRegion, board: BarrierBoard) -> None:
        view = memoryview(region.map)
        self._board = board
        self._count = 0
        self._counts = view[_COUNTS : _COUNTS + 8 * board.ranks].cast("Q")
        self._asleep = view[_ASLEEP : _ASLEEP + 8].cast("Q")
        self._doorbell = Futex(region.map, _DOORBELL)
        order = linux.c_module.fence if linux.c_module is not None else board.barriers.fence or os.sched_yield
        self._stored: Callable[[], object] = order
        """Makes a rank's stores take effect before its next loads; x86 too may reorder these."""

    def arrive(self) -> None:
        """Count one more arrival of this rank. Raises the error that ended the group, if it has failed."""
        self._board.check()
        self._count += 1
        self._board.order()  # what this rank wrote takes effect before its count
        self._counts[self._board.rank] = self._count
        self._stored()  # the count takes effect before it checks whether it is the last one
        if self._asleep[0] and self._all_arrived():
            self._doorbell.value = (self._doorbell.value + 1) & 0xFFFFFFFF
            self._doorbell.wake()

    def wait(self, what: bytes, timeout: float) -> None:
        """Count one more arrival and wait until all ranks have as many. Raises the error that ended the group."""
        self._board.check()
        self._count += 1
        self._counts[self._board.rank] = self._count
        if not self._all_arrived():
            self._asleep[0] = 1
            self._stored()  # the mark takes effect before the counts are read again
            try:
                self._board.wait_until(self._all_arrived, self._missing, self._doorbell, what, timeout)
            finally:
                self._asleep[0] = 0
        self._board.order()  # the others' counts are read before the data that they wrote

    def _all_arrived(self) -> bool:
        return min(self._counts) >= self._count

    def _missing(self) -> list[int]:
        return [rank for rank, count in enumerate(self._counts) if count < self._count]
