"""Which connections a rank accepts: those that show the group's key.

All incoming connections are listened to at once, so that a stranger that connects and sends nothing, or something else,
does not delay a member.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from podrun.collectives.group_errors import within_limits

_KEY_BYTES = 32
_HELLO = struct.Struct(f"<I??{_KEY_BYTES}s")
MOST_STRANGERS = 256
"""Most connections without the key beyond the number that members make; the oldest is closed then."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first bytes of a connection: whose it is, whether it carries data to that rank, and whether that rank is
    near.
    """

    rank: int
    outgoing: bool
    near: bool

    def packed(self, key: bytes) -> bytes:
        """The bytes to send, with a digest of the group's key."""
        return _HELLO.pack(self.rank, self.outgoing, self.near, _digest(key))


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=_KEY_BYTES).digest()


class Admission:
    """The incoming connections at a listener while a group connects. Close it when all members are connected."""

    def __init__(self, listener: socket.socket, key: bytes, most: int) -> None:
        """``most``: most connections that members make; beyond them, the newest `MOST_STRANGERS` others are listened
        to.
        """
        self._key = _digest(key)
        self._most = most + MOST_STRANGERS
        self._received: dict[socket.socket, bytes] = {}
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def admitted(self, seconds: float) -> Iterator[tuple[Hello, socket.socket]]:
        """The connections that have shown the key within ``seconds``. The caller owns their sockets."""
        for ready, _ in self._selector.select(seconds):
            if ready.fileobj is self._listener:
                self._accept()
                continue
            assert isinstance(ready.fileobj, socket.socket)
            hello = self._listen_to(ready.fileobj) if ready.fileobj in self._received else None
            if hello is not None:
                yield hello, ready.fileobj

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # the peer is gone already
            with within_limits("connection for a rank that joins"):
                sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._received[sock] = b""
            self._selector.register(sock, selectors.EVENT_READ)
            if len(self._received) > self._most:
                self._reject(next(iter(self._received)))

    def _listen_to(self, sock: socket.socket) -> Hello | None:
        """The hello of a connection, once it is complete and has the right key."""
        try:
            data = sock.recv(_HELLO.size - len(self._received[sock]))
        except OSError:
            data = b""
        received = self._received[sock] = self._received[sock] + data
        if data and len(received) < _HELLO.size:
            return None
        rank, outgoing, near, offered = _HELLO.unpack(received) if data else (0, False, False, b"")
        if not hmac.compare_digest(offered, self._key):
            self._reject(sock)
            return None
        self._selector.unregister(sock)
        del self._received[sock]
        return Hello(rank, outgoing, near)

    def _reject(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._received[sock]
        sock.close()

    def close(self) -> None:
        """Close all connections that have not shown the key."""
        for sock in list(self._received):
            self._reject(sock)
        self._selector.close()
