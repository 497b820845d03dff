"""Machines behind gRPC: the same bits as in process, the same errors, and nothing hostile gets through."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from podrun.core import executable_file
from podrun.core.errors import (
    ApplicationRuntimeError,
    ConflictError,
    PoplarError,
    RecoverableRuntimeError,
    RecoveryAction,
    ServiceError,
    UnrecoverableRuntimeError,
    UsageError,
)
from podrun.core.ipu_states import IpuErrorState
from podrun.core.layout import IpuRange
from podrun.device.host import remote
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.host.ports import Site
from podrun.device.host.remote import RemotePort
from podrun.device.program.fabric import JobName
from podrun.device.service import wire
from podrun.device.service.control import MachineControl
from podrun.device.service.server import MachineServer
from podrun.device.xla.pieces import PieceCache
from podrun.protos import ipuof_pb2 as pb
from podrun.protos.services import stub_of

from ..conftest import wait_until
from .conftest import owners, request, together
from .pods import Pod, threads
from .programs import data, first_weights, linear

PAIR = IpuRange(0, 8)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("pieces"))


@pytest.fixture
def pod(cache: Path) -> Iterator[Pod]:
    with threads(2, cache) as pod:
        yield pod


def train(connection: Any, owned: IpuRange) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    executable = linear(8, accumulation=2)
    connection.load(executable)
    connection.write_variables(first_weights())
    losses = []
    for batches in (1, 3, 1):
        inputs = {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, batches).items()}
        losses.append(connection.run(batches, inputs).anchors["loss"])
    weights = connection.read_variables(["w", "b", "rate"])
    assert [ipu for ipu, _ in connection.read_digests()] == [
        ipu for ipu in range(8) if ipu // 4 in {own // 4 for own in owned}
    ]
    weights["digests"] = np.array(sorted({digest for _, digest in connection.read_digests()}))
    connection.close()
    return np.concatenate(losses), weights


@pytest.mark.parametrize(
    ("count", "shared"),
    [
        (1, False),
        (8, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, True), (2, True), (4, False))),
    ],
)
def test_the_same_bits_as_in_process(pod: Pod, pieces: PieceCache, count: int, shared: bool) -> None:
    twin = InProcessMachines(8, pieces).connect()
    assert twin.try_attach(request(PAIR)) is None
    losses, weights = train(twin, PAIR)
    connections = owners(lambda: pod.connect(shared=shared), 8, count)
    results = together([partial(train, c, o) for c, o in connections])
    for result in results:
        assert isinstance(result, tuple), repr(result)
        for name, value in weights.items():
            np.testing.assert_array_equal(result[1][name], value)
    np.testing.assert_array_equal(np.concatenate([r[0] for r in results], axis=2), losses)  # type: ignore[index]


def test_long_messages_go_in_parts_and_variables_in_groups(
    pod: Pod, pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = InProcessMachines(8, pieces).connect()
    assert twin.try_attach(request(PAIR)) is None
    losses, weights = train(twin, PAIR)
    monkeypatch.setattr(wire, "PART_BYTES", 48)
    monkeypatch.setattr(wire, "GROUP_BYTES", 4)
    connection = pod.connect(shared=False)
    assert connection.try_attach(request(PAIR)) is None
    again, found = train(connection, PAIR)
    np.testing.assert_array_equal(again, losses)
    for name, value in weights.items():
        np.testing.assert_array_equal(found[name], value)


def test_malformed_parts_are_refused() -> None:
    whole = wire.MessageJoiner(pb.HostRequest, limit=10)
    assert whole.add(pb.HostRequest(part=pb.Part(data=b"12345"))) is None
    with pytest.raises(ApplicationRuntimeError, match="more than 10 bytes"):
        whole.add(pb.HostRequest(part=pb.Part(data=b"123456")))
    with pytest.raises(ApplicationRuntimeError, match="came between them"):
        whole.add(pb.HostRequest(detach=pb.Empty()))
    with pytest.raises(ApplicationRuntimeError, match=r"malformed message in parts$"):
        wire.MessageJoiner(pb.HostRequest).add(pb.HostRequest(part=pb.Part(data=b"\xff", last=True)))
    inner = pb.HostRequest(part=pb.Part(data=b"")).SerializeToString()
    with pytest.raises(ApplicationRuntimeError, match="contains another part"):
        wire.MessageJoiner(pb.HostRequest).add(pb.HostRequest(part=pb.Part(data=inner, last=True)))


def test_machines_that_wait_for_a_group_leave_room_for_who_attaches(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first machine of a POD256 may be the last to load: 63 others ask it for a group that is not there yet."""
    monkeypatch.setattr(remote, "_ANSWER_SECONDS", 5.0)
    job, others = IpuRange(0, 256), 63
    server = MachineServer(agent_id="first", environ={"PODRUN_CACHE_DIR": str(cache)})
    endpoint = server.start()
    control = MachineControl(endpoint)
    try:
        control.configure(partition="p", first_ipu=0, machine_index=0, endpoints=[endpoint] * (others + 1))
        assert server._machine is not None
        book = server._machine.offers
        with grpc.insecure_channel(endpoint) as channel:
            join = stub_of(pb, "Ipuof", channel).JoinGroup
            waiting = [
                join.future(
                    pb.JoinGroupRequest(
                        job=wire.range_to_wire(job), rank=rank, digest="d", timeout_seconds=30
                    )
                )
                for rank in range(1, others + 1)
            ]
            waiters: Any = book._changed
            wait_until(lambda: len(waiters._waiters) >= 24, 60, "claims that wait")
            connection = PortConnection(
                [Site(0, endpoint, IpuRange(0, 4))], lambda site, machines: RemotePort(site)
            )
            assert connection.try_attach(request(job, IpuRange(0, 4))) is None
            assert control.telemetry().agent_id == "first"
            book.publish(JobName(job), "d", {"name": "group"}, lambda error: None)
            assert {reply.result(60).token_json for reply in waiting} == {'{"name": "group"}'}
            connection.close()
    finally:
        control.close()
        server.stop()


