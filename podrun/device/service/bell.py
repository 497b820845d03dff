"""Starting a run without a message: two words of shared memory, one that the host rings and one that answers.

A run of a few milliseconds is asked for many times a second, on several machines at once. Over gRPC that costs every
process on the host more than the run's own overhead; a futex wakes the machine in microseconds. Everything else,
and above all noticing that the other side is gone, stays with the session's gRPC stream.

Layout of the block, at the start of a run's region: uint32 ring, uint32 answer, uint32 status (1: error), uint32
bytes of error text; uint64 batches done, float64 modelled seconds, float64 seconds; then the error as JSON.
"""

from __future__ import annotations

import os
import time

import numpy as np

from podrun.collectives.futex import Futex
from podrun.device.connection import AttachRequest
from podrun.device.program.cores import for_each
from podrun.device.program.engine import Outcome
from podrun.device.program.operands import Array

BLOCK_BYTES = 16384
LOOK = 0.5e-3
"""Seconds to wait awake where every process of a job has a core of its own: to fall asleep and be woken takes a tenth
of a millisecond of a run, each way half."""
_TEXT = 64


class Bell:
    """One side's view of the block: ``block`` is `BLOCK_BYTES` of a region's bytes."""

    def __init__(self, block: Array) -> None:
        self._block = block  # keeps the mapping alive
        self._words = block[:16].view(np.uint32)
        self._done = block[16:24].view(np.uint64)
        self._seconds = block[24:40].view(np.float64)
        address = block.ctypes.data
        self._ring, self._answer = Futex(address), Futex(address + 4)
        self._heard = 0

    # The host's side.

    def ring(self) -> int:
        """Ask for a run; returns its number for `answered`."""
        number = (self._ring.value + 1) & 0xFFFFFFFF
        self._ring.value = number
        self._ring.wake()
        return number

    def answered(self, number: int, seconds: float, look: float = 0.0) -> bool:
        """Wait at most ``seconds``, for the first ``look`` of them awake, for the answer to run ``number``; whether it
        is there."""
        seen = self._answer.value
        if seen != number and not _changes(self._answer, seen, look):
            self._answer.wait(seen, seconds)
        return self._answer.value == number

    def result(self) -> Outcome | str:
        """The answer: an outcome, or an error as JSON."""
        if self._words[2]:
            length = min(int(self._words[3]), BLOCK_BYTES - _TEXT)
            return self._block[_TEXT : _TEXT + length].tobytes().decode("utf-8", "replace")
        return Outcome(int(self._done[0]), float(self._seconds[0]), float(self._seconds[1]))

    # The machine's side.

    def rung(self, seconds: float, look: float = 0.0) -> bool:
        """Wait at most ``seconds``, for the first ``look`` of them awake, for a ring that has not been heard yet;
        whether there is one."""
        if self._ring.value == self._heard and not _changes(self._ring, self._heard, look):
            self._ring.wait(self._heard, seconds)
        if self._ring.value == self._heard:
            return False
        self._heard = self._ring.value
        return True

    def wake(self) -> None:
        """End a wait of `rung` early."""
        self._ring.wake()

    def answer(self, result: Outcome | str) -> None:
        """Answer the ring heard last."""
        if isinstance(result, str):
            text = result.encode("utf-8")[: BLOCK_BYTES - _TEXT]
            self._block[_TEXT : _TEXT + len(text)] = np.frombuffer(text, np.uint8)
            self._words[2:4] = 1, len(text)
        else:
            self._done[0] = result.batches_done
            self._seconds[:] = result.modelled_seconds, result.seconds
            self._words[2] = 0
        self._answer.value = self._heard
        self._answer.wake()


def look_of(request: AttachRequest, ipus: int) -> float:
    """Seconds to wait awake, for the processes of a job on machines of ``ipus`` IPUs."""
    job, owned = request.job.count, request.owned.count
    return LOOK if for_each(-(-job // ipus), -(-job // owned)) else 0.0


def _changes(futex: Futex, seen: int, seconds: float) -> bool:
    """Look until the word is no longer ``seen``, for some time at most; whether it is."""
    end = time.monotonic() + seconds if seconds else 0.0
    while futex.value == seen:
        if not seconds or time.monotonic() >= end:
            return False
        os.sched_yield()  # whoever else wants this core has it
    return True


def deadline(seconds: float | None) -> float:
    """The moment ``seconds`` from now, on the monotonic clock; None: never."""
    return float("inf") if seconds is None else time.monotonic() + seconds
