"""How a process hears that it shall end, while it serves or waits for work.

A signal's handler runs in the main thread between any two of its steps. `threading.Event.set` takes a lock that
`Event.wait` holds for a moment: a signal in that moment waits for ever for a lock that its own thread holds. And a
signal that comes just before the main thread begins to wait, or that the kernel gives to another thread, runs its
handler only when that wait ends: so no wait of the main thread is longer than `LOOK_SECONDS`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
SignalHandler = Callable[[int, FrameType | None], object]
LOOK_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """An event that is set once, by any thread and by handlers of signals."""

    def __init__(self) -> None:
        self._is_set = False
        self._closed = threading.Lock()
        """Held until the request is made; then held only while a thread passes."""
        self._closed.acquire()

    def set(self) -> None:
        """Make the request; all that wait go on."""
        if not self._is_set:
            self._is_set = True
            self._open()

    def is_set(self) -> bool:
        """True iff the request was made."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the request, at most ``timeout`` seconds; None: without limit. True iff the request was made."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = LOOK_SECONDS if end is None else end - time.monotonic()
            if self._closed.acquire(timeout=max(0.0, min(left, LOOK_SECONDS))):
                self._open()
            elif end is not None and left <= LOOK_SECONDS:
                break
        return self._is_set

    def _open(self) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # Another call has released the lock between two steps of this one.
            self._closed.release()


def in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Begin work in a thread of its own, which does not keep the process from ending, and return what has its result or
    its error: the caller goes on, hears signals, and may give the work up.
    """
    from concurrent.futures import Future

    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def stop_on_signals() -> StopRequest:
    """A request that Ctrl-C, SIGTERM or SIGHUP sets; a second signal ends the process at once (the guardian cleans up).

    Signals that the caller ignores (nohup, a script's background) stay ignored.
    """
    stop = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    _take_over(handle)
    return stop


@contextlib.contextmanager
def stop_signals_handled(handle: SignalHandler) -> Iterator[None]:
    """Call ``handle`` for stop signals within the block. Signals that the caller ignores stay ignored."""
    before = _take_over(handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take_over(handle: SignalHandler) -> dict[int, SignalHandler | int | None]:
    """Set the handler of stop signals that are not ignored; the handlers before."""
    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handle) for number in heard}
