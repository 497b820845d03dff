"""The secret is known to its user alone; callers prove that they know it, servers answer the proof, and it never
travels.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from podrun.core import access, identity, known_servers, own_sockets, proven_channel
from podrun.core.cluster_file import load_cluster
from podrun.core.errors import DeniedError, ServiceError, UsageError
from podrun.device.service.control import MachineControl
from podrun.device.service.server import MachineServer
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.server.service import Service
from podrun.partition.state.store import Store
from podrun.partition.state.values import Requirements
from tests.proofs import proof_for

TOKEN = "a-token-of-this-test"
ANOTHER = "another-token-than-that"
METHOD = "/podrun.vipu.v1.UserService/ListPartitions"


def checker(token: str = TOKEN) -> identity.ProofChecker:
    return identity.ProofChecker(token, identity.OwnAddresses("127.0.0.1", 8090), clock=lambda: 1000.0)


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


WHERE = "127.0.0.1:8090"


def session_with(server: identity.ProofChecker, secret: str = TOKEN) -> identity.ProvenSession:
    greeting = identity.Greeting(secret, WHERE)
    session = greeting.session(server.greet(greeting.text))
    assert session is not None
    return session


def test_a_proof_holds_once_and_is_answered() -> None:
    server = checker()
    proof = session_with(server).proof(METHOD, b"x")
    assert TOKEN not in proof.text
    assert server.check(proof.text, METHOD, b"x") == proof.answer
    with pytest.raises(identity.RefusedProof, match="repeats"):
        server.check(proof.text, METHOD, b"x")


def test_the_server_proves_itself_first() -> None:
    """A server that does not know the secret, or is reached under another name than it listens at, opens no session."""
    greeting = identity.Greeting(TOKEN, WHERE)
    reply = checker(token=ANOTHER).greet(greeting.text)
    assert greeting.session(reply) is None
    good = checker().greet(greeting.text)
    assert greeting.session(good) is not None
    assert identity.Greeting(TOKEN, WHERE).session(good) is None  # The reply to another greeting.
    for text in (
        "",
        "x",
        good[:-1],
        good + "0",
        ("1" if good[0] == "0" else "0") + good[1:],
        "ä",
        "x" * 100_000,
    ):
        assert greeting.session(text) is None


@pytest.mark.parametrize(
    "where", ["[::1]:8090", "127.0.0.2:8090", "127.0.0.1:8091", "localhost:8090", "x", ""]
)
def test_a_greeting_that_a_stranger_passes_on_gets_no_reply(where: str) -> None:
    """The server listens at 127.0.0.1:8090 alone: whoever was dialled elsewhere on this host is somebody else."""
    with pytest.raises(identity.RefusedProof):
        checker().greet(identity.Greeting(TOKEN, where).text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_server_at_all_addresses_knows_those_of_its_host(host: str) -> None:
    here = identity.OwnAddresses(host, 8090)
    assert here("127.0.0.1", 8090)
    assert not here("127.0.0.1", 8091)
    assert not here("192.0.2.1", 8090)
    assert not here("no number", 8090)


@pytest.mark.parametrize(
    ("secret", "method", "request_"),
    [(TOKEN, METHOD + "x", b"x"), (TOKEN, METHOD, b"y"), (TOKEN, METHOD, b""), (ANOTHER, METHOD, b"x")],
)
def test_a_proof_for_something_else_is_refused(secret: str, method: str, request_: bytes) -> None:
    server = checker()
    greeting = server.greet(f"2 {WHERE} c").split(" ")[0]
    proof = proof_for(secret, METHOD, WHERE, ("c", greeting), b"x")
    with pytest.raises(identity.RefusedProof, match="does not know"):
        server.check(proof.text, method, request_)


def test_a_proof_for_another_server_is_refused() -> None:
    server = checker()
    proof = proof_for(TOKEN, METHOD, "[::1]:8090", ("c", server.greet(f"2 {WHERE} c").split(" ")[0]))
    with pytest.raises(identity.RefusedProof, match="another server"):
        server.check(proof.text, METHOD)


@pytest.mark.parametrize(
    "text", ["", "2", "2 a b c d e", "1 127.0.0.1:8090 1000000 n m", "x" * 100_000, "2 ä 1 n 1 m"]
)
def test_a_malformed_proof_is_refused(text: str) -> None:
    with pytest.raises(identity.RefusedProof):
        checker().check(text, METHOD)


def test_a_changed_proof_is_refused() -> None:
    server = checker()
    text = session_with(server).proof(METHOD, b"").text
    for at in range(0, len(text), 7):
        changed = text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :]
        with pytest.raises(identity.RefusedProof):
            server.check(changed, METHOD)


def test_calls_of_a_session_may_overtake_each_other_within_bounds() -> None:
    server = checker()
    session = session_with(server)
    proofs = [session.proof(METHOD, b"") for _ in range(3 * identity.WINDOW)]
    server.check(proofs[-1].text, METHOD)
    for proof in proofs[-identity.WINDOW : -1]:
        assert server.check(proof.text, METHOD) == proof.answer
    for proof in (proofs[0], proofs[-identity.WINDOW - 1], proofs[-1]):
        with pytest.raises(identity.RefusedProof, match="repeats"):
            server.check(proof.text, METHOD)


def test_a_server_forgets_a_session_only_with_the_number_that_its_proofs_need() -> None:
    """It refuses a proof that was used before at any time, although it does not remember it for ever."""
    now = [1000.0]
    server = identity.ProofChecker(TOKEN, identity.OwnAddresses("127.0.0.1", 8090), clock=lambda: now[0])
    session = session_with(server)
    first = session.proof(METHOD, b"")
    server.check(first.text, METHOD)
    now[0] += identity.NONCE_S
    server.check(session.proof(METHOD, b"").text, METHOD)
    with pytest.raises(identity.RefusedProof, match="repeats"):
        server.check(first.text, METHOD)
    for _ in range(5):
        now[0] += identity.NONCE_S
        for proof in (first, session.proof(METHOD, b"")):
            with pytest.raises(identity.RefusedProof, match="does not remember") as refused:
                server.check(proof.text, METHOD)
            assert refused.value.again
        server.check(session_with(server).proof(METHOD, b"").text, METHOD)
    assert sum(map(len, server._sessions.values())) <= 2


def test_greetings_of_strangers_take_no_memory() -> None:
    server = checker()
    for _ in range(50):
        server.greet(identity.Greeting(ANOTHER, WHERE).text)
    assert not any(server._sessions.values())


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
        VipuClient("127.0.0.1", service, timeout=60) as client,
        pytest.raises(DeniedError, match="another user's"),
    ):
        client.list_partitions()
    monkeypatch.setenv(access.VARIABLE, TOKEN)
    for own in (True, False):
        with VipuClient("127.0.0.1", service, timeout=60, own=own) as client:
            assert client.list_partitions() == []


def test_a_client_that_expects_its_own_server_takes_no_other(
    service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(access.VARIABLE, ANOTHER)
    with (
        VipuClient("127.0.0.1", service, timeout=60, own=True) as client,
        pytest.raises(access.StrangersServerError, match="not this user's"),
    ):
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
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def intercept_service(self, proceed: Any, call: Any) -> Any:
        self.seen.append((call.method, dict(call.invocation_metadata)))
        return proceed(call)


@contextlib.contextmanager
def strangers_server(
    spy: _Spy, port: int = 0, host: str = "127.0.0.1", relay: grpc.Channel | None = None
) -> Iterator[int]:
    """A server that knows no secret. ``relay``: it passes greetings on to the real server, and its replies back."""
    from concurrent.futures import ThreadPoolExecutor

    from podrun.protos import ipuof_pb2, vipu_pb2
    from podrun.protos.services import add_to_server

    fake = grpc.server(ThreadPoolExecutor(4), interceptors=[spy], options=(("grpc.so_reuseport", 0),))
    add_to_server(vipu_pb2, "UserService", object(), fake)
    add_to_server(ipuof_pb2, "Ipuof", object(), fake)
    if relay is not None:
        pass_on = grpc.unary_unary_rpc_method_handler(
            lambda text, _: relay.unary_unary(access.GREET)(text, timeout=60)
        )
        service, _, method = access.GREET[1:].partition("/")
        fake.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: pass_on}),))
    bound = fake.add_insecure_port(f"{host}:{port}")
    fake.start()
    try:
        yield bound
    finally:
        fake.stop(None).wait(60)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients find no Unix socket, as those on another host."""
    monkeypatch.setattr(own_sockets, "listens_for_me", lambda path: False)


