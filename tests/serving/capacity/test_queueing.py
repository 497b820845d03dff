"""Waiting against closed forms, published figures and its own laws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from podrun.serving.batching import BatchingRule
from podrun.serving.capacity.arrivals import ArrivalProcess, read_arrivals
from podrun.serving.capacity.queueing import ClientLoop, QueueOutcome, closed_loop, open_loop
from tests.simulate.closed_forms import wait_mdc, wait_mmc
from tests.simulate.reference import trace_file

ONE = BatchingRule(1)
REQUESTS = 200_000


def poisson(rate: float, seed: int = 1, requests: int = REQUESTS) -> np.ndarray:
    return ArrivalProcess().unit_times(requests, seed, "test") / rate


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (4, 0.8), (8, 0.7)])
@pytest.mark.sample(3)
def test_constant_runs_wait_as_m_d_c(servers: int, load: float) -> None:
    outcome = open_loop(poisson(servers * load), ONE, servers, lambda rows: 1.0)
    assert outcome.wait.mean() == pytest.approx(wait_mdc(servers, load), rel=0.02)
    assert outcome.busy_s / outcome.span_s / servers == pytest.approx(load, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (4, 0.7)])
def test_exponential_runs_wait_as_m_m_c(servers: int, load: float) -> None:
    runs = itertools.cycle(np.random.default_rng(7).standard_exponential(REQUESTS * 2).tolist())
    outcome = open_loop(poisson(servers * load, 3, REQUESTS * 2), ONE, servers, lambda rows: next(runs))
    assert outcome.wait.mean() == pytest.approx(wait_mmc(servers, load), rel=0.02)


def brute_force(arrivals: np.ndarray, rule: BatchingRule, replicas: int, seconds: float) -> list[float]:
    """The same queue in small steps of time; arrivals lie on the steps."""
    free, queue, ends = [0] * replicas, [], {}
    moments = [round(float(moment)) for moment in arrivals]
    for now in range(10_000):
        queue += [number for number, moment in enumerate(moments) if moment == now]
        while queue and min(free) <= now:
            rows = rule.decide([1] * len(queue), moments[queue[0]], now).rows
            if not rows:
                break
            free[free.index(min(free))] = now + round(seconds)
            for number in queue[:rows]:
                ends[number] = now + seconds
            del queue[:rows]
    return [ends[number] - moments[number] for number in range(len(moments))]


@pytest.mark.parametrize("seed", range(6))
def test_batches_are_those_of_the_rule_step_by_step(seed: int) -> None:
    draw = np.random.default_rng(seed)
    arrivals = np.sort(draw.integers(0, 600, 60)).astype(np.float64)
    rule = BatchingRule(int(draw.integers(1, 9)), float(draw.integers(0, 40)))
    replicas = int(draw.integers(1, 4))
    outcome = open_loop(arrivals, rule, replicas, lambda rows: 17.0)
    assert outcome.latency.tolist() == brute_force(arrivals, rule, replicas, 17.0)


def test_a_trace_of_real_requests_waits_far_longer_than_poisson_arrivals_would() -> None:
    """Row O38 of the reference: constant service of .506290 s, four servers, load .7."""
    arrivals = read_arrivals(f"trace:{trace_file('azure_llm_conv_2023.csv')}")
    outcome = open_loop(np.asarray(arrivals.times), ONE, 4, lambda rows: 0.506290)
    assert len(arrivals.times) == 19_366
    assert outcome.wait.mean() == pytest.approx(0.5521, rel=1e-3)
    assert np.percentile(outcome.wait, 99) == pytest.approx(5.230, rel=1e-3)
    assert (outcome.wait > 1e-9).mean() == pytest.approx(0.5220, rel=1e-3)
    assert outcome.wait.mean() > 5 * wait_mdc(4, 0.7) * 0.506290


def test_clients_that_wait_for_answers_keep_at_most_as_many_requests_waiting() -> None:
    loop = ClientLoop(8, 0.0, 4_000)
    outcome = closed_loop(loop, BatchingRule(4), 1, lambda rows: 1.0)
    assert outcome.runs == 1_000
    assert outcome.percentile(50, 0.05) == 2.0
    alone = closed_loop(ClientLoop(1, 3.0, 100), ONE, 1, lambda rows: 1.0)
    assert (alone.latency == 1.0).all()
    assert alone.span_s == pytest.approx(100 + 99 * 3)


def mean_latency(outcome: QueueOutcome) -> float:
    return float(outcome.latency.mean())


def test_more_replicas_and_slower_arrivals_never_make_answers_later() -> None:
    base = mean_latency(open_loop(poisson(3.0, 5, 20_000), ONE, 4, lambda rows: 1.0))
    assert mean_latency(open_loop(poisson(3.0, 5, 20_000), ONE, 5, lambda rows: 1.0)) < base
    assert mean_latency(open_loop(poisson(2.0, 5, 20_000), ONE, 4, lambda rows: 1.0)) < base


def test_ten_times_as_slow_a_service_has_ten_times_the_latency() -> None:
    rule, slow = BatchingRule(4, 0.5), BatchingRule(4, 5.0)
    one = open_loop(poisson(3.0, 2, 5_000), rule, 2, lambda rows: 1.0)
    ten = open_loop(poisson(3.0, 2, 5_000) * 10, slow, 2, lambda rows: 10.0)
    assert np.allclose(ten.latency, one.latency * 10)


def test_a_rule_that_waits_for_ever_ends_with_the_last_request() -> None:
    outcome = open_loop(np.array([1.0, 2.0, 3.0]), BatchingRule(2, math.inf), 1, lambda rows: 1.0)
    assert outcome.latency.tolist() == [2.0, 1.0, 1.0]
    assert outcome.runs == 2
