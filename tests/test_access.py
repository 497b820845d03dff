"""The secret is known to its user alone; callers prove that they know it, servers answer the proof, and it never
travels.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from podrun.core import access, identity
from podrun.core.cluster import load_cluster
from podrun.core.errors import DeniedError, NotFoundError, ServiceError, UsageError
from podrun.device.service.control import MachineControl
from podrun.device.service.server import MachineServer
from podrun.vipu.client import HARMLESS, VipuClient
from podrun.vipu.machine_pool import LocalMachinePool
from podrun.vipu.service import Service
from podrun.vipu.store import Store
from podrun.vipu.types import Requirements

TOKEN = "a-token-of-this-test"
ANOTHER = "another-token-than-that"
METHOD = "/podrun.vipu.v1.UserService/ListPartitions"


def checker(now: float = 1000.0, token: str = TOKEN) -> identity.ProofChecker:
    return identity.ProofChecker(token, identity.OwnAddresses("127.0.0.1", 8090), clock=lambda: now)


def test_it_is_made_once_and_read_by_its_user_alone(tmp_path: Path) -> None:
    assert access.known_token({}, tmp_path) == ""
    token = access.make_token({}, tmp_path)
    assert len(token) == 64
    assert access.make_token({}, tmp_path) == access.known_token({}, tmp_path) == token
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert access.make_token({access.VARIABLE: TOKEN}, tmp_path) == TOKEN
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    with pytest.raises(UsageError, match="printable"):
        access.known_token({access.VARIABLE: "short"}, None)


def test_a_token_that_cannot_be_kept_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(UsageError, match=r"cannot be kept in .*: No space left"):
        access.make_token({}, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["readable", "link", "fifo", "foreign"])
def test_a_file_that_is_not_the_users_alone_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "token"
    if kind == "link":
        (tmp_path / "elsewhere").write_text(TOKEN)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.write_text(TOKEN)
        path.chmod(0o644 if kind == "readable" else 0o600)
        if kind == "foreign":
            if os.getuid() != 0:
                pytest.skip("needs root")
            os.chown(path, 12345, 12345)
    with pytest.raises(UsageError, match="token"):
        access.make_token({}, tmp_path)


def test_what_only_this_host_reaches() -> None:
    assert all(map(access.is_loopback, ("127.0.0.1", "localhost", "::1", "127.1.2.3")))
    assert not any(map(access.is_loopback, ("10.0.0.1", "0.0.0.0", "hosta")))


def test_a_proof_holds_once_and_is_answered() -> None:
    server, proof = checker(), identity.make_proof(TOKEN, METHOD, "127.0.0.1:8090", now=1000)
    assert TOKEN not in proof.text
    assert server.check(proof.text, METHOD) == proof.answer
    with pytest.raises(identity.RefusedProof, match="repeats"):
        server.check(proof.text, METHOD)
    assert checker(token=ANOTHER)._secret != TOKEN


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"method": METHOD + "x"}, "does not know"),
        ({"where": "127.0.0.1:8091"}, "another server"),
        ({"where": "192.0.2.1:8090"}, "another server"),
        ({"secret": ANOTHER}, "does not know"),
        ({"now": 1000 - identity.WINDOW_S - 1}, "clocks"),
        ({"now": 1000 + identity.WINDOW_S + 1}, "clocks"),
    ],
)
def test_a_proof_for_something_else_is_refused(change: dict[str, Any], reason: str) -> None:
    asked = {"secret": TOKEN, "method": METHOD, "where": "127.0.0.1:8090", "now": 1000, **change}
    with pytest.raises(identity.RefusedProof, match=reason):
        checker().check(identity.make_proof(**asked).text, METHOD)


@pytest.mark.parametrize(
    "text", ["", "1", "1 a b c d", "2 127.0.0.1:8090 1000000 n m", "x" * 100_000, "1 ä 1 n m"]
)
def test_a_malformed_proof_is_refused(text: str) -> None:
    with pytest.raises(identity.RefusedProof):
        checker().check(text, METHOD)


def test_a_changed_proof_is_refused() -> None:
    text = identity.make_proof(TOKEN, METHOD, "127.0.0.1:8090", now=1000).text
    for at in range(0, len(text), 7):
        changed = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
        with pytest.raises(identity.RefusedProof):
            checker().check(changed, METHOD)


def test_old_repetitions_are_forgotten_only_when_they_are_refused_for_their_age() -> None:
    now = [1000.0]
    server = identity.ProofChecker(TOKEN, identity.OwnAddresses("h", 1), clock=lambda: now[0])
    first = identity.make_proof(TOKEN, METHOD, "h:1", now=1000 + identity.WINDOW_S)
    server.check(first.text, METHOD)
    for _ in range(40):
        now[0] += identity.WINDOW_S / 20
        with pytest.raises(identity.RefusedProof):
            server.check(first.text, METHOD)
        server.check(identity.make_proof(TOKEN, METHOD, "h:1", now=now[0]).text, METHOD)
    assert len(server._seen) < 45


def test_the_kernel_knows_whose_connection_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = listener.getsockname()
        with socket.create_connection(here):
            accepted, peer = listener.accept()
            assert identity.user_of_peer(peer, here) == os.getuid()
        assert identity.user_of_peer(peer, here) is None  # closed: nobody's
        accepted.close()
    assert identity.user_of_peer(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert identity.user_of_peer(("no address", 1), ("127.0.0.1", 2)) is None


def test_a_machine_with_a_token_wants_it() -> None:
    server = MachineServer(agent_id="agent0", token=TOKEN)
    endpoint = server.start()
    try:
        stranger = MachineControl(endpoint)
        with pytest.raises(ServiceError, match="UNAUTHENTICATED"):
            stranger.telemetry()
        stranger.close()
        stranger = MachineControl(endpoint, token=ANOTHER)
        with pytest.raises(ServiceError, match="not this user's"):
            stranger.telemetry()
        stranger.close()
        friend = MachineControl(endpoint, token=TOKEN)
        assert friend.telemetry().agent_id == "agent0"
        friend.close()
    finally:
        server.stop()


@pytest.fixture
def service() -> Iterator[int]:
    cluster = load_cluster("pod16")
    made = Service(cluster, Store(None, "pod16"), LocalMachinePool(cluster))
    yield made.start("127.0.0.1", 0, TOKEN)
    made.stop()


def test_a_service_wants_its_users_secret(service: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(access.VARIABLE, ANOTHER)
    with (
        VipuClient("127.0.0.1", service, timeout=10) as client,
        pytest.raises(DeniedError, match="another user's"),
    ):
        client.list_partitions()
    monkeypatch.setenv(access.VARIABLE, TOKEN)
    for own in (True, False):
        with VipuClient("127.0.0.1", service, timeout=10, own=own) as client:
            assert client.list_partitions() == []


def test_a_client_that_expects_its_own_server_takes_no_other(
    service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(access.VARIABLE, ANOTHER)
    with (
        VipuClient("127.0.0.1", service, timeout=10, own=True) as client,
        pytest.raises(access.StrangersServerError, match="not this user's"),
    ):
        client.list_partitions()


def test_a_strangers_server_is_asked_to_change_nothing(service: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server proves itself with its answer, when a call has been carried out: the error must not come too late."""
    from concurrent.futures import ThreadPoolExecutor

    from podrun.protos import vipu_pb2_grpc as stubs

    monkeypatch.setenv(access.VARIABLE, TOKEN)
    spy = _Spy()
    fake = grpc.server(ThreadPoolExecutor(1), interceptors=[spy])
    stubs.add_UserServiceServicer_to_server(stubs.UserServiceServicer(), fake)
    port = fake.add_insecure_port("127.0.0.1:0")
    fake.start()
    try:
        with VipuClient("127.0.0.1", port, timeout=10, own=True) as client:
            for change in (
                lambda: client.create_partition(Requirements("p", 4)),
                lambda: client.remove_partition("p"),
                lambda: client.reset_partition("p"),
            ):
                with pytest.raises(access.StrangersServerError):
                    change()
    finally:
        fake.stop(None).wait(5)
    assert {method for method, _ in spy.seen} == {HARMLESS}
    with VipuClient("127.0.0.1", service, timeout=10, own=True) as client:
        with pytest.raises(NotFoundError):
            client.remove_partition("none")
        client.list_partitions()


