"""What instances print: whole lines with mpirun's tags, ``[1,RANK]<stdout>:text``.

`LineAssembler` turns chunks of bytes into lines; `OutputMixer` tags and writes them, keeps a copy in files if asked,
and remembers the end of each instance's standard error, so that the traceback that matters can be shown last.
"""

from __future__ import annotations

import enum
import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

JOB = 1
"""mpirun numbers its jobs; podrun has one."""
MAX_LINE_BYTES = 1 << 20
"""Bytes of a line; longer lines are written in pieces."""
REMEMBERED_LINES = 400
LAST_LINES = 20
"""Lines shown of a failing instance that printed no traceback."""
HOLD_SECONDS = 1.5
TRACEBACK = b"Traceback (most recent call last):"
_SYNTAX_ERROR = b'  File "'
"""What a traceback of Python's begins with where no frame was entered."""
_ERROR = re.compile(rb"[\w.]+(Error|Exception|_exception|Interrupt|Warning)\b")
_CHAINED = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)


class OutputChannel(enum.Enum):
    """The two output streams of an instance."""

    STDOUT = "stdout"
    STDERR = "stderr"


class LineAssembler:
    """Turns chunks into whole lines (without line ends). Of a line that rewrites itself with carriage returns, as
    progress bars do, it keeps the last state.
    """

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._rest = b""
        self._limit = limit

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that ``chunk`` completes; the rest waits for the next one."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        while len(self._rest) > self._limit:
            lines.append(self._rest[: self._limit])
            self._rest = self._rest[self._limit :]
        return [last_state(line) for line in lines]

    def finish(self) -> list[bytes]:
        """The last line, if it has no line end."""
        rest, self._rest = self._rest, b""
        return [last_state(rest)] if rest else []


