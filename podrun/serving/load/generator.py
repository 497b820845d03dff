"""Load on a server: so many requests in flight, or so many a second at times that do not depend on the answers.

A measurement is a row of windows of equal time without a gap between them. It ends when the last three are stable or
have errors alone, or after so many windows; the figures are those of the last three.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import report_step
from podrun.serving.load.servers import ModelServer
from podrun.serving.load.windows import STABLE_WINDOWS, LoadWindow, are_refused, are_stable, joined

MOST_IN_FLIGHT = 4096
"""Requests in flight beyond which no more are sent: a server that does not answer costs no memory without end."""
NOT_SENT = f"not sent: {MOST_IN_FLIGHT} requests are in flight"
LoadClock = Callable[[], float]
"""Seconds on a clock that never goes back."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """How long and how exactly is measured. ``interval_s`` of a window; ``warm_up_s`` before the first; windows are
    stable if rate and the latency at ``percentile`` stay within ``share`` of their mean."""

    interval_s: float = 5.0
    warm_up_s: float = 1.0
    most_windows: int = 10
    share: float = 0.1
    percentile: float = 99.0


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """``concurrency`` requests in flight, or ``rate`` requests a second, ``evenly`` or at the times of a Poisson
    process."""

    concurrency: int = 0
    rate: float = 0.0
    evenly: bool = True
    seed: int = 1

    @property
    def label(self) -> str:
        """The level of load in words."""
        return f"{self.concurrency} in flight" if self.concurrency else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Measured:
    """A level's answers. ``whole``: of the last three windows; ``stable``: whether they were."""

    level: LoadLevel
    whole: LoadWindow
    windows: int
    stable: bool


class _Recorder:
    """Counts answers into the window of now."""

    def __init__(self, server: ModelServer, clock: LoadClock) -> None:
        self.server, self.clock, self.window = server, clock, LoadWindow()

    async def send(self, since: float) -> None:
        """One request whose latency counts from ``since``."""
        answer = await self.server.infer()
        self.window.count(round((self.clock() - since) * 1e9), answer)


async def measure(server: ModelServer, level: LoadLevel, measuring: Measuring, clock: LoadClock) -> Measured:
    """Put a load on a server until its answers are stable."""
    recorder = _Recorder(server, clock)
    windows: list[LoadWindow] = []
    async with _load(recorder, level):
        await asyncio.sleep(measuring.warm_up_s)
        recorder.window, begin = LoadWindow(), clock()
        while len(windows) < measuring.most_windows:
            report_step(f"{level.label}: window", len(windows) + 1, measuring.most_windows)
            await asyncio.sleep(measuring.interval_s)
            now = clock()
            recorder.window.span_s, begin = now - begin, now
            windows.append(recorder.window)
            recorder.window = LoadWindow()
            if are_refused(windows) or are_stable(windows, measuring.share, measuring.percentile):
                break
    stable = are_stable(windows, measuring.share, measuring.percentile)
    return Measured(level, joined(windows[-STABLE_WINDOWS:]), len(windows), stable)


@asynccontextmanager
async def _load(recorder: _Recorder, level: LoadLevel) -> AsyncIterator[None]:
    """The load, as long as the block runs; requests in flight are then given up."""
    if level.concurrency:
        tasks = [asyncio.create_task(_in_turn(recorder)) for _ in range(level.concurrency)]
    else:
        tasks = [asyncio.create_task(_in_time(recorder, level))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome


async def _in_turn(recorder: _Recorder) -> None:
    """One client: the next request when the last is answered."""
    while True:
        before = recorder.window.answered
        await recorder.send(recorder.clock())
        if recorder.window.answered == before:  # A server that refuses at once is not asked without a pause.
            await asyncio.sleep(0.001)


async def _in_time(recorder: _Recorder, level: LoadLevel) -> None:
    """Requests at their times, whatever becomes of those before."""
    draw = np.random.default_rng(level.seed)
    waiting: set[asyncio.Task[None]] = set()
    due = recorder.clock()
    try:
        while True:
            due += 1 / level.rate if level.evenly else float(draw.standard_exponential()) / level.rate
            await asyncio.sleep(max(0.0, due - recorder.clock()))
            if len(waiting) >= MOST_IN_FLIGHT:
                recorder.window.errors[NOT_SENT] += 1
                continue
            task = asyncio.create_task(recorder.send(due))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
