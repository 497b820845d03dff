"""Agents and clusters that are made and removed while the service runs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import ConfigError, ConflictError, ExistsError, NotFoundError, UsageError
from podrun.partition.state.repair import diagnose_rows, read_rows, repair
from podrun.partition.state.store import Store
from podrun.partition.state.values import PartitionState, Requirements

from .conftest import Pod

S = PartitionState


def remove(pod: Pod, name: str) -> None:
    pod.client.remove_partition(name)
    pod.client.wait_for_state(name, {S.REMOVED}, 60)


def divide(pod: Pod) -> None:
    """Two clusters of two agents each instead of the POD's one of four."""
    pod.client.remove_cluster("pod16")
    pod.client.create_cluster("left", ["ipum1", "ipum2"], ipu_links="torus")
    pod.client.create_cluster("right", ["ipum4", "ipum3"], ilds=2)


def test_a_pod_begins_as_one_cluster(pod16: Pod) -> None:
    (cluster,) = pod16.client.list_clusters()
    assert (cluster.name, cluster.num_ipus, cluster.ipu_link_domain_size) == ("pod16", 16, 16)
    assert cluster.agents == ("ipum1", "ipum2", "ipum3", "ipum4")
    assert {agent.cluster for agent in pod16.client.list_agents()} == {"pod16"}


def test_clusters_have_links_and_allocations_of_their_own(pod16: Pod) -> None:
    divide(pod16)
    left, right = pod16.client.list_clusters()
    assert (left.ipu_link_topology, left.gateway_topology, left.ipu_link_domain_size) == ("torus", "none", 8)
    assert (right.gateway_topology, right.ipu_link_domain_size) == ("looped", 4)
    assert [(a.name, a.cluster, a.agents) for a in pod16.client.list_allocations()] == [
        ("left", "left", ("ipum1", "ipum2")),
        ("right", "right", ("ipum4", "ipum3")),
    ]
    pod16.active("a", 8, num_gcds=2, cluster="right")
    info = pod16.client.get_partition("a")
    assert (info.cluster, info.num_ilds, info.agents) == ("right", 2, ("ipum4", "ipum3"))
    pod16.active("b", 8)
    info = pod16.client.get_partition("b")
    assert (info.cluster, info.num_ilds, info.agents) == ("left", 1, ("ipum1", "ipum2"))
    assert info.ild_routing == "RINGSWNC"  # A whole domain, and a torus.
    with pytest.raises(UsageError, match=r"a partition of 16 IPUs is larger than left of 8"):
        pod16.client.create_partition(Requirements("c", 16))
    with pytest.raises(UsageError, match=r"no 4 aligned IPUs are free: 0 IPUs are"):
        pod16.client.create_partition(Requirements("c", 4))
    assert pod16.client.cluster().num_ipus == 8  # Of the largest cluster.


def test_a_partition_lies_in_the_cluster_that_is_named(pod16: Pod) -> None:
    divide(pod16)
    pod16.active("a", 4, cluster="right")
    assert pod16.client.get_partition("a").agents == ("ipum4",)
    pod16.active("b", 4, allocation="right", index=2)
    assert pod16.client.get_partition("b").agents == ("ipum3",)
    with pytest.raises(NotFoundError, match="there is no cluster 'up'"):
        pod16.client.create_partition(Requirements("c", 4, cluster="up"))
    with pytest.raises(UsageError, match="allocation right is in cluster right, not in left"):
        pod16.client.create_partition(Requirements("c", 4, cluster="left", allocation="right"))
    pod16.client.create_partition(Requirements("waits", 4, cluster="right"), wait=True)
    assert pod16.client.list_queue()[0].blockers in (("a",), ("b",))
    remove(pod16, "a")
    assert pod16.client.wait_for_state("waits", {S.ACTIVE}, 60) is S.ACTIVE
    assert pod16.client.get_partition("waits").agents == ("ipum4",)


def test_an_agent_is_added_and_used(pod16: Pod) -> None:
    pod16.active("runs", 16)
    generation = pod16.client.get_partition("runs").generation
    for number in (5, 6):
        pod16.client.create_agent(f"ipum{number}", f"10.1.1.{number}")
    agents = {agent.agent_id: agent for agent in pod16.client.list_agents()}
    assert (agents["ipum5"].cluster, agents["ipum5"].host, agents["ipum5"].port) == ("", "10.1.1.5", 8080)
    assert len({agent.serial for agent in agents.values()}) == 6
    pod16.client.create_cluster("more", ["ipum5", "ipum6"])
    pod16.active("p", 8)
    assert pod16.client.get_partition("p").agents == ("ipum5", "ipum6")
    assert pod16.client.get_partition("runs").generation == generation
    pod16.pool.machine("ipum5", "p").die()
    assert pod16.client.wait_for_state("p", {S.ERROR}, 60) is S.ERROR
    remove(pod16, "p")
    pod16.client.remove_cluster("more")
    pod16.client.remove_agent("ipum5")
    assert [agent.agent_id for agent in pod16.client.list_agents()][-1] == "ipum6"
    assert pod16.client.get_partition("runs").state is S.ACTIVE


