"""The service over gRPC: the client's view, the calls of machines, and the state that survives a restart."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest

from podrun.core.access import make_token
from podrun.core.environment import environment, runtime_directory
from podrun.core.errors import (
    ConflictError,
    DeadlineError,
    NotFoundError,
    ServiceError,
    SilentMachineError,
    TakenBy,
    UsageError,
)
from podrun.core.ipu_states import IpuErrorState
from podrun.core.proven_channel import open_channel
from podrun.core.telemetry import AttachedProcess, MachineReport
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.machines.operations import REPORT_SECONDS, SILENT_REPORT_SECONDS, Reporter, process_runs
from podrun.partition.state.records import MachineUse
from podrun.partition.state.values import AgentState, PartitionState, Requirements, SyncType, parse_sync_type
from podrun.protos import vipu_pb2
from podrun.protos.services import stub_of

from .conftest import Pod

S = PartitionState


def test_create_get_list_remove(pod16: Pod) -> None:
    client = pod16.client
    client.create_partition(Requirements("p", 16, reconfigurable=True))
    assert client.wait_for_state("p", {S.ACTIVE}, deadline=20) is S.ACTIVE
    info = client.get_partition("p")
    assert (info.size, info.reconfigurable, info.sync_type) == (16, True, SyncType.C2_COMPATIBLE)
    assert (info.cluster, info.allocation, info.generation) == ("pod16", "pod16", 1)
    assert info.agents == ("ipum1", "ipum2", "ipum3", "ipum4")
    assert info.created == 1_700_000_000.0
    assert client.list_partitions() == [info]
    client.remove_partition("p")
    assert client.wait_for_state("p", {S.REMOVED}, deadline=20) is S.REMOVED
    assert client.list_partitions() == []
    assert not pod16.pool.running_agents()


def test_machines_are_configured_in_partition_order(pod16: Pod) -> None:
    pod16.active("p", 16)
    machines = [pod16.pool.machine(f"ipum{i}", "p") for i in (1, 2, 3, 4)]
    endpoints = [machine.endpoint for machine in machines]
    for index, machine in enumerate(machines):
        assert machine.configured["partition"] == "p"
        assert machine.configured["first_ipu"] == 4 * index
        assert machine.configured["machine_index"] == index
        assert list(machine.configured["endpoints"]) == endpoints


def test_the_ipuof_config_of_a_gcd_lists_its_devices(pod16: Pod) -> None:
    pod16.active("half", 2)
    pod16.active("p", 8, num_gcds=2)
    config = pod16.client.ipuof_config("p", gcd=1)
    assert config.state is S.ACTIVE
    assert [d.partition_ipu for d in config.devices] == [4, 5, 6, 7]
    assert [d.machine for d in config.devices] == [1] * 4
    assert [d.ipu for d in config.devices] == [0, 1, 2, 3]
    assert [d.ipu_number for d in config.devices] == [3, 2, 1, 0]
    where = pod16.pool.machine("ipum4", "p").endpoint
    assert {f"{d.ip}:{d.server_port}" for d in config.devices} == {where}
    assert config.attributes["GCD Id"] == "1"
    assert config.attributes["Partition Size"] == "8"
    assert config.attributes["IPU-Link Configuration"] == "default"
    with pytest.raises(UsageError, match="no GCD 2"):
        pod16.client.ipuof_config("p", gcd=2)


def test_small_partitions_share_a_machine_but_no_process(pod16: Pod) -> None:
    pod16.active("a", 2)
    pod16.active("b", 2)
    a, b = pod16.pool.machine("ipum1", "a"), pod16.pool.machine("ipum1", "b")
    assert a is not b
    assert b.configured["first_ipu"] == 0
    device = pod16.client.ipuof_config("b").devices[0]
    assert (device.partition_ipu, device.ipu, device.ipu_number) == (0, 0, 1)


def test_errors_keep_their_class_and_hint_over_grpc(pod16: Pod) -> None:
    client = pod16.client
    with pytest.raises(UsageError, match="power of two") as caught:
        client.create_partition(Requirements("p", 3))
    assert caught.value.hint == "Use 2 or 4."
    pod16.active("p16", 16)
    with pytest.raises(ConflictError, match="exists already"):
        client.create_partition(Requirements("p16", 1))
    with pytest.raises(ConflictError, match="are free"):
        client.create_partition(Requirements("more", 1))
    with pytest.raises(NotFoundError, match="no partition 'p61'") as missing:
        client.get_partition("p61")
    assert "Did you mean p16?" in str(missing.value.hint)
    with pytest.raises(UsageError, match="out of range"):
        client.create_partition(Requirements("p", -1))


def test_status_codes_for_third_parties(pod16: Pod) -> None:
    channel = open_channel(f"127.0.0.1:{pod16.port}", (), make_token(environment(), runtime_directory()))
    stub = stub_of(vipu_pb2, "UserService", channel)

    def code_of(size: int, name: str) -> grpc.StatusCode:
        needs = vipu_pb2.PartitionRequirements(size=size)
        with pytest.raises(grpc.RpcError) as caught:
            stub.CreatePartition(
                vipu_pb2.CreatePartitionRequest(partition_id=name, requirements=needs), timeout=60
            )
        code = caught.value.code()
        assert isinstance(code, grpc.StatusCode)
        return code

    pod16.active("p", 16)
    assert code_of(3, "q") is grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(16, "p") is grpc.StatusCode.ALREADY_EXISTS
    assert code_of(16, "q") is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetPartition(vipu_pb2.GetPartitionRequest(partition_id="no"), timeout=60)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    status = stub.GetPartitionStatus(vipu_pb2.GetPartitionStatusRequest(partition_id="p"), timeout=60).status
    assert vipu_pb2.PartitionState.Name(status.state) == "PS_ACTIVE"
    channel.close()


def test_without_a_server_the_address_is_named() -> None:
    with (
        VipuClient("127.0.0.1", 1, timeout=5) as client,
        pytest.raises(ServiceError, match="no V-IPU server") as caught,
    ):
        client.server_version()
    assert "vipu-server" in str(caught.value.hint)


def test_wait_for_state_names_the_state_it_waited_for(pod16: Pod) -> None:
    pod16.active("p", 4)
    now = iter([0.0, 10.0])
    with pytest.raises(DeadlineError, match="p is still ACTIVE after 5 s; waited for RESETTING"):
        pod16.client.wait_for_state("p", {S.RESETTING}, 5, clock=lambda: next(now), sleep=lambda _: None)


def test_ipu_error_is_cleared_by_ipu_reset_only_on_that_ipu(pod16: Pod) -> None:
    pod16.active("p", 8)
    machine = pod16.pool.machine("ipum2", "p")
    machine.ipu_errors.update(dict.fromkeys((1, 2), IpuErrorState.TILE_PARITY))
    machine.links_down.add(3)
    pod16.client.reset_ipus("p", [5])
    reports = pod16.client.machine_reports("p")
    assert [ipu.error_state for ipu in reports[1].ipus] == [
        "no errors",
        "no errors",
        "tile parity error",
        "no errors",
    ]
    assert reports[1].ipus[0].links_down == (3,)
    with pytest.raises(UsageError, match="no IPU 8"):
        pod16.client.reset_ipus("p", [8])


def test_link_down_is_cleared_by_partition_reset(pod16: Pod) -> None:
    pod16.active("p", 8)
    pod16.pool.machine("ipum2", "p").links_down.add(3)
    pod16.client.reset_partition("p")
    assert pod16.client.wait_for_state("p", {S.ACTIVE}, 60) is S.ACTIVE
    assert pod16.client.machine_reports("p")[1].ipus[0].links_down == ()
    assert pod16.client.get_partition("p").generation == 2


def test_lost_machine_needs_agent_restart_then_partition_reset(pod16: Pod) -> None:
    pod16.active("p", 8)
    pod16.pool.machine("ipum2", "p").die()
    client = pod16.client
    assert client.wait_for_state("p", {S.ERROR}, 60) is S.ERROR
    assert client.machine_reports("p")[1].state == "lost"
    assert {a.agent_id: a.state for a in client.list_agents()}["ipum2"] is AgentState.LOST
    with pytest.raises(ConflictError, match="ipum2 is lost") as caught:
        client.reset_partition("p")
    assert caught.value.hint == "Replace it first: vipu-admin restart agent ipum2"
    with pytest.raises(ConflictError, match="not ACTIVE"):
        client.reset_ipus("p", [5])
    client.restart_agent("ipum2")
    state, error = client.partition_state("p")
    assert state is S.ERROR
    assert "vipu reset partition p" in error
    client.reset_partition("p")
    assert client.wait_for_state("p", {S.ACTIVE}, 60) is S.ACTIVE
    assert pod16.pool.machine("ipum2", "p").configured["machine_index"] == 1


def test_an_unnoticed_loss_is_found_by_the_next_report(pod16: Pod) -> None:
    pod16.active("p", 8)
    pod16.pool.machine("ipum2", "p").alive = False
    assert pod16.client.machine_reports("p")[1].ipus[0].error_state == "no answer"
    assert pod16.client.wait_for_state("p", {S.ERROR}, 60) is S.ERROR
    assert "machine ipum2 is lost" in pod16.client.get_partition("p").error


@pytest.mark.parametrize(
    ("runs", "seconds", "shown"), [(True, 5.0, True), (False, 5.0, False), (True, 60.0, False)]
)
def test_a_silent_machine_shows_no_process_that_is_gone(
    pod16: Pod, runs: bool, seconds: float, shown: bool
) -> None:
    """Else a job that ended when its machine became unreachable would keep others off the partition for ever."""
    now = [0.0]
    reporter = Reporter(pod16.cluster, pod16.pool, lambda: now[0], lambda process: runs)
    pod16.active("p", 4)
    machine = pod16.pool.machine("ipum1", "p")
    machine.process = AttachedProcess(4711, "me", "train.py", 1.0)
    partitions = pod16.service._allocator.partitions.values()
    assert reporter.reports(partitions, set())[0].ipus[0].process is not None
    machine.fail = "telemetry"
    now[0] = seconds
    (report,) = reporter.reports(partitions, set())
    assert report.state == "no answer"
    assert [ipu.process is not None for ipu in report.ipus] == [shown] * 4
    assert report.stale_seconds == seconds


def test_a_process_on_another_host_counts_as_running() -> None:
    here = AttachedProcess(os.getpid(), "me", "pytest", psutil.Process().create_time(), socket.gethostname())
    assert process_runs(here)
    assert not process_runs(replace(here, start_time_s=1.0)), "another process has its number now"
    assert process_runs(replace(here, host="elsewhere", start_time_s=1.0))
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert not process_runs(replace(here, pid=ended.pid))


def test_a_power_cycled_machine_needs_a_partition_reset(pod16: Pod) -> None:
    pod16.active("p", 4)
    pod16.client.power_cycle_agent("ipum1")
    assert pod16.client.partition_state("p")[0] is S.ERROR
    assert ("power_cycle", None) in pod16.pool.machine("ipum1", "p").calls
    with pytest.raises(NotFoundError, match="no agent 'ipum9'"):
        pod16.client.power_cycle_agent("ipum9")


def test_a_machine_that_cannot_be_configured_puts_the_partition_in_error(pod16: Pod) -> None:
    start = pod16.pool._start

    def broken(agents: object) -> object:
        started = start(agents)  # type: ignore[arg-type]
        started[-1][1].fail = "configure"
        return started

    pod16.pool._start = broken  # type: ignore[method-assign, assignment]
    pod16.client.create_partition(Requirements("p", 8))
    with pytest.raises(ServiceError, match="ERROR: machine ipum2: configure failed") as refused:
        pod16.client.wait_for_state("p", {S.ACTIVE}, 60)
    assert "vipu-admin restart agent ipum2, then: vipu reset partition p" in refused.value.message
    pod16.pool.machine("ipum2", "p").fail = ""
    pod16.client.reset_partition("p")
    assert pod16.client.wait_for_state("p", {S.ACTIVE}, 60) is S.ACTIVE


def test_valid_faults_reach_every_machine_and_invalid_ones_none(pod16: Pod) -> None:
    pod16.active("p", 8, faults=["ipu:5@batch=17:tile-parity"])
    assert ("inject", ["ipu:5@batch=17:tile-parity"]) in pod16.pool.machine("ipum1", "p").calls
    pod16.client.inject_faults("p", ["link:2-3@batch=1:down"])
    assert ("inject", ["link:2-3@batch=1:down"]) in pod16.pool.machine("ipum2", "p").calls
    for bad in ("ipu:99@batch=1:tile-parity", "ipu:1@batch=1:nonsense", "nonsense"):
        with pytest.raises(UsageError):
            pod16.client.inject_faults("p", [bad])
    assert len([c for c in pod16.pool.machine("ipum1", "p").calls if c[0] == "inject"]) == 2


def test_reports_of_the_whole_pod(pod16: Pod) -> None:
    pod16.active("b", 4)
    pod16.active("a", 2)
    reports = pod16.client.machine_reports()
    assert [(r.agent_id, r.partition, r.state) for r in reports] == [
        ("ipum1", "b", "up"),
        ("ipum2", "a", "up"),
        ("ipum3", "", "standby"),
        ("ipum4", "", "standby"),
    ]
    assert [len(r.ipus) for r in reports] == [4, 2, 0, 0]
    assert [ipu.partition_ipu for ipu in reports[0].ipus] == [0, 1, 2, 3]


def test_spares_are_used_again(make_pod: Callable[..., Pod]) -> None:
    pod = make_pod(keep_spares=True)
    pod.pool.prestart(["ipum1", "ipum2"])
    pod.active("p", 8)
    pod.client.remove_partition("p")
    pod.client.wait_for_state("p", {S.REMOVED}, 60)
    pod.active("q", 8)
    assert len(pod.pool.started) == 2
    assert ("power_cycle", None) in pod.pool.started[0].calls


def test_state_survives_a_restart(make_pod: Callable[..., Pod], tmp_path: Path) -> None:
    state = tmp_path / "state.sqlite"
    first = make_pod("pod16", state)
    first.client.remove_allocation("pod16")
    first.client.create_allocation("mine", ["ipum1", "ipum2"])
    first.client.create_allocation("yours", ["ipum3", "ipum4"])
    first.active("p", 8, num_gcds=2)
    first.active("q", 4, allocation="yours")
    first.pool.machine("ipum3", "q").die()
    first.client.wait_for_state("q", {S.ERROR}, 60)
    before = first.client.list_partitions()
    first.stop()

    second = make_pod("pod16", state)
    assert second.client.wait_for_state("p", {S.ACTIVE}, 60) is S.ACTIVE
    p, q = second.client.list_partitions()
    assert (p.name, p.num_gcds, p.agents, p.generation) == ("p", 2, ("ipum1", "ipum2"), 2)
    assert q == before[1]
    assert [a.name for a in second.client.list_allocations()] == ["mine", "yours"]
    assert {a.agent_id: a.state for a in second.client.list_agents()}["ipum3"] is AgentState.LOST


def test_an_interrupted_reset_is_completed_by_the_next_server(
    make_pod: Callable[..., Pod], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_pod("pod16", tmp_path / "state")
    first.active("p", 4)
    reached, closing, close = threading.Event(), threading.Event(), first.pool.close

    def interrupted() -> None:
        reached.set()
        assert closing.wait(60)
        raise ServiceError("the machine does not answer (CANCELLED)")

    def close_pool(**options: bool) -> None:
        closing.set()
        close()

    monkeypatch.setattr(first.pool.machine("ipum1", "p"), "reset_links", interrupted)
    monkeypatch.setattr(first.pool, "close", close_pool)
    first.client.reset_partition("p")
    assert reached.wait(60)
    first.stop()
    second = make_pod("pod16", tmp_path / "state")
    assert second.client.wait_for_state("p", {S.ACTIVE}, 60) is S.ACTIVE


def test_a_taken_port_is_named(pod16: Pod, make_pod: Callable[..., Pod]) -> None:
    other = make_pod()
    with pytest.raises(ConflictError, match=f"port {pod16.port} on 127.0.0.1 is taken"):
        other.service.start("127.0.0.1", pod16.port)


def test_many_clients_never_share_an_ipu(make_pod: Callable[..., Pod]) -> None:
    pod = make_pod("pod64")
    refused: list[str] = []

    def ask(i: int) -> None:
        with VipuClient("127.0.0.1", pod.port, timeout=60) as client:
            try:
                client.create_partition(Requirements(f"p{i}", 8))
            except ConflictError as error:
                refused.append(error.message)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 4
    assert pod.service.wait_idle(60)
    held = [agent for info in pod.client.list_partitions() for agent in info.agents]
    assert len(held) == len(set(held)) == 16


@pytest.mark.parametrize("text", ["c2-compatible", "ST_C2_COMPATIBLE", "C2_Compatible"])
def test_sync_type_spellings(text: str) -> None:
    assert parse_sync_type(text) is SyncType.C2_COMPATIBLE
    with pytest.raises(UsageError, match="unknown sync type"):
        parse_sync_type(text + "x")


def test_a_reset_waits_until_machines_that_are_being_replaced_are_there(
    pod16: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod16.active("p", 16)
    inside, go_on = threading.Event(), threading.Event()
    acquire = pod16.pool.acquire

    def slow(uses: Sequence[MachineUse]) -> dict[MachineUse, str]:
        if len(uses) == 1:  # that of the agent which is restarted, not those of the partition
            inside.set()
            assert go_on.wait(60)
        return acquire(uses)

    monkeypatch.setattr(pod16.pool, "acquire", slow)
    restart = threading.Thread(target=lambda: pod16.client.restart_agent("ipum2"))
    restart.start()
    assert inside.wait(60)
    pod16.client.reset_partition("p")
    assert not pod16.service.wait_idle(0.2)
    go_on.set()
    restart.join(60)
    pod16.client.wait_for_state("p", {PartitionState.ACTIVE}, 60)
    assert all(pod16.pool.machine(f"ipum{n}", "p").configured for n in (1, 2, 3, 4))


def test_a_place_that_is_named_is_taken_or_waited_for(pod16: Pod) -> None:
    pod16.active("third", 4, index=3)
    assert pod16.client.get_partition("third").agents == ("ipum3",)
    with pytest.raises(ConflictError, match="partitions in the way: third"):
        pod16.client.create_partition(Requirements("again", 4, index=3))
    pod16.client.create_partition(Requirements("waits", 8, index=2), wait=True)
    assert pod16.client.list_queue()[0].blockers == ("third",)
    pod16.active("first", 4)
    assert pod16.client.get_partition("first").agents[0] in ("ipum1", "ipum2")
    pod16.client.remove_partition("third")
    assert pod16.client.wait_for_state("waits", {S.ACTIVE}, 60) is S.ACTIVE
    assert pod16.client.get_partition("waits").agents == ("ipum3", "ipum4")
    with pytest.raises(UsageError, match="pod16 has 1 places for 16 IPUs, no place 2"):
        pod16.client.create_partition(Requirements("p", 16, index=2))


def test_a_routing_that_is_named_is_used(make_pod: Callable[..., Pod], tmp_path: Path) -> None:
    pod = make_pod("pod64", tmp_path / "state")
    pod.active("p", 16, routing="swnc")
    assert pod.client.get_partition("p").ild_routing == "SWNC"
    assert pod.client.ipuof_config("p").attributes["IPU-Link Configuration"] == "slidingWindow"
    for size, routing, why in (
        (32, "DNC", "direct links .* at most 16 IPUs of a domain, not 32"),
        (32, "ring-swnc", "need a whole IPU-Link domain of 64"),
        (32, "btnc", "rings .BTNC. need a whole IPU-Link domain of 64"),
        (4, "sideways", "there is no routing 'sideways'"),
    ):
        with pytest.raises(UsageError, match=why):
            pod.client.create_partition(Requirements("q", size, routing=routing))
    pod.stop()
    again = make_pod("pod64", tmp_path / "state")
    assert again.client.get_partition("p").ild_routing == "SWNC"
    again.client.remove_partition("p")
    again.client.wait_for_state("p", {S.REMOVED}, 60)
    again.active("whole", 64, routing="btnc")
    attributes = again.client.ipuof_config("whole").attributes
    assert (attributes["IPU-Link Configuration"], attributes["IPU-Link Topology"]) == ("barleyTwist", "torus")


def test_processes_read_whether_their_partition_was_moved_or_removed(pod16: Pod) -> None:
    pod16.active("p", 8, relocatable=True)
    before = pod16.client.get_partition("p").agents
    left = pod16.pool.machine(before[0], "p")
    pod16.pool.machine(before[1], "p").die()
    assert pod16.service.wait_idle(60)
    after = pod16.client.get_partition("p").agents
    assert not set(before) & set(after)
    assert left.taken_by == [TakenBy.MOVE]
    now = pod16.pool.machine(after[0], "p")
    pod16.client.remove_partition("p")
    pod16.client.wait_for_state("p", {S.REMOVED}, 60)
    assert now.taken_by == [TakenBy.REMOVAL]


def test_a_machine_known_to_be_silent_is_waited_for_briefly(
    pod16: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first who looks waits for the deadline of a report; those after it do not."""
    pod16.active("p", 8)
    machine = pod16.pool.machine("ipum2", "p")
    waits: list[float | None] = []

    def telemetry(timeout: float | None = None) -> MachineReport:
        waits.append(timeout)
        raise SilentMachineError("no answer")

    monkeypatch.setattr(machine, "telemetry", telemetry)
    for _ in range(2):
        answering, silent = pod16.client.machine_reports("p")
        assert (answering.state, silent.state) == ("up", "no answer")
    assert waits == [REPORT_SECONDS, SILENT_REPORT_SECONDS]
