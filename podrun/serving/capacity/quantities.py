"""Quantities of a command line: rates (``5000/s``), durations (``20ms``), objectives (``p99=20ms``) and prices."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ns|us|ms|s|min|m|h)")
_RATE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(k|M)?\s*(?:/\s*(s|min|m|h))?")
_OBJECTIVE = re.compile(r"p(\d{1,2}(?:\.\d+)?)=(.+)")


@dataclass(frozen=True, slots=True)
class Objective:
    """A share of the requests, in per cent, is answered within so many seconds."""

    percentile: float
    seconds: float

    @property
    def name(self) -> str:
        """The quantile as people write it: ``p99``, ``p99.9``."""
        return f"p{self.percentile:g}"


def duration_seconds(text: str, option: str) -> float:
    """Seconds of ``20ms``, ``1.5s``, ``2min``. Raises UsageError that names the option."""
    parts = _DURATION.fullmatch(text.strip())
    if parts is None:
        raise UsageError(
            f"{option}: {text!r} is no duration", hint=f"Units are {', '.join(_UNITS)}: {option} 20ms"
        )
    return float(parts[1]) * _UNITS[parts[2]]


def requests_per_second(text: str, option: str = "--rate") -> float:
    """Requests a second of ``5000/s``, ``20k/s``, ``300/min``; a number alone is a second's. Raises UsageError."""
    parts = _RATE.fullmatch(text.strip())
    value = (
        float(parts[1]) * {"k": 1e3, "M": 1e6, None: 1.0}[parts[2]] / _UNITS[parts[3] or "s"]
        if parts
        else 0.0
    )
    if value <= 0:
        raise UsageError(f"{option}: {text!r} is no rate", hint=f"As in {option} 5000/s or {option} 300/min.")
    return value


def read_objectives(text: str) -> tuple[Objective, ...]:
    """Objectives of ``p50=5ms,p99=20ms``, by percentile. Raises UsageError for what is none, or contradicts itself."""
    objectives = sorted(map(_objective, text.split(",")), key=lambda one: one.percentile)
    for lower, higher in itertools.pairwise(objectives):
        if lower.percentile == higher.percentile:
            raise UsageError(f"--slo: {lower.name} has two limits", hint="Keep one of them.")
        if lower.seconds > higher.seconds:
            raise UsageError(
                f"--slo: {lower.name} may be later than {higher.name}, which includes it",
                hint=f"Give {higher.name} at least the time of {lower.name}.",
            )
    return tuple(objectives)


def _objective(text: str) -> Objective:
    parts = _OBJECTIVE.fullmatch(text.strip())
    if parts is None or not 0 < float(parts[1]) < 100:
        raise UsageError(
            f"--slo: {text!r} is no objective", hint="As in --slo p99=20ms or --slo p50=5ms,p99=20ms."
        )
    seconds = duration_seconds(parts[2], "--slo")
    if seconds <= 0:
        raise UsageError(f"--slo: {text!r} leaves no time", hint="As in --slo p99=20ms.")
    return Objective(float(parts[1]), seconds)


def read_prices(words: Iterable[str]) -> dict[str, float]:
    """Prices of an hour of ``pod16=12.5``, by POD. Raises UsageError."""
    prices: dict[str, float] = {}
    for word in words:
        pod, equals, text = word.partition("=")
        try:
            prices[pod.lower()] = price = float(text)
        except ValueError:
            price = -1.0
        if not equals or not 0 <= price < math.inf:
            raise UsageError(f"--price: {word!r} is no price of an hour", hint="As in --price pod16=12.5.")
    return prices