@pytest.mark.parametrize(
    ("call", "arguments", "error", "words"),
    [
        ("create_agent", ("ipum1", "h"), ExistsError, "agent ipum1 exists already"),
        ("create_agent", ("new", "10.1.1.2"), ConflictError, "agent ipum2 is at 10.1.1.2:8080 already"),
        ("create_agent", ("new", "no host"), UsageError, "no address of an agent"),
        ("create_agent", ("new", "h", 0), UsageError, "no address of an agent"),
        ("create_agent", ("a b", "h"), UsageError, "'a b' is no name for an agent"),
        ("remove_agent", ("ipum1",), ConflictError, "agent ipum1 is in cluster pod16"),
        ("remove_agent", ("ipum9",), NotFoundError, "there is no agent 'ipum9'"),
        ("remove_agent", ("kept",), ConflictError, "agent kept is in reservation keep"),
        ("create_cluster", ("pod16", ["free1"]), ExistsError, "cluster pod16 exists already"),
        ("create_cluster", ("c", ["ipum1"]), ConflictError, "agent ipum1 is in cluster pod16"),
        ("create_cluster", ("c", ["ipum9"]), NotFoundError, "there is no agent 'ipum9'"),
        ("create_cluster", ("c", []), UsageError, "a cluster needs at least one agent"),
        ("create_cluster", ("c", ["free1", "free1"]), UsageError, "agent free1 is named twice"),
        ("create_cluster", ("c", ["free1", "free2", "kept"]), UsageError, "3 agents do not make 1 equal"),
        ("create_cluster", ("-", ["free1"]), UsageError, "no name for a cluster"),
        ("remove_cluster", ("pod16",), ConflictError, "cluster pod16 has partitions: p"),
        ("remove_cluster", ("pod17",), NotFoundError, "Did you mean pod16"),
        ("create_allocation", ("a", ["free1"]), ConflictError, "agent free1 is in no cluster"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    pod16: Pod, call: str, arguments: tuple[object, ...], error: type[Exception], words: str
) -> None:
    pod16.active("p", 4)
    for name in ("free1", "free2", "kept"):
        pod16.client.create_agent(name, f"host-{name}")
    pod16.client.create_reservation("keep", ["kept"], begin_in_s=0, for_s=60)
    before = (pod16.client.list_agents(), pod16.client.list_clusters(), pod16.client.list_allocations())
    with pytest.raises(error) as refused:
        getattr(pod16.client, call)(*arguments)
    assert words in f"{refused.value} {refused.value.hint}"  # type: ignore[attr-defined]
    assert refused.value.hint  # type: ignore[attr-defined]
    after = (pod16.client.list_agents(), pod16.client.list_clusters(), pod16.client.list_allocations())
    assert after == before


def test_links_that_there_cannot_be_are_refused(make_pod: Callable[..., Pod]) -> None:
    pod = make_pod("pod128")
    pod.client.remove_cluster("pod128")
    names = [f"ipum{n}" for n in range(1, 33)]
    known = [agent.agent_id for agent in pod.client.list_agents()]
    assert len(known) == len(names)
    with pytest.raises(UsageError, match="IPU-Links join at most 64 IPUs, not the 128 of 32 agents"):
        pod.client.create_cluster("c", known)
    with pytest.raises(UsageError, match="2 IPU-Link domains have to be joined by GW-Links"):
        pod.client.create_cluster("c", known, ilds=2, gateway="none")
    with pytest.raises(UsageError, match="there is no topology 'star'") as refused:
        pod.client.create_cluster("c", known, ilds=2, ipu_links="star")
    assert "mesh, torus" in str(refused.value.hint)
    pod.client.create_cluster("c", known, ilds=2, ipu_links="torus", gateway="looped")
    pod.active("p", 128, num_gcds=2)
    assert pod.client.get_partition("p").num_ilds == 2


def test_requests_and_allocations_keep_their_cluster(pod16: Pod) -> None:
    divide(pod16)
    pod16.active("a", 8, cluster="left")
    pod16.client.create_partition(Requirements("waits", 8, allocation="left"), wait=True)
    with pytest.raises(ConflictError, match="has partitions: a"):
        pod16.client.remove_cluster("left")
    with pytest.raises(ConflictError, match="allocation left has partitions: a"):
        pod16.client.remove_allocation("left")
    pod16.client.set_maintenance("ipum1")
    pod16.client.remove_partition("a", force=True)
    pod16.client.wait_for_state("a", {S.REMOVED}, 60)
    with pytest.raises(ConflictError, match="requests wait for allocation left: waits"):
        pod16.client.remove_allocation("left")
    with pytest.raises(ConflictError, match="requests wait for cluster left: waits"):
        pod16.client.remove_cluster("left")
    pod16.client.remove_partition("waits")
    pod16.client.remove_allocation("left")
    pod16.client.remove_allocation("right")
    with pytest.raises(ConflictError, match="ipum1 and ipum3 are in different clusters"):
        pod16.client.create_allocation("both", ["ipum1", "ipum3"])
    pod16.client.create_allocation("half", ["ipum3"])
    with pytest.raises(ConflictError, match="cluster right has allocations: half"):
        pod16.client.remove_cluster("right")


def test_the_last_cluster_may_go(pod16: Pod) -> None:
    pod16.client.remove_cluster("pod16")
    with pytest.raises(UsageError, match="pod16 has no cluster") as refused:
        pod16.client.create_partition(Requirements("p", 4))
    assert "vipu-admin create cluster" in str(refused.value.hint)
    for agent in pod16.client.list_agents():
        pod16.client.remove_agent(agent.agent_id)
    assert pod16.client.list_agents() == []
    assert pod16.client.service_metrics().free_ipus == 0
    pod16.client.create_agent("one", "10.0.0.1")
    pod16.client.create_cluster("c", ["one"])
    pod16.active("p", 4)


def test_agents_and_clusters_are_there_after_a_restart(tmp_path: Path, make_pod: Callable[..., Pod]) -> None:
    path = tmp_path / "state.sqlite"
    pod = make_pod("pod16", path)
    divide(pod)
    pod.client.create_agent("spare", "10.1.1.9", 9000)
    pod.active("a", 8, cluster="right", num_gcds=2)
    pod.client.create_partition(Requirements("b", 8, cluster="right", num_gcds=2), wait=True)
    before = (pod.client.list_clusters(), pod.client.get_partition("a").agents)
    pod.stop()
    again = make_pod("pod16", path)
    assert again.service.wait_idle(60)
    assert (again.client.list_clusters(), again.client.get_partition("a").agents) == before
    assert {a.agent_id: a.host for a in again.client.list_agents()}["spare"] == "10.1.1.9"
    assert again.client.list_queue()[0].blockers == ("a",)
    again.client.remove_agent("spare")
    again.stop()


def test_a_changed_description_is_refused_as_before(tmp_path: Path, make_pod: Callable[..., Pod]) -> None:
    path = tmp_path / "state.sqlite"
    pod = make_pod("pod16", path)
    divide(pod)
    pod.stop()
    pod16 = load_cluster("pod16")
    other = replace(pod16, topology=replace(pod16.topology, ild_ipus=8))
    store = Store(path, "pod16")
    with pytest.raises(ConfigError, match="another description of pod16"):
        store.load(other)
    assert [part.name for part in (store.load(pod16).layout or pod16).clusters] == ["left", "right"]
    store.close()


@pytest.mark.parametrize("damage", ["{", '["x"]', '{"name": "left", "agents": 9}'])
def test_a_layout_that_cannot_be_read_is_refused_and_repaired(
    tmp_path: Path, make_pod: Callable[..., Pod], damage: str
) -> None:
    path, pod16 = tmp_path / "state.sqlite", load_cluster("pod16")
    pod = make_pod("pod16", path)
    divide(pod)
    pod.active("a", 4, cluster="left")
    pod.active("b", 4, cluster="right")
    pod.stop()
    whole = diagnose_rows(pod16, read_rows(path))
    assert whole.problems == ()
    assert {p.name for p in whole.kept.partitions} == {"a", "b"}
    with sqlite3.connect(path) as db:
        db.execute("UPDATE layout SET data = ? WHERE kind = 'cluster' AND position = 0", (damage,))
    db.close()
    store = Store(path, "pod16")
    with pytest.raises(ConfigError, match="is damaged or no state file"):
        store.load(pod16)
    store.close()
    found = diagnose_rows(pod16, read_rows(path))
    assert "its agents and clusters, which were changed, cannot be read" in found.problems[0].what
    repair(path, pod16, found)
    store = Store(path, "pod16")
    kept = store.load(pod16)
    store.close()
    assert kept.layout is None
    assert {p.allocation for p in kept.partitions} <= {"left", "right"}


def test_those_who_watch_are_told_of_agents_that_come_and_go(pod16: Pod) -> None:
    changes = pod16.client.watch(["machine"])
    while next(changes).kind != "synced":
        pass
    pod16.client.create_agent("new", "10.1.1.9")
    pod16.service.look_around()
    change = next(changes)
    assert (change.name, (change.value or {})["cluster"]) == ("new", None)
    pod16.client.remove_agent("new")
    pod16.service.look_around()
    change = next(changes)
    assert (change.name, change.value) == ("new", None)


def test_the_rows_of_a_divided_pod_are_plain(tmp_path: Path, make_pod: Callable[..., Pod]) -> None:
    path = tmp_path / "state.sqlite"
    pod = make_pod("pod16", path)
    divide(pod)
    pod.stop()
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT data FROM layout WHERE kind = 'cluster' ORDER BY position").fetchall()
    db.close()
    assert [json.loads(data)["name"] for (data,) in rows] == ["left", "right"]
