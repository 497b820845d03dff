"""Which host runs which machines, and which machines share a process."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import UsageError
from podrun.partition.machines.ray_starts import (
    MACHINE_BYTES,
    MOST_TOGETHER,
    PROCESSES_PER_CORE,
    Host,
    host_of_agents,
    in_processes,
    machines_per_process,
    own_machines_per_process,
)

GIB = 1 << 30


def hosts(count: int) -> list[Host]:
    return [Host(f"n{i}", f"10.0.0.{i + 1}", 8, 64 * GIB) for i in range(count)]


def test_ipu_link_domains_stay_together_if_there_are_as_many_as_hosts() -> None:
    cluster = load_cluster("pod256")
    where = host_of_agents(cluster, hosts(2))
    assert [{where[agent.id].address for agent in ild.agents} for ild in cluster.ilds] == [
        *[{"10.0.0.1"}] * 2,
        *[{"10.0.0.2"}] * 2,
    ]
    few = host_of_agents(load_cluster("pod16"), hosts(2))
    assert [host.address for host in few.values()] == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2


@given(st.sampled_from(["pod16", "pod64", "pod256"]), st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_order_of_hosts_does_not_matter(name: str, count: int, chance: random.Random) -> None:
    cluster, several = load_cluster(name), hosts(count)
    expected = host_of_agents(cluster, several)
    assert set(expected) == {agent.id for agent in cluster.agents}
    chance.shuffle(several)
    assert host_of_agents(cluster, several) == expected


def test_addresses_are_ordered_as_numbers() -> None:
    two = [Host("a", "10.0.0.10", 1, GIB), Host("b", "10.0.0.9", 1, GIB)]
    assert next(iter(host_of_agents(load_cluster("pod16"), two).values())).node == "b"


def test_machines_share_a_process_if_cores_or_memory_are_short() -> None:
    assert machines_per_process(2 * PROCESSES_PER_CORE, 2, 16 * GIB) == 1
    assert machines_per_process(4, 2, 16 * GIB) == 1
    assert machines_per_process(16, 2, 16 * GIB) == 8
    assert machines_per_process(64, 4, 16 * GIB) == 16
    assert machines_per_process(64, 64, 64 * GIB) == 1
    assert machines_per_process(16, 64, 8 * MACHINE_BYTES) == 4
    assert machines_per_process(64, 1, 0) == MOST_TOGETHER
    assert machines_per_process(64, 1, 0, 1) == 1


def test_the_users_number_of_machines_in_a_process_is_1_to_64() -> None:
    assert own_machines_per_process({}) is None
    assert own_machines_per_process({"PODRUN_MACHINES_PER_PROCESS": "64"}) == 64
    for wrong in ("0", "65", "some", "9" * 5000):
        with pytest.raises(UsageError, match="PODRUN_MACHINES_PER_PROCESS"):
            own_machines_per_process({"PODRUN_MACHINES_PER_PROCESS": wrong})


def test_a_process_holds_neighbours_of_one_host_each_once() -> None:
    first, second = hosts(2)
    where = {"a": first, "b": first, "c": second, "d": second, "e": second}
    each = {first: 2, second: 2}
    assert in_processes(["a", "b", "c", "d", "e"], where, each) == [["a", "b"], ["c", "d"], ["e"]]
    assert in_processes(["a", "a", "b"], where, each) == [["a"], ["a", "b"]]
