"""How podrun's commands speak: errors in one form, tables, colour where a terminal shows it, and the progress of work.

An error is two lines on standard error, the same for every command:

    vipu: error: there is no partition p9
    hint: vipu list partitions

Colour appears on a terminal only: never in a file or a pipe, with ``NO_COLOR`` set (https://no-color.org), or where
``TERM`` is ``dumb``.

**Progress** says how far a long preparation is: on a terminal in a line that is written over and taken away at the end,
in a log in one line (or none). There is one such line; who writes to the terminal meanwhile does so `above_status`.

    with reporting("preparing 'training'", sys.stderr):
        for piece in reported_steps("compiling piece", pieces):
            ...

Quick work prints nothing. One preparation is reported at a time; of a preparation inside another, only the steps.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import zip_longest
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

from podrun.core.environment import PODRUN_MOMENTS, environment
from podrun.core.errors import PodrunError, UsageError
from podrun.core.quick_dataclass import dataclass

Item = TypeVar("Item")

TERMINAL_AFTER, TERMINAL_EVERY = 1.0, 0.25
"""Seconds until a terminal shows the line, and between two of them."""
LOG_AFTER = 5.0
"""Seconds until a log gets its line."""


class Output(Protocol):
    """What is written to: a text stream."""

    def write(self, text: str, /) -> object:
        """Write text; returns the number of its characters."""

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


def live(output: Output, environ: Mapping[str, str] | None = None) -> bool:
    """True iff ``output`` is a terminal that can write over a line."""
    return environment(environ).get("TERM") != "dumb" and output.isatty()


def terminal_columns(output: Output) -> int | None:
    """Characters in a line of a terminal: COLUMNS, else what it says, else 80. None for everything else."""
    if not output.isatty():
        return None
    told = environment().get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return int(told)
    try:
        return os.get_terminal_size(output.fileno()).columns or 80  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return 80


def fitted(text: str, width: int) -> str:
    """``text`` in one line that leaves the last column free: terminals begin a new line behind it."""
    line = " ".join(text.split())
    return line if len(line) < width else line[: max(width - 4, 0)] + "..."


_screen = threading.RLock()
_drawn: list[Output] = []
"""The terminal that shows a status line at this moment."""


def _draw(text: str, output: Output) -> None:
    """Write the status line over the last one; an empty text takes it away."""
    with _screen:
        if text:
            output.write(f"\r{fitted(text, terminal_columns(output) or 80)}\x1b[K")
            output.flush()
            _drawn[:] = [output]
        elif _drawn:
            _take_away()


def _take_away() -> None:
    output = _drawn.pop()
    with contextlib.suppress(OSError, ValueError):  # Nobody reads the output, or the stream was closed.
        output.write("\r\x1b[K")
        output.flush()


@contextlib.contextmanager
def above_status() -> Iterator[None]:
    """While whole lines are written to the terminal: the status line is taken away, and drawn again afterwards."""
    with _screen:
        if _drawn:
            _take_away()
        yield


_lock = threading.Lock()
_current: list[Preparation] = []
"""The preparation that is reported, if any."""


@contextlib.contextmanager
def reporting(
    what: str,
    output: Output,
    *,
    log_after: float | None = LOG_AFTER,
    terminal_after: float = TERMINAL_AFTER,
    file: Path | None = None,
) -> Iterator[None]:
    """Report on ``output`` what happens inside the block, if it takes long. ``log_after``: None for nothing in logs.
    ``file``: write it into this file instead, for another process that is `following` it.
    """
    preparation = Preparation(what)
    note_moment(what)
    with _lock:
        inside = bool(_current)
        if not inside:
            _current.append(preparation)
    if inside:
        yield
        return
    try:
        if file is not None:
            with _in_thread(
                lambda over: _repeat(lambda text: _tell(text, file), preparation.text, over, 0.0)
            ):
                yield
        elif live(output):
            with _in_thread(
                lambda over: _repeat(lambda text: _draw(text, output), preparation.text, over, terminal_after)
            ):
                yield
        elif log_after is not None:
            with _in_thread(lambda over: _in_log(preparation, output, over, log_after)):
                yield
        else:
            yield
    finally:
        with _lock:
            _current.clear()


@contextlib.contextmanager
def following(file: Path, output: Output) -> Iterator[None]:
    """Show on a terminal what another process is `reporting` into ``file``, while the block runs."""
    with _in_thread(
        lambda over: _repeat(lambda text: _draw(text, output), lambda: _told(file), over, TERMINAL_EVERY)
    ):
        yield


STALE_AFTER = 5.0
"""Seconds after which the process that reports into a file is taken for gone."""


def _told(file: Path) -> str:
    try:
        if time.time() - file.stat().st_mtime > STALE_AFTER:
            return ""
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _tell(text: str, file: Path) -> None:
    if not text:
        file.unlink(missing_ok=True)
        return
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


@contextlib.contextmanager
def _in_thread(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do ``work`` in a thread, whose event is set when the block is over."""
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(OSError, ValueError):  # Nobody reads the output, or the stream was closed.
            work(over)

    thread = threading.Thread(target=run, name="podrun-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def reported_steps(step: str, items: Collection[Item]) -> Iterator[Item]:
    """The items, one after another; the item being worked on is the present step of what is reported."""
    for number, item in enumerate(items, 1):
        report_step(step, number, len(items))
        yield item


def report_step(step: str, done: int = 0, total: int = 0) -> None:
    """Note the present step of the preparation that is reported, if any."""
    if done <= 1:
        note_moment(step)
    with _lock:
        for preparation in _current:
            preparation.step, preparation.done, preparation.total = step, done, total


FIRST_BATCH = "a first batch is done"
"""The moment that a machine notes after the first batch of a program."""


def note_moment(name: str) -> None:
    """Say in the file of PODRUN_MOMENTS, if it is set, that something begins: the time (seconds since 1970), this
    process and the seconds of a core that it has used. Raises UsageError if the file cannot be written."""
    if path := environment().get(PODRUN_MOMENTS):
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{time.time():.3f} {os.getpid()} {time.process_time():.3f} {name}\n")
        except OSError as error:
            raise UsageError(f"PODRUN_MOMENTS: {path} cannot be written: {error.strerror}") from error


def _repeat(
    show: Callable[[str], None], text: Callable[[], str], over: threading.Event, after: float
) -> None:
    """Show the text again and again, from ``after`` seconds on; an empty one at the end."""
    if over.wait(after):
        return
    try:
        while True:
            show(text())
            if over.wait(TERMINAL_EVERY):
                return
    finally:
        show("")


def _in_log(preparation: Preparation, output: Output, over: threading.Event, after: float) -> None:
    if not over.wait(after):
        output.write(
            f"{preparation.text()} so far; what is compiled is kept, so that the next start is quick\n"
        )
        output.flush()


STYLES: Mapping[str, str] = {
    "bold": "1",
    "dim": "2",
    "red": "1;31",
    "green": "32",
    "yellow": "33",
    "cyan": "1;36",
}
"""Names of styles and their codes (ECMA-48, select graphic rendition)."""
TONES: Mapping[str, str] = {"ok": "green", "warning": "yellow", "wrong": "red"}
"""The style of a state's name in tables and lists."""


def shows_colour(stream: TextIO, environ: Mapping[str, str] | None = None) -> bool:
    """True iff text written to ``stream`` may be coloured."""
    env = environment(environ)
    return not env.get("NO_COLOR") and env.get("TERM") != "dumb" and stream.isatty()


def styled(text: str, style: str, stream: TextIO, environ: Mapping[str, str] | None = None) -> str:
    """``text`` in a style of `STYLES` if ``stream`` shows colour, else as it is."""
    if not style or not text or not shows_colour(stream, environ):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def error_lines(command: str, message: str, hint: str | None = None, stream: TextIO | None = None) -> str:
    """What a command prints for an error: its own name, the message, and the hint on a line of its own."""
    to = stream or sys.stderr
    said = f"{command}: {styled('error:', 'red', to)} {message}\n"
    return said + (f"{styled('hint:', 'bold', to)} {hint}\n" if hint else "")


def show_error(command: str, error: PodrunError, stream: TextIO | None = None) -> None:
    """Print an error, where in the user's program it was if that is known, and its hint."""
    to = stream or sys.stderr
    places = "".join(f"\n  in {line}" for line in error.location.splitlines())
    to.write(error_lines(command, error.message + places, error.hint, to))
    to.flush()


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]], stream: TextIO | None = None) -> str:
    """A table as the V-IPU command line prints it, without a final newline; cells hold no newlines.

    One leading space, `` | `` between columns, a dashed rule under the header and after the last row. On a terminal the
    header is bold, rules are dim, and cells of the widest columns go on in further lines if the table is too wide.
    """
    to = stream or sys.stdout
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    if width := terminal_columns(to):
        widths = narrowed(widths, width - 3 * len(widths) + 1)
    rule = styled("-" * (sum(widths) + 3 * len(widths) - 1), "dim", to)
    first, *others = [
        " " + " | ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip()
        for line in lines
        for cells in in_lines(line, widths)
    ]
    return "\n".join([styled(first, "bold", to), rule, *others, rule])


