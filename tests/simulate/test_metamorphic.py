"""Relations that hold between simulations whatever their figures are: more spares, other units of time, other names of
jobs and users, users taken together, a POD and a log twice as large."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podrun.checkpoint.policy import CheckpointPolicy
from podrun.core.cluster_file import load_cluster
from podrun.simulate.campaign import Campaign, CampaignResult
from podrun.simulate.campaign_setup import CampaignSetup, RecoveryTimes
from podrun.simulate.counted_pool import POLICIES, CountedPool
from podrun.simulate.jobs import JobOutcome, TraceJob
from podrun.simulate.pod_queue import PodQueue
from podrun.simulate.queue_metrics import queue_figures
from podrun.simulate.rates import FailureRates, FailureSource, RepairTimes
from podrun.simulate.workload import TraceGenerator

JOBS = TraceGenerator(jobs=150, largest=32, mean_gap_s=200.0).draw(5)
POOL = 40
REPAIR = RepairTimes(24.0, 48.0)


def campaign(
    per_hour: float, spares: int, seed: int, pod: str = "pod64", days: float = 40.0
) -> CampaignResult:
    source = FailureSource("machine", "lost", per_hour / 16, detect_s=60.0, repair=REPAIR)
    setup = CampaignSetup(load_cluster(pod), FailureRates("test", (source,)), days, spares=spares)
    return Campaign(setup, seed).run()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_more_spares_never_lower_the_useful_time(seed: int) -> None:
    """With the same failures, in each replication and not only on average."""
    shares = [campaign(0.05, spares, seed).ettr for spares in (0, 1, 2, 4, 8, 64)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_without_failures_spares_repairs_and_policies_do_not_matter() -> None:
    assert campaign(0.0, 0, 1).bins == campaign(0.0, 16, 2).bins


def test_a_slower_world_is_the_same_world() -> None:
    """Rates a tenth, durations and days ten times: each share of the time stays, and so do the failures."""
    times = RecoveryTimes()
    slower = RecoveryTimes(**{name: 10 * getattr(times, name) for name in RecoveryTimes.__dataclass_fields__})
    results = []
    for factor, durations in ((1, times), (10, slower)):
        source = FailureSource("machine", "streaming-memory", 0.02 / factor, detect_s=60.0 * factor)
        setup = CampaignSetup(
            load_cluster("pod64"), FailureRates("test", (source,)), 10.0 * factor, step_s=1.0 * factor,
            checkpoint=CheckpointPolicy(value=1800.0 * factor), times=durations,
        )  # fmt: skip
        results.append(Campaign(setup, 3).run())
    one, other = results
    assert one.failures == other.failures > 50
    assert one.ettr == pytest.approx(other.ettr, rel=1e-6)
    for name, spent in one.bins.items():
        assert 10 * spent == pytest.approx(other.bins[name], rel=1e-6, abs=1e4), name


def starts(outcomes: list[JobOutcome]) -> list[int]:
    """Start times by the line of the job."""
    return [outcome.start for outcome in sorted(outcomes, key=lambda outcome: outcome.job.line)]


def scheduled(policy: str, jobs: list[TraceJob], processors: int = POOL) -> list[JobOutcome]:
    return CountedPool(processors, policy).run(jobs)


@pytest.mark.parametrize("policy", POLICIES)
def test_times_a_hundred_times_longer_make_waits_a_hundred_times_longer(policy: str) -> None:
    longer = [
        replace(job, submit=100 * job.submit, run=100 * job.run, requested=100 * job.requested)
        for job in JOBS
    ]
    assert starts(scheduled(policy, longer)) == [100 * at for at in starts(scheduled(policy, JOBS))]


@pytest.mark.parametrize("policy", POLICIES)
def test_names_of_jobs_and_users_decide_nothing(policy: str) -> None:
    renamed = [replace(job, name=f"z{-number}", user=f"u{job.user}"[::-1]) for number, job in enumerate(JOBS)]
    assert starts(scheduled(policy, renamed)) == starts(scheduled(policy, JOBS))


def test_users_taken_together_change_the_fairness_alone() -> None:
    outcomes = scheduled("easy", [replace(job, user=str(job.line % 7)) for job in JOBS])
    merged = scheduled("easy", [replace(job, user="everybody") for job in JOBS])
    assert starts(merged) == starts(outcomes)
    several, one = queue_figures(outcomes, POOL), queue_figures(merged, POOL)
    assert several.mean_bounded_slowdown == one.mean_bounded_slowdown
    assert several.fairness_jain < one.fairness_jain == 1.0


@pytest.mark.parametrize("policy", ["fcfs", "easy"])
def test_each_job_and_the_pool_twice_as_large_is_the_same_queue(policy: str) -> None:
    wide = [replace(job, size=2 * job.size) for job in JOBS]
    assert starts(scheduled(policy, wide, 2 * POOL)) == starts(scheduled(policy, JOBS))


def test_a_pod_and_its_jobs_twice_as_large_wait_alike() -> None:
    """Under podrun's own allocator, from one IPU-Link domain of 64 to two halves of it."""
    jobs = TraceGenerator(jobs=60, largest=8, mean_gap_s=120.0).draw(5)
    small = starts(PodQueue(load_cluster("pod16")).run(jobs))
    wide = [replace(job, size=4 * job.size) for job in jobs]
    assert starts(PodQueue(load_cluster("pod64")).run(wide)) == small


def test_more_processors_never_make_anybody_wait_under_first_come_first_served() -> None:
    few, many = (starts(scheduled("fcfs", JOBS, processors)) for processors in (POOL, 2 * POOL))
    assert all(later <= earlier for later, earlier in zip(many, few, strict=True))
