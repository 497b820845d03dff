"""A captured POD as the start of a simulation: its state with time 0 at the capture, its requests as jobs.

A partition or a request with a time limit uses all of it: how long its program really runs is not known. Without a
limit it stays to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from podrun.core.errors import UsageError
from podrun.core.identity import user_name
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.capture import CapturedPod
from podrun.partition.state.records import Partition, Queued
from podrun.partition.state.values import NO_USER
from podrun.simulate.engine import nanoseconds
from podrun.simulate.jobs import TraceJob

JOB_PREFIX = "job."
"""Begins the names of the partitions of a log's jobs."""


def allocator_of(start: CapturedPod) -> Allocator:
    """The allocator of a captured POD; time 0 is the capture."""
    state = start.since_capture().state
    return Allocator(
        start.pod,
        allocations=state.allocations,
        partitions=state.partitions,
        lost=state.lost,
        plans=state.plans,
    )


def planned_moments(allocator: Allocator) -> list[float]:
    """When the allocator must look at its plans: now, and when reservations begin and end or agents are to be empty."""
    moments = {0.0}
    for reservation in allocator.reservations.values():
        moments |= {reservation.start, reservation.end}
    moments |= {entry.deadline for entry in allocator.maintenance.values()}
    return sorted(moment for moment in moments if moment >= 0)


def job_of_request(entry: Queued) -> TraceJob:
    """A request that waits, as a job that came before time 0."""
    limit = nanoseconds(entry.needs.limit_s)
    return TraceJob(
        entry.needs.name, nanoseconds(entry.since), limit, limit, entry.needs.size, _user(entry.needs.owner)
    )


def job_of_partition(partition: Partition) -> TraceJob:
    """A partition that is there already, as a job."""
    limit = nanoseconds(partition.limit_s)
    return TraceJob(
        partition.name, nanoseconds(partition.created), limit, limit, partition.size, _user(partition.owner)
    )


def _user(owner: int) -> str:
    return "" if owner == NO_USER else user_name(owner)


def jobs_since_capture(jobs: Sequence[TraceJob], start: CapturedPod) -> list[TraceJob]:
    """The jobs of a log, the first of which comes at the capture. Raises UsageError for names that are taken."""
    taken = [p.name for p in start.state.partitions] + [e.needs.name for e in start.state.plans.queue]
    for name in taken:
        if name.startswith(JOB_PREFIX):
            raise UsageError(
                f"partition {name} of the captured POD has a name of simulated jobs",
                hint=f"Not {JOB_PREFIX}N.",
            )
    first = min((job.submit for job in jobs), default=0)
    return [replace(job, submit=job.submit - first) for job in jobs]