def last_state(line: bytes) -> bytes:
    """A line with carriage returns as a terminal shows it."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]


def tag(instance: int, channel: OutputChannel, line: bytes) -> bytes:
    """One tagged line with its line end."""
    return b"[%d,%d]<%s>:%s\n" % (JOB, instance, channel.value.encode(), line)


class OutputMixer:
    """Takes chunks from all instances and writes tagged lines.

    ``write(channel, data)`` puts bytes on podrun's own standard output or error. ``only`` suppresses all instances but
    one. ``directory``: copies, untagged, in ``DIR/1/rank.N/stdout`` and ``stderr`` as mpirun writes them.

    A traceback is held back for a moment (`HOLD_SECONDS`): if its instance ends with it, and is the one
    that fails the launch, it comes last on the screen, once, instead of between what the others print. What another
    instance has said in the same words is told in one line.
    """

    def __init__(
        self,
        instances: int,
        write: Callable[[OutputChannel, bytes], None],
        *,
        only: int | None = None,
        directory: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._only = only
        self._clock = clock
        self._assemblers = {
            (i, channel): LineAssembler() for i in range(instances) for channel in OutputChannel
        }
        self._errors: list[deque[bytes]] = [deque(maxlen=REMEMBERED_LINES) for _ in range(instances)]
        self._held: dict[int, tuple[float, list[bytes]]] = {}
        self._said: dict[tuple[bytes, ...], int] = {}
        self._said_before: set[tuple[bytes, ...]] = set()
        self._written = 0
        self._last_error_at = [-1] * instances
        self._files = _open_files(directory, instances) if directory else {}

    def feed(self, instance: int, channel: OutputChannel, chunk: bytes) -> None:
        """Take bytes that an instance printed."""
        self._copy(instance, channel, chunk)
        self._take(instance, channel, self._assemblers[instance, channel].feed(chunk))

    def begin_attempt(self) -> None:
        """The instances start again: what they say from here on is of another attempt. An error that an earlier attempt
        ended with is told in one line."""
        self.release_all()
        self._said_before.update(self._said)
        self._said.clear()
        for instance, errors in enumerate(self._errors):
            errors.clear()
            self._last_error_at[instance] = -1

    def finish(self, instance: int) -> None:
        """The instance has ended: write its unfinished last line."""
        for channel in OutputChannel:
            self._take(instance, channel, self._assemblers[instance, channel].finish())

    @property
    def holding(self) -> bool:
        """True iff a traceback is held back."""
        return bool(self._held)

    def release(self, instance: int) -> None:
        """Write the lines of an instance that are held back."""
        if instance in self._held:
            lines = self._held.pop(instance)[1]
            self._emit(instance, OutputChannel.STDERR, self._once(instance, lines))

    def keep(self, instance: int) -> None:
        """Keep the held lines of the failing instance, for `show_failure`."""
        if instance in self._held:
            self._held[instance] = (math.inf, self._held[instance][1])

    def release_due(self) -> None:
        """Write lines that were held back for `HOLD_SECONDS`, because their instance did not end."""
        due = self._clock() - HOLD_SECONDS
        for instance in [i for i, (since, _) in self._held.items() if since <= due]:
            self.release(instance)

    def release_all(self, *, but: int | None = None) -> None:
        """Write the held lines of all instances except ``but``."""
        if but in self._held:
            self._said.setdefault(tuple(self._held[but][1]), but)
        for instance in sorted(self._held.keys() - {but}):
            self.release(instance)

    def close(self) -> None:
        """Write all held lines and close the files."""
        self.release_all()
        for file in self._files.values():
            file.close()
        self._files = {}

    def show_failure(self, instance: int) -> bool:
        """Show what the instance said about its failure. False if it said nothing. What was shown is not repeated."""
        held = self._held.pop(instance, None)
        lines = last_words(self._errors[instance]) if held is None else held[1]
        if not lines:
            return False
        if held is not None or self._last_error_at[instance] < 0:
            lines = self._once(instance, lines)
            self._write(
                OutputChannel.STDERR, b"".join(tag(instance, OutputChannel.STDERR, line) for line in lines)
            )
            self._written += 1
            self._last_error_at[instance] = self._written
        return True

    def explains_itself(self, instance: int) -> bool:
        """True iff the instance's last words are a traceback, or a Python error without one (SyntaxError)."""
        lines = self._errors[instance]
        return bool(last_traceback(lines)) or (bool(lines) and b"Error: " in lines[-1])

    def _once(self, instance: int, lines: list[bytes]) -> list[bytes]:
        """The lines; in place of those that another instance says as well, one line."""
        if self._only not in (None, instance):
            return lines
        if tuple(lines) in self._said_before:
            return [b"%s (the same error as before)" % _named(lines)]
        first = self._said.setdefault(tuple(lines), instance)
        return lines if first == instance else [b"%s (the same as of instance %d)" % (_named(lines), first)]

    def note_written(self) -> None:
        """Note that something else was written to the screen."""
        self._written += 1

    def _copy(self, instance: int, channel: OutputChannel, chunk: bytes) -> None:
        """Copy the bytes to the instance's file. If the file cannot be written (a full disk), warn once and stop
        copying.
        """
        file = self._files.get((instance, channel))
        if file is None:
            return
        rest = memoryview(chunk)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            del self._files[instance, channel]
            file.close()
            text = f"podrun: {file.name} is not complete: {error.strerror}\n"
            self._write(OutputChannel.STDERR, text.encode(errors="surrogateescape"))
            self._written += 1

    def _take(self, instance: int, channel: OutputChannel, lines: Sequence[bytes]) -> None:
        if channel is OutputChannel.STDERR and lines:
            self._errors[instance].extend(lines)
            lines = self._hold(instance, list(lines))
        self._emit(instance, channel, lines)

    def _hold(self, instance: int, lines: list[bytes]) -> list[bytes]:
        """Hold back a traceback and the lines after it; returns the lines before it."""
        held = self._held.get(instance)
        if held is None:
            start = next((i for i, line in enumerate(lines) if _begins(line)), len(lines))
            lines, kept = lines[:start], lines[start:]
            if kept:
                self._held[instance] = (self._clock(), kept)
            return lines
        held[1].extend(lines)
        if len(held[1]) > REMEMBERED_LINES:
            self.release(instance)
        return []

    def _emit(self, instance: int, channel: OutputChannel, lines: Sequence[bytes]) -> None:
        shown = self._only is None or self._only == instance
        if not lines or not shown:
            return
        self._write(channel, b"".join(tag(instance, channel, line) for line in lines))
        self._written += 1
        if channel is OutputChannel.STDERR:
            self._last_error_at[instance] = self._written


def _begins(line: bytes) -> bool:
    """True for the first line of a traceback, or of a SyntaxError, which has none."""
    return line.startswith((TRACEBACK, _SYNTAX_ERROR))


def _named(lines: Sequence[bytes]) -> bytes:
    """The line of a traceback that names the error."""
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])


def last_words(lines: Sequence[bytes]) -> list[bytes]:
    """The last traceback, else the last lines."""
    return last_traceback(lines) or list(lines)[-LAST_LINES:]


def last_traceback(lines: Sequence[bytes]) -> list[bytes]:
    """The last Python traceback, with those it is chained to and the text after it; empty if there is none."""
    kept = list(lines)
    starts = [i for i, line in enumerate(kept) if line.lstrip().startswith(TRACEBACK)]
    if not starts:
        return []
    first = starts.pop()
    while starts and any(line.strip() in _CHAINED for line in kept[starts[-1] : first]):
        first = starts.pop()
    return kept[first:]


def _open_files(directory: Path, instances: int) -> dict[tuple[int, OutputChannel], FileIO]:
    width = len(str(instances - 1))
    files: dict[tuple[int, OutputChannel], FileIO] = {}
    for instance in range(instances):
        folder = directory / str(JOB) / f"rank.{instance:0{width}d}"
        folder.mkdir(parents=True, exist_ok=True)
        for channel in OutputChannel:
            files[instance, channel] = (folder / channel.value).open("wb", buffering=0)
    return files
