"""``podrun simulate`` from its options to its figures: reads or draws the jobs, runs them, says what became of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from podrun import __version__
from podrun.core.documents import write_output
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import text_table
from podrun.partition.state.capture import CapturedPod, read_capture
from podrun.simulate.captured_start import jobs_since_capture
from podrun.simulate.counted_pool import CountedPool
from podrun.simulate.jobs import JobOutcome, TraceJob, arrivals_scaled, as_swf, clairvoyant, moments
from podrun.simulate.queue_metrics import SHOWN_USERS, queue_figures, users_of
from podrun.simulate.traces.cluster_logs import summary_of
from podrun.simulate.traces.lines import JobLog
from podrun.simulate.traces.reading import read_trace
from podrun.simulate.workload import TraceGenerator

SCHEMA_VERSION = 1
Users = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class SimulateRequest:
    """The options of a command line."""

    jobs: Path | None
    processors: int | None
    pod: str | None
    policy: str | None
    scale: float
    format: str | None
    clairvoyant: bool
    generate: str | None
    write_swf: Path | None
    max_broken: float
    seed: int
    users: bool
    json_file: Path | None
    start: Path | None = None
    serve: int | None = None
    conformance: str | None = None
    patience: float = 30.0


def run_request(asked: SimulateRequest) -> tuple[dict[str, Any], list[str], Users]:
    """The report of a request as JSON values, warnings, and figures by user. Raises PodrunError."""
    request = with_defaults(asked)
    start = None if request.start is None else read_capture(request.start)
    if start is not None:
        request = replace(request, pod=start.pod.name)
    largest = start.pod.ipu_count if start else request.processors or _pod_size(request)
    jobs, source, warnings = _jobs_of(request, largest)
    jobs = arrivals_scaled(jobs, request.scale)
    if request.clairvoyant:
        jobs = clairvoyant(jobs)
    if start is not None:
        jobs = jobs_since_capture(jobs, start)
        if not jobs and not start.state.plans.queue:
            raise UsageError(
                f"nothing waits in the captured POD {request.start}",
                hint=f"Add jobs to simulate: podrun simulate JOBS --start {request.start}",
            )
    outcomes, processors, more = _outcomes(request, jobs, start)
    if not outcomes:
        raise UsageError("no job starts", hint="What is in the way has no time limit: vipu list partitions")
    if never := more.get("never_started"):
        warnings.append(f"warning: {never} jobs never start: partitions in the way have no time limit")
    figures = queue_figures(outcomes, processors)
    users = users_of(outcomes)
    report = {
        "schema_version": SCHEMA_VERSION,
        "podrun_version": __version__,
        "policy": request.policy,
        "processors": processors,
        "pod": request.pod,
        "scale": request.scale,
        "clairvoyant": request.clairvoyant,
        "seed": request.seed,
        **figures.as_json(),
        **more,
        "source": source,
        "by_user": dict(list(users.items())[:SHOWN_USERS]),
    }
    return report, warnings, users


def _jobs_of(request: SimulateRequest, largest: int) -> tuple[list[TraceJob], dict[str, Any], list[str]]:
    """The jobs, what is said of where they come from, and warnings."""
    if request.jobs is None and request.generate is None:
        return [], {"file": request.start.name if request.start else None}, []
    if request.jobs is None:
        generator = TraceGenerator(**generator_values(request.generate or "", TraceGenerator))
        jobs = generator.draw(request.seed)
        if generator.largest > largest:
            raise UsageError(
                f"jobs of up to {generator.largest} do not fit {largest}", hint=f"largest={largest}"
            )
        if request.write_swf is not None:
            write_output(request.write_swf, as_swf(jobs))
        return jobs, {"stated": generator.expected(), "drawn": moments(jobs)}, []
    trace = read_trace(request.jobs, request.format or "", most_broken=request.max_broken, largest=largest)
    warnings = []
    if trace.broken:
        warnings.append(f"warning: {len(trace.broken)} lines are left out: {trace.broken_words()}")
    return trace.jobs, _source(request.jobs, trace), warnings


def _source(path: Path, trace: JobLog) -> dict[str, Any]:
    return {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "format": trace.format,
        "broken": len(trace.broken),
        "broken_lines": [{"line": line, "why": why} for line, why in trace.broken[:20]],
        "dropped": dict(sorted(trace.dropped.items())),
        "summary": summary_of(trace),
    }


def _pod_size(request: SimulateRequest) -> int:
    from podrun.core.cluster_file import load_cluster

    return load_cluster(request.pod or "", simulated=True).ipu_count


def _outcomes(
    request: SimulateRequest, jobs: Sequence[TraceJob], start: CapturedPod | None
) -> tuple[list[JobOutcome], int, dict[str, Any]]:
    """What became of the jobs, the size of the pool, and figures that only a POD has."""
    if request.pod is None:
        processors = request.processors or 0
        return CountedPool(processors, request.policy or "easy").run(jobs), processors, {}
    from podrun.core.cluster_file import load_cluster
    from podrun.simulate.pod_queue import PodQueue
    from podrun.simulate.stepped_pod import served_outcomes

    pod = load_cluster(request.pod, simulated=True) if start is None else start.pod
    if request.serve is not None:
        return served_outcomes(pod, jobs, request.serve, request.patience), pod.ipu_count, {}
    queue = PodQueue(pod, seed=request.seed, start=start)
    return queue.run(jobs), pod.ipu_count, queue.figures()


def shown_figures(report: Mapping[str, Any]) -> str:
    """The report as text."""
    where = (
        f"{report['pod']} of {report['processors']} IPUs"
        if report["pod"]
        else f"{report['processors']} processors"
    )
    rows = [
        ("jobs", f"{report['jobs']:,} on {where}, {report['policy']}"),
        ("mean wait", f"{report['mean_wait_s']:,.1f} s"),
        (
            "median, 95 %, 99 %",
            " ".join(f"{report[f'{n}_wait_s']:,.1f}" for n in ("median", "p95", "p99")) + " s",
        ),
        ("mean bounded slowdown", f"{report['mean_bounded_slowdown']:,.3f}"),
        ("weighted by IPU-seconds", f"{report['weighted_bounded_slowdown']:,.3f}"),
        ("utilisation, occupancy", f"{report['utilisation']:.1%} {report['occupancy']:.1%}"),
        ("started before others", f"{report['backfilled']:,}"),
        ("fairness over users", f"{report['fairness_jain']:.3f} (Jain, {report['users']} users)"),
    ]
    if "mean_fragmentation" in report:
        rows.append(("fragmentation", f"{report['mean_fragmentation']:.1%} of free IPUs, over time"))
    width = max(len(name) for name, _ in rows) + 2
    return "".join(f"{name:<{width}}{value}\n" for name, value in rows)


def shown_users(users: Users) -> str:
    """The heaviest users as a table."""
    rows = [
        (
            name or "-",
            f"{entry['jobs']:.0f}",
            f"{entry['mean_wait_s']:,.0f}",
            f"{entry['mean_bounded_slowdown']:,.2f}",
            f"{entry['processor_seconds'] / 3600:,.1f}",
        )
        for name, entry in list(users.items())[:SHOWN_USERS]
    ]
    return text_table(("user", "jobs", "mean wait s", "mean slowdown", "processor-hours"), rows)


def generator_values(text: str, kind: type[Any]) -> Mapping[str, Any]:
    """``jobs=1000,mean-gap-s=60`` as the fields of a dataclass. Raises UsageError, which lists them."""
    defaults: dict[str, Any] = {entry.name: entry.default for entry in fields(kind)}
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        key = name.replace("-", "_")
        if key not in defaults or not equals:
            names = ", ".join(entry.replace("_", "-") for entry in defaults)
            raise UsageError(f"{part!r} says nothing of a log that is drawn", hint=f"Known: {names}.")
        try:
            values[key] = type(defaults[key])(value)
        except ValueError:
            raise UsageError(f"{name} is {value!r}, not a number", hint="--generate jobs=1000") from None
    return values


def with_defaults(request: SimulateRequest) -> SimulateRequest:
    """The request with its policy."""
    return replace(
        request,
        policy=request.policy
        or (
            "own scheduler"
            if request.serve is not None
            else "podrun"
            if request.pod or request.start
            else "easy"
        ),
    )
