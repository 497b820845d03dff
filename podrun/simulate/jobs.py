"""A job of a log: when somebody asks for how many processors, and how long they work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.simulate.engine import SECOND


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job as a log records it. Times in nanoseconds; ``submit`` from an origin of the log's own. ``requested``: the
    time that was asked for, at which the job is ended. ``line``: where it stands in the log, from 1."""

    name: str
    submit: int
    run: int
    requested: int
    size: int
    user: str = ""
    status: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of a job. Times in nanoseconds. ``size``: the processors it held, which may be more than it asked
    for. ``jumped``: it started before a job that came earlier."""

    job: TraceJob
    start: int
    end: int
    size: int
    jumped: bool = False

    @property
    def wait(self) -> int:
        """Time from the request to the start."""
        return self.start - self.job.submit


def arrivals_scaled(jobs: Sequence[TraceJob], scale: float) -> list[TraceJob]:
    """The jobs with their arrivals drawn together: at 0.6 they come in 60 % of the time, in whole seconds from the
    first one."""
    if scale == 1.0 or not jobs:
        return list(jobs)
    first = min(job.submit for job in jobs)
    return [replace(job, submit=first + int((job.submit - first) / SECOND * scale) * SECOND) for job in jobs]


def clairvoyant(jobs: Sequence[TraceJob]) -> list[TraceJob]:
    """The jobs as if everybody knew how long theirs take."""
    return [replace(job, requested=job.run) for job in jobs]


def moments(jobs: Sequence[TraceJob]) -> dict[str, float]:
    """The moments of a log, by the names of `TraceGenerator.expected`."""
    submits = np.array([job.submit for job in jobs]) / SECOND
    runs = np.array([job.run for job in jobs]) / SECOND
    return {
        "mean_gap_s": float(np.diff(submits).mean()) if len(jobs) > 1 else 0.0,
        "mean_size": float(np.mean([job.size for job in jobs])),
        "median_run_s": float(np.median(runs)),
        "mean_run_s": float(runs.mean()),
    }


def as_swf(jobs: Sequence[TraceJob]) -> str:
    """A log in the Standard Workload Format, in whole seconds."""
    users = {user: number for number, user in enumerate(dict.fromkeys(job.user for job in jobs), 1)}
    lines = ["; Version: 2.2", "; Computer: drawn by podrun simulate", f"; MaxJobs: {len(jobs)}"]
    lines += [
        f"{number} {job.submit // SECOND} -1 {-(-job.run // SECOND)} {job.size} -1 -1 {job.size} "
        f"{-(-job.requested // SECOND)} -1 1 {users[job.user]} -1 -1 -1 -1 -1 -1"
        for number, job in enumerate(jobs, 1)
    ]
    return "\n".join(lines) + "\n"
