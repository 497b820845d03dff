"""Plans, partitions and room for made-up runs, whose answers follow from closed forms."""

from __future__ import annotations

import json
import math

import jsonschema
import pytest

from podrun.core.documents import load_schema
from podrun.core.errors import UsageError
from podrun.serving.capacity.answer import answer_capacity, answer_json
from podrun.serving.capacity.arrivals import ArrivalProcess
from podrun.serving.capacity.costs import ModelCosts, RunCost
from podrun.serving.capacity.planning import PlannedService, ServiceDemand, partition_sizes
from podrun.serving.capacity.presentation import answer_text, capacity_page
from podrun.serving.capacity.quantities import Objective

RUNS = tuple(RunCost(rows, 0.8e-3 + 0.1e-3 * rows, 0.1e-3, 0.1 * rows) for rows in (1, 2, 4, 8, 16))
"""The batch of 16 does not fit."""


def service(
    rate: float | None, slo: float = 0.02, per: int = 1, name: str = "net", **demand: object
) -> PlannedService:
    arrivals = demand.pop("arrivals", ArrivalProcess())
    assert isinstance(arrivals, ArrivalProcess)
    goals = (Objective(99.0, slo),)
    return PlannedService(
        ModelCosts(name, per, RUNS), ServiceDemand(rate, goals, arrivals, requests=4_000, seed=3), name
    )


def test_partitions_are_powers_of_two_from_a_replica_on() -> None:
    assert list(partition_sizes(3, 20)) == [4, 8, 16]


def test_the_smallest_partition_carries_the_rate_and_the_next_smaller_does_not() -> None:
    most = 8 / RUNS[3].seconds  # Rows a second of one replica at its largest batch that fits.
    answer = answer_capacity([service(2.5 * most)], "pod16", {})
    (one,) = answer.services
    assert one.needed_ipus == 4
    assert answer.pod == "pod4"
    assert one.final.plan.run.rows <= 8
    assert one.final.holds
    assert 0.95 * 16 * most < one.highest_rate <= 16 * most
    assert one.lost_highest_rate == pytest.approx(one.highest_rate * 12 / 16, rel=0.03)


def test_a_target_that_is_too_small_is_said_and_its_room_told() -> None:
    answer = answer_capacity([service(1e6)], "pod4", {})
    assert not answer.holds
    (one,) = answer.services
    assert one.needed_ipus is None
    assert math.isinf(one.final.ratio)
    assert "never: the replicas carry" in answer_text(answer)
    assert answer_json(answer)["services"][0]["best"]["latency_s"] is None


def test_prices_choose_the_cheapest_pod_and_not_the_smallest() -> None:
    answer = answer_capacity([service(1_000.0)], "pod64", {"pod16": 9.0, "pod64": 7.0})
    assert answer.pod == "pod64"
    assert "cheapest POD that does: pod64 (7 an hour)" in answer_text(answer)


def test_several_models_share_a_pod() -> None:
    answer = answer_capacity([service(9_000.0, name="a"), service(2_000.0, name="b", per=2)], "pod16", {})
    assert answer.holds
    assert sum(one.ipus for one in answer.services) <= 16
    assert all(one.final.holds for one in answer.services)


def test_bursts_need_more_than_poisson_arrivals() -> None:
    calm = answer_capacity([service(15_000.0, 0.004)], "pod64", {}).services[0]
    bursts = ArrivalProcess("burst", cv=8.0)
    wild = answer_capacity([service(15_000.0, 0.004, arrivals=bursts)], "pod64", {}).services[0]
    assert calm.needed_ipus is not None
    assert wild.needed_ipus is not None
    assert wild.needed_ipus > calm.needed_ipus


def test_clients_of_a_closed_loop_are_answered_as_fast_as_they_ask() -> None:
    clients = ArrivalProcess("closed", clients=4, think_s=0.0)
    one = answer_capacity([service(None, arrivals=clients)], "pod4", {}).services[0]
    assert one.final.rate == pytest.approx(4 / one.final.plan.run.seconds, rel=0.01)
    assert one.curve == []


def test_one_seed_gives_the_same_bytes_and_the_schema_holds() -> None:
    texts = [json.dumps(answer_json(answer_capacity([service(9_000.0)], "pod16", {}))) for _ in range(2)]
    assert texts[0] == texts[1]
    jsonschema.validate(json.loads(texts[0]), load_schema("podrun.serving.capacity", "capacity.schema.json"))


def test_the_page_draws_the_limit_and_loads_nothing() -> None:
    page = capacity_page(answer_capacity([service(9_000.0)], "pod16", {}))
    assert "p99 at most 20 ms" in page
    assert "http" not in page.replace("http-equiv", "")


def test_an_objective_shorter_than_one_run_is_refused_with_the_run() -> None:
    with pytest.raises(UsageError, match=r"one run of net takes 0\.9 ms"):
        service(100.0, slo=0.5e-3)
