"""The simulations' speed: a month of 65,536 IPUs, a log of jobs, the loop of events, the allocator.

    python benchmarks/simulate.py --json FILE [--traces DIRECTORY] [--only engine,allocator,campaign,...]

``engine``: events a second. ``allocator``: milliseconds of an event at 65,536 IPUs, median, with nothing held, with 512
partitions of 64, with 16 requests that wait on a full POD, and of a direct request beside them. ``campaign``: a job on
65,536 IPUs for 30 days with failures at 6.5 per 1000 M2000-days and 400 spares, report included. ``replications``: 20
of them on two processes. ``easy``: KTH-SP2's jobs under EASY; ``podrun``: under podrun's allocator on a POD128; both
need the log ``kth.swf`` in ``--traces`` (or PODRUN_TRACES). Seconds are of this process' or its children's wall clock,
``*_cpu_s`` of its CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from short_mode import add_short

from podrun.checkpoint.policy import CheckpointPolicy, Spacing
from podrun.core.cluster_file import load_cluster
from podrun.partition.state import events as ev
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.values import Requirements
from podrun.simulate.campaign_setup import CampaignSetup
from podrun.simulate.chaos_report import campaign_report, replicate
from podrun.simulate.commands.chaos import _Workers
from podrun.simulate.counted_pool import CountedPool
from podrun.simulate.engine import Order, VirtualEngine
from podrun.simulate.pod_queue import PodQueue
from podrun.simulate.queue_metrics import queue_figures
from podrun.simulate.rates import FailureRates, FailureSource, RepairTimes
from podrun.simulate.traces.reading import read_trace

TARGETS = {
    "events_per_s": 1e6,
    "allocator_median_ms": 0.2,
    "campaign_s": 60,
    "replications_s": 600,
    "easy_s": 20,
    "podrun_s": 60,
}
"""What was asked for: events at least so many, the others at most."""


DALY = CheckpointPolicy(Spacing.DALY, cost_s=10.0)
"""With a failure each 13.5 minutes a checkpoint each hour would leave nothing."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--traces", type=Path, default=Path(os.environ.get("PODRUN_TRACES", ".")))
    parser.add_argument(
        "--only", default="engine,allocator,campaign,replications,easy,podrun", metavar="LIST"
    )
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--replications", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1 << 30, help="of the log at most")
    add_short(parser, days=1.0, replications=2, jobs=500)
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "host": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "targets": TARGETS,
    }
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "engine": measure_engine,
        "allocator": measure_allocator,
        "campaign": lambda: measure_campaign(options.days),
        "replications": lambda: measure_replications(options.days, options.replications),
        "easy": lambda: measure_log(options.traces, options.jobs, on_pod=False),
        "podrun": lambda: measure_log(options.traces, options.jobs, on_pod=True),
    }
    for name in options.only.split(","):
        figures[name] = measures[name]()
        print(name, json.dumps(figures[name]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure_engine(events: int = 300_000) -> dict[str, Any]:
    """Events a second, 1,000 of which are planned at any time."""
    engine, left = VirtualEngine(), [events]

    def step(_: object) -> None:
        left[0] -= 1
        if left[0] > 0:
            engine.after(left[0] % 977 + 1, Order.END, "step")

    engine.on("step", step)
    for place in range(1000):
        engine.at(place, Order.END, "step")
    begin = time.process_time()
    engine.run()
    return {"events": engine.handled, "events_per_s": engine.handled / (time.process_time() - begin)}


def measure_allocator() -> dict[str, Any]:
    """Milliseconds of an event at 65,536 IPUs."""
    pod = load_cluster("pod64k")
    result: dict[str, Any] = {}
    for held in (0, 512):
        allocator, spent = _filled(held), list[float]()
        for number in range(20):
            _cycle(allocator, f"x{number}", spent)
        result[f"{held}_held_ms"] = statistics.median(spent)
    full, spent = _filled(len(pod.ilds)), []
    for number in range(16):
        needs = Requirements(f"q{number}", 256, num_gcds=4, owner=0)
        full.handle(ev.Enqueue(needs, 0, full.now))
    for number in range(40):
        full.now += 1
        name = f"p{number}"
        _timed(full, ev.Tick(full.now), spent)
        _timed(full, ev.ResetPartition(name), spent)
        _timed(full, ev.OperationSucceeded(name, full.partitions[name].operation), spent)
    result["16_waiting_ms"] = statistics.median(spent)
    full.handle(ev.RemovePartition("p0"))
    full.handle(ev.OperationSucceeded("p0", full.partitions["p0"].operation))
    spent = []
    for number in range(20):
        name = f"x{number}"
        _timed(full, ev.CreatePartition(Requirements(name, 8, owner=0, limit_s=10), full.now), spent)
        for event in (ev.OperationSucceeded, ev.RemovePartition, ev.OperationSucceeded):
            ended = () if event is ev.RemovePartition else (full.partitions[name].operation,)
            full.handle(event(name, *ended))
    result["direct_16_waiting_ms"] = statistics.median(spent)
    return result


def _filled(partitions: int) -> Allocator:
    allocator = Allocator(load_cluster("pod64k"))
    allocator.now = 1000.0
    for number in range(partitions):
        name = f"p{number}"
        allocator.handle(ev.CreatePartition(Requirements(name, 64, owner=0, limit_s=1e6), 1000.0))
        allocator.handle(ev.OperationSucceeded(name, allocator.partitions[name].operation))
    return allocator


def _timed(allocator: Allocator, event: ev.Event, spent: list[float]) -> None:
    begin = time.process_time()
    allocator.handle(event)
    spent.append((time.process_time() - begin) * 1e3)


def _cycle(allocator: Allocator, name: str, spent: list[float]) -> None:
    """A partition of 8 comes and goes: six events."""
    _timed(allocator, ev.CreatePartition(Requirements(name, 8, owner=0), allocator.now), spent)
    operation = allocator.partitions[name].operation
    _timed(allocator, ev.OperationStarted(name, operation), spent)
    _timed(allocator, ev.OperationSucceeded(name, operation), spent)
    _timed(allocator, ev.Tick(allocator.now), spent)
    _timed(allocator, ev.RemovePartition(name), spent)
    _timed(allocator, ev.OperationSucceeded(name, allocator.partitions[name].operation), spent)


def _setup(days: float) -> CampaignSetup:
    repair = RepairTimes(4.0, 24.0, 720.0)
    source = FailureSource("machine", "unrecoverable", 6.5 / 24_000, detect_s=60.0, repair=repair)
    rates = FailureRates("6.5 per 1000 M2000-days", (source,))
    return CampaignSetup(load_cluster("pod64k"), rates, days, checkpoint=DALY, spares=400)


def measure_campaign(days: float) -> dict[str, Any]:
    """One replication with its report."""
    begin, cpu = time.perf_counter(), time.process_time()
    setup = _setup(days)
    report = campaign_report(setup, 1, [replicate(setup, 1, incidents=True)])
    spent = {"campaign_s": time.perf_counter() - begin, "campaign_cpu_s": time.process_time() - cpu}
    return {**spent, "days": days, "failures": report["failures"], "ettr": report["ettr"]}


def measure_replications(days: float, count: int) -> dict[str, Any]:
    """Replications in two processes."""
    begin = time.perf_counter()
    setup = _setup(days)
    results = list(_Workers(2)([(setup, seed) for seed in range(1, count + 1)]))
    report = campaign_report(setup, 1, results)
    spent = time.perf_counter() - begin
    return {"replications_s": spent, "replications": count, "ettr": report["intervals"]["ettr"]}


def measure_log(traces: Path, most: int, *, on_pod: bool) -> dict[str, Any]:
    """KTH-SP2's jobs; without the log nothing is measured."""
    path = traces / "kth.swf"
    if not path.is_file():
        return {"skipped": f"there is no {path.name} in --traces"}
    begin, cpu = time.perf_counter(), time.process_time()
    jobs = read_trace(path, largest=100).jobs[:most]
    pool = PodQueue(load_cluster("pod128")) if on_pod else CountedPool(100, "easy")
    figures = queue_figures(pool.run(jobs), 128 if on_pod else 100)
    name = "podrun" if on_pod else "easy"
    return {
        f"{name}_s": time.perf_counter() - begin,
        f"{name}_cpu_s": time.process_time() - cpu,
        "jobs": figures.jobs,
        "mean_wait_s": figures.mean_wait_s,
        "mean_bounded_slowdown": figures.mean_bounded_slowdown,
    }


if __name__ == "__main__":
    main()
