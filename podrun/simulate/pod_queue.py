"""podrun's own allocator and queue, driven by the jobs of a log in virtual time.

The allocator is the one of the partition service, event by event: a job is a request that waits in its queue, its
partition is provisioned, the job runs, the partition is removed. Sizes round up to powers of two, as partitions are.
Machines answer after the times of `MachineTimes`. The request's time limit is what the job asked for, so that the queue
lets others pass as it does in service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from podrun.core.cluster import Cluster
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.partition.state import events as ev
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.candidates import largest_possible
from podrun.partition.state.capture import CapturedPod
from podrun.partition.state.values import PartitionState, Requirements
from podrun.simulate.captured_start import (
    JOB_PREFIX,
    allocator_of,
    job_of_partition,
    job_of_request,
    planned_moments,
)
from podrun.simulate.engine import SECOND, Order, VirtualEngine, nanoseconds
from podrun.simulate.jobs import JobOutcome, TraceJob
from podrun.simulate.streams import RandomStreams


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """Seconds that machines take: until a new partition is active, until its IPUs are given back."""

    provision_s: float = 0.0
    release_s: float = 0.0


class PodQueue:
    """A virtual POD whose allocator serves jobs. ``outcomes``: of jobs that have started."""

    def __init__(
        self,
        pod: Cluster,
        *,
        seed: int = 1,
        times: MachineTimes = MachineTimes(),
        start: CapturedPod | None = None,
    ) -> None:
        self.pod, self.times = pod, times
        self.engine = VirtualEngine()
        self.streams = RandomStreams(seed)
        self.allocator = Allocator(pod) if start is None else allocator_of(start)
        self.outcomes: list[JobOutcome] = []
        self._jobs: dict[str, TraceJob] = {}
        self._waiting: dict[str, None] = {}
        self._ended: set[str] = set()
        self._free = pod.ipu_count - int(self.allocator.table.taken.sum())
        self._free_time = self._broken_time = 0.0
        self._looked = 0
        self._largest = -1
        self.engine.on("submit", self._submit)
        self.engine.on("machines", self._machines)
        self.engine.on("end", self._end)
        self.engine.on("tick", self._tick)
        if start is not None:
            self._go_on()

    def run(self, jobs: Sequence[TraceJob]) -> list[JobOutcome]:
        """Let the jobs come, start and end; what became of each, in the order of starts. Raises UsageError for a job
        that can never run."""
        for number, job in enumerate(jobs):
            self._jobs[f"{JOB_PREFIX}{number}"] = job
            self.engine.at(job.submit, Order.SUBMISSION, "submit", f"{JOB_PREFIX}{number}")
        self.engine.run()
        return self.outcomes

    def figures(self) -> dict[str, Any]:
        """What only a POD has. Fragmentation: 1 - the largest partition possible / free IPUs, over time while IPUs are
        free."""
        broken = self._broken_time / self._free_time if self._free_time else 0.0
        figures = {"mean_fragmentation": broken, "allocator_events": self.engine.handled}
        if self._waiting:
            figures["never_started"] = len(self._waiting)
        return figures

    # --- the start from a captured POD ------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Go on with the partitions, the requests and the reservations of a captured POD."""
        for entry in sorted(self.allocator.queue.values(), key=lambda entry: entry.rank):
            self._jobs[entry.needs.name] = job_of_request(entry)
            self._waiting[entry.needs.name] = None
        for partition in self.allocator.partitions.values():
            self._jobs.setdefault(partition.name, job_of_partition(partition))
            if partition.state is PartitionState.ACTIVE:
                if partition.ends:
                    self.engine.at(nanoseconds(partition.ends), Order.END, "end", partition.name)
            elif partition.state is not PartitionState.ERROR:
                self.engine.at(0, Order.END, "machines", [partition.name, partition.operation])
        for moment in planned_moments(self.allocator):
            self.engine.at(nanoseconds(moment), Order.PLAN, "tick")

    def _tick(self, _: object) -> None:
        self._decide(ev.Tick(self.engine.now / SECOND))

    # --- events ---------------------------------------------------------------------------------------------

    def _decide(self, event: ev.Event) -> None:
        self._account()
        self.allocator.now = self.engine.now / SECOND
        for instruction in self.allocator.handle(event):
            self._carry_out(instruction)
        self._largest = -1

    def _carry_out(self, instruction: ev.MachineOrder) -> None:
        match instruction:
            case ev.ProvisionMachines(partition, operation):
                self._free -= self.allocator.partitions[partition].size
                delay = self.times.provision_s
            case ev.ReleaseMachines(partition, operation):
                delay = self.times.release_s
                self._ended.add(partition)
            case _:
                return
        self.engine.after(nanoseconds(delay), Order.END, "machines", [partition, operation])

    def _submit(self, name: str) -> None:
        job = self._jobs[name]
        size = 1 << (job.size - 1).bit_length()
        if size > self.pod.ipu_count:
            raise UsageError(
                f"job {job.name} (line {job.line}) needs a partition of {size} IPUs, more than {self.pod.name} has",
                hint="Use a larger POD: --pod pod256",
            )
        domain = self.pod.topology.ild_ipus
        needs = Requirements(
            name, size, num_gcds=max(1, size // domain), limit_s=job.requested / SECOND, owner=0
        )
        self._waiting[name] = None
        self._decide(ev.Enqueue(needs, 0, self.engine.now / SECOND))

    def _machines(self, data: Sequence[Any]) -> None:
        name, operation = str(data[0]), int(data[1])
        partition = self.allocator.partitions[name]
        if partition.operation != operation:
            return  # It was overtaken.
        removing = partition.state is PartitionState.REMOVING
        if removing:
            self._free += partition.size
        self._decide(ev.OperationSucceeded(name, operation))
        if not removing:
            self._begin(name)

    def _begin(self, name: str) -> None:
        job, now = self._jobs[name], self.engine.now
        size = self.allocator.partitions[name].size
        if name not in self._waiting:  # It was there before the simulation began.
            if job.run:
                self.engine.after(job.run, Order.END, "end", name)
            return
        jumped = next(iter(self._waiting)) != name
        del self._waiting[name]
        self.outcomes.append(JobOutcome(job, now, now + job.run, size, jumped))
        if job.run:
            self.engine.after(job.run, Order.END, "end", name)

    def _end(self, name: str) -> None:
        if name not in self._ended:
            self._decide(ev.RemovePartition(name))

    def _account(self) -> None:
        """Add the time since the last look to what is free and what of it no partition could have."""
        spent = (self.engine.now - self._looked) / SECOND
        self._looked = self.engine.now
        if spent and self._free:
            if self._largest < 0:
                self._largest = largest_possible(self.allocator)
            self._free_time += spent * self._free
            self._broken_time += spent * (self._free - min(self._largest, self._free))
