"""Failures in virtual time: what each source of `podrun.simulate.rates` strikes, and when.

Units of equal rate are pooled: the next failure of all of them is drawn from the sum of their rates, then the unit.
Units with an age (Weibull) have a time each, on a heap. Both come from the source's own streams, so that the same
failures meet every policy.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from podrun.core.cluster import Cluster
from podrun.simulate.engine import Order, VirtualEngine, nanoseconds
from podrun.simulate.rates import FailureSource, machines_of_unit, unit_count
from podrun.simulate.streams import RandomStreams, lemon_factor, weibull_left

HOUR_S = 3600.0


class FailureProcess:
    """The failures of one source. ``number``: of the source; its events on the engine carry it."""

    def __init__(
        self, engine: VirtualEngine, streams: RandomStreams, pod: Cluster, source: FailureSource, number: int
    ) -> None:
        self.engine, self.pod, self.source, self.number = engine, pod, source, number
        self._name = f"source {number} {source.unit} {source.kind}"
        self._streams = streams
        self._times = streams.of(self._name, "times")
        self._choices = streams.of(self._name, "units")
        self._count = unit_count(pod, source.unit)
        self._factors = self._drawn_factors()
        self._summed: NDArray[np.float64] | None = None
        self._ages: list[tuple[float, int]] = []
        self._events = iter(source.trace)
        self._total = source.per_hour * (self._count if self._factors is None else float(self._factors.sum()))

    def _drawn_factors(self) -> NDArray[np.float64] | None:
        """How often each unit fails, as a multiple of the mean; None: all alike."""
        lemons = self.source.lemons
        stream = self._streams.of(self._name, "lemons")
        if lemons.shape:
            return np.asarray(stream.gamma(lemons.shape, 1 / lemons.shape, self._count))
        if not lemons.share:
            return None
        factors = np.where(stream.random(self._count) < lemons.share, lemons.factor, 1.0)
        return np.asarray(factors / (1 + lemons.share * (lemons.factor - 1)))

    def start(self) -> None:
        """Plan the first failure of every unit."""
        if self.source.shape != 1.0 and self.source.per_hour:
            for unit in range(self._count):
                heapq.heappush(self._ages, (self._first_of(unit, 0.0), unit))
        self._plan()

    def _first_of(self, unit: int, now_h: float) -> float:
        """When a fresh unit fails, in hours."""
        shape, factor = self.source.shape, 1.0 if self._factors is None else float(self._factors[unit])
        scale = 1 / (self.source.per_hour * factor * math.gamma(1 + 1 / shape))
        return now_h + weibull_left(self._times, shape, scale, 0.0)

    def _plan(self) -> None:
        event = f"failure {self.number}"
        if self.source.trace:
            entry = next(self._events, None)
            if entry is not None:
                self.engine.at(nanoseconds(entry[0] * HOUR_S), Order.FAILURE, event, entry[1])
        elif self._ages:
            hours, unit = heapq.heappop(self._ages)
            self.engine.at(max(self.engine.now, nanoseconds(hours * HOUR_S)), Order.FAILURE, event, unit)
        elif self._total > 0:
            wait = float(self._times.exponential(HOUR_S / self._total))
            self.engine.after(nanoseconds(wait), Order.FAILURE, event, self._chosen())

    def _chosen(self) -> int:
        if self._factors is None:
            return int(self._choices.integers(self._count))
        if self._summed is None:
            self._summed = np.cumsum(self._factors)
        place = float(self._choices.random()) * float(self._summed[-1])
        return min(int(np.searchsorted(self._summed, place, side="right")), self._count - 1)

    def struck(self, unit: int) -> tuple[int, ...]:
        """The machines that the failure of a unit strikes, a burst with it; plans the next failure."""
        if self.source.shape != 1.0 and self.source.per_hour:
            again = self._first_of(unit, self.engine.now / 1e9 / HOUR_S)
            heapq.heappush(self._ages, (again, unit))
        self._plan()
        machines = list(machines_of_unit(self.pod, self.source.unit, unit))
        bursts = self.source.bursts
        if bursts.share and float(self._choices.random()) < bursts.share:
            more = int(self._choices.geometric(1 / max(bursts.mean_size, 1.0)))
            per_domain = self.pod.topology.ild_ipus // 4
            first = machines[0] // per_domain * per_domain
            others = [m for m in range(first, first + per_domain) if m not in machines]
            machines += sorted(int(m) for m in self._choices.permutation(others)[:more])
        return tuple(machines)

    def renew(self, machine: int) -> None:
        """Put a fresh unit in the place of one that was replaced: its age and how often it fails are drawn anew."""
        lemons = self.source.lemons
        if self._factors is None or self.source.unit not in ("machine", "node"):
            return
        unit = machine if self.source.unit == "machine" else machine * 4 // 8
        stream = self._streams.of(self._name, "fresh")
        old = float(self._factors[unit])
        if lemons.shape:
            fresh = lemon_factor(stream, lemons.shape)
        else:
            lemon = float(stream.random()) < lemons.share
            fresh = (lemons.factor if lemon else 1.0) / (1 + lemons.share * (lemons.factor - 1))
        self._factors[unit] = fresh
        self._total += self.source.per_hour * (fresh - old)
        self._summed = None