def test_a_strangers_server_hears_a_greeting_and_nothing_else(
    service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No name, no request and no proof: nothing that tells it something or could be used elsewhere."""
    monkeypatch.setenv(access.VARIABLE, TOKEN)
    spy = _Spy()
    with strangers_server(spy) as port, VipuClient("127.0.0.1", port, timeout=60, own=True) as client:
        for ask in (
            lambda: client.create_partition(Requirements("p", 4)),
            lambda: client.remove_partition("p"),
            client.list_partitions,
            lambda: next(client.watch()),
        ):
            with pytest.raises(access.StrangersServerError, match="not this user's"):
                ask()
    assert {method for method, _ in spy.seen} == {access.GREET}
    assert not any(access.PROOF_KEY in metadata for _, metadata in spy.seen)


@pytest.mark.usefixtures("over_tcp")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("relayed", [True, False])
def test_a_stranger_at_another_address_of_the_name_relays_nothing(
    service: int, monkeypatch: pytest.MonkeyPatch, own: bool, relayed: bool
) -> None:
    """``localhost`` leads to the stranger at 127.0.0.2 first: the real server replies to no greeting for that address,
    and the client finds it at its own."""
    monkeypatch.setenv(access.VARIABLE, TOKEN)
    monkeypatch.setattr(proven_channel, "numeric_hosts", lambda host: ["127.0.0.2", "127.0.0.1"])
    spy = _Spy()
    with (
        grpc.insecure_channel(f"127.0.0.1:{service}") as real,
        strangers_server(spy, service, "127.0.0.2", real if relayed else None),
        VipuClient("localhost", service, timeout=60, own=own) as client,
    ):
        assert client.list_partitions() == []
    assert {method for method, _ in spy.seen} == {access.GREET}


@pytest.mark.usefixtures("over_tcp")
def test_a_stranger_who_takes_the_port_is_not_believed_and_a_restarted_server_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(access.VARIABLE, TOKEN)
    cluster = load_cluster("pod16")

    def serve(port: int) -> tuple[Service, int]:
        made = Service(cluster, Store(None, "pod16"), LocalMachinePool(cluster))
        return made, made.start("127.0.0.1", port, TOKEN)

    first, port = serve(0)
    with VipuClient("127.0.0.1", port, timeout=60, own=False) as client:
        assert client.list_partitions() == []
        first.stop(grace=0)
        spy = _Spy()
        with strangers_server(spy, port), pytest.raises(ServiceError):
            client.remove_partition("p")
        with strangers_server(spy, port), pytest.raises(ServiceError):
            until_reached(client)
        second, _ = serve(port)
        try:
            assert until_reached(client) == []
        finally:
            second.stop(grace=0)
    asked = [metadata for method, metadata in spy.seen if method != access.GREET]
    assert all(
        access.PROOF_KEY in metadata for metadata in asked
    )  # For the server that ended: of no use to others.


def until_reached(client: VipuClient) -> Any:
    """The answer, once gRPC has connected again."""
    for _ in range(1200):
        try:
            return client.list_partitions()
        except access.StrangersServerError:
            raise
        except ServiceError as error:
            if "answers" not in str(error) and "does not answer" not in str(error):
                raise
            threading.Event().wait(0.05)
    raise AssertionError


@pytest.mark.usefixtures("over_tcp")
def test_a_call_goes_on_after_the_server_has_forgotten_the_greeting(
    service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(access.VARIABLE, TOKEN)
    with VipuClient("127.0.0.1", service, timeout=60, own=True) as client:
        client.list_partitions()
        monkeypatch.setattr(identity.ProofChecker, "_nonce", _forgetful(identity.ProofChecker._nonce, 3))
        assert client.list_partitions() == []
        assert next(client.watch(["partition"])).kind


def _forgetful(real: Any, times: int) -> Any:
    """``ProofChecker._nonce`` that forgets all its numbers so many times."""
    left = [times]

    def nonce(self: identity.ProofChecker) -> str:
        if left[0]:
            left[0] -= 1
            self._sessions.clear()
        return str(real(self))

    return nonce


def test_a_user_reaches_the_own_server_through_the_own_folder(
    service: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a Unix socket proves it, nothing is asked over TCP, under no name of the host."""
    monkeypatch.setenv(access.VARIABLE, TOKEN)

    def no_tcp(*_: object) -> Any:
        raise AssertionError("over TCP")

    monkeypatch.setattr(proven_channel.ProvenChannel, "_greeted", no_tcp)
    for host in ("127.0.0.1", "localhost"):
        with VipuClient(host, service, timeout=60, own=True) as client:
            assert client.list_partitions() == []
    monkeypatch.setenv(access.VARIABLE, ANOTHER)  # Another secret, another name.
    with VipuClient("127.0.0.1", service, timeout=60, own=True) as client, pytest.raises(AssertionError):
        client.list_partitions()


def test_the_socket_goes_with_its_server() -> None:
    folder = own_sockets.socket_folder()
    before = set(folder.iterdir())
    server = MachineServer(token=TOKEN)
    server.start()
    assert len(set(folder.iterdir()) - before) == 1
    server.stop()
    assert set(folder.iterdir()) == before


def test_a_machine_hears_no_program_before_it_has_proved_itself() -> None:
    """A file may be old, and its port somebody else's: no request to attach is sent, so no program and no weights."""
    from podrun.core.errors import UnrecoverableRuntimeError
    from podrun.core.layout import IpuRange
    from podrun.device.connection import AttachRequest
    from podrun.device.host.ports import Site
    from podrun.device.host.remote import RemotePort

    spy = _Spy()
    with strangers_server(spy) as port:
        whole = IpuRange(0, 4)
        for own, admit in ((True, None), (False, known_servers.only_of([]))):
            machine = RemotePort(Site(0, f"127.0.0.1:{port}", whole), token=TOKEN, own=own, admit=admit)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(proven_channel, "user_of_server", lambda host, port: os.getuid() + 1_000_007)
                with pytest.raises(UnrecoverableRuntimeError, match=f"is run by {os.getuid() + 1_000_007}"):
                    machine.attach(AttachRequest(whole, whole, os.getpid(), "me", "program", ""))
    assert {method for method, _ in spy.seen} == {access.GREET}


def test_a_named_server_has_to_stay_the_same_users(tmp_path: Path) -> None:
    known, bob, carol = known_servers.KnownServers(tmp_path), os.getuid() + 1_000_007, os.getuid() + 1_000_008
    known.admit("127.0.0.1:8090", bob)
    known.admit("127.0.0.1:8090", bob)
    with pytest.raises(access.StrangersServerError, match=f"run by {carol}; .* was {bob}'s") as refused:
        known.admit("127.0.0.1:8090", carol)
    assert str(known.path) in (refused.value.hint or "")
    known.admit("127.0.0.1:8090", os.getuid())  # The own one is always welcome,
    with pytest.raises(access.StrangersServerError, match="was this user's"):
        known.admit("127.0.0.1:8090", bob)  # and nobody takes its place.
    assert known.users() == {os.getuid()}
    for number in range(2 * known_servers.MOST):
        known.admit(f"127.0.0.1:{number}", bob)
    assert len(known._read()) == known_servers.MOST
    known.path.write_text("[1, {")
    assert known.users() == frozenset()
    known_servers.only_of([bob])("127.0.0.1:1", bob)
    with pytest.raises(access.StrangersServerError):
        known_servers.only_of([bob])("127.0.0.1:1", carol)


def test_the_kernel_knows_who_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        taken: list[Any] = []
        thread = threading.Thread(target=lambda: taken.append(listener.accept()), daemon=True)
        thread.start()
        assert identity.user_of_server(host, port) == os.getuid()
        thread.join(60)
        assert identity.user_of_server(host, port, patience=0.01) is None  # Nobody has taken the connection.
        taken[0][0].close()
    assert identity.user_of_server("127.0.0.1", port) is None
    assert identity.user_of_server("192.0.2.1", port) is None


def test_a_server_that_is_silent_holds_no_other_call_and_no_closing_up() -> None:
    """One call waits for the greeting's reply; another's deadline, and the channel's end, do not wait for that."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = proven_channel.open_channel(f"127.0.0.1:{silent.getsockname()[1]}", (), TOKEN, own=True)
        codes: list[str] = []

        def ask(timeout: float) -> None:
            with pytest.raises(grpc.RpcError) as failed:
                channel.unary_unary(METHOD)(b"", timeout=timeout)
            codes.append(failed.value.code().name)

        first = threading.Thread(target=ask, args=(60.0,), daemon=True)
        first.start()
        silent.accept()[0].close()
        ask(0.05)
        assert codes[0] in ("DEADLINE_EXCEEDED", "UNAVAILABLE")
        channel.close()
        first.join(60)
        assert not first.is_alive()
        assert codes[1] in ("CANCELLED", "UNAVAILABLE")
