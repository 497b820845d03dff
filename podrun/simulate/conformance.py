"""What a scheduler of others breaks: it drives a virtual POD through hard workloads, and is judged by rules.

Each workload is a virtual POD of its own; the scheduler's command is started for it, finds it in
``PODRUN_VIRTUAL_POD``, and ends when the POD says that nothing more happens.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrun.core.cluster import Cluster
from podrun.core.environment import environment
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import text_table
from podrun.simulate.engine import SECOND
from podrun.simulate.jobs import JobOutcome, TraceJob
from podrun.simulate.stepped_pod import SchedulerRecord, SteppedPod
from podrun.simulate.stepped_server import ADDRESS_VARIABLE
from podrun.simulate.workload import TraceGenerator

MOST_OVERTAKEN = 64
"""Jobs that may start before one that came earlier; more is starvation."""
PATIENCE_S = 30.0
"""Seconds without a call to `Advance` after which a scheduler is taken to answer no more."""


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    """Whether a scheduler kept one rule in one workload; ``broken`` says what it did, empty if it did nothing wrong."""

    workload: str
    rule: str
    broken: str

    def as_json(self) -> dict[str, Any]:
        """The verdict as values of JSON."""
        return {"workload": self.workload, "rule": self.rule, "kept": not self.broken, "broken": self.broken}


def conformance_workloads(pod: Cluster) -> dict[str, list[TraceJob]]:
    """Workloads by name: drawn jobs, a job of the whole POD in a stream of small ones, many jobs at one time, jobs that
    end long before their limit."""
    size = pod.ipu_count
    mixed = TraceGenerator(jobs=60, mean_gap_s=60.0, largest=size).draw(7)
    small = max(1, size // 4)
    stream = [_job(number, 10 * number, 100, 400, small) for number in range(160)]
    stream.append(_job(160, 55, 100, 400, size))
    burst = [
        _job(number, 0, 50 + 7 * (number % 5), 100, 1 << number % size.bit_length()) for number in range(40)
    ]
    early = [_job(number, 5 * number, 10, 86_400, small) for number in range(30)]
    return {"mixed": mixed, "a large job among small ones": stream, "all at once": burst, "early ends": early}


def _job(number: int, submit: int, run: int, requested: int, size: int) -> TraceJob:
    return TraceJob(f"{number}", submit * SECOND, run * SECOND, requested * SECOND, size, line=number + 1)


def judged(command: str, pod: Cluster, patience_s: float = PATIENCE_S) -> list[RuleVerdict]:
    """Start a scheduler's command on each workload and judge what it did. Raises UsageError for a command that cannot
    be started."""
    words = shlex.split(command)
    if not words:
        raise UsageError("there is no command of a scheduler", hint='--conformance "python my_scheduler.py"')
    verdicts: list[RuleVerdict] = []
    for name, jobs in conformance_workloads(pod).items():
        virtual = SteppedPod(pod, jobs)
        port = virtual.start()
        try:
            ended = _run(words, port, virtual, patience_s)
        finally:
            virtual.stop()
        verdicts += verdicts_on(name, virtual.record, virtual, ended)
    return verdicts


def _run(words: Sequence[str], port: int, virtual: SteppedPod, patience_s: float) -> str:
    """Run a scheduler to its end; what was wrong with how it ended, empty if nothing was. Its own children end with it:
    one that outlived a shell would hold its standard error open."""
    variables = {**environment(), ADDRESS_VARIABLE: f"127.0.0.1:{port}"}
    try:
        process = subprocess.Popen(
            words, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise UsageError(
            f"{words[0]} cannot be started: {error.strerror}", hint="--conformance COMMAND"
        ) from error
    virtual.last_call = time.monotonic()
    try:
        while True:
            try:
                _, errors = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() - virtual.last_call > patience_s:
                    return f"it did not call Advance for {patience_s:g} s, and was ended"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return f"it ended with exit code {process.returncode}" + "".join(f": {line[:200]}" for line in last)
    return "" if virtual.done.is_set() else "it ended before the POD had said that nothing more happens"


def verdicts_on(name: str, record: SchedulerRecord, virtual: SteppedPod, ended: str) -> list[RuleVerdict]:
    """The rules, each with what a scheduler did against it in one workload."""
    started = {outcome.job.name for outcome in record.outcomes}
    unstarted = [job.name for job in virtual.jobs.values() if job.name not in started]
    overtaken = most_overtaken(record.outcomes)
    rules: Mapping[str, str] = {
        "it answers": ended,
        "no IPU is owned twice": _these("asked for IPUs that others held", record.refused)
        or _these("shared IPUs", sorted(record.shared)),
        "no request is lost": _these("never started", unstarted),
        "nobody starves": ""
        if overtaken[0] <= MOST_OVERTAKEN
        else f"job {overtaken[1]} was overtaken by {overtaken[0]} later jobs (at most {MOST_OVERTAKEN})",
        "each job runs once": _these("got a partition again", sorted(record.twice)),
        "each job has the IPUs it asked for": _these("got fewer", sorted(record.too_small)),
        "a job keeps its IPUs to its end": _these("lost them before", sorted(record.taken_away)),
        "IPUs are given back": _these("kept them", sorted(record.kept)),
    }
    return [RuleVerdict(name, rule, broken) for rule, broken in rules.items()]


def _these(words: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
    return f"{len(names)} {words}: {shown}" if names else ""


def most_overtaken(outcomes: Sequence[JobOutcome]) -> tuple[int, str]:
    """The most jobs that came after one and started before it, and which one that is."""
    worst, name = 0, ""
    for place, outcome in enumerate(outcomes):
        overtakers = sum(other.job.submit > outcome.job.submit for other in outcomes[:place])
        if overtakers > worst:
            worst, name = overtakers, outcome.job.name
    return worst, name


def shown_verdicts(verdicts: Sequence[RuleVerdict]) -> str:
    """The rules as a table, broken ones with what was done."""
    rules = dict.fromkeys(verdict.rule for verdict in verdicts)
    rows = [
        (rule, verdict.workload, verdict.broken)
        for rule in rules
        for verdict in verdicts
        if verdict.rule == rule and verdict.broken
    ]
    broken = {row[0] for row in rows}
    kept = "".join(f"kept    {rule}\n" for rule in rules if rule not in broken)
    return kept + (text_table(("broken", "workload", "what it did"), rows) if rows else "")


def conformance_run(
    command: str, pod: Cluster, patience_s: float, show: Callable[[str], None]
) -> tuple[dict[str, Any], int]:
    """Judge a scheduler and show the verdicts: the report as JSON values, and the exit code, 1 if a rule is broken."""
    verdicts = judged(command, pod, patience_s)
    show(shown_verdicts(verdicts))
    broken = sum(bool(verdict.broken) for verdict in verdicts)
    report = {
        "schema_version": 1,
        "command": command,
        "pod": pod.name,
        "broken": broken,
        "verdicts": [verdict.as_json() for verdict in verdicts],
    }
    return report, int(broken > 0)
