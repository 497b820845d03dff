"""A pool of processors that are only counted, under the policies of the literature.

``fcfs``: first come, first served. ``easy``: the first of the queue gets a reservation at the earliest time at which
enough processors are free by the times that were asked for; others start if they end before it, or fit into what it
leaves over (Mu'alem and Feitelson, IEEE TPDS 2001). ``sjbf``: the same, with the others by the time they asked for,
shortest first (Gaussier et al., SC'15). ``conservative``: everyone in the queue gets a reservation. Who is ready is
asked after each end and each arrival, ends first, as the published figures do.

podrun's own allocator and queue place partitions on links instead: `podrun.simulate.pod_queue`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from operator import attrgetter

from podrun.simulate.engine import Order, VirtualEngine
from podrun.simulate.jobs import JobOutcome, TraceJob
from podrun.simulate.profile import FreeProfile

POLICIES = ("fcfs", "easy", "sjbf", "conservative")
"""Policies of a counted pool."""


class CountedPool:
    """Processors, jobs that run, and jobs that wait in the order in which they came. ``outcomes``: of jobs that have
    started. Jobs must not be larger than the pool."""

    def __init__(self, processors: int, policy: str) -> None:
        choose: dict[str, Callable[[], None]] = {
            "fcfs": self._start_in_order,
            "easy": self._backfill,
            "sjbf": self._backfill_shortest,
            "conservative": self._start_reserved,
        }
        self.engine = VirtualEngine()
        self.processors = self.free = processors
        self.outcomes: list[JobOutcome] = []
        self._plan = choose[policy]
        self._keeps_profile = policy == "conservative"
        self._waiting: list[TraceJob] = []
        self._running: list[tuple[int, int, int]] = []
        """(end by the time asked for, number, size), sorted by the end."""
        self._profile = FreeProfile(processors)
        self._reserved: dict[int, int] = {}
        """Begin of the reservation of each waiting job, by its identity."""
        self.engine.on("submit", self._submit)
        self.engine.on("end", self._end)

    def run(self, jobs: Sequence[TraceJob]) -> list[JobOutcome]:
        """Let the jobs come, start and end; what became of each, in the order of starts."""
        for job in jobs:
            self.engine.at(job.submit, Order.SUBMISSION, "submit", job)
        self.engine.run()
        return self.outcomes

    # --- events ---------------------------------------------------------------------------------------------

    def _submit(self, job: TraceJob) -> None:
        self._waiting.append(job)
        if self._keeps_profile:
            self._reserve(job)
        self._look()

    def _end(self, entry: tuple[int, int, int]) -> None:
        by_request, _, size = entry
        self.free += size
        del self._running[bisect.bisect_left(self._running, entry)]
        if self._keeps_profile and by_request > self.engine.now:
            self._profile.give_back(self.engine.now, by_request, size)
            self._compress()
        self._look()

    def _look(self) -> None:
        if self._waiting:
            self._plan()

    def _start(self, job: TraceJob, jumped: bool) -> None:
        now = self.engine.now
        self.free -= job.size
        entry = (now + job.requested, len(self.outcomes), job.size)
        bisect.insort(self._running, entry)
        end = now + job.run
        self.outcomes.append(JobOutcome(job, now, end, job.size, jumped))
        self.engine.at(end, Order.END, "end", entry)

    # --- policies -------------------------------------------------------------------------------------------

    def _start_in_order(self) -> None:
        """Start from the front until one does not fit."""
        count = 0
        for job in self._waiting:
            if job.size > self.free:
                break
            self._start(job, False)
            count += 1
        del self._waiting[:count]

    def _backfill(self, by: Callable[[TraceJob], int] | None = None) -> None:
        """EASY: `_start_in_order`, then those that do not delay the first of the queue."""
        self._start_in_order()
        if len(self._waiting) < 2 or not self.free:
            return
        shadow, extra = self._reservation(self._waiting[0])
        others = self._waiting[1:]
        started: set[int] = set()
        now = self.engine.now
        for job in others if by is None else sorted(others, key=by):
            if job.size > self.free:
                continue
            if now + job.requested > shadow:
                if job.size > extra:
                    continue
                extra -= job.size
            self._start(job, True)
            started.add(id(job))
            if not self.free:
                break
        if started:
            self._waiting = [job for job in self._waiting if id(job) not in started]

    def _backfill_shortest(self) -> None:
        self._backfill(attrgetter("requested"))

    def _reservation(self, job: TraceJob) -> tuple[int, int]:
        """When enough processors are free for a job by the times asked for, and how many more there are then."""
        free, begin = self.free, self.engine.now
        for end, _, size in self._running:
            if free >= job.size and end > begin:
                break
            free, begin = free + size, end
        return begin, free - job.size

    # --- conservative ---------------------------------------------------------------------------------------

    def _reserve(self, job: TraceJob) -> None:
        begin = self._profile.earliest(self.engine.now, job.requested, job.size)
        self._profile.take(begin, begin + job.requested, job.size)
        self._reserved[id(job)] = begin

    def _compress(self) -> None:
        """Give everyone in the queue, in its order, the earliest begin after something ended early."""
        for job in self._waiting:
            begin = self._reserved[id(job)]
            self._profile.give_back(begin, begin + job.requested, job.size)
            self._reserve(job)

    def _start_reserved(self) -> None:
        now = self.engine.now
        self._profile.forget_before(now)
        ready = [job for job in self._waiting if self._reserved[id(job)] <= now and job.size <= self.free]
        if not ready:
            return
        started = set(map(id, ready))
        waits = False
        for job in self._waiting:
            if id(job) in started:
                del self._reserved[id(job)]
                self._start(job, waits)
            else:
                waits = True
        self._waiting = [job for job in self._waiting if id(job) not in started]
