"""Host collectives between the instances of a launch: popdist's, and PopART's broadcastWeights."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.conftest import Commands
from tests.copies import run_command
from tests.system.conftest import PROGRAMS

pytestmark = pytest.mark.system
PROGRAM = PROGRAMS / "instances.py"


def launch(commands, instances, *words, env=None):
    line = ("podrun", "--offline-mode=yes", f"--num-replicas={instances}", f"--num-instances={instances}")
    return run_command(commands, *line, PROGRAM, *words, env=env)


@pytest.mark.parametrize("instances", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_instances_exchange_arrays_and_weights(commands: Commands, instances: int) -> None:
    done = launch(commands, instances)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line]
    assert len(found) == instances
    factor = sum(range(1, instances + 1))
    some = sorted({0, instances - 1})
    for one in found:
        assert one["total"] == [factor * i for i in range(5)]
        assert one["half"] == [float(np.float16(1000.5 * factor))] * 3
        assert one["large"] == [sum(range(instances))] * 2
        assert one["gathered"] == [[i, i * i] for i in range(instances)]
        mpi = one["mpi"]
        rank = mpi["rank"][0]
        assert mpi["rank"] == [rank, instances, rank, instances, 1]
        assert mpi["gathered"] == (None if rank else [[i, 0.5] for i in range(instances)])
        assert mpi["best"] == [instances - 1, 0.5]
        assert mpi["mine"] == [rank]
        assert mpi["note"] == [["seed", "table"], 7, [[1.0, 0.0], [0.0, 1.0]]]
        assert mpi["objects"] == ["ab"[: i + 1] for i in range(instances)]
        assert mpi["sum"] == sum(range(instances)) + instances / 2
    assert sorted(one["mpi"]["rank"][0] for one in found) == list(range(instances))
    for one in found:
        assert one["root"] == [(instances - 1) * 10, 7]
        assert one["weights"] == [float(instances - 1)] * 4
    assert sorted(str(one["some"]) for one in found) == sorted(
        ["[2.0]"] * len(some) + ["None"] * (instances - len(some))
    )
    assert [one["again"] for one in found if one["again"]] == [some] * len(some)


def test_an_instance_that_does_not_come_is_named(commands: Commands) -> None:
    done = launch(commands, 2, "absent", env={"PODRUN_HOST_COLLECTIVES_TIMEOUT": "2"})
    assert done.returncode != 0
    assert "popdist.barrier: instance 1 did not come within 2 s" in done.stderr


def test_instances_that_differ_say_how(commands: Commands) -> None:
    done = launch(commands, 2, "differ")
    assert done.returncode != 0
    assert "popdist.allReduceSum" in done.stderr
    assert "float32[2]" in done.stderr
    assert "float32[3]" in done.stderr
