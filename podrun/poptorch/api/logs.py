"""The log of PopTorch: its level, and what it says of options."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from podrun.core.environment import environment
from podrun.poptorch.api.signatures import checks_arguments

if TYPE_CHECKING:
    from podrun.poptorch.api.options import Options


LEVEL = "POPTORCH_LOG_LEVEL"
"""Environment variable: the first level of the log."""


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


_PREFIX = "poptorch.Options"


_NAMES_BELOW = {
    "auto_loss_scaling": "automaticLossScalingSettings.enabled",
    "enable_synthetic_data": "syntheticDataMode",
    "floating_point_exceptions": "enableFloatingPointExceptions",
    "stochastic_rounding": "enableStochasticRounding",
}
"""Options that have another name below the front end."""


_SYNTHETIC = {False: 0, True: 2}
"""PopART's number of the synthetic data that the option means: none, normally distributed."""


def log_options(options: Options) -> None:
    """Write the values of options to the log at level DEBUG, in the SDK's words."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    parts = (options._execution_strategy.backendOptions(), options._values, options._extra)
    for group in (*parts, *(part.toDict() for part in options._parts.values()), options._Popart.options):
        for name, value in group.items():
            if name == "enable_synthetic_data":
                value = _SYNTHETIC[value]
            if name != "popart_options":
                for line in option_lines(_NAMES_BELOW.get(name, name), value):
                    logger.debug("%s", line)


def option_lines(name: str, value: object) -> Iterator[str]:
    """What the log says of an option: a value, or each entry of a dictionary, or each element that a list adds."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield f"{_PREFIX} set {name}[{key}] to {_logged(entry)}"
    elif isinstance(value, (list, tuple, set, frozenset)):
        for entry in sorted(value, key=str) if isinstance(value, (set, frozenset)) else value:
            yield f"{_PREFIX} added {_logged(entry)} to {name}"
    elif value is not None:
        yield f"{_PREFIX} set {name} to value {_logged(value)}"


def _logged(value: object) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    return str(value).lower() if isinstance(value, bool) else str(value)


@checks_arguments
def setLogLevel(level: str | int) -> None:
    """Set the least level of the log: TRACE, DEBUG, INFO, WARN, ERR, OFF, TRACE_ALL, DEBUG_IR, or the numbers 0 to 4
    and 6. ValueError for another.
    """
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
