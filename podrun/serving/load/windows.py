"""Answers of a window of time: latencies in an HDR histogram, errors by kind, modelled time; and when windows are
stable.

Latencies of requests that were sent at times of the tool's own count from those times, also when the tool was late: a
server that stops is charged with all requests that should have been sent meanwhile (no coordinated omission).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from typing import Protocol

from podrun.core.quick_dataclass import dataclass

LOWEST_NS, HIGHEST_NS, DIGITS = 1_000, 600_000_000_000, 3
"""Latencies that a histogram tells apart: from a microsecond to ten minutes, to three digits."""
STABLE_WINDOWS = 3


class LatencyHistogram(Protocol):
    """What is used of ``hdrh.histogram.HdrHistogram``; values are nanoseconds."""

    def record_value(self, value: int) -> bool:
        """Count a value; False for one that is out of range."""

    def get_value_at_percentile(self, percentile: float) -> int:
        """The value below which a share of the values lies, in per cent."""

    def get_mean_value(self) -> float:
        """The mean latency, in nanoseconds."""

    def get_total_count(self) -> int:
        """How many values were counted."""

    def add(self, other: LatencyHistogram) -> None:
        """Count the values of another histogram."""


def new_histogram() -> LatencyHistogram:
    """An empty histogram of latencies."""
    from hdrh.histogram import HdrHistogram

    histogram: LatencyHistogram = HdrHistogram(LOWEST_NS, HIGHEST_NS, DIGITS)
    return histogram


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The outcome of one request. ``error``: its kind, empty for a result. ``modelled_us``: compute, transfer and
    queue of a server with the backend ``poplar``; None where the answer does not say."""

    error: str = ""
    modelled_us: tuple[float, float, float] | None = None


@dataclass(slots=True)
class LoadWindow:
    """Answers that came within a span of time. ``span_s``: set when it ends."""

    latencies: LatencyHistogram = field(default_factory=new_histogram)
    errors: Counter[str] = field(default_factory=Counter)
    modelled: list[tuple[float, float, float]] = field(default_factory=list)
    span_s: float = 0.0

    def count(self, latency_ns: int, answer: ServerAnswer) -> None:
        """Count an answer: its latency, or its error."""
        if answer.error:
            self.errors[answer.error] += 1
            return
        self.latencies.record_value(min(max(latency_ns, LOWEST_NS), HIGHEST_NS))
        if answer.modelled_us is not None:
            self.modelled.append(answer.modelled_us)

    @property
    def answered(self) -> int:
        """Requests that have a result."""
        return self.latencies.get_total_count()

    @property
    def rate(self) -> float:
        """Results a second."""
        return self.answered / self.span_s if self.span_s else 0.0

    def latency_s(self, percentile: float) -> float:
        """Seconds within which a share of the results came."""
        return self.latencies.get_value_at_percentile(percentile) / 1e9

    @property
    def mean_s(self) -> float:
        """Mean latency in seconds."""
        return self.latencies.get_mean_value() / 1e9 if self.answered else 0.0

    def modelled_s(self) -> tuple[float, float, float] | None:
        """Mean modelled compute, transfer and queue in seconds; None if no answer said."""
        if not self.modelled:
            return None
        compute, transfer, queue = (
            statistics.fmean(values) / 1e6 for values in zip(*self.modelled, strict=True)
        )
        return compute, transfer, queue


def are_stable(windows: Sequence[LoadWindow], share: float, percentile: float) -> bool:
    """True iff the last three windows differ from their mean by at most a share, in rate and in a latency."""
    last = windows[-STABLE_WINDOWS:]
    if len(last) < STABLE_WINDOWS or not all(window.answered for window in last):
        return False
    rates = [window.rate for window in last]
    latencies = [window.latency_s(percentile) for window in last]
    return all(
        abs(value - statistics.fmean(values)) <= share * statistics.fmean(values)
        for values in (rates, latencies)
        for value in values
    )


def are_refused(windows: Sequence[LoadWindow]) -> bool:
    """True iff the last three windows have errors and no result: more windows would say nothing else."""
    last = windows[-STABLE_WINDOWS:]
    return len(last) == STABLE_WINDOWS and all(window.errors and not window.answered for window in last)


def joined(windows: Sequence[LoadWindow]) -> LoadWindow:
    """One window of the answers of several."""
    whole = LoadWindow()
    for window in windows:
        whole.latencies.add(window.latencies)
        whole.errors += window.errors
        whole.modelled += window.modelled
        whole.span_s += window.span_s
    return whole
