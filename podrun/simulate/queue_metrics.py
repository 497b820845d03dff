"""What a queue did to its jobs: waiting, slowdown, utilisation, and how fairly.

Bounded slowdown of a job: max(1, (wait + run) / max(run, 10 s)); averaged over jobs, and weighted by processor-seconds.
Fairness: Jain's index of the users' mean bounded slowdowns, 1 if all are equal, 1/n if one of n has all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podrun.core.quick_dataclass import dataclass
from podrun.simulate.engine import SECOND
from podrun.simulate.jobs import JobOutcome

BOUND_S = 10.0
"""Shorter runs count as this long in the bounded slowdown."""
SHOWN_USERS = 50

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """Figures of one simulation; seconds. ``utilisation``: of processor-seconds between the first arrival and the last
    end, those in which jobs ran, by what they asked for; ``occupancy``: by what they held, which is more where sizes
    are rounded up."""

    jobs: int
    mean_wait_s: float
    median_wait_s: float
    p95_wait_s: float
    p99_wait_s: float
    max_wait_s: float
    mean_bounded_slowdown: float
    median_bounded_slowdown: float
    p95_bounded_slowdown: float
    weighted_bounded_slowdown: float
    mean_flow_s: float
    mean_run_s: float
    makespan_s: float
    utilisation: float
    occupancy: float
    backfilled: int
    fairness_jain: float
    users: int

    def as_json(self) -> dict[str, Any]:
        """The figures by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


def bounded_slowdowns(outcomes: Sequence[JobOutcome]) -> Floats:
    """The bounded slowdown of each job."""
    wait, run = _seconds(outcomes)
    return np.maximum(1.0, (wait + run) / np.maximum(run, BOUND_S))


def queue_figures(outcomes: Sequence[JobOutcome], processors: int) -> QueueFigures:
    """The figures of jobs that have all ended; zeros without jobs."""
    if not outcomes:
        return QueueFigures(**{entry.name: 0 for entry in fields(QueueFigures)})
    wait, run = _seconds(outcomes)
    slowdown = bounded_slowdowns(outcomes)
    asked = np.array([outcome.job.size for outcome in outcomes], np.float64)
    held = np.array([outcome.size for outcome in outcomes], np.float64)
    first = min(outcome.job.submit for outcome in outcomes)
    span = (max(outcome.end for outcome in outcomes) - first) / SECOND
    by_user = users_of(outcomes)
    means = np.array([entry["mean_bounded_slowdown"] for entry in by_user.values()])
    room = max(processors * span, 1e-9)
    return QueueFigures(
        jobs=len(outcomes),
        mean_wait_s=float(wait.mean()),
        median_wait_s=float(np.median(wait)),
        p95_wait_s=float(np.percentile(wait, 95)),
        p99_wait_s=float(np.percentile(wait, 99)),
        max_wait_s=float(wait.max()),
        mean_bounded_slowdown=float(slowdown.mean()),
        median_bounded_slowdown=float(np.median(slowdown)),
        p95_bounded_slowdown=float(np.percentile(slowdown, 95)),
        weighted_bounded_slowdown=float(np.average(slowdown, weights=np.maximum(asked * run, 1e-9))),
        mean_flow_s=float((wait + run).mean()),
        mean_run_s=float(run.mean()),
        makespan_s=span,
        utilisation=float((asked * run).sum()) / room,
        occupancy=float((held * run).sum()) / room,
        backfilled=sum(outcome.jumped for outcome in outcomes),
        fairness_jain=float(means.sum() ** 2 / (len(means) * (means**2).sum())),
        users=len(by_user),
    )


def users_of(outcomes: Sequence[JobOutcome]) -> Mapping[str, dict[str, float]]:
    """Figures of each user: jobs, mean wait, mean bounded slowdown, processor-seconds; the heaviest users first."""
    entries: dict[str, list[int]] = defaultdict(list)
    for index, outcome in enumerate(outcomes):
        entries[outcome.job.user].append(index)
    wait, run = _seconds(outcomes)
    slowdown = bounded_slowdowns(outcomes)
    work = np.array([outcome.job.size for outcome in outcomes], np.float64) * run
    users = {
        user: {
            "jobs": len(indices),
            "mean_wait_s": float(wait[indices].mean()),
            "mean_bounded_slowdown": float(slowdown[indices].mean()),
            "processor_seconds": float(work[indices].sum()),
        }
        for user, indices in entries.items()
    }
    return dict(sorted(users.items(), key=lambda entry: (-entry[1]["processor_seconds"], entry[0])))


def _seconds(outcomes: Sequence[JobOutcome]) -> tuple[Floats, Floats]:
    """Wait and run of each job."""
    wait = np.array([outcome.wait for outcome in outcomes], np.float64) / SECOND
    run = np.array([outcome.end - outcome.start for outcome in outcomes], np.float64) / SECOND
    return wait, run
