"""``popart.getLogger``: PopART's logger objects over Python's own logging."""

from __future__ import annotations

import logging
import os

_LEVELS = {
    "TRACE": 5,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "OFF": logging.CRITICAL + 10,
}
_ROOT = "podrun.popart"


class Logger:
    """A logger of one of PopART's parts: ``popart.getLogger("session").setLevel("INFO")``."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(_ROOT if name in ("all", "popart") else f"{_ROOT}.{name}")

    def setLevel(self, level: str) -> None:
        """TRACE, DEBUG, INFO, WARN, ERR, CRITICAL or OFF."""
        name = str(level).upper()
        name = {"WARNING": "WARN", "ERROR": "ERR"}.get(name, name)
        if name not in _LEVELS:
            raise ValueError(f"Unknown log level {level!r}; it is one of {', '.join(_LEVELS)}.")
        self._logger.setLevel(_LEVELS[name])
        _ensure_handler()

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


def _ensure_handler() -> None:
    """A handler of our own on first use, unless the program has set up logging itself."""
    root = logging.getLogger(_ROOT)
    if root.handlers or logging.getLogger().handlers:
        return
    destination = os.environ.get("POPART_LOG_DEST", "stderr")
    handler: logging.Handler
    if destination in ("stderr", "stdout"):
        import sys

        handler = logging.StreamHandler(sys.stderr if destination == "stderr" else sys.stdout)
    else:
        handler = logging.FileHandler(destination)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(name)s [%(levelname).1s] %(message)s"))
    root.addHandler(handler)


def getLogger(name: str = "all") -> Logger:
    """The logger of a part of PopART (``session``, ``devicex`` ...), or of all of it."""
    return Logger(name)


def configure_from_environment() -> None:
    """POPART_LOG_LEVEL sets the level of everything, as in PopART."""
    level = os.environ.get("POPART_LOG_LEVEL")
    if level and level.upper() in _LEVELS:
        getLogger().setLevel(level)
