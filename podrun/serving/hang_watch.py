"""Ends a server that hangs: it answered before, and does not say any more that it lives.

Triton can stop in a handler of its own after a fault, where no signal but SIGKILL ends it. `podrun serve` then starts
it again, as one that crashed.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable

from podrun.core.quick_dataclass import dataclass

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 120.0
"""Of silence after which a server hangs. Answers of a loaded host may take seconds."""


@dataclass(slots=True)
class LastAnswer:
    """The last moment, in seconds of a clock, at which a server said that it lives; None before it first does."""

    last: float | None = None
    patience: float = PATIENCE_SECONDS

    def hangs(self, answered: bool, now: float) -> bool:
        """Whether a server hangs that has just ``answered``, or not."""
        if answered:
            self.last = now
        return self.last is not None and now - self.last >= self.patience


def server_lives(address: str) -> bool:
    """Whether the server at ``host:port`` says that it lives."""
    connection = http.client.HTTPConnection(address, timeout=LOOK_SECONDS)
    try:
        connection.request("GET", "/v2/health/live")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class HangWatch:
    """Watches a server as long as the context lasts. ``end``: what is done once if it hangs, and ``hung`` says so."""

    def __init__(
        self,
        end: Callable[[], None],
        answers: Callable[[], bool],
        silence: LastAnswer | None = None,
        look_seconds: float = LOOK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end, self._answers, self._clock = end, answers, clock
        self._silence, self._look_seconds = silence or LastAnswer(), look_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self.hung = False

    def __enter__(self) -> HangWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._look_seconds):
            if self._silence.hangs(self._answers(), self._clock()):
                self.hung = True
                self._end()
                return
