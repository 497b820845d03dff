"""Intervals of 95 %: of a mean over replications, and of a rate from counted events."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrun.core.quick_dataclass import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A figure with its interval; ``low`` and ``high`` are None where one replication tells nothing of the spread."""

    mean: float
    low: float | None
    high: float | None
    replications: int

    def as_json(self) -> dict[str, Any]:
        """The interval as values of JSON."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "replications": self.replications}


def mean_interval(values: Sequence[float]) -> ConfidenceInterval:
    """The mean of replications with Student's interval: mean +- t s / sqrt(n)."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return ConfidenceInterval(mean, None, None, count)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    half = student_quantile(count - 1, (1 + CONFIDENCE) / 2) * spread
    return ConfidenceInterval(mean, mean - half, mean + half, count)


def rate_interval(events: int, time: float) -> ConfidenceInterval:
    """Events per time with the exact interval of a Poisson count; without an event from 0 to 3.69 / time."""
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if not events else _solve(lambda mean: 1 - _poisson_below(events - 1, mean) - tail, events)
    high = _solve(lambda mean: tail - _poisson_below(events, mean), events + 1)
    return ConfidenceInterval(events / time, low / time, high / time, 1)


def _poisson_below(events: int, mean: float) -> float:
    """P(at most so many events)."""
    if mean <= 0:
        return 1.0
    steps = np.arange(1, events + 1)
    logs = np.concatenate([[0.0], np.cumsum(math.log(mean) - np.log(steps))]) - mean
    return float(np.exp(logs).sum())


def _solve(rising: Callable[[float], float], near: float) -> float:
    """Where a rising function is 0."""
    low, high = 0.0, max(8.0, near + 10 * math.sqrt(near) + 10)
    for _ in range(200):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def student_quantile(freedom: int, share: float) -> float:
    """The value below which a share above 1/2 of Student's distribution lies."""
    return _solve(lambda value: _student_below(value, freedom) - share, 1e4)


def _student_below(value: float, freedom: int) -> float:
    """The distribution function for a value above 0, with the angle theta = atan(value / sqrt(freedom)) (Abramowitz
    and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(value / math.sqrt(freedom))
    cosine, sine = math.cos(theta), math.sin(theta)
    if freedom % 2:
        term = total = cosine if freedom > 1 else 0.0
        for k in range(3, freedom - 1, 2):
            term *= (k - 1) / k * cosine * cosine
            total += term
        both = 2 / math.pi * (theta + sine * total)
    else:
        term = total = 1.0
        for k in range(2, freedom - 1, 2):
            term *= (k - 1) / k * cosine * cosine
            total += term
        both = sine * total
    return (1 + both) / 2
