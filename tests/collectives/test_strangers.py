"""Who is at a group's ports and has no business there: groups come together all the same, and who meets a stranger
instead of a group is told so at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from collective_ranks import PATIENCE, hosts, on_all
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.collectives import RankLostError, create, join_group, registrar
from podrun.collectives.connection_security import Admission, Hello, Introduction, StrangerError
from podrun.collectives.rendezvous import hosts_token
from podrun.collectives.tcp_link import listen
from podrun.core.errors import ConflictError, UsageError

NASTY = [
    b"[" * 100_000 + b"\n",
    b'{"rank": Infinity}\n',
    b'{"key": 1, "rank": 1e999}\n',
    b'{"key": "\xc3\xa9", "rank": 1}\n',
    b"null\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"",
]


@settings(max_examples=15)
@given(st.lists(st.one_of(st.sampled_from(NASTY), st.binary(max_size=300)), min_size=1, max_size=6))
def test_groups_come_together_whatever_strangers_say(said: list[bytes]) -> None:
    first, token = create(2, address="127.0.0.1", timeout=2 * PATIENCE, host="A")
    with contextlib.ExitStack() as closing:
        closing.callback(first.close)
        for text in said:
            stranger = closing.enter_context(socket.create_connection(("127.0.0.1", token["port"])))
            with contextlib.suppress(ConnectionError):  # it may be turned away in the middle
                stranger.sendall(text)
        second = join_group(token, 1, host="B")
        closing.callback(second.close)
        first_listener = first._client.listener  # type: ignore[attr-defined]
        for text in said:
            stranger = closing.enter_context(socket.create_connection(first_listener.getsockname()))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(text)
        began = time.monotonic()
        assert on_all([first, second], lambda group: group.barrier()) == [None, None]
        assert time.monotonic() - began < PATIENCE, "silent strangers hold nobody up"


def test_crowds_of_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrar, "MOST_STRANGERS", 5)
    first, token = create(2, address="127.0.0.1", timeout=PATIENCE, host="A")
    crowd = [socket.create_connection(("127.0.0.1", token["port"])) for _ in range(30)]
    second = join_group(token, 1, host="B")
    try:
        assert on_all([first, second], lambda group: group.barrier()) == [None, None]
        crowd[0].settimeout(PATIENCE)
        assert crowd[0].recv(1) == b""
    finally:
        for each in (second, first, *crowd):
            each.close()


def _met(admission: Admission, sock: socket.socket, count: int) -> bytes:
    """What the listener sends to a connection."""
    sock.settimeout(0.05)
    end, data = time.monotonic() + PATIENCE, b""
    while len(data) < count and time.monotonic() < end:
        assert list(admission.admitted(0.05)) == []
        with contextlib.suppress(TimeoutError):
            data += sock.recv(count - len(data))
    return data


def test_a_hello_may_come_in_parts_and_a_wrong_proof_is_turned_away() -> None:
    hello = Hello(3, True, False)
    right, guess = Introduction(hello, b"secret"), Introduction(hello, b"secrets")
    with listen("127.0.0.1") as door, contextlib.closing(Admission(door, b"secret", 1)) as admission:
        slow, wrong = (socket.create_connection(door.getsockname()) for _ in range(2))
        with slow, wrong:
            slow.sendall(right.said[:10])
            wrong.sendall(guess.said)
            answer = _met(admission, wrong, guess.answer_bytes())
            with pytest.raises(StrangerError):
                guess.answered(answer)
            wrong.sendall(bytes(32))
            slow.sendall(right.said[10:])
            proof = right.answered(_met(admission, slow, right.answer_bytes()))
            slow.sendall(proof[:5])
            assert list(admission.admitted(0.05)) == []
            slow.sendall(proof[5:])
            ((said, sock),) = admission.admitted(PATIENCE)
            sock.close()
            assert said == hello
            wrong.settimeout(PATIENCE)
            assert wrong.recv(1) == b""


def test_what_was_overheard_opens_nothing_and_who_listens_at_a_ranks_port_learns_nothing() -> None:
    key, hello = b"secret", Hello(1, True, False)
    heard = Introduction(hello, key)
    with listen("127.0.0.1") as door, contextlib.closing(Admission(door, key, 1)) as admission:
        with socket.create_connection(door.getsockname()) as member:
            member.sendall(heard.said)
            answer = _met(admission, member, heard.answer_bytes())
            proof = heard.answered(answer)
        with socket.create_connection(door.getsockname()) as thief:
            thief.sendall(heard.said)
            assert _met(admission, thief, heard.answer_bytes()) != answer
            thief.sendall(proof)
            assert list(admission.admitted(0.2)) == []
            thief.settimeout(PATIENCE)
            assert thief.recv(1) == b""
    again = Introduction(hello, key)
    assert again.said != heard.said
    with pytest.raises(StrangerError):
        again.answered(answer)
    assert key not in heard.said + answer + proof


@pytest.mark.parametrize("key", ["k", "x" * 100, "ключ"])
def test_members_may_agree_on_any_key(key: str) -> None:
    first, token = create(2, address="127.0.0.1", timeout=PATIENCE, key=key, host="A")
    second = join_group(hosts_token(2, "127.0.0.1", token["port"], key, PATIENCE), 1, host="B")
    assert on_all([first, second], lambda group: group.barrier()) == [None, None]
    second.close()
    first.close()


@contextlib.contextmanager
def _server(answer: bytes) -> Iterator[int]:
    """The port of a service that is none of ours."""
    with listen("127.0.0.1") as door:

        def serve() -> None:
            with door.accept()[0] as sock:
                sock.recv(1000)
                sock.sendall(answer)
                sock.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        yield door.getsockname()[1]
        thread.join(60)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[1]\n", b"[" * 5000 + b"\n"])
def test_another_service_at_the_groups_port_is_told_at_once(answer: bytes) -> None:
    with _server(answer) as port:
        group = join_group(hosts_token(2, "127.0.0.1", port, "key", 60), 1)
        with pytest.raises(RankLostError, match=f"what listens at 127.0.0.1:{port} is another group"):
            group.barrier()
        group.close()


def test_the_key_of_another_job_is_told_at_once() -> None:
    ours, token = create(2, address="127.0.0.1", timeout=60)
    other = join_group({**token, "key": "another"}, 1)
    with pytest.raises(RankLostError, match="another group and did not let rank 1 in"):
        other.barrier()
    other.close()
    ours.close()


@pytest.mark.parametrize("port", [-1, 65536, 10**30])
def test_ports_that_cannot_be_are_refused(port: int) -> None:
    with pytest.raises(UsageError, match="there is no port"):
        create(2, address="127.0.0.1", port=port)
    with pytest.raises(UsageError, match="there is no port"):
        join_group(hosts_token(2, "127.0.0.1", port, "key", 1), 1)


def test_addresses_that_cannot_be_are_refused() -> None:
    for everywhere in ("", "0.0.0.0", "::"):
        with pytest.raises(UsageError, match="cannot reach"):
            create(2, address=everywhere)
    for wrong in ("a..b", "x" * 300):
        with pytest.raises(ConflictError, match="cannot listen"):
            create(2, address=wrong)
        with pytest.raises(RankLostError, match="cannot reach rank 0"):
            join_group(hosts_token(2, wrong, 1, "key", 0.1), 1)


@pytest.mark.parametrize("names", ["ABC", "AAB"])
def test_who_is_lost_before_all_have_come_is_named_at_once(names: str) -> None:
    """Also where nobody has sent it anything yet."""
    with hosts(names, timeout=2 * PATIENCE, absent=(2,)) as groups:
        began = time.monotonic()

        def work(group: Any) -> None:
            if group.rank == 1:
                group.close()
            else:
                group.barrier()

        error, _ = on_all(groups, work)
        assert isinstance(error, RankLostError)
        assert error.rank == 1
        assert "rank 1 of 3 died or left before all ranks were connected" in str(error)
        assert time.monotonic() - began < PATIENCE
