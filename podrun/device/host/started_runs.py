"""Runs that were started and not waited for: several may be in flight on one connection.

Machines do the runs of a connection one after the other, in the order in which they were started; results are
collected in that order as well, whoever waits first. Starting and waiting may happen in different threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from podrun.core.error_codec import copy_error
from podrun.core.errors import ApplicationRuntimeError, InternalError, PoplarError
from podrun.device.connection import RunResult


class StartedRun:
    """A run in flight. `wait` may be called more than once and from any thread."""

    def __init__(self, runs: RunsInFlight, finish: Callable[[], RunResult]) -> None:
        self._runs, self._finish = runs, finish
        self._result: RunResult | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """True iff the result, or the error, is known."""
        return self._result is not None or self._error is not None

    def wait(self) -> RunResult:
        """The result. Raises what the system reports, as `podrun.device.connection.Connection.run` does."""
        self._runs.collect_to(self)
        if self._result is None:
            raise self._error or InternalError("a run ended without a result")
        return self._result

    def collect(self) -> None:
        """Wait for the machines and keep what they answer. For `RunsInFlight`."""
        try:
            result = self._finish()
            self._result = None if self._error is not None else result
        except Exception as error:  # Raised by `wait`, to whoever started the run.
            self._error = error

    def fail(self, error: Exception) -> None:
        """Let the run end with an error unless it has ended."""
        if not self.done:
            self._error = error


class RunsInFlight:
    """The runs of a connection that were not collected, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._runs: deque[StartedRun] = deque()

    def add(self, finish: Callable[[], RunResult]) -> StartedRun:
        """A run that was started after all others. ``finish``: waits for the machines."""
        run = StartedRun(self, finish)
        self._runs.append(run)
        return run

    def make_room(self, depth: int) -> None:
        """Collect the oldest runs until fewer than ``depth`` are in flight. Their errors stay with them."""
        while len(self._runs) >= depth:
            self._collect_oldest()

    def collect_to(self, run: StartedRun) -> None:
        """Collect the oldest runs until ``run`` is done."""
        while not run.done:
            self._collect_oldest()

    def abandon(self, error: Exception | None = None) -> None:
        """The IPUs are given up: runs that are not done end with an error, the given one if there is one."""
        runs, self._runs = self._runs, deque()
        for run in runs:
            reason = ApplicationRuntimeError("the IPUs were released while the run was in flight")
            run.fail(copy_error(error) if isinstance(error, PoplarError) else reason)

    def _collect_oldest(self) -> None:
        with self._lock:
            try:
                oldest = self._runs[0]
            except IndexError:  # Another thread has collected or abandoned it.
                return
            if not oldest.done:
                oldest.collect()
            if self._runs and self._runs[0] is oldest:
                self._runs.popleft()
