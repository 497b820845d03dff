"""Faults of the network between instances, in their collectives: the same error for all, and the next call connects."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from podrun.core.errors import UsageError
from podrun.core.event_record import EVENT_PATH, read_event_record
from podrun.faults import PlanOfALaunch, parse_fault, parse_faults, validate
from podrun.faults.in_program import program_faults
from podrun.popdist import collectives
from podrun.record.recorder import FOLDER
from tests.device.conftest import together
from tests.device.fault_kinds import Instances

AT = "instance-network:0-1@during=collective"


def add_twice() -> list[Any]:
    """Two calls; returns the result of each, or its error."""
    found: list[Any] = []
    for _ in range(2):
        try:
            found.append(collectives.allReduceSum(np.ones(2, np.float32)).tolist())
        except collectives.popdist_error as error:
            found.append(error.message)
    return found


def results(count: int, fault: str, timeout: float = 60.0) -> list[Any]:
    with Instances(count, parse_faults(fault), timeout) as instances:
        found = together([partial(instances.run, index, add_twice) for index in range(count)], 120)
        assert instances.plan.left() == []
    return found


def test_all_instances_hear_of_a_partition_and_connect_again() -> None:
    said = "popdist.allReduceSum: instance 0 and instance 1 did not reach each other over the network."
    assert results(3, f"{AT}:partitioned") == [[said, [3.0, 3.0]]] * 3


@pytest.mark.parametrize(("kind", "seconds"), [("delayed,seconds=3", 3.0), ("lossy,loss=0.5", 0.2)])
def test_a_slow_or_lossy_link_delays_both_ends(kind: str, seconds: float) -> None:
    slept: list[float] = []
    with mock.patch.object(collectives.time, "sleep", slept.append):
        assert results(2, f"{AT}:{kind}") == [[[2.0, 2.0]] * 2] * 2
    assert [each for each in slept if each > 0.1] == [seconds] * 2


def test_a_delay_beyond_the_deadline_names_the_other_end() -> None:
    found = results(2, f"{AT}:delayed,seconds=9", timeout=0.05)
    assert [each[0] for each in found] == [
        f"popdist.allReduceSum: instance {other} did not come within 0.05 s." for other in (1, 0)
    ]


def test_lost_packets_cost_more_the_more_is_sent() -> None:
    fault = parse_fault(f"{AT}:lossy,loss=0.1")
    assert [round(fault.delay(size), 9) for size in (100, 1448 * 10, 1448 * 1000, 1448 * 10**6)] == [
        0,
        0.2,
        0.6,
        1.2,
    ]
    assert parse_fault(f"{AT}:lossy,loss=0").delay(10**9) == 0


def test_a_strike_counts_once_for_both_ends_and_not_again_in_the_next_life(tmp_path: Path) -> None:
    plan = PlanOfALaunch(tmp_path / "plan")
    plan.write(parse_faults(f"{AT},repeat=2:partitioned"))

    def take(instance: int, life: int) -> bool:
        environ = {
            "PODRUN_PROGRAM_FAULTS": str(tmp_path / "plan"),
            "OMPI_COMM_WORLD_RANK": str(instance),
            "PODRUN_RESTART_COUNT": str(life),
        }
        return program_faults(environ).take("collective", (0, 1)) is not None

    assert take(0, 0)
    assert take(1, 0)
    assert take(1, 1)  # Instance 0 was ended before it came to the second strike.
    assert plan.left() == []
    assert not take(1, 1)
    assert not take(0, 2)
    assert not take(2, 2)


def test_a_group_without_both_ends_is_spared() -> None:
    with Instances(2, parse_faults(f"{AT}:partitioned")) as instances:

        def alone() -> Any:
            with collectives.instance_groups.only({0}):
                collectives._strike(mock.Mock(), 8)
            return "spared"

        assert instances.run(0, alone) == "spared"
        assert len(instances.plan.left()) == 1


def test_records_and_monitors_hear_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "record").mkdir()
    monkeypatch.setenv(EVENT_PATH, str(tmp_path))
    monkeypatch.setenv(FOLDER, str(tmp_path / "record"))
    results(2, f"{AT}:partitioned")
    found = read_event_record(tmp_path)
    assert "did not reach each other over the network" in found["description"]
    lines = [
        json.loads(line) for path in (tmp_path / "record").iterdir() for line in path.read_text().splitlines()
    ]
    errors = [line["data"] for line in lines if line["kind"] == "error"]
    assert [(each["during"], each["error"]) for each in errors] == [("collective", "popdist_error")] * 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("instance-network:0-2@batch=1:partitioned", "the launch has no instance 2, only 0 to 1"),
        (
            "instance-network:0@batch=1:partitioned",
            "takes the two instances it joins, as instance-network:2-3",
        ),
        ("instance-network:0-1@during=load:delayed", "there is no event 'load', only collective"),
        ("instance-network:0-1@batch=1:lossy,loss=1", "loss=1 is no number from 0 to 0.99"),
    ],
)
def test_what_cannot_be_is_refused(fault: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate([parse_fault(fault)], ipus=16, instances=2)
