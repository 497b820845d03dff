"""Logs of GPU clusters: Philly, Helios, Acme, Alibaba's PAI and its openb pods.

None has a requested time: the run counts. Philly (``cluster_job_log``): a JSON list of jobs with attempts; the GPUs are
those of an attempt, the run is the sum of the attempts. Helios and Acme: one row for each job; jobs without GPUs are
left out. Alibaba gpu-v2020: ``task`` rows, or openb's pods; GPUs are shares and round up to whole ones, because IPUs
are not shared.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrun.core.errors import ConfigError
from podrun.simulate.traces.lines import (
    BrokenLineError,
    JobLog,
    job_of,
    read_moment,
    read_number,
    required_field,
    spent,
    table_rows,
)

ClusterRow = tuple[str, float | None, float | None, float, str, str]
"""Name, submitted, run, GPUs, user, state."""


def read_philly(trace: JobLog, text: str) -> None:
    """The jobs of Philly's ``cluster_job_log``."""
    try:
        jobs = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{trace.path} is no JSON: {error}", hint="Philly's log is one JSON list."
        ) from None
    if not isinstance(jobs, list):
        raise ConfigError(f"{trace.path} is no list of jobs", hint="Philly's log is one JSON list.")
    for number_, job in enumerate(jobs, 1):
        _add(trace, number_, functools.partial(_philly_job, job))


def _philly_job(job: object) -> ClusterRow:
    if not isinstance(job, dict):
        raise BrokenLineError("it is no job")
    attempts = job.get("attempts") or []
    run, gpus = 0.0, 0
    for attempt in attempts:
        start, end = (read_moment(str(attempt.get(name)), name) for name in ("start_time", "end_time"))
        run += spent(start, end) or 0.0
        gpus = max(gpus, sum(len(part.get("gpus", ())) for part in attempt.get("detail") or ()))
    submitted = read_moment(str(job.get("submitted_time")), "submitted_time")
    return (
        str(job.get("jobid", "")),
        submitted,
        run,
        gpus,
        str(job.get("user", "")),
        str(job.get("status", "")),
    )


def read_helios(trace: JobLog, text: str) -> None:
    """The jobs of Helios's ``cluster_log.csv``."""
    _rows(trace, text, _gpu_row)


def read_acme(trace: JobLog, text: str) -> None:
    """A job table of Acme (Seren, Kalos). The run is from start to end: Kalos' ``duration`` begins at the request."""
    _rows(trace, text, _gpu_row)


def _gpu_row(row: Mapping[str, str]) -> ClusterRow:
    submitted = read_moment(required_field(row, "submit_time"), "submit_time")
    start, end = (
        read_moment(row.get("start_time", ""), "start_time"),
        read_moment(row.get("end_time", ""), "end_time"),
    )
    run = spent(start, end)
    if start is not None and submitted is not None and start < submitted:
        raise BrokenLineError(
            f"the clock runs backwards: it starts {submitted - start:g} s before its request"
        )
    gpus = read_number(row.get("gpu_num", "") or "0", "gpu_num")
    return required_field(row, "job_id"), submitted, run, gpus, row.get("user", ""), row.get("state", "")


PAI_COLUMNS = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type"


def read_pai(trace: JobLog, text: str) -> None:
    """The task table of Alibaba's gpu-v2020, with or without its header."""
    if not text.startswith("job_name"):
        text = f"{PAI_COLUMNS}\n{text}"
    _rows(trace, text, _pai_row)


def _pai_row(row: Mapping[str, str]) -> ClusterRow:
    start, end = (
        read_moment(row.get("start_time", ""), "start_time"),
        read_moment(row.get("end_time", ""), "end_time"),
    )
    instances = read_number(row.get("inst_num", "") or "1", "inst_num")
    share = read_number(row.get("plan_gpu", "") or "0", "plan_gpu") / 100
    name = f"{required_field(row, 'job_name')}/{row.get('task_name', '')}"
    return name, start, spent(start, end), instances * share, row.get("user", ""), row.get("status", "")


def read_openb(trace: JobLog, text: str) -> None:
    """The pod table of Alibaba's openb (v2023)."""
    _rows(trace, text, _openb_row)


def _openb_row(row: Mapping[str, str]) -> ClusterRow:
    created = read_moment(required_field(row, "creation_time"), "creation_time")
    begun = read_moment(row.get("scheduled_time", ""), "scheduled_time")
    end = read_moment(row.get("deletion_time", ""), "deletion_time")
    run = spent(begun if begun is not None else created, end)
    gpus = read_number(row.get("num_gpu", "") or "0", "num_gpu")
    return required_field(row, "name"), created, run, gpus, row.get("qos", ""), row.get("pod_phase", "")


def _rows(trace: JobLog, text: str, read: Callable[[Mapping[str, str]], ClusterRow]) -> None:
    for line, row in table_rows(text):
        _add(trace, line, functools.partial(read, row))


def _add(trace: JobLog, line: int, read: Callable[[], ClusterRow]) -> None:
    """Add what a row says, or note why not."""
    try:
        name, submitted, run, gpus, user, state = read()
    except BrokenLineError as error:
        return trace.break_line(line, str(error))
    except (AttributeError, TypeError):
        return trace.break_line(line, "its fields are not those of the format")
    if submitted is None:
        return trace.break_line(line, "there is no time of the request")
    if gpus <= 0:
        return trace.drop("asked for no GPU")
    if not run:
        return trace.drop("never ran")
    times = (submitted, run, run)
    trace.jobs.append(job_of(name, times, math.ceil(gpus), user=user, status=state, line=line))
    return None


def summary_of(trace: JobLog) -> dict[str, Any]:
    """Figures as papers give them for such logs: jobs, mean run, mean GPUs, and shares of the states by count and by
    GPU time."""
    runs = [job.run / 1e9 for job in trace.jobs]
    work = [run * job.size for run, job in zip(runs, trace.jobs, strict=True)]
    return {
        "jobs": len(runs),
        "mean_run_s": sum(runs) / max(len(runs), 1),
        "mean_size": sum(job.size for job in trace.jobs) / max(len(runs), 1),
        "share_by_count": _shares(trace, [1.0] * len(runs)),
        "share_by_time": _shares(trace, work),
    }


def _shares(trace: JobLog, weights: Sequence[float]) -> dict[str, float]:
    total = sum(weights) or 1.0
    shares: dict[str, float] = {}
    for job, weight in zip(trace.jobs, weights, strict=True):
        shares[job.status] = shares.get(job.status, 0.0) + weight / total
    return dict(sorted(shares.items()))
