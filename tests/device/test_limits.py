"""Limits for one peer of a machine: sessions, bytes and time; the others and the partition service go on."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.identity import Caller
from podrun.device.service import host_session, servicer, wire
from podrun.device.service.control import MachineControl
from podrun.device.service.host_session import SessionLimits
from podrun.device.service.server import MachineServer
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.server.service import Service
from podrun.partition.state.store import Store
from podrun.protos import ipuof_pb2 as pb
from podrun.protos.services import stub_of
from tests.conftest import wait_until

OTHER = Caller(31003, own=False)


@pytest.fixture
def machine() -> Iterator[str]:
    server = MachineServer(agent_id="agent0")
    endpoint = server.start()
    control = MachineControl(endpoint)
    control.configure(partition="p", first_ipu=0, machine_index=0, endpoints=[endpoint])
    control.close()
    yield endpoint
    server.stop()


class Silent:
    """A session that sends what it is told to, and then nothing."""

    def __init__(self, endpoint: str, *requests: pb.HostRequest) -> None:
        self.channel = grpc.insecure_channel(endpoint, options=wire.CHANNEL_OPTIONS)
        self.requests: queue.SimpleQueue[pb.HostRequest | None] = queue.SimpleQueue()
        for request in requests:
            self.requests.put(request)
        stub = stub_of(pb, "Ipuof", self.channel)
        self.call: Any = stub.Session(iter(self.requests.get, None), timeout=120)

    def code(self) -> grpc.StatusCode:
        """How it ends."""
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self.call:
                pass
        code = caught.value.code()
        assert isinstance(code, grpc.StatusCode)
        return code

    def close(self) -> None:
        self.requests.put(None)
        self.call.cancel()
        self.channel.close()


@pytest.fixture
def silent(machine: str) -> Iterator[Callable[..., Silent]]:
    made: list[Silent] = []

    def make(*requests: pb.HostRequest) -> Silent:
        made.append(Silent(machine, *requests))
        return made[-1]

    yield make
    for each in made:
        each.close()


def attach() -> pb.HostRequest:
    ipus = pb.IpuRange(first=0, count=4)
    return pb.HostRequest(attach=pb.AttachRequest(job=ipus, owned=ipus, pid=1))


def test_a_session_that_says_nothing_is_ended_with_a_line_in_the_log(
    silent: Callable[..., Silent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(servicer, "ATTACH_SECONDS", 0.2)
    with caplog.at_level(logging.WARNING, "podrun.device"):
        assert silent().code() is grpc.StatusCode.CANCELLED
        assert silent(pb.HostRequest(detach=pb.Empty())).code() is grpc.StatusCode.CANCELLED
    assert "no request to attach within 0.2 s" in caplog.text


def test_a_session_that_stops_in_the_middle_of_a_message_is_ended(
    silent: Callable[..., Silent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(servicer, "PART_SECONDS", 0.2)
    with caplog.at_level(logging.WARNING, "podrun.device"):
        assert silent(attach(), pb.HostRequest(part=pb.Part(data=b"x"))).code() is grpc.StatusCode.CANCELLED
    assert "no further part of a message within 0.2 s" in caplog.text


def test_an_attached_session_may_be_silent(
    silent: Callable[..., Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in (0.2, 2.0, 20.0):
        monkeypatch.setattr(servicer, "ATTACH_SECONDS", seconds)
        holder = silent(attach())
        with contextlib.suppress(grpc.RpcError):  # it was ended before it attached: the host is busy
            assert not next(holder.call).error_json
            break
    with pytest.raises(grpc.RpcError):
        list(silent().call)  # ended after the time in which the other would have been
    assert holder.call.is_active()


def test_nothing_is_buffered_before_a_session_is_attached(silent: Callable[..., Silent]) -> None:
    part = pb.HostRequest(part=pb.Part(data=bytes(host_session.FIRST_BYTES + 1)))
    (reply,) = list(silent(part).call)
    assert "are more than 65536 bytes" in json.loads(reply.error_json)["message"]
    large = attach()
    large.attach.command = "x" * host_session.FIRST_BYTES
    (reply,) = list(silent(large).call)
    assert "a message is more than 65536 bytes" in json.loads(reply.error_json)["message"]


class CountedLimits(SessionLimits):
    """Limits that tell how many sessions were let in."""

    def __init__(self) -> None:
        super().__init__()
        self.admitted = threading.Semaphore(0)

    @contextlib.contextmanager
    def session(self, caller: Caller) -> Iterator[str]:
        with super().session(caller) as refusal:
            if not refusal:
                self.admitted.release()
            yield refusal


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> CountedLimits:
    """The limits of `machine`, if it is asked for after this."""
    counted = CountedLimits()
    monkeypatch.setattr(servicer, "SessionLimits", lambda: counted)
    return counted


def test_sessions_are_counted_and_the_partition_service_is_heard_all_the_same(
    limits: CountedLimits, machine: str, silent: Callable[..., Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "ATTACH_SECONDS", 300.0)  # a busy host ends none of them early
    held = [silent() for _ in range(host_session.SESSIONS)]
    # A further session must not come before one of these.
    assert all(limits.admitted.acquire(timeout=60) for _ in held)
    assert silent().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    control = MachineControl(machine)
    assert control.telemetry().partition == "p"
    control.power_cycle()
    control.close()
    assert all(each.call.is_active() for each in held)


def test_another_user_has_fewer_sessions_and_bytes() -> None:
    counted, own = SessionLimits(), Caller(0, own=True)
    opened = [counted.session(OTHER) for _ in range(host_session.SESSIONS_OF_OTHERS + 1)]
    refusals = [session.__enter__() for session in opened]
    assert refusals[:-1] == [""] * host_session.SESSIONS_OF_OTHERS
    assert f"has {host_session.SESSIONS_OF_OTHERS} sessions" in refusals[-1]
    with counted.session(own) as refusal:
        assert refusal == ""
    opened[0].__exit__(None, None, None)
    with counted.session(OTHER) as refusal:
        assert refusal == ""
    assert counted.most_bytes(OTHER, attached=True) < counted.most_bytes(own, attached=True)
    assert counted.most_bytes(own, attached=False) == host_session.FIRST_BYTES


CHAOS = """
import random, socket, sys, time
rng = random.Random(7)
ports, held = list(map(int, sys.argv[1:])), []
for n in range(2000):
    s = socket.create_connection(("127.0.0.1", ports[n % len(ports)]), timeout=10)
    s.settimeout(0.05)
    try:
        if n % 4 == 1: s.sendall(rng.randbytes(200))
        if n % 4 == 2: s.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + rng.randbytes(rng.randrange(60)))
        if n % 4 == 3: s.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    except OSError: pass
    held.append(s)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.system
def test_two_thousand_connections_harm_nobody(machine: str) -> None:
    cluster = load_cluster("pod16")
    service = Service(cluster, Store(None, "pod16"), LocalMachinePool(cluster))
    port = service.start("127.0.0.1", 0)
    this = psutil.Process()
    before, files = this.memory_info().rss, this.num_fds()
    words = [sys.executable, "-c", CHAOS, str(port), machine.rpartition(":")[2]]
    chaos = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert chaos.stdout is not None
        assert chaos.stdout.readline() == "there\n"
        control = MachineControl(machine)
        with VipuClient("127.0.0.1", port, timeout=10) as client:
            for _ in range(20):
                assert client.list_partitions() == []
                assert control.telemetry().partition == "p"
        control.close()
        assert this.memory_info().rss - before < 200 << 20
        chaos.communicate(timeout=30)
        wait_until(lambda: this.num_fds() <= files + 50, 60, "files of closed connections")
    finally:
        chaos.kill()
        chaos.wait(60)
        service.stop(grace=0)