LEAST_WIDTH = 8
"""Characters that a column keeps on a narrow terminal."""


def narrowed(widths: Sequence[int], room: int) -> list[int]:
    """Widths of columns that sum to ``room`` at most: the widest become narrower, to `LEAST_WIDTH` at least."""
    narrow = list(widths)
    while sum(narrow) > room and max(narrow) > LEAST_WIDTH:
        narrow[narrow.index(max(narrow))] -= 1
    return narrow


def in_lines(cells: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """The lines of a row whose cells are that wide."""
    columns_of_lines = [wrapped(cell, width) or [""] for cell, width in zip(cells, widths, strict=True)]
    return list(zip_longest(*columns_of_lines, fillvalue=""))


def wrapped(text: str, width: int) -> list[str]:
    """``text`` in lines of ``width`` at most, broken between words where it can be; as it is if it fits."""
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False)


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """One pair of name and value a line, values aligned."""
    known = list(pairs)
    width = max(len(name) for name, _ in known)
    return "\n".join(f" {name.ljust(width)} | {value}".rstrip() for name, value in known)


_ending_at_once = threading.Event()


def end_at_once() -> None:
    """Let the command that runs in this process end without unloading its libraries, one of which would crash. What was
    registered with atexit runs, and output is written.
    """
    _ending_at_once.set()


def leave(code: int, leave_now: Callable[[int], object] = os._exit) -> int:
    """The exit code of a command, at its end. Ends the process here if `end_at_once` was called."""
    if _ending_at_once.is_set():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        leave_now(code)
    return code
