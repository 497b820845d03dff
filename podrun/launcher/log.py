"""podrun's own lines: PopRun's log format, progress, and errors. All on standard error.

    10:51:04.123 4711 POPRUN [I] partition p16 is PS_ACTIVE

Log lines appear with -v (I) and -vv (D), warnings (W) always; progress lines unless --quiet.
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
from typing import TextIO

from podrun.core.errors import PodrunError
from podrun.core.terminal import error_lines, shows_colour

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
        """A line for -vv."""
        if self.verbosity >= 2:
            self._line("D", text)

    def info(self, text: str) -> None:
        """A line for -v."""
        if self.verbosity >= 1:
            self._line("I", text)

    def warning(self, text: str) -> None:
        """A line unless --quiet. Each text is written once."""
        if self.verbosity >= 0 and text not in self._warned:
            self._warned.add(text)
            self._line("W", text)

    def progress(self, text: str) -> None:
        """Progress of the launch: a plain line unless --quiet (with -v a log line)."""
        if self.verbosity >= 1:
            self._line("I", text)
        elif self.verbosity == 0:
            self.write(self._styled(text) if shows_colour(self._stream) else f"podrun: {text}\n")

    def _styled(self, text: str) -> str:
        """The line as a terminal shows it, as wide as the terminal."""
        from rich.console import Console
        from rich.text import Text

        console = Console(file=self._stream)
        with console.capture() as capture:
            console.print(Text.assemble(("podrun: ", "bold cyan"), text), soft_wrap=True)
        return capture.get()

    def error(self, error: PodrunError) -> None:
        """Message and hint, always."""
        self.write(error_text(error))

    def write(self, text: str) -> None:
        """Text as it is, in one piece."""
        with self._lock:
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError as error:
                # A launch must still be ended when nobody reads its output.
                silence(self._stream, error)
            except ValueError:
                return  # The stream is closed.

    def _line(self, level: str, text: str) -> None:
        stamp = self._now().strftime("%H:%M:%S.%f")[:-3]
        self.write(f"{stamp} {os.getpid()} {TAG} [{level}] {text}\n")


def silence(stream: TextIO, error: OSError) -> None:
    """Discard further output, so that the interpreter does not fail when it flushes the stream at its end.

    Nothing is said if the reader is gone (a pipe, a closed terminal). Another reason, such as a full disk, is reported
    on standard error.
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
