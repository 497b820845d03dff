"""``popart.getLogger``: PopART's logger objects over Python's own logging.

PopART's log is its own: it goes to standard error (or where POPART_LOG_DEST says) from WARN on unless told otherwise,
whatever the program does with Python's logging.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TextIO

from podrun.session.environment import LOG_DESTINATION, LOG_LEVEL, ours

TRACE = 5
"""Below DEBUG: every operator that a builder adds."""

_LEVELS = {
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "OFF": logging.CRITICAL + 10,
}
_ALIASES = {"WARNING": "WARN", "ERROR": "ERR"}
_ROOT = "podrun.popart"
_FORMAT = "%(asctime)s %(process)d %(name)s [%(levelname).1s] %(message)s"

logging.addLevelName(TRACE, "TRACE")


class Logger:
    """A logger of one of PopART's parts: ``popart.getLogger("session").setLevel("INFO")``."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(_ROOT if name in ("all", "popart") else f"{_ROOT}.{name}")

    def setLevel(self, level: str) -> None:
        """TRACE, DEBUG, INFO, WARN, ERR, CRITICAL or OFF. ValueError for anything else."""
        name = str(level).upper()
        name = _ALIASES.get(name, name)
        if name not in _LEVELS:
            raise ValueError(f"Unknown log level {level!r}; it is one of {', '.join(_LEVELS)}.")
        self._logger.setLevel(_LEVELS[name])

    def debug(self, message: str) -> None:
        """Log at DEBUG."""
        self._logger.debug("%s", message)

    def info(self, message: str) -> None:
        """Log at INFO."""
        self._logger.info("%s", message)

    def warn(self, message: str) -> None:
        """Log at WARN."""
        self._logger.warning("%s", message)

    def error(self, message: str) -> None:
        """Log at ERR."""
        self._logger.error("%s", message)

    def critical(self, message: str) -> None:
        """Log at CRITICAL."""
        self._logger.critical("%s", message)


class _Standard(logging.StreamHandler[TextIO]):
    """Writes to what is ``sys.stderr`` or ``sys.stdout`` when a line comes: a program may put others there."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._stream_name = name

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Where the next line goes."""
        found: TextIO = getattr(sys, self._stream_name)
        return found


def getLogger(name: str = "all") -> Logger:
    """The logger of a part of PopART (``session``, ``devicex`` ...), or of all of it."""
    return Logger(name)


def configure(environ: Mapping[str, str] | None = None) -> None:
    """Set the log up as POPART_LOG_DEST and POPART_LOG_LEVEL say; once, when ``popart`` is imported."""
    found, root = ours(environ), logging.getLogger(_ROOT)
    destination = found.get(LOG_DESTINATION) or "stderr"
    handler = (
        _Standard(destination)
        if destination in ("stderr", "stdout")
        else logging.FileHandler(destination, delay=True)
    )
    handler.setFormatter(logging.Formatter(_FORMAT))
    root.handlers = [handler]
    root.propagate = False
    level = found.get(LOG_LEVEL, "").upper()
    root.setLevel(_LEVELS.get(_ALIASES.get(level, level), logging.WARNING))
