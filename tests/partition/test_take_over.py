"""A restarted server takes over the machines of the last one; a server that was replaced commands nothing."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from podrun.core.errors import ConflictError, UsageError
from podrun.device.service.control import MachineControl
from podrun.device.service.server import MachineServer
from podrun.partition.commands.stop import choose_server
from podrun.partition.host.discovery import (
    POD,
    VIPU_SERVER,
    ProcessId,
    Registry,
    ServiceEntry,
    own_process_id,
)
from podrun.partition.machines.keeper import PROTOCOL, Keeper, ListedMachine, MachineList
from podrun.partition.state.store import Superseded
from podrun.partition.state.values import AgentState, PartitionState

from .conftest import FakeMachine, Pod

S = PartitionState
MakePod = Callable[..., Pod]


def left_by(pod: Pod) -> list[FakeMachine]:
    """Stop a server as if it were killed: its machines go on."""
    pod.stop(leave_machines=True)
    return [machine for machine in pod.pool.started if machine.alive]


def test_machines_in_order_go_on_untouched(make_pod: MakePod, tmp_path: Path) -> None:
    first = make_pod("pod16", tmp_path / "state")
    first.active("p", 8, num_gcds=2)
    before = first.client.get_partition("p")
    left = left_by(first)
    calls = [list(machine.calls) for machine in left]
    second = make_pod("pod16", tmp_path / "state", left=left)
    assert second.client.get_partition("p") == before
    assert [machine.calls[len(done) :] for machine, done in zip(left, calls, strict=True)] == (
        [[("lead", None)]] * 2
    )
    assert second.client.ipuof_config("p").devices[0].server_port == int(left[0].endpoint.rpartition(":")[2])
    second.pool.machine("ipum1", "p").die()
    assert second.client.wait_for_state("p", {S.ERROR}, 60) is S.ERROR


def test_a_machine_that_ended_meanwhile_is_lost(make_pod: MakePod, tmp_path: Path) -> None:
    first = make_pod("pod16", tmp_path / "state")
    first.active("p", 8)
    first.active("q", 4)
    left = left_by(first)
    left[1].alive = False
    second = make_pod("pod16", tmp_path / "state", left=left)
    assert second.client.partition_state("q")[0] is S.ACTIVE
    state, error = second.client.partition_state("p")
    assert (state, "its process ended while no server ran" in error) == (S.ERROR, True)
    states = {agent.agent_id: agent.state for agent in second.client.list_agents()}
    assert states["ipum2"] is AgentState.LOST


def test_an_interrupted_operation_is_done_again_with_the_same_machines(
    make_pod: MakePod, tmp_path: Path
) -> None:
    first = make_pod("pod16", tmp_path / "state")
    first.active("p", 4)
    left = left_by(first)
    left[0].configured["operation"] -= 1  # The last reset was stored, and did not reach the machine.
    second = make_pod("pod16", tmp_path / "state", left=left)
    assert second.client.wait_for_state("p", {S.ACTIVE}, 60) is S.ACTIVE
    assert second.client.get_partition("p").generation == 2
    assert second.pool.started == left


def test_machines_of_no_partition_become_spares_or_end(make_pod: MakePod, tmp_path: Path) -> None:
    first = make_pod("pod16", tmp_path / "state", keep_spares=True)
    first.active("p", 4)
    left = left_by(first)
    strays = [FakeMachine("ipum1", "127.0.0.1:1"), FakeMachine("ipum3", "127.0.0.1:2")]
    strays[0].configured = {"partition": "p", "operation": 9}  # A second machine for the same use.
    strays[1].configured = {"partition": "gone", "operation": 7}
    silent = FakeMachine("ipum4", "127.0.0.1:3")
    silent.fail = "lead"
    second = make_pod("pod16", tmp_path / "state", keep_spares=True, left=[*left, *strays, silent])
    assert second.pool.running_agents() == {"ipum1", "ipum3"}
    assert (strays[1].alive, strays[1].configured) == (True, {})
    assert not silent.alive


def test_a_server_that_was_replaced_changes_nothing(make_pod: MakePod, tmp_path: Path) -> None:
    path = tmp_path / "state"
    pod = make_pod("pod16", path)
    pod.active("p", 4)
    told: list[str] = []
    pod.service.on_superseded = lambda: told.append("superseded")
    with sqlite3.connect(
        path
    ) as db:  # As a server on another host would, through a file system without locks.
        db.execute("UPDATE pod SET epoch = epoch + 1")
    db.close()
    with pytest.raises(ConflictError, match=r"another server owns .* \(its epoch 2; ours 1\)"):
        pod.client.remove_partition("p")
    assert pod.client.partition_state("p")[0] is S.ACTIVE
    assert told == ["superseded"]
    assert issubclass(Superseded, ConflictError)


@pytest.fixture
def machine() -> Iterator[MachineServer]:
    server = MachineServer(agent_id="ipum1")
    server.start()
    yield server
    server.stop()


def test_a_machine_refuses_a_server_of_an_earlier_epoch(machine: MachineServer) -> None:
    old, new = MachineControl(machine.endpoint, epoch=4), MachineControl(machine.endpoint, epoch=5)
    assert old.lead() == ("", 0)
    place = {"first_ipu": 0, "machine_index": 0, "endpoints": [machine.endpoint]}
    old.configure(partition="p", operation=17, **place)  # type: ignore[arg-type]
    assert new.lead() == ("p", 17)
    refused = [
        old.lead,
        old.power_cycle,
        old.stop,
        old.reset_links,
        lambda: old.reset_ipus([0]),
        lambda: old.inject(["ipu:0@batch=1:tile-parity"]),
        lambda: old.configure(partition="q", operation=18, **place),  # type: ignore[arg-type]
    ]
    for call in refused:
        with pytest.raises(ConflictError, match=r"obeys a newer V-IPU server \(epoch 5, not 4\)"):
            call()
    assert old.telemetry().ipus  # Looking is free.
    new.power_cycle()
    assert new.lead() == ("", 0)
    old.close()
    new.close()


def test_stop_asks_which_server_is_meant() -> None:
    def entry(cluster: str, port: int, kind: str = VIPU_SERVER) -> ServiceEntry:
        return ServiceEntry(
            kind, "", port if kind == VIPU_SERVER else 0, own_process_id(), cluster, last_port=port
        )

    one, other, left = entry("pod16", 8090), entry("pod64", 8091), entry("pod16", 8092, POD)
    assert choose_server([one], None, None) is one
    assert choose_server([one, other], 8091, None) is other
    assert choose_server([one, other, left], 8092, None) is left
    assert choose_server([one, other], None, "pod16") is one
    for entries, port, cluster, message in [
        ([one, left], None, "pod16", "several servers: pod16 at port 8090, pod16 at port 8092"),
        ([one], 9, None, "no V-IPU server at port 9"),
        ([], None, None, "runs no V-IPU server on this host"),
    ]:
        with pytest.raises(UsageError, match=message):
            choose_server(entries, port, cluster)


def test_a_stopped_machine_is_left_as_it_is(make_pod: MakePod, tmp_path: Path) -> None:
    first = make_pod("pod16", tmp_path / "state")
    first.active("p", 8)
    left = left_by(first)
    left[1].fail = "lead"  # It listens, but its process is stopped.
    second = make_pod("pod16", tmp_path / "state", left=left)
    assert second.client.partition_state("p") == (S.ACTIVE, "")
    assert {agent.agent_id: agent.health for agent in second.client.list_agents()}["ipum2"] == "suspect"
    left[1].fail = ""
    second.client.machine_reports("p")
    assert {agent.health for agent in second.client.list_agents()} == {"up"}


def test_the_list_of_machines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known, machine = (
        MachineList(tmp_path, "pod"),
        ListedMachine("ipum1", "127.0.0.1:1", "p", "ipum1-1-1", True),
    )
    assert known.read() is None
    known.write([machine])
    assert known.read() == [machine]
    assert [path.name for path in tmp_path.iterdir()] == ["pod.machines"]
    for damaged in ("", "[]", '{"version": 2, "machines": []}', '{"version": 1, "machines": [{"agent": 1}]}'):
        (tmp_path / "pod.machines").write_text(damaged)
        assert known.read() is None
    known.remove()
    known.remove()
    assert list(tmp_path.iterdir()) == []
    nowhere = MachineList(tmp_path / "missing", "pod")
    nowhere.write([machine])
    assert "cannot be written" in caplog.text
    MachineList(tmp_path, "").write([machine])
    assert list(tmp_path.iterdir()) == []


def test_a_keeper_is_ended_also_when_the_runtime_directory_is_gone(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "run")
    registry.directory.mkdir()
    with subprocess.Popen(["sleep", "60"]) as process:
        owner = ProcessId.of(process.pid)
        assert owner is not None
        entry = ServiceEntry(POD, "", 0, owner, "pod16", pod="4711", address="h:1", protocol=PROTOCOL)
        registry.publish(entry)
        keeper = Keeper(registry, "pod16", "4711")
        assert keeper.running() is not None
        shutil.rmtree(registry.directory)
        keeper.end()
        assert process.wait(60) == -signal.SIGTERM
    keeper.end()


@pytest.mark.parametrize(("protocol", "whose"), [(None, "an earlier"), (PROTOCOL + 1, "a later")])
def test_a_keeper_of_another_build_ends_and_its_partitions_come_up_anew(
    make_pod: MakePod, tmp_path: Path, caplog: pytest.LogCaptureFixture, protocol: int | None, whose: str
) -> None:
    registry = Registry(tmp_path / "run")
    registry.directory.mkdir()
    with subprocess.Popen(["sleep", "60"]) as process:
        owner = ProcessId.of(process.pid)
        assert owner is not None
        plain = asdict(ServiceEntry(POD, "", 0, owner, "pod16", pod="4711", address="h:1"))
        del plain["protocol"]
        if protocol is not None:
            plain |= {"protocol": protocol, "a field of later builds": 1}
        path = registry.directory / f"{POD}-{process.pid}-0.json"
        path.write_text(json.dumps(plain))
        keeper = Keeper(registry, "pod16", "4711")
        assert keeper.running() is None
        assert process.wait(60) == -signal.SIGTERM
    assert f"started by {whose} build of podrun" in caplog.text
    assert f"process {process.pid}" in caplog.text
    assert keeper.running() is None
    # What a server does then: no machine is left, so each partition gets new ones.
    first = make_pod("pod16", tmp_path / "state")
    first.active("p", 4)
    first.stop(leave_machines=True)
    second = make_pod("pod16", tmp_path / "state", left=None)
    assert second.service.wait_idle(60)
    assert [(info.name, info.state) for info in second.client.list_partitions()] == [("p", S.ACTIVE)]
    assert second.pool.started


def test_entries_of_other_builds_are_understood_and_stay(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    entry = ServiceEntry(POD, "", 0, own_process_id(), "pod16", pod="4711", address="h:1")
    path = tmp_path / "pod-1-0.json"
    path.write_text(json.dumps({**asdict(entry), "more": ["of a later build"]}))
    assert registry.entries() == [entry]
    assert registry.sweep() == []
    assert path.exists()
