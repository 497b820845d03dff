"""Ways to watch a program: the log, functions called before and after capture, and latencies.

Latencies come from stamps: when the data of a call crossed between host and IPUs, in seconds of the host's monotonic
clock, measured. The emulated IPUs take all micro-batches of a call at once and give all results at once, so the stamps
of one kind are equal within a call; there are as many as the IPUs would give.
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

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


_before: OrderedDict[int, Callable[[], Any]] = OrderedDict()
_after: OrderedDict[int, Callable[[], Any]] = OrderedDict()


def _register(hooks: OrderedDict[int, Callable[[], Any]], hook: Callable[[], Any]) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError("a hook must be callable")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call a function before every capture, in the order of registration. RuntimeError if it cannot be called."""
    return _register(_before, hook)


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Call a function after every capture, also after one that failed."""
    return _register(_after, hook)


def run_before() -> None:
    """Call the functions registered for the time before a capture."""
    for hook in list(_before.values()):
        hook()


def run_after() -> None:
    """Call the functions registered for the time after a capture."""
    for hook in list(_after.values()):
        hook()


Latency = tuple[float, float, float]
"""Least, greatest and average seconds."""

COUNTERS = ("input", "input_complete", "output", "output_complete")


@dataclass(frozen=True, slots=True)
class CallStamps:
    """One call: when its inputs were requested and had arrived, when its results were ready and had arrived.

    ``inputs`` and ``outputs``: tensors of each kind; ``input_crossings`` and ``output_crossings``: transfers of each.
    """

    asked: float
    arrived: float
    ready: float
    returned: float
    inputs: int
    input_crossings: int
    outputs: int
    output_crossings: int

    def counters(self) -> dict[str, list[list[float]]]:
        """The stamps by counter: a list for each tensor."""
        values = (self.asked, self.arrived, self.ready, self.returned)
        stamps = {}
        for name, value in zip(COUNTERS, values, strict=True):
            incoming = name.startswith("input")
            tensors = self.inputs if incoming else self.outputs
            crossings = self.input_crossings if incoming else self.output_crossings
            stamps[name] = [[value] * crossings for _ in range(tensors)]
        return stamps


def no_counters() -> dict[str, list[list[float]]]:
    """The counters before the first call."""
    return {name: [[]] for name in COUNTERS}


def latency(counters: dict[str, list[list[float]]], start: str, end: str) -> Latency:
    """Seconds from one counter to another; zeros without stamps."""
    firsts, lasts = _by_crossing(counters[start], min), _by_crossing(counters[end], max)
    if not firsts or not lasts:
        return (0.0, 0.0, 0.0)
    per = max(len(firsts) // len(lasts), 1)
    spans = [last - firsts[min(i * per, len(firsts) - 1)] for i, last in enumerate(lasts)]
    return (min(spans), max(spans), sum(spans) / len(spans))


def _by_crossing(stamps: Sequence[Sequence[float]], of: type | object) -> list[float]:
    tensors = [row for row in stamps if row]
    return [of(row) for row in zip(*tensors, strict=False)] if tensors else []  # type: ignore[operator]
