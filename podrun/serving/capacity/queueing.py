"""Requests wait for replicas in virtual time: FIFO, batches by the rule of the runtime and the servers.

All replicas are alike, and a request goes to the first that is free. Time goes from run to run: between two runs
nothing is decided, so no event stands for a single request.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable

import numpy as np

from podrun.core.errors import InternalError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.batching import BatchingRule

RunSeconds = Callable[[int], float]
"""Seconds of a run of so many rows."""


@dataclass(frozen=True, slots=True)
class QueueOutcome:
    """What became of the requests. Seconds, one entry a request in order of arrival: ``latency`` from arrival to
    answer, ``wait`` from arrival to the begin of its run. ``runs`` and ``busy_s``: runs of all replicas and their
    time; ``span_s``: from time 0 to the last answer."""

    latency: np.ndarray
    wait: np.ndarray
    runs: int
    busy_s: float
    span_s: float

    def percentile(self, percent: float, warm_up: float = 0.0) -> float:
        """The latency within which a share of the requests is answered, without a first share ``warm_up`` of them."""
        kept = self.latency[int(len(self.latency) * warm_up) :]
        return float(np.percentile(kept, percent, method="inverted_cdf"))


class _Takes:
    """How many requests of one size a rule takes, by how many wait: a table of what `BatchingRule.decide` says."""

    def __init__(self, rule: BatchingRule, rows: int) -> None:
        if rows > rule.most_rows and rule.whole_requests:
            raise InternalError(f"requests of {rows} rows do not fit runs of {rule.most_rows}")
        self.window = -(-rule.most_rows // rows) + 1
        late = rule.delay_s if math.isfinite(rule.delay_s) else 0.0
        self.early = [rule.decide([rows] * count, 1.0, 1.0).rows // rows for count in range(self.window + 1)]
        self.late = [
            rule.decide([rows] * count, 0.0, late).rows // rows if math.isfinite(rule.delay_s) else taken
            for count, taken in enumerate(self.early)
        ]
        self.grows_to = [
            next((more for more in range(count + 1, self.window + 1) if self.early[more]), 0)
            for count in range(self.window + 1)
        ]
        """The number of waiting requests at which the rule runs some without waiting longer; 0: never."""


def open_loop(
    arrivals: np.ndarray, rule: BatchingRule, replicas: int, run_seconds: RunSeconds, rows: int = 1
) -> QueueOutcome:
    """Simulate requests of ``rows`` rows that come at times independent of the answers. ``arrivals``: seconds,
    ascending; ``run_seconds``: how long a run of so many rows takes.
    """
    takes, times, count = _Takes(rule, rows), arrivals.tolist(), len(arrivals)
    free = [0.0] * replicas
    begins: list[float] = []
    lasts: list[float] = []
    sizes: list[int] = []
    head = 0
    while head < count:
        oldest = times[head]
        until = oldest + rule.delay_s
        now = max(free[0], oldest)
        while True:
            waiting = bisect_right(times, now, head, min(count, head + takes.window)) - head
            taken = (takes.late if now >= until else takes.early)[waiting]
            if taken:
                break
            more = takes.grows_to[waiting]
            now = min(until, times[head + more - 1] if more and head + more <= count else math.inf)
            if now == math.inf:  # The rule waits for requests that do not come: the last ones end the trace.
                now, taken = times[-1], count - head
                break
        last = run_seconds(taken * rows)
        heapq.heapreplace(free, now + last)
        begins.append(now)
        lasts.append(last)
        sizes.append(taken)
        head += taken
    return _outcome(arrivals, np.array(begins), np.array(lasts), np.array(sizes))


def _outcome(arrivals: np.ndarray, begins: np.ndarray, lasts: np.ndarray, sizes: np.ndarray) -> QueueOutcome:
    wait = np.repeat(begins, sizes) - arrivals
    ends = begins + lasts
    latency = np.repeat(ends, sizes) - arrivals
    return QueueOutcome(latency, wait, len(begins), float(lasts.sum()), float(ends.max()))


@dataclass(frozen=True, slots=True)
class ClientLoop:
    """Clients that send a request, wait for its answer, think for ``think_s``, and send the next, until
    ``requests`` were sent. They begin spread over one think time, or at once."""

    clients: int
    think_s: float
    requests: int


def closed_loop(
    loop: ClientLoop, rule: BatchingRule, replicas: int, run_seconds: RunSeconds, rows: int = 1
) -> QueueOutcome:
    """Requests of clients that wait for their answers."""
    takes = _Takes(rule, rows)
    clients = min(loop.clients, loop.requests)
    coming = [loop.think_s * place / clients for place in range(clients)]
    free, queue = [0.0] * replicas, deque[float]()
    begins: list[float] = []
    lasts: list[float] = []
    sizes: list[int] = []
    order: list[float] = []
    sent = clients
    while queue or coming:
        if not queue:
            queue.append(heapq.heappop(coming))
        oldest, now = queue[0], max(free[0], queue[0])
        while True:
            while coming and coming[0] <= now:
                queue.append(heapq.heappop(coming))
            waiting = min(len(queue), takes.window)
            taken = (takes.late if now >= oldest + rule.delay_s else takes.early)[waiting]
            if taken:
                break
            now = min(oldest + rule.delay_s, coming[0] if coming else math.inf)
            if now == math.inf:  # Everybody waits for a batch that cannot become full.
                now, taken = max(queue[-1], free[0]), waiting
                break
        last = run_seconds(taken * rows)
        heapq.heapreplace(free, now + last)
        begins.append(now)
        lasts.append(last)
        sizes.append(taken)
        for _ in range(taken):
            order.append(queue.popleft())
            if sent < loop.requests:
                sent += 1
                heapq.heappush(coming, now + last + loop.think_s)
    return _outcome(np.array(order), np.array(begins), np.array(lasts), np.array(sizes))