def test_no_server_is_no_strangers_server() -> None:
    with (
        VipuClient("127.0.0.1", 1, timeout=10, own=True) as client,
        pytest.raises(ServiceError, match="no V-IPU server answers"),
    ):
        client.list_partitions()


class _Spy(grpc.ServerInterceptor):
    """A stranger's server that keeps what callers send, to use it elsewhere."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def intercept_service(self, proceed: Any, call: Any) -> Any:
        self.seen += [
            (call.method, value) for key, value in call.invocation_metadata if key == access.PROOF_KEY
        ]
        return proceed(call)


def test_what_a_strangers_server_hears_opens_no_other(service: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from podrun.protos import vipu_pb2 as pb
    from podrun.protos import vipu_pb2_grpc as stubs

    monkeypatch.setenv(access.VARIABLE, TOKEN)
    spy = _Spy()
    fake = grpc.server(ThreadPoolExecutor(1), interceptors=[spy])
    stubs.add_UserServiceServicer_to_server(stubs.UserServiceServicer(), fake)
    port = fake.add_insecure_port("127.0.0.1:0")
    fake.start()
    try:
        with (
            VipuClient("127.0.0.1", port, timeout=10, own=True) as client,
            pytest.raises(access.StrangersServerError),
        ):
            client.list_partitions()
    finally:
        fake.stop(None).wait(5)
    ((method, proof),) = spy.seen
    assert method == METHOD
    assert TOKEN not in proof
    with grpc.insecure_channel(f"127.0.0.1:{service}") as channel:
        stub = stubs.UserServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListPartitions(pb.ListPartitionsRequest(), timeout=10, metadata=((access.PROOF_KEY, proof),))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "another server" in caught.value.details()
