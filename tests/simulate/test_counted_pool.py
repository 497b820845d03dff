"""Policies of a counted pool: by hand, against published figures, and against queueing theory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest

from podrun.simulate.counted_pool import POLICIES, CountedPool
from podrun.simulate.engine import SECOND, nanoseconds
from podrun.simulate.jobs import JobOutcome, TraceJob, arrivals_scaled, clairvoyant
from podrun.simulate.profile import FreeProfile
from podrun.simulate.queue_metrics import queue_figures
from podrun.simulate.streams import RandomStreams
from podrun.simulate.traces.reading import read_trace
from podrun.simulate.workload import TraceGenerator

from .reference import trace_file


def job(name: str, submit: float, run: float, size: int, requested: float = 0.0, line: int = 0) -> TraceJob:
    wanted = requested or run
    times = (nanoseconds(submit), nanoseconds(min(run, wanted)), nanoseconds(wanted))
    return TraceJob(name, *times, size, line=line)


def starts(policy: str, jobs: Iterable[TraceJob], processors: int = 10) -> dict[str, float]:
    outcomes = CountedPool(processors, policy).run(list(jobs))
    return {outcome.job.name: outcome.start / SECOND for outcome in outcomes}


JOBS = [
    job("long", 0, 100, 6),
    job("whole", 1, 10, 10),  # Waits for 100.
    job("short", 2, 50, 4),  # Ends before.
    job("narrow", 3, 500, 1),
]


def test_first_come_first_served_lets_nobody_pass() -> None:
    assert starts("fcfs", JOBS) == {"long": 0, "whole": 100, "short": 110, "narrow": 110}


def test_easy_lets_pass_who_does_not_delay_the_first() -> None:
    assert starts("easy", JOBS) == {"long": 0, "short": 2, "whole": 100, "narrow": 110}


def test_shortest_first_takes_the_shortest_of_those_that_may_pass() -> None:
    jobs = [job("a", 0, 100, 6), job("b", 1, 10, 10), job("c", 2, 60, 4), job("d", 2, 20, 4)]
    jobs[2:2] = [job("e", 1.5, 1, 4)]
    assert starts("sjbf", jobs)["d"] == 2.5
    assert starts("easy", jobs)["c"] == 2.5


def test_conservative_delays_nobody_who_waits() -> None:
    jobs = [job("a", 0, 100, 6), job("b", 1, 10, 8), job("c", 2, 105, 4), job("d", 3, 200, 2)]
    easy, conservative = starts("easy", jobs), starts("conservative", jobs)
    assert easy["d"] == 3  # It fits into what b leaves over.
    assert conservative["d"] == 3
    jobs[3] = job("d", 3, 200, 3)
    assert starts("conservative", jobs)["c"] == 110
    assert starts("conservative", jobs)["d"] >= 110


def test_conservative_moves_up_when_a_job_ends_early() -> None:
    jobs = [job("a", 0, 10, 10, 100), job("b", 1, 10, 10), job("c", 2, 10, 10)]
    assert starts("conservative", jobs) == {"a": 0, "b": 10, "c": 20}


def held(outcomes: list[JobOutcome]) -> int:
    """Most processors that are held at once."""
    changes = [(o.start, 1, o.size) for o in outcomes] + [(o.end, 0, -o.size) for o in outcomes]
    total = most = 0
    for _, _, size in sorted(changes):
        total += size
        most = max(most, total)
    return most


@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_runs_once_and_none_before_it_came(policy: str) -> None:
    jobs = TraceGenerator(jobs=400, largest=32, mean_gap_s=300).draw(4)
    outcomes = CountedPool(40, policy).run(jobs)
    assert sorted(o.job.line for o in outcomes) == list(range(1, 401))
    assert all(o.start >= o.job.submit and o.end - o.start == o.job.run for o in outcomes)
    assert held(outcomes) <= 40


def test_first_come_first_served_starts_in_order() -> None:
    outcomes = CountedPool(40, "fcfs").run(TraceGenerator(jobs=300, largest=32).draw(4))
    assert all(a.start <= b.start for a, b in pairwise(sorted(outcomes, key=lambda o: o.job.line)))


def test_a_profile_is_that_of_an_array() -> None:
    rng = np.random.default_rng(2)
    profile, plain = FreeProfile(12), np.full(400, 12)
    for _ in range(200):
        now, length, size = int(rng.integers(0, 60)), int(rng.integers(1, 15)), int(rng.integers(1, 9))
        begin = profile.earliest(now, length, size)
        window = next(t for t in range(now, 380) if (plain[t : t + length] >= size).all())
        assert begin == window
        if begin + length < 300:
            profile.take(begin, begin + length, size)
            plain[begin : begin + length] -= size
        assert [profile.free_at(t) for t in range(400)] == plain.tolist()


# --- published figures: rows O14, O17 to O20 and O25 of the reference --------------------------------------------


@pytest.fixture(scope="module")
def kth() -> list[TraceJob]:
    jobs = read_trace(trace_file("kth.swf"), largest=100).jobs
    assert len(jobs) == 28_481
    return jobs


@pytest.mark.parametrize(
    ("policy", "slowdown", "tolerance"),
    [("fcfs", 6814.97, 1e-3), ("easy", 92.5765, 1e-3), ("sjbf", 69.405, 1e-2)],
)
def test_kth_has_the_published_slowdown(
    kth: list[TraceJob], policy: str, slowdown: float, tolerance: float
) -> None:
    figures = queue_figures(CountedPool(100, policy).run(kth), 100)
    assert figures.mean_bounded_slowdown == pytest.approx(slowdown, rel=tolerance)
    if policy == "easy":
        assert figures.mean_flow_s == pytest.approx(15_696.8, rel=1e-3)
        assert figures.backfilled == 17_073
    if policy == "fcfs":
        assert figures.mean_wait_s == pytest.approx(353_776, rel=1e-3)


def test_kth_has_the_published_slowdown_where_run_times_are_known(kth: list[TraceJob]) -> None:
    figures = queue_figures(CountedPool(100, "easy").run(clairvoyant(kth)), 100)
    assert figures.mean_bounded_slowdown == pytest.approx(71.294, rel=1e-3)


def test_lublin_has_the_reference_slowdown() -> None:
    jobs = read_trace(trace_file("lublin256.swf"), largest=256).jobs
    easy = queue_figures(CountedPool(256, "easy").run(jobs), 256)
    assert easy.mean_bounded_slowdown == pytest.approx(590.753, rel=1e-3)
    assert easy.mean_wait_s == pytest.approx(97_181, rel=1e-3)
    fcfs = queue_figures(CountedPool(256, "fcfs").run(jobs), 256)
    assert fcfs.mean_bounded_slowdown == pytest.approx(66_502.5, rel=1e-3)


def waits_first_come(servers: int, arrivals: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """The wait of each job of one processor, in the order of arrivals."""
    jobs = [
        job(str(i), float(at), float(run), 1, line=i)
        for i, (at, run) in enumerate(zip(arrivals, runs, strict=True))
    ]
    outcomes = sorted(CountedPool(servers, "fcfs").run(jobs), key=lambda outcome: outcome.job.line)
    return np.array([outcome.start - outcome.job.submit for outcome in outcomes]) / SECOND


@pytest.mark.parametrize(
    ("servers", "load", "constant", "wait"),
    [(4, 0.8, False, 0.74554), pytest.param(4, 0.9, True, 0.99997, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("count", "tolerance"),
    [
        (20_000, 0.05),
        pytest.param(1_000_000, 0.01, marks=pytest.mark.slow),  # Two queues of a million jobs: 15 s.
    ],
)
def test_one_processor_jobs_wait_as_theory_says(
    servers: int, load: float, constant: bool, wait: float, count: int, tolerance: float
) -> None:
    """Row O14. The mean of a million waits alone has a standard error of 1.5 %: waits that follow each other are alike.
    The same jobs on one processor that is ``servers`` times as fast wait alike too, and the mean of their waits is
    known exactly: what it lacks in this sample says how much the sample is off (a control variate).
    """
    streams = RandomStreams(11)
    arrivals = np.cumsum(streams.of("jobs", "gaps").exponential(1 / (servers * load), count))
    runs = np.ones(count) if constant else streams.of("jobs", "runs").exponential(1.0, count)
    means = waits_first_come(servers, arrivals, runs).reshape(20, -1).mean(axis=1)
    known = load / (1 - load) * (0.5 if constant else 1.0) / servers
    control = waits_first_come(1, arrivals, runs / servers).reshape(20, -1).mean(axis=1) - known
    slope = float(np.cov(means, control)[0, 1] / control.var(ddof=1))
    corrected = means - slope * control
    error = float(corrected.std(ddof=2)) / math.sqrt(20)
    assert 3 * error < tolerance * wait
    assert float(corrected.mean()) == pytest.approx(wait, rel=tolerance)


@pytest.mark.parametrize("servers", [1, 3])
def test_each_job_waits_as_the_recursion_of_queues_says(servers: int) -> None:
    """Kiefer and Wolfowitz: whoever comes takes the server that is free first. It needs no law of arrivals or runs."""
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.integers(0, 20, 2000))  # Some come at the same time.
    runs = np.where(rng.random(2000) < 0.9, rng.integers(1, 15, 2000), rng.integers(50, 200, 2000))
    free, expected = [0] * servers, []
    for at, run in zip(arrivals.tolist(), runs.tolist(), strict=True):
        start = max(at, heapq.heappop(free))
        heapq.heappush(free, start + run)
        expected.append(start - at)
    assert waits_first_come(servers, arrivals, runs).tolist() == expected


def test_scaled_arrivals_are_whole_seconds_from_the_first() -> None:
    jobs = [job("a", 10, 5, 1), job("b", 15, 5, 1), job("c", 21, 5, 1)]
    assert [j.submit // SECOND for j in arrivals_scaled(jobs, 0.6)] == [10, 13, 16]


def test_the_azure_conversation_trace_waits_as_measured() -> None:
    """Row O38: bursts wait for much longer than M/D/c says."""
    from datetime import datetime

    lines = trace_file("azure_llm_conv_2023.csv").read_text().splitlines()[1:]
    times = [datetime.fromisoformat(line.split(",")[0][:26]) for line in lines]
    begin = times[0]
    service = 0.506290
    jobs = [job(str(i), (t - begin).total_seconds(), service, 1) for i, t in enumerate(times)]
    figures = queue_figures(CountedPool(4, "fcfs").run(jobs), 4)
    assert len(jobs) == 19_366
    assert figures.mean_wait_s == pytest.approx(0.5521, rel=1e-3)
    assert figures.p99_wait_s == pytest.approx(5.230, rel=1e-3)
    assert math.isclose(service, 4 * 0.7 * 3501.72 / 19_366, rel_tol=1e-4)
