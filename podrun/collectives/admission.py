"""Which connections a rank accepts: those whose other end proves to know the group's key.

Who connects says whose connection it is and sends a random number. The listener answers with a proof that it knows the
key, for that number and what was said, and with a number of its own; then the other end proves the same. So whoever
listens at a rank's port, or connects to it, sees nothing of the key, and what was overheard opens nothing later.

All incoming connections are listened to at once, so that a stranger that connects and sends nothing, or something else,
does not delay a member.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from podrun.collectives.group import within_limits

_NUMBER, _PROOF = 16, 32
_HELLO = struct.Struct(f"<I??{_NUMBER}s")
_ANSWER = _NUMBER + _PROOF
MOST_STRANGERS = 256
"""Most connections without a proof beyond the number that members make; the oldest is closed then."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What the first bytes of a connection say: whose it is, whether it carries data to that rank, and whether that
    rank is near.
    """

    rank: int
    outgoing: bool
    near: bool


class StrangerError(ConnectionError):
    """What listens at a rank's port does not know the group's key."""


class Introduction:
    """The side that connects. ``said`` goes first; `answered` then turns the listener's answer into the proof."""

    def __init__(self, hello: Hello, key: bytes) -> None:
        self._key = key
        self.said = _HELLO.pack(hello.rank, hello.outgoing, hello.near, secrets.token_bytes(_NUMBER))

    @staticmethod
    def answer_bytes() -> int:
        """How long the listener's answer is."""
        return _ANSWER

    def answered(self, answer: bytes) -> bytes:
        """What to send next. Raises StrangerError if the listener has not proved that it knows the key."""
        number, proof = answer[:_NUMBER], answer[_NUMBER:]
        if not hmac.compare_digest(proof, _proof(self._key, "listener", self.said, number)):
            raise StrangerError("what listens there does not know the group's key")
        return _proof(self._key, "member", self.said, number)


def _proof(key: bytes, who: str, said: bytes, number: bytes) -> bytes:
    """A proof that one side knows the key, for both sides' numbers and what the connection is."""
    return hmac.new(key, b"podrun link " + who.encode() + b"\n" + said + number, "sha256").digest()


@dataclass(slots=True)
class _Incoming:
    """A connection that has not proved anything. ``wanted``: the proof it has to send; empty before its hello."""

    received: bytes = b""
    hello: Hello | None = None
    wanted: bytes = b""


class Admission:
    """The incoming connections at a listener while a group connects. Close it when all members are connected.

    ``most``: most connections that members make; beyond them, the newest `MOST_STRANGERS` others are listened to.
    ``dress``: what becomes of an accepted connection (`podrun.collectives.encryption`).
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        most: int,
        dress: Callable[[socket.socket], socket.socket] = lambda sock: sock,
    ) -> None:
        self._key, self._most, self._dress = key, most + MOST_STRANGERS, dress
        self._strangers: dict[socket.socket, _Incoming] = {}
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def admitted(self, seconds: float) -> Iterator[tuple[Hello, socket.socket]]:
        """The connections that have shown within ``seconds`` that they know the key. The caller owns their sockets."""
        for ready, _ in self._selector.select(seconds):
            if ready.fileobj is self._listener:
                self._accept()
                continue
            assert isinstance(ready.fileobj, socket.socket)
            hello = self._listen_to(ready.fileobj) if ready.fileobj in self._strangers else None
            if hello is not None:
                yield hello, ready.fileobj

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # the peer is gone already
            with within_limits("connection for a rank that joins"):
                sock = self._dress(self._listener.accept()[0])
            sock.setblocking(False)
            self._strangers[sock] = _Incoming()
            self._selector.register(sock, selectors.EVENT_READ)
            if len(self._strangers) > self._most:
                self._reject(next(iter(self._strangers)))

    def _listen_to(self, sock: socket.socket) -> Hello | None:
        """The hello of a connection, once its proof is complete and right."""
        stranger = self._strangers[sock]
        size = len(stranger.wanted) or _HELLO.size
        try:
            data = sock.recv(size - len(stranger.received))
            stranger.received += data
            if data and len(stranger.received) < size:
                return None
            if data and not stranger.wanted:
                self._answer(sock, stranger)
                return None
        except OSError:
            data = b""
        if not data or not hmac.compare_digest(stranger.received, stranger.wanted):
            self._reject(sock)
            return None
        self._selector.unregister(sock)
        del self._strangers[sock]
        return stranger.hello

    def _answer(self, sock: socket.socket, stranger: _Incoming) -> None:
        said, number = stranger.received, secrets.token_bytes(_NUMBER)
        rank, outgoing, near, _ = _HELLO.unpack(said)
        stranger.hello, stranger.received = Hello(rank, outgoing, near), b""
        stranger.wanted = _proof(self._key, "member", said, number)
        # A few bytes into an empty buffer: this does not wait.
        sock.sendall(number + _proof(self._key, "listener", said, number))

    def _reject(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._strangers[sock]
        sock.close()

    def close(self) -> None:
        """Close all connections that have proved nothing."""
        for sock in list(self._strangers):
            self._reject(sock)
        self._selector.close()
