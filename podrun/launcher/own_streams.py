"""podrun's own standard output and error.

`Log` writes podrun's own lines: PopRun's log format, progress, and errors, all on standard error. Log lines
(``10:51:04.123 4711 POPRUN [I] partition p16 is ACTIVE``) appear with -v (I) and -vv (D), warnings (W) always;
progress lines unless --quiet. `open_mixer` lets the output of instances come out there, `send_logs_to` the log records
of podrun's services.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from podrun.core.errors import NotFoundError, PodrunError
from podrun.core.terminal import above_status, error_lines, shows_colour, styled, terminal_columns, wrapped
from podrun.launcher.output import OutputChannel, OutputMixer

if TYPE_CHECKING:
    from podrun.launcher.spec import LaunchSpec
    from podrun.record.running_launch import OutputTail


def open_mixer(spec: LaunchSpec, tail: OutputTail) -> OutputMixer:
    """The mixer of a launch, which writes to podrun's own streams and to ``tail``. Raises NotFoundError for
    --output-filename."""
    output = spec.output
    directory = Path(output.directory) if output.directory else None

    def write(channel: OutputChannel, data: bytes) -> None:
        write_to_stream(channel, data)
        if stopped := tail.add(data):
            write_to_stream(OutputChannel.STDERR, f"podrun: {stopped}\n".encode())

    try:
        return OutputMixer(spec.layout.instances, write, only=output.only_instance, directory=directory)
    except OSError as error:
        raise NotFoundError(
            f"output cannot be written to {directory}: {error.strerror}",
            hint="Name another --output-filename.",
        ) from error


def write_to_stream(channel: OutputChannel, data: bytes) -> None:
    """Write to podrun's own standard output or error, in one piece, and flush."""
    stream = sys.stdout if channel is OutputChannel.STDOUT else sys.stderr
    with above_status():
        try:
            stream.buffer.write(data)
            stream.buffer.flush()
        except OSError as error:
            # Nobody reads the output: drop it, and let the instances go on.
            silence(stream, error)


def send_logs_to(log: Log) -> Callable[[], None]:
    """Route log records of podrun's own service to ``log``. Returns a function that undoes it."""
    logger, handler = logging.getLogger("podrun"), LogHandler(log)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if log.verbosity >= 2 else logging.WARNING)
    logger.propagate = False

    def undo() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]

    return undo


TAG = "POPRUN"
_READER_GONE = (errno.EPIPE, errno.EIO)


class Log:
    """Writes whole lines, from any thread; progress in colour on a terminal. ``verbosity``: -1 quiet, 0
    usual, 1 verbose, 2 very verbose."""

    def __init__(
        self,
        verbosity: int = 0,
        stream: TextIO | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.verbosity = verbosity
        self._stream = stream or sys.stderr
        self._now = now
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def debug(self, text: str) -> None:
        """Write a line that only ``-vv`` shows."""
        if self.verbosity >= 2:
            self._line("D", text)

    def info(self, text: str) -> None:
        """Write a line that ``-v`` shows."""
        if self.verbosity >= 1:
            self._line("I", text)

    def warning(self, text: str) -> None:
        """A line unless --quiet. Each text is written once."""
        if self.verbosity >= 0 and text not in self._warned:
            self._warned.add(text)
            self._line("W", text)

    def progress(self, text: str) -> None:
        """Show the progress of the launch: a plain line unless --quiet (with -v a log line)."""
        if self.verbosity >= 1:
            self._line("I", text)
        elif self.verbosity == 0:
            self.write(self._styled(text) if shows_colour(self._stream) else f"podrun: {text}\n")

    def _styled(self, text: str) -> str:
        """The line as a terminal shows it: continued under its beginning where the terminal is too narrow."""
        name = "podrun: "
        lines = wrapped(text, (terminal_columns(self._stream) or 80) - len(name))
        first, *rest = lines or [""]
        return "".join(
            [styled(name, "cyan", self._stream), first, "\n", *(f"{'':{len(name)}}{line}\n" for line in rest)]
        )

    def error(self, error: PodrunError) -> None:
        """Write message and hint, at every verbosity."""
        self.write(error_text(error))

    def write(self, text: str) -> None:
        """Text as it is, in one piece."""
        with self._lock, above_status():
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError as error:
                # A launch must still end properly when nobody reads its output.
                silence(self._stream, error)
            except ValueError:
                return  # The stream is closed.

    def _line(self, level: str, text: str) -> None:
        stamp = self._now().strftime("%H:%M:%S.%f")[:-3]
        self.write(f"{stamp} {os.getpid()} {TAG} [{level}] {text}\n")


def silence(stream: TextIO, error: OSError) -> None:
    """Discard further output, so that the interpreter does not fail when it flushes the stream at its end.

    Silent if the reader is gone (a pipe, a closed terminal). Any other reason, such as a full disk, is reported on
    standard error.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    if error.errno not in _READER_GONE and stream is not sys.stderr:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"podrun: output from here on is lost: {error.strerror}\n")
            sys.stderr.flush()


class LogHandler(logging.Handler):
    """Hands what podrun's services log to a Log: warnings as warnings, the rest with -vv."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            self._log.warning(text)
        else:
            self._log.debug(text)


def error_text(error: PodrunError) -> str:
    """What the command prints for an error: the message, and the hint on a line of its own."""
    return error_lines("podrun", str(error), error.hint)
