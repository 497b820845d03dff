"""Signals to podrun: handlers record them, and the main thread acts on them at safe places.

A handler that raises may interrupt an import (Python may then ignore the exception, go on, and hang at the import's
lock), or the moment between creating a resource and recording that it must be removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_SECONDS = 0.05
"""Interval at which the main thread checks for a signal while another thread works."""
PATIENCE_SECONDS = 1.0
"""Time for background work to end by itself after a signal, before it is cancelled."""
GIVE_UP_SECONDS = 10.0
"""Time for cancelled background work to end."""
CLEARING_SECONDS = 4.0
"""Time for clean-up; after it one more signal leaves the rest to the guardian process."""


class Interrupted(BaseException):
    """podrun got a signal before instances were started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stopping:
    """The stop signals of this process while `heard`. ``on_signal`` is called in the handler: it may note things and
    wake somebody, nothing more."""

    def __init__(
        self, on_signal: Callable[[int], None], *, exit_at_once: Callable[[int], None] = os._exit
    ) -> None:
        self.number: int | None = None
        self._on_signal = on_signal
        self._exit_at_once = exit_at_once
        self._clearing_since: float | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[Stopping]:
        """Handle the signals. What the caller ignores (nohup, a job in the background of a script) stays ignored."""
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._handle) for number in heard}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def clearing(self) -> None:
        """Clean-up begins: signals do not interrupt it unless it takes longer than `CLEARING_SECONDS`."""
        self._clearing_since = time.monotonic()

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self.number is not None:
            raise Interrupted(self.number)

    def wait_for(self, work: Callable[[], T], cancel: Callable[[], None]) -> T:
        """Run blocking ``work`` in a thread and return its result.

        After a signal the work may end by itself within `PATIENCE_SECONDS`; then ``cancel`` must make it end. Raises
        Interrupted in both cases.
        """
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="podrun-prepare", daemon=True)
        thread.start()
        while thread.is_alive() and self.number is None:
            thread.join(LOOK_SECONDS)
        if self.number is not None:
            thread.join(PATIENCE_SECONDS)
            if thread.is_alive():
                cancel()
                thread.join(GIVE_UP_SECONDS)
        self.check()
        if errors:
            raise errors[0]
        return results[0]

    def _handle(self, number: int, _: FrameType | None) -> None:
        since = self._clearing_since
        if since is not None and time.monotonic() - since > CLEARING_SECONDS:
            self._exit_at_once(128 + number)
        if self.number is None:
            self.number = number
        self._on_signal(number)