@pytest.mark.slow
def test_a_long_wait_does_not_end_the_connection(pod: Pod) -> None:
    """gRPC's servers by themselves end connections on which nothing but three pings came, one every 10 s."""
    connections = owners(pod.connect, 8, 2)
    first = connections[0][0]
    first.host_sync_timeout = 45.0
    with pytest.raises(PoplarError, match="still waiting for host sync after: 45 seconds"):
        first.load(linear(8))
    for connection, _ in connections:
        connection.close()


def test_attach_says_who_is_there(pod: Pod) -> None:
    first, second = pod.connect(), pod.connect()
    assert first.try_attach(request(IpuRange(4, 4), pid=os.getpid())) is None
    refusal = second.try_attach(request(PAIR))
    assert refusal is not None
    assert f"IPUs 4-7 attached by process {os.getpid()}" in refusal
    process = pod.controls[1].telemetry().ipus[0].process
    assert process is not None
    assert process.host == socket.gethostname()
    assert process.start_time_s is not None
    first.close()
    assert second.try_attach(request(PAIR)) is None, "detaching is done when close returns"
    second.close()


def test_errors_cross_as_they_are(pod: Pod) -> None:
    connection = pod.connect()
    assert connection.try_attach(request(PAIR)) is None
    executable = linear(8)
    connection.load(executable)
    with pytest.raises(ApplicationRuntimeError, match="variables have no value yet: w"):
        connection.run(1, data(executable, 1))
    with pytest.raises(ApplicationRuntimeError, match="no variable 'v'"):
        connection.read_variables(["v"])
    for control in pod.controls:
        control.inject(["ipu:6@batch=0:soft-error"])
    connection.write_variables(first_weights())
    with pytest.raises(RecoverableRuntimeError, match=r"CIUERRVR\.IPUSOFTERR error on IPU 6"):
        connection.run(1, data(executable, 1))
    state = pod.controls[1].telemetry().ipus[2]
    assert (state.error_state, state.recovery_action) == (
        IpuErrorState.SOC_SOFT_ERROR,
        RecoveryAction.IPU_RESET,
    )
    pod.controls[1].reset_ipus([2])
    assert not pod.controls[1].telemetry().ipus[2].has_error
    with pytest.raises(PoplarError):
        connection.run(1, data(executable, 1))
    connection.load(executable)
    connection.write_variables(first_weights())
    assert connection.run(1, data(executable, 1)).batches_done == 1
    connection.close()


