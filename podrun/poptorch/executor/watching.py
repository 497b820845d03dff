"""Ways to watch a program: functions called before and after capture, and latencies.

Latencies come from stamps: when the data of a call crossed between host and IPUs, in seconds of the host's monotonic
clock, measured. The emulated IPUs take all micro-batches of a call at once and give all results at once, so the stamps
of one kind are equal within a call; there are as many as the IPUs would give.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from podrun.core.quick_dataclass import dataclass

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
