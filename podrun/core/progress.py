"""Says how far a long preparation is: on a terminal in a line that is written over, in a log in one line.

    with reporting("preparing 'training'", sys.stderr):
        for piece in counted("compiling piece", pieces):
            ...

What is quick says nothing. One preparation at a time is reported: of one inside another, the steps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

Item = TypeVar("Item")

TERMINAL_AFTER, TERMINAL_EVERY = 1.0, 0.25
"""Seconds until a terminal shows the line, and between two of them."""
LOG_AFTER = 5.0
"""Seconds until a log gets its line."""


class Output(Protocol):
    """A text stream."""

    def write(self, text: str, /) -> object:
        """Write."""

    def flush(self) -> object:
        """Write what is buffered."""

    def isatty(self) -> bool:
        """True iff a terminal shows it."""


@dataclass(slots=True)
class Preparation:
    """What is being prepared, and how far it is: ``done`` of ``total`` of the present step (total 0: not counted)."""

    what: str
    clock: Callable[[], float] = time.monotonic
    step: str = ""
    done: int = 0
    total: int = 0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def text(self) -> str:
        """``podrun: preparing 'training': compiling piece 12 of 40, 8 s``."""
        step = f" {self.step}" if self.step else ""
        if self.step and self.total:
            step += f" {self.done} of {self.total}"
        return f"podrun: {self.what}:{step}{',' if step else ''} {self.clock() - self.started:.0f} s"


_lock = threading.Lock()
_current: list[Preparation] = []
"""The preparation that is reported, if any."""


@contextlib.contextmanager
def reporting(
    what: str,
    output: Output,
    *,
    log_after: float = LOG_AFTER,
    terminal_after: float = TERMINAL_AFTER,
) -> Iterator[None]:
    """Report on ``output`` what happens inside, if it takes long."""
    preparation = Preparation(what)
    with _lock:
        inside = bool(_current)
        if not inside:
            _current.append(preparation)
    if inside:
        yield
        return
    over = threading.Event()
    terminal = output.isatty()
    show, after = (_on_terminal, terminal_after) if terminal else (_in_log, log_after)

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):  # Nobody reads it, or the stream was closed.
            show(preparation, output, over, after)

    thread = threading.Thread(target=run, name="podrun-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with _lock:
            _current.clear()


def counted(step: str, items: Collection[Item]) -> Iterator[Item]:
    """The items one after another; while one is worked on, it is the present step of what is reported."""
    for number, item in enumerate(items, 1):
        at(step, number, len(items))
        yield item


def at(step: str, done: int = 0, total: int = 0) -> None:
    """Note the present step of what is reported, if anything is."""
    with _lock:
        for preparation in _current:
            preparation.step, preparation.done, preparation.total = step, done, total


def _on_terminal(preparation: Preparation, output: Output, over: threading.Event, after: float) -> None:
    shown = False
    while not over.wait(TERMINAL_EVERY if shown else after):
        output.write(f"\r{preparation.text()}\x1b[K")
        output.flush()
        shown = True
    if shown:
        output.write("\r\x1b[K")
        output.flush()


def _in_log(preparation: Preparation, output: Output, over: threading.Event, after: float) -> None:
    if not over.wait(after):
        output.write(
            f"{preparation.text()} so far; what is compiled is kept, so that the next start is quick\n"
        )
        output.flush()