def answers(endpoint: str) -> bool:
    try:
        MachineControl(endpoint, timeout=2.0).telemetry()
    except ServiceError as error:
        if "does not answer" not in error.message:
            raise
        return False
    return True


def test_a_lost_machine_is_named_with_its_endpoint(pod: Pod) -> None:
    connections = owners(pod.connect, 8, 2)
    for control in pod.controls:
        control.inject(["machine:1@batch=1:lost"])

    def work(connection: Any, owned: IpuRange) -> None:
        executable = linear(8)
        connection.load(executable)
        connection.write_variables(first_weights())
        connection.run(2, {n: a[:, :, owned.first : owned.stop] for n, a in data(executable, 2).items()})

    for result in together([partial(work, c, o) for c, o in connections]):
        assert isinstance(result, UnrecoverableRuntimeError), repr(result)
        assert "Fabric error: connection not established" in result.message
        assert pod.endpoints[1] in result.message
        assert "machine 1" in result.message
    wait_until(lambda: not answers(pod.endpoints[1]), 60, "the lost machine is silent")
    for connection, _ in connections:
        connection.close()


def test_a_server_that_stops_ends_runs(pod: Pod, cache: Path) -> None:
    connection = pod.connect()
    assert connection.try_attach(request(PAIR)) is None
    connection.load(linear(8))
    connection.write_variables(first_weights())
    pod.controls[0].stop()

    def run_on() -> None:
        for _ in range(1000):
            connection.run(1, data(linear(8), 1))

    with pytest.raises(UnrecoverableRuntimeError):
        run_on()
    connection.close()


def test_configured_anew_takes_ipus_away(pod: Pod) -> None:
    connection = pod.connect()
    assert connection.try_attach(request(PAIR)) is None
    pod.configure()
    with pytest.raises(ApplicationRuntimeError, match="configured anew"):
        connection.load(linear(8))
    connection.close()
    assert connection.try_attach(request(PAIR)) is None
    connection.close()


def test_a_machine_in_no_partition(cache: Path) -> None:
    server = MachineServer(agent_id="agent9", environ={"PODRUN_CACHE_DIR": str(cache)})
    control = MachineControl(server.start())
    report = control.telemetry()
    assert (report.agent_id, report.ipus, report.pid) == ("agent9", (), os.getpid())
    control.power_cycle()
    with pytest.raises(ApplicationRuntimeError, match="in no partition"):
        control.reset_ipus([0])
    with pytest.raises(ApplicationRuntimeError, match="in no partition"):
        Pod([server.endpoint], [], []).connect().try_attach(request(IpuRange(0, 4)))
    control.configure(partition="p", first_ipu=0, machine_index=0, endpoints=[server.endpoint])
    with pytest.raises(UsageError, match="tile-party"):
        control.inject(["ipu:0@batch=0:tile-party"])
    control.close()
    server.stop()
    server.stop()


def test_a_port_that_is_taken() -> None:
    server = MachineServer()
    port = int(server.start().rpartition(":")[2])
    with pytest.raises(ConflictError, match=f"cannot listen on 127.0.0.1:{port}"):
        MachineServer().start(port=port)
    server.stop()


# --- Hostile clients ----------------------------------------------------------------------------------------


class Raw:
    """A session spoken by hand."""

    def __init__(self, endpoint: str) -> None:
        self.channel = grpc.insecure_channel(endpoint, options=wire.CHANNEL_OPTIONS)

    def ask(self, *requests: pb.HostRequest) -> list[pb.MachineReply]:
        replies = stub_of(pb, "Ipuof", self.channel).Session(iter(requests), timeout=60)
        return list(replies)

    def errors(self, *requests: pb.HostRequest) -> list[str]:
        return [json.loads(r.error_json)["message"] if r.error_json else "" for r in self.ask(*requests)]


