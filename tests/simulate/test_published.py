"""Published outcomes of failing systems: rows O11, O12, O16 and O28 to O34 of the reference, within their tolerances.

Other rows: `test_closed_forms` has the formulas, `test_counted_pool` and `test_archive_logs` the logs.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from podrun.checkpoint.policy import CheckpointPolicy
from podrun.core.cluster_file import load_cluster
from podrun.simulate.campaign import Campaign
from podrun.simulate.campaign_setup import CampaignSetup, RecoveryTimes
from podrun.simulate.intervals import rate_interval
from podrun.simulate.rates import FailureRates, FailureSource, read_rates
from podrun.simulate.server_pool import PoolParameters, ServerFault, ServerPool, replay_gang
from tests.simulate import closed_forms as cf

from .reference import trace_file

MINUTE = 1 / 1440


def faults_of_trace() -> list[ServerFault]:
    events = json.loads(trace_file("fault_trace.json").read_text())
    number = {name: i for i, name in enumerate(sorted({event["node_id"] for event in events}))}
    begun: dict[int, list[float]] = {}
    faults = []
    for event in sorted(events, key=lambda event: event["event_time"]):
        server = number[event["node_id"]]
        if event["event_type"] == "fault_start":
            begun.setdefault(server, []).append(event["event_time"])
        else:
            faults.append(ServerFault(server, begun[server].pop(0), event["event_time"]))
    return faults


@pytest.mark.parametrize(
    ("gang", "useful", "lost", "restart", "failures"),
    [(320, 0.97260, 0.02043, 0.00697, 409), (128, 0.98239, None, None, 255)],
)
def test_the_infinitehbd_replay(
    gang: int, useful: float, lost: float | None, restart: float | None, failures: int
) -> None:
    shares = replay_gang(
        faults_of_trace(), 400, gang, checkpoint_days=1 / 24, restart_days=10 / 1440, days=348.98
    )
    assert shares.failures == failures
    assert shares.useful == pytest.approx(useful, abs=1e-4)
    if lost is not None:
        assert (shares.lost, shares.restart) == pytest.approx((lost, restart), abs=1e-4)
    assert shares.useful + shares.lost + shares.restart + shares.waiting == pytest.approx(1.0, abs=1e-9)


@pytest.mark.slow
def test_airesim_of_14_days() -> None:
    """Published: 644.63 +- 7.15 h of 8 runs; the mean of 40 runs lies within."""
    results = [ServerPool(PoolParameters(work_days=14.0), seed).run() for seed in range(40)]
    assert np.mean([r.hours for r in results]) == pytest.approx(644.63, abs=7.15)
    assert np.mean([r.failures for r in results]) == pytest.approx(912.2, abs=18.7)
    assert np.mean([r.etr for r in results]) == pytest.approx(0.5212, abs=0.006)


@pytest.mark.slow
def test_a_pool_with_airesims_defaults_gives_its_published_means() -> None:
    results = [ServerPool(PoolParameters(), seed).run() for seed in range(30)]
    assert np.mean([r.hours for r in results]) == pytest.approx(9865.97, abs=33.6)
    assert np.mean([r.failures for r in results]) == pytest.approx(11_145.6, abs=100)
    assert np.mean([r.etr for r in results]) == pytest.approx(0.6228, abs=0.002)
    assert np.mean([r.manual_repairs for r in results]) == pytest.approx(8922.9, abs=100)


def test_runs_between_failures_of_airesim_are_half_an_hour() -> None:
    outcome = ServerPool(PoolParameters(work_days=100.0), 42).run()
    assert outcome.manual_repairs / outcome.failures == pytest.approx(0.8, abs=0.03)
    assert 28 < 100 * 1440 / outcome.failures < 34


@pytest.mark.parametrize(
    ("gpus", "rate", "hours"),
    [
        (131_072, 6.5, 0.225),
        (16_384, 2.34, 5.008),
        (1024, 23.7, 7.9),
        (8, 20.96, 24 * 47.7),
        (8, 6.5, 24 * 153.8),
    ],
)
def test_mean_times_between_failures_of_rsc(gpus: int, rate: float, hours: float) -> None:
    assert cf.job_mttf_hours(gpus / 8, rate) == pytest.approx(hours, rel=3e-3)


@pytest.mark.slow
def test_simulated_efficiency_at_the_optimum_of_16384_processors() -> None:
    """Row O12: .92848 at mu = 240,601 s with T = 17,194 s."""
    mttf, cost = 240_601.0, 600.0
    policy = CheckpointPolicy(value=17_194.0 - cost, cost_s=cost, restore_s=600.0)
    times = RecoveryTimes(60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    source = FailureSource("machine", "streaming-memory", 3600 / mttf / 16, detect_s=0.0)
    setup = CampaignSetup(
        load_cluster("pod64"), FailureRates("test", (source,)), 6000.0, checkpoint=policy, times=times
    )
    shares = [Campaign(setup, seed).run().ettr for seed in range(8)]
    half = 2.365 * np.std(shares, ddof=1) / math.sqrt(8)
    assert np.mean(shares) == pytest.approx(0.92848, abs=half + 0.0005)


def test_the_servers_down_in_a_real_log_exceed_poisson() -> None:
    """Row O16: mean 9.26 down; Poisson says that 17 spares suffice for 99 % of the time."""
    faults, days = faults_of_trace(), 348.98
    changes = sorted([(f.begin, 1) for f in faults] + [(min(f.end, days), -1) for f in faults])
    spent, down, before = dict[int, float](), 0, 0.0
    for at, step in changes:
        spent[down] = spent.get(down, 0.0) + at - before
        down, before = down + step, at
    spent[down] = spent.get(down, 0.0) + days - before
    mean = sum(count * time for count, time in spent.items()) / days
    assert mean == pytest.approx(9.26, abs=0.01)
    assert cf.spares_for(mean, 0.99) == 17
    reached, spares = 0.0, -1
    while reached < 0.99 * days:
        spares += 1
        reached += spent.get(spares, 0.0)
    assert 1.7 * 17 < spares <= 2 * 17


def test_llama_3_stays_above_90_per_cent_up_to_half_an_interval_of_18_minutes() -> None:
    """Row O32."""
    failures = 2048 * 3.789e-3
    assert cf.ettr(failures, 18.5 * MINUTE, 1e-9, 0.0) >= 0.9 > cf.ettr(failures, 18.7 * MINUTE, 1e-9, 0.0)
    assert failures * 54 == pytest.approx(419, rel=2e-3)
    interval = rate_interval(419, 1.0)
    assert interval.low is not None
    assert interval.high is not None
    assert (419 - interval.low, interval.high - 419) == pytest.approx((40, 40), abs=2.5)


@pytest.mark.slow
def test_the_preset_of_llama_3_gives_its_failures() -> None:
    """Row O32, simulated: 16,384 chips for 54 days."""
    setup = CampaignSetup(load_cluster("pod64k"), read_rates("llama3"), 54.0, ipus=16_384)
    counts = [Campaign(setup, seed).run().failures for seed in range(4)]
    assert np.mean(counts) == pytest.approx(419, abs=40)


@pytest.mark.parametrize("gpus", [2048, 4096])
def test_hourly_checkpoints_suffice_for_small_jobs_of_rsc_1(gpus: int) -> None:
    """Row O33."""
    assert cf.ettr(gpus / 8 * 6.5e-3, 5 * MINUTE, 60 * MINUTE, 0.0) >= 0.9


@pytest.mark.parametrize(("stall", "reported"), [(10.0, 0.44), (3.0, 0.80)])
def test_replicas_that_go_on_stall_only_to_regroup(stall: float, reported: float) -> None:
    """Row O34: a failure each 18 minutes."""
    assert cf.stalled_efficiency(18.0, stall) == pytest.approx(reported, abs=0.05)
