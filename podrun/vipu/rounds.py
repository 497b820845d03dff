"""What the service does once a second: time limits, deadlines, the queue, clients that vanished, heartbeats."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("podrun.vipu")

ROUND_S = 1.0
"""Between two rounds."""
QUEUE_LEASE_S = 15.0
"""A queued request whose state nobody asks for so long leaves the queue: its client has vanished."""
HEARTBEAT_S = 5.0
"""Between two questions to every machine in use."""


def steady_clock(
    wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Seconds since 1970 as they were at the call, and steady from then on: a clock that is set does not end partitions
    or reservations."""
    base = wall() - monotonic()
    return lambda: base + monotonic()


class SignsOfLife:
    """When each queued request was last asked for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}

    def note(self, name: str) -> None:
        """The client of a request asks."""
        with self._lock:
            self._seen[name] = self._clock()

    def vanished(self, waiting: set[str]) -> list[str]:
        """Requests among those waiting whose client has not asked for `QUEUE_LEASE_S`; forgets all others."""
        with self._lock:
            now = self._clock()
            self._seen = {name: self._seen.get(name, now) for name in waiting}
            return [name for name, seen in self._seen.items() if now - seen > QUEUE_LEASE_S]


class Rounds:
    """A thread that calls ``work`` every ``seconds`` until it is stopped. An error is logged and ends one call only."""

    def __init__(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        self._seconds, self._work = seconds, work
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; waits for a call that is under way. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(10.0)

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._work()
            except Exception:
                log.exception("%s failed", self._thread.name)