def attach(first: int = 0, count: int = 4, *, job: int = 4) -> pb.HostRequest:
    return pb.HostRequest(
        attach=pb.AttachRequest(
            job=pb.IpuRange(first=0, count=job), owned=pb.IpuRange(first=first, count=count), pid=1
        )
    )


def test_requests_out_of_turn_are_refused(pod: Pod) -> None:
    raw = Raw(pod.endpoints[0])
    empty = pb.HostRequest()
    assert raw.errors(
        empty,
        pb.HostRequest(run=pb.RunRequest(batches=1)),
        pb.HostRequest(write=pb.WriteRequest()),
        attach(),
        attach(),
    ) == [
        "the request is of no kind that this machine knows",
        "this process holds no IPUs of this machine",
        "this process holds no IPUs of this machine",
        "",
        "this process is attached already",
    ]
    errors = raw.errors(
        attach(), pb.HostRequest(run=pb.RunRequest(batches=1)), pb.HostRequest(detach=pb.Empty())
    )
    assert errors == ["", "a run was requested before its tensors were bound", ""]


def test_ranges_from_nowhere_are_refused(pod: Pod) -> None:
    raw = Raw(pod.endpoints[0])
    for first, count, job in ((0, 0, 4), (4, 4, 8), (0, 1 << 31, 1 << 31), (3, 2, 4)):
        assert raw.errors(attach(first, count, job=job))[0].startswith("machine 0 (IPUs 0-3) cannot attach")


def test_programs_that_are_none_are_refused(pod: Pod) -> None:
    raw = Raw(pod.endpoints[0])
    good = executable_file.dumps(linear(4))
    for data_ in (b"", b"junk", good[:-1], good[:100] + b"\0" + good[101:]):
        load = pb.LoadRequest(digest="d", executable=pb.Blob(inline=data_), timeout_seconds=5)
        errors = raw.errors(attach(), pb.HostRequest(load=load))
        assert "Executable" in errors[1] or "checksum" in errors[1]


def test_memory_that_was_not_handed_over_is_refused(pod: Pod) -> None:
    raw = Raw(pod.endpoints[0])
    load = pb.LoadRequest(
        digest="d", executable=pb.Blob(inline=executable_file.dumps(linear(4))), timeout_seconds=5
    )
    tensor = pb.Tensor(name="w", dtype="float32", shape=[4, 1], offset=0)
    write = pb.HostRequest(write=pb.WriteRequest(region=pb.Region(number=1, size=4096), tensors=[tensor]))
    errors = raw.errors(attach(), pb.HostRequest(load=load), write)
    assert errors[2] == "this process has not said that it hands memory over"


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (pb.Tensor(name="w", dtype="float32", shape=[1 << 62, 1 << 62]), "does not lie in its"),
        (pb.Tensor(name="w", dtype="float32", shape=[4, 1], offset=1 << 63), "does not lie in its"),
        (pb.Tensor(name="w", dtype="object", shape=[1]), "cannot have dtype"),
        (pb.Tensor(name="w", dtype="no such", shape=[1]), "there is no dtype"),
        (pb.Tensor(name="w", dtype="float32", shape=[4, 1], inline=b"1234"), "does not lie in its"),
        (pb.Tensor(name="w", dtype="float32", shape=[1], inline=b"12345678"), "comes with 8 bytes"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensor: pb.Tensor, message: str) -> None:
    with pytest.raises(ApplicationRuntimeError, match=message):
        wire.tensors_from_wire([tensor], None)


def test_objects_cannot_be_smuggled_in() -> None:
    """A tensor of Python objects would be pointers of the sender's choice."""
    region = np.zeros(64, np.uint8)
    with pytest.raises(ApplicationRuntimeError, match="cannot have dtype"):
        wire.tensors_from_wire([pb.Tensor(name="w", dtype="O", shape=[1])], region)


def test_huge_anchors_from_afar_are_refused() -> None:
    with pytest.raises(ApplicationRuntimeError, match="cannot be sent to another host"):
        wire.empty_tensors([pb.Tensor(name="a", dtype="float32", shape=[1 << 40])])
