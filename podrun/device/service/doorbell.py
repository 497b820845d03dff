"""The doorbell: starts a run by a futex in shared memory in place of a message.

A host process starts runs of a few milliseconds many times a second, on several machines at once. Over gRPC this costs
every process of the host more time than the run's own overhead; a futex wakes the machine in microseconds. Everything
else, such as noticing that the other side is gone, stays with the session's gRPC stream.

Layout of the block, at the start of a run's region: uint32 ring, uint32 answer, uint32 status (1: error), uint32
bytes of error text; uint64 batches done, float64 modelled seconds, float64 seconds; then the error as JSON.

Several runs may be in flight: a ring counts up, the machine runs ring after ring, and the answer is the number of the
last one done. Each run has a *slot*, that of its number modulo the slots, whose block holds its result; the ring and
the answer lie in the first block.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence

import numpy as np

from podrun.collectives.linux import Futex
from podrun.core.executable import Array
from podrun.device.connection import AttachRequest, RunOutcome
from podrun.device.program.machine_groups import has_core_for_each_process

BLOCK_BYTES = 16384
SPIN_SECONDS = 0.5e-3
"""Seconds to wait awake where every process of a job has a core of its own. Falling asleep and being woken takes 0.1
ms of a run, half of it on each side."""
_TEXT = 64
_STATUS, _RESULT = 8, struct.Struct("=IIQdd")
_MASK = 0xFFFFFFFF


class Doorbell:
    """One side's view of the blocks of all slots: each is `BLOCK_BYTES` of a region's bytes."""

    def __init__(self, blocks: Sequence[Array]) -> None:
        self._blocks = list(blocks)
        self._ring, self._answer = Futex(self._blocks[0], 0), Futex(self._blocks[0], 4)
        self._heard = 0

    # The host's side.

    @property
    def next_number(self) -> int:
        """The number of the run that is asked for next."""
        return (self._ring.value + 1) & _MASK

    def ring(self) -> int:
        """Ask for a run; returns its number for `answered`."""
        number = self.next_number
        self._ring.value = number
        self._ring.wake()
        return number

    def answered(self, number: int, seconds: float, spin: float = 0.0) -> bool:
        """Wait at most ``seconds`` for the answer to run ``number`` or an earlier one, the first ``spin`` seconds
        awake. Returns whether that of ``number`` arrived."""
        seen = self._answer.value
        if _is_before(seen, number) and not _changes(self._answer, seen, spin):
            self._answer.wait(seen, seconds)
        return not _is_before(self._answer.value, number)

    def result(self, number: int) -> RunOutcome | str:
        """The answer to a run: an outcome, or an error as JSON."""
        block = self._blocks[number % len(self._blocks)]
        status, length, done, modelled, seconds = _RESULT.unpack_from(block.data, _STATUS)
        if status:
            return (
                block[_TEXT : _TEXT + min(length, BLOCK_BYTES - _TEXT)].tobytes().decode("utf-8", "replace")
            )
        return RunOutcome(done, modelled, seconds)

    # The machine's side.

    def rung(self, seconds: float, spin: float = 0.0) -> bool:
        """Wait at most ``seconds`` for a ring that was not heard, the first ``spin`` seconds awake. Returns whether
        there is one; of several the oldest is heard."""
        if self._ring.value == self._heard and not _changes(self._ring, self._heard, spin):
            self._ring.wait(self._heard, seconds)
        if self._ring.value == self._heard:
            return False
        self._heard = (self._heard + 1) & _MASK
        return True

    @property
    def slot(self) -> int:
        """The slot of the ring that was heard."""
        return self._heard % len(self._blocks)

    def wake(self) -> None:
        """End a wait of `rung` early."""
        self._ring.wake()

    def answer(self, result: RunOutcome | str) -> None:
        """Answer the ring that was heard."""
        block = self._blocks[self.slot]
        if isinstance(result, str):
            text = result.encode("utf-8")[: BLOCK_BYTES - _TEXT]
            block[_TEXT : _TEXT + len(text)] = np.frombuffer(text, np.uint8)
            _RESULT.pack_into(block.data, _STATUS, 1, len(text), 0, 0.0, 0.0)
        else:
            times = result.modelled_seconds, result.seconds
            _RESULT.pack_into(block.data, _STATUS, 0, 0, result.batches_done, *times)
        self._answer.value = self._heard
        self._answer.wake()


def spin_seconds_for(request: AttachRequest, ipus: int) -> float:
    """Seconds that the processes of a job wait awake, on machines of ``ipus`` IPUs."""
    job, owned = request.job.count, request.owned.count
    return SPIN_SECONDS if has_core_for_each_process(-(-job // ipus), -(-job // owned)) else 0.0


def _is_before(answered: int, number: int) -> bool:
    """True iff run ``answered`` comes before run ``number``; numbers begin again after 2^32 runs."""
    return 0 < (number - answered) & _MASK < 1 << 31


def _changes(futex: Futex, seen: int, seconds: float) -> bool:
    """Wait awake, at most ``seconds``, until the word is no longer ``seen``. Returns whether it changed."""
    end = time.monotonic() + seconds if seconds else 0.0
    while futex.value == seen:
        if not seconds or time.monotonic() >= end:
            return False
        os.sched_yield()  # lets other threads use this core
    return True


def deadline(seconds: float | None) -> float:
    """The moment ``seconds`` from now, on the monotonic clock; None: never."""
    return float("inf") if seconds is None else time.monotonic() + seconds
