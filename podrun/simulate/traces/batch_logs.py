"""Logs of batch systems: the Standard Workload Format, Slurm's sacct, and plain tables.

SWF: 18 columns, -1 for unknown (Feitelson's Parallel Workloads Archive). The size is what was requested, else what was
allocated; without a requested time the run itself counts. Column 3 is the wait on the real system and no input.
sacct: ``-X -P --format=JobIDRaw,User,Submit,Eligible,Start,End,Timelimit,State,NNodes,AllocTRES,...``; who waits for
nothing but the queue does so from Eligible on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from podrun.simulate.traces.lines import (
    BrokenLineError,
    JobLog,
    job_of,
    read_duration,
    read_integer,
    read_moment,
    read_number,
    required_field,
    spent,
    table_rows,
)

SWF_COLUMNS = 18


def read_swf(trace: JobLog, text: str) -> None:
    """The jobs of a log in the Standard Workload Format."""
    last = float("-inf")
    for line, row in enumerate(text.splitlines(), 1):
        if row.startswith(";"):
            name, colon, value = row[1:].partition(":")
            if colon:
                trace.header.setdefault(name.strip(), value.strip())
            continue
        fields = row.split()
        if not fields:
            continue
        try:
            last = _swf_job(trace, fields, line, last)
        except BrokenLineError as error:
            trace.break_line(line, str(error))


def _swf_job(trace: JobLog, fields: list[str], line: int, last: float) -> float:
    """Add the job of a line; returns when it was submitted."""
    if len(fields) != SWF_COLUMNS:
        raise BrokenLineError(f"it has {len(fields)} columns, not {SWF_COLUMNS}")
    submit, run = read_number(fields[1], "the submit time"), read_number(fields[3], "the run time")
    allocated = read_integer(fields[4], "the number of allocated processors")
    wanted = read_integer(fields[7], "the number of requested processors")
    requested = read_number(fields[8], "the requested time")
    if submit < last:
        raise BrokenLineError(f"the clock runs backwards: submitted at {submit:g} s, after {last:g} s")
    size = wanted if wanted > 0 else allocated
    requested = run if requested == -1 else requested
    if run <= 0:
        trace.drop("never ran")
    elif requested <= 0:
        trace.drop("asked for no time")
    elif size <= 0:
        trace.drop("asked for no processor")
    else:
        times = (submit, run, requested)
        trace.jobs.append(job_of(fields[0], times, size, user=fields[11], status=fields[10], line=line))
    return submit


_GPUS = re.compile(r"gres/gpu(?::[\w.-]+)?=(\d+)")


def read_sacct(trace: JobLog, text: str) -> None:
    """What ``sacct -P`` prints. Sizes are GPUs if any job has some, else nodes."""
    rows = list(table_rows(text, "|"))
    with_gpus = any("gres/gpu" in f"{row.get('AllocTRES')}{row.get('ReqTRES')}" for _, row in rows)
    for line, row in rows:
        try:
            _sacct_job(trace, row, line, with_gpus)
        except BrokenLineError as error:
            trace.break_line(line, str(error))


def _sacct_job(trace: JobLog, row: Mapping[str, str], line: int, with_gpus: bool) -> None:
    name, state = required_field(row, "JobIDRaw", "JobID"), row.get("State", "").split(" ")[0]
    submit = read_moment(row.get("Eligible", ""), "Eligible") or read_moment(
        required_field(row, "Submit"), "Submit"
    )
    start, end = read_moment(row.get("Start", ""), "Start"), read_moment(row.get("End", ""), "End")
    run = spent(start, end)
    if submit is None:
        raise BrokenLineError("there is no Submit or Eligible time")
    if start is not None and start < submit:
        raise BrokenLineError(
            f"the clock runs backwards: it starts {submit - start:g} s before it is eligible"
        )
    if not run:
        return trace.drop("never ran")
    parts = _GPUS.findall(row.get("AllocTRES", "") or row.get("ReqTRES", ""))
    size = sum(map(int, parts)) if with_gpus else read_integer(row.get("NNodes", "") or "1", "NNodes")
    if size <= 0:
        return trace.drop("asked for no processor")
    limit = read_duration(row.get("Timelimit", ""), "Timelimit") or run
    trace.jobs.append(
        job_of(name, (submit, run, limit), size, user=row.get("User", ""), status=state, line=line)
    )
    return None


PLAIN_COLUMNS = ("submit_s", "run_s", "size")
"""Columns that a plain table must have; ``requested_s``, ``user``, ``id`` and ``status`` may be there."""


def read_plain(trace: JobLog, text: str) -> None:
    """A table with the columns ``submit_s, run_s, size`` and perhaps ``requested_s, user, id, status``."""
    for line, row in table_rows(text):
        try:
            times = [read_number(required_field(row, name), name) for name in PLAIN_COLUMNS[:2]]
            requested = row.get("requested_s", "").strip()
            size = read_integer(required_field(row, "size"), "size")
            if times[1] < 0:
                raise BrokenLineError(f"the clock runs backwards: run_s is {times[1]:g}")
            if times[1] == 0 or size <= 0:
                trace.drop("never ran" if times[1] == 0 else "asked for no processor")
                continue
            limit = read_number(requested, "requested_s") if requested else times[1]
            if limit <= 0:
                trace.drop("asked for no time")
                continue
        except BrokenLineError as error:
            trace.break_line(line, str(error))
            continue
        status = row.get("status", "")
        name = row.get("id", "") or str(line)
        whole = (times[0], times[1], limit)
        trace.jobs.append(job_of(name, whole, size, user=row.get("user", ""), status=status, line=line))
