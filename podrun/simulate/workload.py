"""A synthetic log with stated moments, where a real one may not be had.

Arrivals: a Poisson process whose rate swings over the day by a sine. Sizes: powers of two, log-uniform between bounds.
Runs: lognormal by median and mean, cut off at a longest one; requested times: runs times a factor that is uniform
between 1 and a bound, because people ask for more than they need. Users: shares by Zipf's law. `moments` are those of
what was drawn, beside which `TraceGenerator.expected` puts the stated ones.
"""

from __future__ import annotations

import math

import numpy as np

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.simulate.engine import SECOND, nanoseconds
from podrun.simulate.jobs import TraceJob
from podrun.simulate.streams import RandomStreams

DAY_S = 86_400.0
MOST_JOBS = 10_000_000
"""Jobs of a log that is drawn: each takes some hundred bytes of memory."""


@dataclass(frozen=True, slots=True)
class TraceGenerator:
    """The moments of a log. ``daily_swing``: the rate is so many times more by day and less by night, 0 to 1."""

    jobs: int = 10_000
    mean_gap_s: float = 120.0
    daily_swing: float = 0.5
    smallest: int = 1
    largest: int = 64
    median_run_s: float = 600.0
    mean_run_s: float = 3_600.0
    longest_run_s: float = 7 * DAY_S
    most_asked: float = 3.0
    users: int = 50

    def __post_init__(self) -> None:
        if self.jobs > MOST_JOBS:
            raise UsageError(f"a log of {self.jobs} jobs is too long", hint=f"{MOST_JOBS} jobs at the most.")
        if self.jobs < 1 or self.mean_gap_s <= 0 or self.users < 1 or not 0 <= self.daily_swing < 1:
            raise UsageError("a log needs jobs, a gap between them and users", hint="podrun help simulate")
        if not 0 < self.median_run_s <= self.mean_run_s <= self.longest_run_s:
            raise UsageError(
                f"runs with the median {self.median_run_s:g} s have no mean of {self.mean_run_s:g} s",
                hint="The mean of a lognormal time is above its median.",
            )
        if not 1 <= self.smallest <= self.largest:
            raise UsageError(f"there is no size from {self.smallest} to {self.largest}", hint="1 or more")

    def expected(self) -> dict[str, float]:
        """The means and medians that generated traces should have."""
        sizes = self._sizes()
        return {
            "mean_gap_s": self.mean_gap_s,
            "mean_size": sum(sizes) / len(sizes),
            "median_run_s": self.median_run_s,
            "mean_run_s": self.mean_run_s,
        }

    def draw(self, seed: int) -> list[TraceJob]:
        """The jobs of a seed, in the order of arrivals."""
        streams = RandomStreams(seed)
        gaps = streams.of("workload", "arrivals").exponential(self.mean_gap_s, self.jobs)
        submits = _swinging(np.cumsum(gaps), self.daily_swing)
        sigma = math.sqrt(2 * math.log(self.mean_run_s / self.median_run_s))
        normal = streams.of("workload", "runs").standard_normal(self.jobs)
        runs = np.minimum(self.median_run_s * np.exp(sigma * normal), self.longest_run_s)
        factors = streams.of("workload", "requests").uniform(1.0, self.most_asked, self.jobs)
        sizes = streams.of("workload", "sizes").choice(self._sizes(), self.jobs)
        weights = 1.0 / np.arange(1, self.users + 1)
        users = streams.of("workload", "users").choice(self.users, self.jobs, p=weights / weights.sum())
        return [
            TraceJob(
                str(number + 1),
                nanoseconds(float(submits[number])),
                max(SECOND, nanoseconds(float(runs[number]))),
                max(SECOND, nanoseconds(float(runs[number] * factors[number]))),
                int(sizes[number]),
                f"user{users[number]}",
                "1",
                number + 1,
            )
            for number in range(self.jobs)
        ]

    def _sizes(self) -> list[int]:
        low, high = self.smallest.bit_length() - 1, self.largest.bit_length() - 1
        return [1 << power for power in range(low, high + 1)]


def _swinging(times: np.ndarray, swing: float) -> np.ndarray:
    """Arrivals of an even rate moved so that the rate swings by a sine over the day: t + s D/2pi (1 - cos) is even."""
    if not swing:
        return times
    moved = times.copy()
    for _ in range(60):
        even = moved - swing * DAY_S / (2 * math.pi) * (np.cos(2 * math.pi * moved / DAY_S) - 1)
        moved -= (even - times) / (1 + swing)
    return moved
