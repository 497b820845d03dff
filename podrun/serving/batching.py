"""When waiting requests are run together: one rule for the runtime, the servers and the capacity planner.

    rule = BatchingRule(most_rows=8, delay_s=0.002)
    rule.decide([3, 2], oldest_since=10.0, now=10.001)      # wait: BatchDecision(rows=0, until=10.002)
    rule.decide([3, 2, 4], oldest_since=10.0, now=10.001)   # run two requests: BatchDecision(rows=5, until=inf)

Pure: who asks has the queue and the clock. Rows are taken from the front of the queue. A rule of `whole_requests` is
that of Triton's dynamic batcher: it runs a preferred size as soon as requests make one, else as many requests as fit
when the next does not fit or the oldest has waited for the delay. Otherwise requests may be divided, as PopRT's
runtime does: rows that fill batches run at once, the rest waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """``rows``: to run now, from the front of the queue; 0: none. ``until``: when to decide again if nothing arrives
    before, seconds on the clock of ``now``; infinity: never.
    """

    rows: int
    until: float = math.inf


@dataclass(frozen=True, slots=True)
class BatchingRule:
    """When waiting requests are run together. ``most_rows``: of a run. ``delay_s``: how long the oldest request waits
    for others, infinity for ever. ``preferred_rows``: sizes that run at once.

    UsageError for sizes below 1 or above ``most_rows``, and for a negative delay.
    """

    most_rows: int
    delay_s: float = 0.0
    preferred_rows: tuple[int, ...] = ()
    whole_requests: bool = True

    def __post_init__(self) -> None:
        if self.most_rows < 1 or not self.delay_s >= 0:
            raise UsageError(f"a batch of {self.most_rows} rows and a delay of {self.delay_s} s cannot be")
        if wrong := [size for size in self.preferred_rows if not 1 <= size <= self.most_rows]:
            raise UsageError(f"a preferred size is 1 to {self.most_rows} rows, not {wrong[0]}")

    def decide(self, waiting: Sequence[int], oldest_since: float, now: float) -> BatchDecision:
        """What to do with requests of so many rows each, in order of arrival. ``oldest_since``: when the first came."""
        if not waiting:
            return BatchDecision(0)
        late = now >= oldest_since + self.delay_s
        rows = self._divided(waiting, late) if not self.whole_requests else self._whole(waiting, late)
        return BatchDecision(rows, math.inf if rows else oldest_since + self.delay_s)

    def _divided(self, waiting: Sequence[int], late: bool) -> int:
        total = sum(waiting)
        return total // self.most_rows * self.most_rows or (total if late else 0)

    def _whole(self, waiting: Sequence[int], late: bool) -> int:
        if waiting[0] >= self.most_rows:  # A request that is larger than a batch runs alone.
            return waiting[0]
        sums = [rows for rows in accumulate(waiting) if rows <= self.most_rows]
        if preferred := [rows for rows in sums if rows in self.preferred_rows]:
            return preferred[-1]
        full = len(sums) < len(waiting) or sums[-1] == self.most_rows
        return sums[-1] if full or late else 0
