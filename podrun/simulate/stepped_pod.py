"""A virtual POD for schedulers of others: the partition service on machines that answer at once, on a stepped clock.

A scheduler makes and removes partitions over the same gRPC API as on a POD, and calls `Advance` when it has decided:
jobs whose partitions are active start, virtual time passes until the next job comes or ends, and the reply says which.
Nothing waits for a clock. What the scheduler did is kept: `podrun.simulate.conformance` judges it.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any, cast

from podrun.core.cluster import Cluster
from podrun.core.errors import ExhaustedError, ServiceError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import MachineReport
from podrun.partition.machines.pool import Control, MachinePool
from podrun.partition.server.service import Service
from podrun.partition.state.records import ITSELF, Asker
from podrun.partition.state.store import Store
from podrun.partition.state.values import PartitionState, Requirements
from podrun.simulate.engine import SECOND, nanoseconds
from podrun.simulate.jobs import JobOutcome, TraceJob
from podrun.simulate.stepped_server import add_clock, partition_size

EPOCH_S = 1_000_000_000.0
"""The service's time at virtual time 0, in seconds since 1970."""
SETTLE_S = 60.0
"""Longest time that the service's threads may take for the partitions of one step."""


class _ReadyMachine:
    """A machine that does what it is told at once."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values, **options: None

    def telemetry(self, timeout: float | None = None) -> MachineReport:
        """A report of nothing."""
        return MachineReport("")


class _VirtualMachines(MachinePool):
    """Machines without processes."""

    def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        return [("127.0.0.1:1", None) for _ in agents]

    def _kill(self, machine: object) -> None:
        """There is no process."""

    def _connect(self, endpoint: str) -> Control:
        return cast("Control", _ReadyMachine())

    def _watch(self, machine: object) -> Callable[[], None]:
        return lambda: None


class _WatchedService(Service):
    """Notes requests for IPUs that others hold."""

    refused: list[str]

    def create(
        self, needs: Requirements, *, wait: bool = False, priority: int = 0, asker: Asker = ITSELF
    ) -> None:
        """As the service; a refusal for want of IPUs is noted."""
        try:
            super().create(needs, wait=wait, priority=priority, asker=asker)
        except ExhaustedError:
            self.refused.append(needs.name)
            raise


@dataclass(frozen=True, slots=True)
class Advanced:
    """What happened in a simulated POD up to ``now`` nanoseconds of virtual time."""

    now: int
    submitted: tuple[TraceJob, ...]
    ended: tuple[str, ...]
    done: bool
    waiting: int


@dataclass(slots=True)
class SchedulerRecord:
    """What a scheduler did. ``outcomes``: of jobs that started, in the order of starts; the others by job."""

    outcomes: list[JobOutcome] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    too_small: set[str] = field(default_factory=set)
    taken_away: set[str] = field(default_factory=set)
    twice: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    steps: int = 0


class SteppedPod:
    """A virtual POD and the jobs that come to it."""

    def __init__(self, pod: Cluster, jobs: Sequence[TraceJob]) -> None:
        self.pod, self.jobs = (
            pod,
            {f"job{number}": replace(job, name=f"job{number}") for number, job in enumerate(jobs)},
        )
        self.record = SchedulerRecord()
        self.done, self.last_call = threading.Event(), time.monotonic()
        self._lock = threading.Lock()
        self._now = 0
        self._to_come = sorted(self.jobs, key=lambda name: self.jobs[name].submit, reverse=True)
        first = min((job.submit for job in jobs), default=0)
        self._first = first
        self._waiting: dict[str, None] = {}
        self._ends: list[tuple[int, str]] = []
        self._running: dict[str, tuple[object, ...]] = {}
        self._ended_lives: dict[str, tuple[object, ...]] = {}
        for job in jobs:
            if partition_size(job) > pod.ipu_count:
                raise UsageError(
                    f"job {job.name} (line {job.line}) needs {partition_size(job)} IPUs, more than {pod.name} has",
                    hint="Use a larger POD: --pod pod256",
                )
        self._service = _WatchedService(
            pod, Store(None, pod.name), _VirtualMachines(pod), clock=lambda: EPOCH_S + self._now / SECOND
        )
        self._service.refused = self.record.refused

    def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port."""
        self._service.more_servicers = (lambda server: add_clock(self, server),)
        return self._service.start(host, port)

    def stop(self) -> None:
        """Stop listening; calls under way are ended."""
        self._service.stop(grace=0)

    def advance(self, at_most: int = 0) -> Advanced:
        """Start what can start, let time pass, and say what happened. Raises ServiceError if the service's threads do
        not come to an end."""
        with self._lock:
            self.last_call = time.monotonic()
            self.record.steps += 1
            self._settle()
            self._begin_jobs()
            self._now = self._next_time(at_most)
            self._service.look_around()
            self._settle()
            ended = tuple(self._end_jobs())
            submitted = tuple(self._submit_jobs())
            over = not (self._to_come or self._ends or submitted or ended) and not at_most
            if over:
                self.record.kept |= set(self._service._allocator.partitions) & self.record.ended
                self.done.set()
            return Advanced(self._now, submitted, ended, over, len(self._waiting))

    def _settle(self) -> None:
        if not self._service.wait_idle(SETTLE_S):
            raise ServiceError(
                f"partitions of the virtual POD are not ready after {SETTLE_S:g} s",
                hint="Is the host overloaded?",
            )

    def _next_time(self, at_most: int) -> int:
        """When something happens next; partitions over their time limit count."""
        times = [self.jobs[self._to_come[-1]].submit - self._first] if self._to_come else []
        times += [self._ends[0][0]] if self._ends else []
        times += [
            nanoseconds(partition.ends - EPOCH_S)
            for name, partition in self._service._allocator.partitions.items()
            if partition.ends and name in self._running
        ]
        times += [self._now + at_most] if at_most else []
        return max(self._now, min(times, default=self._now))

    def _begin_jobs(self) -> None:
        """Jobs start whose partitions are active; jobs end whose partitions are gone."""
        partitions = self._service._allocator.partitions
        for name in [name for name in self._running if name not in partitions]:
            self.record.taken_away.add(name)
            del self._running[name]
        for name, partition in partitions.items():
            if partition.state is not PartitionState.ACTIVE:
                continue
            job, life = self.jobs.get(name), (partition.created, partition.slices)
            if job is None or name in self._running:
                continue
            if name not in self._waiting:
                if name in self.record.ended and self._ended_lives.get(name) != life:
                    self.record.twice.add(name)
                continue
            if partition.size < job.size:
                self.record.too_small.add(name)
            jumped = next(iter(self._waiting)) != name
            del self._waiting[name]
            self._running[name] = life
            shifted = JobOutcome(
                job, self._now + self._first, self._now + self._first + job.run, partition.size, jumped
            )
            self.record.outcomes.append(shifted)
            heapq.heappush(self._ends, (self._now + job.run, name))
        self._note_shared()

    def _note_shared(self) -> None:
        """IPUs that two running jobs have; the allocator prevents it."""
        holders: dict[tuple[str, int], str] = {}
        for name in self._running:
            for part in self._service._allocator.partitions[name].slices:
                for slot in range(part.first_slot, part.first_slot + part.count):
                    other = holders.setdefault((part.agent_id, slot), name)
                    if other != name:
                        self.record.shared |= {other, name}

    def _end_jobs(self) -> list[str]:
        ended = []
        while self._ends and self._ends[0][0] <= self._now:
            name = heapq.heappop(self._ends)[1]
            if name not in self._running:
                continue  # Its partition was taken away.
            if name not in self._service._allocator.partitions:
                self.record.taken_away.add(name)
            self._ended_lives[name] = self._running.pop(name)
            self.record.ended.add(name)
            ended.append(name)
        return ended

    def _submit_jobs(self) -> list[TraceJob]:
        submitted = []
        while self._to_come and self.jobs[self._to_come[-1]].submit - self._first <= self._now:
            name = self._to_come.pop()
            self._waiting[name] = None
            submitted.append(self._named(name))
        return submitted

    def _named(self, name: str) -> TraceJob:
        job = self.jobs[name]
        return replace(job, submit=job.submit - self._first)

    @property
    def waiting(self) -> list[str]:
        """Jobs that have come and not started."""
        return list(self._waiting)


def served_outcomes(pod: Cluster, jobs: Sequence[TraceJob], port: int, patience_s: float) -> list[JobOutcome]:
    """What becomes of jobs under a scheduler that comes to a port and steps the clock. Raises ServiceError for one that
    is silent for too long."""
    virtual = SteppedPod(pod, jobs)
    bound = virtual.start(port=port)
    print(f"podrun simulate: {pod.name} is served at PODRUN_VIRTUAL_POD=127.0.0.1:{bound}", flush=True)
    try:
        while not virtual.done.wait(0.2):
            if virtual.record.steps and time.monotonic() - virtual.last_call > patience_s:
                raise ServiceError(
                    f"the scheduler did not call Advance for {patience_s:g} s; {len(virtual.waiting)} jobs wait, "
                    f"{len(virtual.record.outcomes)} of {len(jobs)} have started",
                    hint="--patience SECONDS, or podrun simulate --conformance COMMAND says what it breaks.",
                )
        time.sleep(0.2)  # The last answer is on its way.
        return virtual.record.outcomes
    finally:
        virtual.stop()
