"""Sightings arranged for people: rows to sort and filter, rates, what has changed, lines of text. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from podrun.core.ipu_states import IpuErrorState, MachineState
from podrun.core.quick_dataclass import dataclass
from podrun.monitor.live.sighting import IpuSight, JobSight, MachineSight, PodSighting
from podrun.monitor.pod_health import HealthProblem, Severity

BARS = " ▁▂▃▄▅▆▇█"
NARROW = 60
"""Columns below which only the most important cells are shown."""


class SortKey(enum.StrEnum):
    """What machines are sorted by."""

    NAME = "name"
    BUSY = "busy"
    ERRORS = "errors"
    POWER = "power"

    def after(self) -> SortKey:
        """The next one, round and round."""
        order = list(SortKey)
        return order[(order.index(self) + 1) % len(order)]


@dataclass(frozen=True, slots=True)
class PodTotals:
    """Figures of the whole POD. ``busy_percent``: mean of the IPUs that processes hold; None without any."""

    machines: int
    machines_answering: int
    ipus: int
    ipus_held: int
    ipus_in_error: int
    busy_percent: float | None
    power_w: float | None


def totals_of(seen: PodSighting) -> PodTotals:
    """Sums over machines in partitions."""
    machines = [machine for machine in seen.machines if machine.partition]
    ipus = [ipu for machine in machines for ipu in machine.ipus]
    held = [ipu for ipu in ipus if ipu.process]
    busy = [ipu.busy_percent for ipu in held if ipu.busy_percent is not None]
    watts = [ipu.power_w for ipu in ipus if ipu.power_w is not None]
    return PodTotals(
        machines=len(machines),
        machines_answering=sum(machine.state == MachineState.UP for machine in machines),
        ipus=len(ipus),
        ipus_held=len(held),
        ipus_in_error=sum(ipu.error not in ("", IpuErrorState.NOT_READY) for ipu in ipus),
        busy_percent=sum(busy) / len(busy) if busy else None,
        power_w=sum(watts) if watts else None,
    )


def bar(percent: float | None) -> str:
    """One character, as high as the share; a question mark for an unknown one."""
    if percent is None:
        return "?"
    return BARS[min(max(round(percent / 100 * (len(BARS) - 1)), 0), len(BARS) - 1)]


def ipu_cell(ipu: IpuSight) -> str:
    """An IPU in eight columns: ``ERROR``, ``starts``, ``free``, or how busy it is."""
    if ipu.error == IpuErrorState.NOT_READY:
        return "starts"
    if ipu.error:
        return "ERROR"
    if not ipu.process:
        return "free"
    return f"{bar(ipu.busy_percent)} " + ("?" if ipu.busy_percent is None else f"{ipu.busy_percent:.0f}%")


def machine_row(machine: MachineSight) -> tuple[str, ...]:
    """Machine, partition, state, its four IPUs (empty where the partition has none), power, batches."""
    state = machine.state if machine.age_s is None else f"{machine.state} {machine.age_s:.0f}s"
    if machine.health != "up":
        state = f"{state}, {machine.health}"
    cells = {ipu.number: ipu_cell(ipu) for ipu in machine.ipus}
    power = "" if machine.power_w is None else f"{machine.power_w:.0f} W"
    ipus = [cells.get(number, "") for number in range(4)]
    return (machine.agent, machine.partition, state, *ipus, power, str(machine.batches or ""))


def shown_machines(seen: PodSighting, order: SortKey, words: str) -> list[MachineSight]:
    """Machines whose name, partition, state or processes contain each of the words, in an order."""
    wanted = words.lower().split()

    def text(machine: MachineSight) -> str:
        said = [machine.agent, machine.partition, machine.state, machine.health]
        return " ".join([*said, *(f"{ipu.process} {ipu.error}" for ipu in machine.ipus)]).lower()

    kept = [machine for machine in seen.machines if all(word in text(machine) for word in wanted)]
    keys = {
        SortKey.NAME: lambda machine: 0.0,
        SortKey.BUSY: lambda machine: -sum(ipu.busy_percent or 0.0 for ipu in machine.ipus),
        SortKey.ERRORS: lambda machine: (
            -float(sum(bool(ipu.error) for ipu in machine.ipus) + (machine.state != MachineState.UP))
        ),
        SortKey.POWER: lambda machine: -(machine.power_w or 0.0),
    }
    return sorted(kept, key=keys[order])  # Stable: within equal ones the POD's order stays.


def ipu_rows_of(seen: PodSighting, words: str) -> list[dict[str, Any]]:
    """A row for each IPU of the machines that `shown_machines` keeps, as plain data."""
    return [
        {
            "time_s": seen.time_s,
            "agent": one.agent,
            "partition": one.partition,
            "state": one.state,
            "age_s": one.age_s,
        }
        | asdict(ipu)
        for one in shown_machines(seen, SortKey.NAME, words)
        for ipu in one.ipus
    ]


def batch_rates(before: PodSighting | None, after: PodSighting) -> dict[str, float]:
    """Batches a second by partition between two sightings; left out where the count went back (a new job)."""
    if before is None or after.time_s <= before.time_s:
        return {}
    counts = {job.partition: job.batches for job in before.jobs}
    seconds = after.time_s - before.time_s
    return {
        job.partition: (job.batches - counts[job.partition]) / seconds
        for job in after.jobs
        if job.partition in counts and job.batches >= counts[job.partition]
    }


def job_rows(seen: PodSighting, rates: Mapping[str, float]) -> list[tuple[JobSight, tuple[str, ...]]]:
    """Jobs, each with its processes below it, as rows of partition, state, IPUs, batches a second, owner, since. The
    job that each row belongs to is with it."""
    rows: list[tuple[JobSight, tuple[str, ...]]] = []
    for job in seen.jobs:
        rate = f"{rates[job.partition]:.1f}" if job.partition in rates else ""
        since = clock_time(job.since_s) if job.since_s else ""
        rows.append((job, (job.partition, job.state, str(job.ipus), rate, job.owner, since)))
        held = job.processes or ("held by nobody",)
        for place, text in enumerate(held, 1):
            branch = "└" if place == len(held) else "├"
            rows.append((job, (f"{branch} {text}", "", "", "", "", "")))
    return rows


JOB_COLUMNS = ("Partition and processes", "State", "IPUs", "Batches/s", "Owner", "Since")
BETWEEN_COLUMNS = 2
"""Characters around each cell of a table on the screen."""


def fitted_names(rows: Sequence[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Rows of `JOB_COLUMNS` that fit into so many columns: first cells that are too long end in dots."""
    others = (max(len(row[column]) for row in (JOB_COLUMNS, *rows)) for column in range(1, len(JOB_COLUMNS)))
    most = max(width - sum(others) - BETWEEN_COLUMNS * len(JOB_COLUMNS), len(JOB_COLUMNS[0]))
    return [(first if len(first) <= most else f"{first[: most - 3]}...", *rest) for first, *rest in rows]


