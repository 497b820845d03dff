"""PopTorch's log: its level and where it goes."""

from __future__ import annotations

import logging

from podrun.core.environment import environment

LEVEL = "POPTORCH_LOG_LEVEL"
"""Environment variable: the level that the log starts with."""
_LEVELS = {
    "TRACE_ALL": logging.DEBUG,
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "DEBUG_IR": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": logging.CRITICAL + 1,
}
_NUMBERS = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}

logger = logging.getLogger("poptorch::python")


def setLogLevel(level: str | int) -> None:
    """Log from a level on: TRACE, DEBUG, INFO, WARN, ERR, OFF, TRACE_ALL, DEBUG_IR, or the numbers 0 to 4 and 6.
    ValueError for another."""
    name = _NUMBERS.get(level) if isinstance(level, int) else level
    if name not in _LEVELS:
        raise ValueError(f"Unknown log level {level!r}: use one of {', '.join(_LEVELS)}")
    logger.setLevel(_LEVELS[name])


def start_log() -> None:
    """Log to stderr, from the level that the environment names."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        form = "%(asctime)s.%(msecs)03d %(name)s %(levelname)s: %(message)s"
        handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    setLogLevel(environment().get(LEVEL, "WARN"))
