"""Who may connect to a rank: those that show the group's key. All that knock are listened to at once, so that nobody
who connects and says nothing, or something else, keeps a member waiting.
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

from podrun.collectives.errors import within_limits

_KEY_BYTES = 32
_HELLO = struct.Struct(f"<I??{_KEY_BYTES}s")
MOST_STRANGERS = 256
"""Connections that have not shown the key, beyond as many as members make: the oldest then goes."""


@dataclass(frozen=True, slots=True)
class Hello:
    """How a connection begins: whose it is, whether it carries data to that rank, and whether that rank is near."""

    rank: int
    outgoing: bool
    near: bool

    def packed(self, key: bytes) -> bytes:
        """As it travels, with the group's key."""
        return _HELLO.pack(self.rank, self.outgoing, self.near, _digest(key))


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=_KEY_BYTES).digest()


class Admission:
    """The connections that come in at a listener, while a group comes together. Close it when all are there."""

    def __init__(self, listener: socket.socket, key: bytes, most: int) -> None:
        """``most``: connections that members make at most; of others some more are heard, the last that came."""
        self._key = _digest(key)
        self._most = most + MOST_STRANGERS
        self._heard: dict[socket.socket, bytes] = {}
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def coming(self, seconds: float) -> Iterator[tuple[Hello, socket.socket]]:
        """The connections that have shown the key, after at most so many seconds. The socket is the caller's."""
        for ready, _ in self._selector.select(seconds):
            if ready.fileobj is self._listener:
                self._accept()
                continue
            assert isinstance(ready.fileobj, socket.socket)
            hello = self._listen_to(ready.fileobj) if ready.fileobj in self._heard else None
            if hello is not None:
                yield hello, ready.fileobj

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # whoever it was has gone again
            with within_limits("connection for a rank that comes"):
                sock, _ = self._listener.accept()
            sock.setblocking(False)
            self._heard[sock] = b""
            self._selector.register(sock, selectors.EVENT_READ)
            if len(self._heard) > self._most:
                self._turn_away(next(iter(self._heard)))

    def _listen_to(self, sock: socket.socket) -> Hello | None:
        """What it says, if that is now all said and right."""
        try:
            data = sock.recv(_HELLO.size - len(self._heard[sock]))
        except OSError:
            data = b""
        said = self._heard[sock] = self._heard[sock] + data
        if data and len(said) < _HELLO.size:
            return None
        rank, outgoing, near, offered = _HELLO.unpack(said) if data else (0, False, False, b"")
        if not hmac.compare_digest(offered, self._key):
            self._turn_away(sock)
            return None
        self._selector.unregister(sock)
        del self._heard[sock]
        return Hello(rank, outgoing, near)

    def _turn_away(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._heard[sock]
        sock.close()

    def close(self) -> None:
        """Let go of all that have not shown the key."""
        for sock in list(self._heard):
            self._turn_away(sock)
        self._selector.close()
