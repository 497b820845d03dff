"""The doorbell: starts a run by a futex in shared memory in place of a message.

A host process starts runs of a few milliseconds many times a second, on several machines at once. Over gRPC this costs
every process of the host more time than the run's own overhead; a futex wakes the machine in microseconds. Everything
else, such as noticing that the other side is gone, stays with the session's gRPC stream.

Layout of the block, at the start of a run's region: uint32 ring, uint32 answer, uint32 status (1: error), uint32
bytes of error text; uint64 batches done, float64 modelled seconds, float64 seconds; then the error as JSON.
"""

from __future__ import annotations

import os
import time

import numpy as np

from podrun.collectives.linux import Futex
from podrun.device.connection import AttachRequest
from podrun.device.program.engine import RunOutcome
from podrun.device.program.machine_groups import has_core_for_each_process
from podrun.device.program.xla_memory import Array

BLOCK_BYTES = 16384
SPIN_SECONDS = 0.5e-3
"""Seconds to wait awake where every process of a job has a core of its own. Falling asleep and being woken takes 0.1
ms of a run, half of it on each side."""
_TEXT = 64


class Doorbell:
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

    def answered(self, number: int, seconds: float, spin: float = 0.0) -> bool:
        """Wait at most ``seconds`` for the answer to run ``number``, the first ``spin`` seconds awake. Returns
        whether it arrived."""
        seen = self._answer.value
        if seen != number and not _changes(self._answer, seen, spin):
            self._answer.wait(seen, seconds)
        return self._answer.value == number

    def result(self) -> RunOutcome | str:
        """The answer: an outcome, or an error as JSON."""
        if self._words[2]:
            length = min(int(self._words[3]), BLOCK_BYTES - _TEXT)
            return self._block[_TEXT : _TEXT + length].tobytes().decode("utf-8", "replace")
        return RunOutcome(int(self._done[0]), float(self._seconds[0]), float(self._seconds[1]))

    # The machine's side.

    def rung(self, seconds: float, spin: float = 0.0) -> bool:
        """Wait at most ``seconds`` for a new ring, the first ``spin`` seconds awake. Returns whether there is one."""
        if self._ring.value == self._heard and not _changes(self._ring, self._heard, spin):
            self._ring.wait(self._heard, seconds)
        if self._ring.value == self._heard:
            return False
        self._heard = self._ring.value
        return True

    def wake(self) -> None:
        """End a wait of `rung` early."""
        self._ring.wake()

    def answer(self, result: RunOutcome | str) -> None:
        """Answer the last ring."""
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


def spin_seconds_for(request: AttachRequest, ipus: int) -> float:
    """Seconds that the processes of a job wait awake, on machines of ``ipus`` IPUs."""
    job, owned = request.job.count, request.owned.count
    return SPIN_SECONDS if has_core_for_each_process(-(-job // ipus), -(-job // owned)) else 0.0


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