def changes_between(before: PodSighting | None, after: PodSighting) -> list[str]:
    """What began and ended between two sightings: problems, jobs and states of partitions, in words."""
    old = () if before is None else before.problems
    lines = [f"{problem.severity.value}: {problem_text(problem)}" for problem in _new(old, after.problems)]
    lines += [f"over: {problem_text(problem)}" for problem in _new(after.problems, old)]
    if before is not None:
        states = {job.partition: job.state for job in before.jobs}
        now = {job.partition: job.state for job in after.jobs}
        lines += [f"partition {name} is {state}" for name, state in now.items() if states.get(name) != state]
        lines += [f"partition {name} is removed" for name in states if name not in now]
    stamp = clock_time(after.time_s)
    return [f"{stamp}  {line}" for line in lines]


def _new(old: Sequence[HealthProblem], now: Sequence[HealthProblem]) -> list[HealthProblem]:
    known = {(problem.what, problem.partition, problem.agent, problem.ipus) for problem in old}
    return [one for one in now if (one.what, one.partition, one.agent, one.ipus) not in known]


def problem_text(problem: HealthProblem) -> str:
    """A problem in one line, with what to type."""
    place = " ".join(filter(None, [problem.partition, problem.agent, ",".join(map(str, problem.ipus))]))
    return f"{place}: {problem.what}. {problem.remedy}"


def clock_time(time_s: float) -> str:
    """A Unix time in UTC as ``HH:MM:SS``."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%H:%M:%S")


def headline(seen: PodSighting, width: int) -> str:
    """The POD in one line; on narrow terminals without what matters least, and always with its health."""
    totals = totals_of(seen)
    broken = sum(problem.severity is Severity.BROKEN for problem in seen.problems)
    busy = "" if totals.busy_percent is None else f"  {totals.busy_percent:.0f}% busy"
    health = f"  {broken} broken" if broken else "  healthy"
    power = "" if totals.power_w is None else f"  {totals.power_w:.0f} W modelled"
    machines = f"  {totals.machines_answering}/{totals.machines} machines"
    ipus = f"  {totals.ipus_held}/{totals.ipus} IPUs"
    waiting = f"  {len(seen.waiting)} waiting"
    lines = (
        f"{seen.server}{machines}{ipus} held{busy}{power}{waiting}{health}",
        f"{seen.server}{machines}{ipus} held{busy}{waiting}{health}",
        f"{machines}{ipus} held{busy}{waiting}{health}".lstrip(),
        f"{ipus}{busy}{health}".lstrip(),
    )
    return next((line for line in lines[width < NARROW :] if len(line) <= width), lines[-1])


def as_lines(seen: PodSighting, order: SortKey, words: str, width: int) -> Iterator[str]:
    """The whole sighting as text: for pipes, dumb terminals and ``--once``."""
    clock = f"{clock_time(seen.time_s)} UTC  "
    yield clock + headline(seen, width - len(clock))
    names = ("Machine", "Partition", "State", "IPU0", "IPU1", "IPU2", "IPU3", "Power", "Batches")
    columns = range(len(names)) if width >= NARROW else (0, 3, 4, 5, 6)
    rows = [names, *(machine_row(machine) for machine in shown_machines(seen, order, words))]
    widths = [max(len(row[column]) for row in rows) for column in columns]
    for row in rows:
        cells = (row[column].ljust(size) for column, size in zip(columns, widths, strict=True))
        yield "  ".join(cells).rstrip()
    for job in seen.jobs:
        held = ", ".join(job.processes) or "nobody"
        yield f"{job.partition}: {job.ipus} IPUs, {job.state}, held by {held}"
    for request in seen.waiting:
        blockers = ", ".join(request.blockers) or "others"
        yield f"waits: {request.name}, {request.size} IPUs, place {request.position}, for {blockers}"
    for problem in seen.problems:
        yield f"{problem.severity.value}: {problem_text(problem)}"
