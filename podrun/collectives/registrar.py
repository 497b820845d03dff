"""How ranks on several hosts find each other, and how an error reaches all of them: one registrar, run by rank 0.

The registrar listens where the token says. Every rank, rank 0 too, keeps one connection to it, a `RegistrarClient`.
First each rank reports its host and where it listens for data; when all have, everyone gets the *roster*. Then the
first rank of each host makes the host's shared-memory group and sends its token, and everyone gets all tokens. A rank
that is lost before it has reported that it is connected to all others ends the group. From then on the connection
carries only errors: what one rank reports, all get (the first error only), and the registrar reports when rank 0
leaves. Ranks that wait long report their last collectives: where two ranks differ, each may wait for the other without
exchanging anything, and only the registrar can see it.

Every message on these connections is a line of JSON. Messages are only compared and shown. The token's key never
travels: a rank begins with a random number, the registrar answers with a proof that it knows the key and with a number
of its own, and the rank then proves the same. So whoever else listens there learns nothing, and what was overheard
opens nothing later.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import operator
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from podrun.collectives.barrier import label_text
from podrun.collectives.connection_security import MOST_STRANGERS, accepted
from podrun.collectives.group import (
    HostLimitError,
    RankLostError,
    different_collectives,
    for_rank,
    within_limits,
)
from podrun.collectives.tcp_link import listen
from podrun.core.error_codec import error_to_dict
from podrun.core.quick_dataclass import dataclass
from podrun.core.tls import credentials

_MAX_LINE = 4 * 1024 * 1024
INTRODUCTION_S = 5.0
"""Most seconds that a message waits until the rank is introduced: only an error can come before."""


class JsonLines:
    """Splits the bytes of a connection, in whatever parts they arrive, into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def more(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that these bytes complete. Raises ValueError for bytes that are no message."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise ValueError("a line that is too long")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("brackets nested too deeply") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a JSON object")
        return messages


def send_message(sock: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message."""
    sock.sendall(json.dumps(message, default=str).encode() + b"\n")


def proof_of(key: bytes, who: str, number: str) -> str:
    """A proof that ``who`` (``registrar`` or ``rank N``) knows the key, for the other side's random number."""
    return hmac.new(key, f"podrun group {who}\n{number}".encode(), "sha256").hexdigest()


STRANGER_SECONDS = 30.0
"""Time for a connection to prove that a rank makes it; ranks do so at once."""


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection to the registrar; ``rank`` is -1 until it has proved that it knows the key. ``number``: that of the
    registrar for it; empty until it has begun.
    """

    socket: socket.socket
    lines: JsonLines = field(default_factory=JsonLines)
    rank: int = -1
    number: str = ""
    since: float = field(default_factory=time.monotonic)


class Registrar:
    """Rank 0's thread that brings the ranks together and distributes errors. `close` ends it."""

    def __init__(self, address: str, port: int, size: int, key: str) -> None:
        self._tls = credentials()
        self._listener = listen(address, port)
        self.port = int(self._listener.getsockname()[1])
        self._size, self._key = size, key.encode(errors="replace")
        self._entries: dict[int, dict[str, Any]] = {}
        self._boards: dict[str, dict[str, Any]] = {}
        self._members: dict[int, socket.socket] = {}
        self._strangers: deque[_Connection] = deque()
        self._connected: set[int] = set()
        self._aborted: dict[str, Any] | None = None
        self._waiting: dict[int, dict[int, bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._waker, self._wake_end = socket.socketpair()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="group-registrar", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(STRANGER_SECONDS if self._strangers else None):
                if key.fileobj is self._wake_end:
                    self._broadcast({"bye": True})
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data.socket.fileno() >= 0:  # not dropped meanwhile
                    self._read(key.data)
            while self._strangers and time.monotonic() - self._strangers[0].since > STRANGER_SECONDS:
                self._drop(self._strangers[0])

    def _accept(self) -> None:
        try:
            with for_rank(0), within_limits("connection for a rank that joins"):
                sock = accepted(self._listener.accept()[0], self._tls)
        except HostLimitError as error:
            self._selector.unregister(self._listener)  # it would stay ready for ever
            self._abort(error_to_dict(error))
            return
        except OSError:  # the peer is gone already
            return
        sock.settimeout(5.0)
        stranger = _Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        self._strangers.append(stranger)
        if len(self._strangers) > MOST_STRANGERS + self._size:
            # A rank that has begun to introduce itself is kept as long as others have not.
            self._drop(next((other for other in self._strangers if not other.number), self._strangers[0]))

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(65536)
        except OSError:
            data = b""
        try:
            for message in connection.lines.more(data):
                self._handle(connection, message)
        except (OSError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError):
            data = b""  # not a member of the group
        if not data:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        """Close a connection. If it belongs to a rank that others still wait for, that ends the group."""
        if connection in self._strangers:
            self._strangers.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if self._members.pop(connection.rank, None) is not None and connection.rank not in self._connected:
            lost = RankLostError(
                f"rank {connection.rank} of {self._size} died or left before all ranks were connected",
                rank=connection.rank,
                hint="Close this group, replace the rank and make a new group.",
            )
            self._abort(error_to_dict(lost))

    def _let_in(self, connection: _Connection, message: dict[str, Any]) -> None:
        """Admit a rank that proves that it knows the key, and tell the others which ranks are missing or where
        all are.
        """
        if not connection.number:
            connection.number = secrets.token_hex(16)
            answer = proof_of(self._key, "registrar", str(message["number"])[:200])
            send_message(connection.socket, {"answer": answer, "number": connection.number})
            return
        rank = operator.index(message["rank"])
        wanted = proof_of(self._key, f"rank {rank}", connection.number)
        if not hmac.compare_digest(str(message["proof"]).encode(errors="replace"), wanted.encode()):
            raise ValueError("not a member")
        if not 0 <= rank < self._size:
            raise ValueError("no rank of this group")
        if rank in self._entries:
            send_message(connection.socket, {"refused": f"rank {rank} of the group was already taken"})
            return
        self._entries[rank] = {k: message[k] for k in ("host", "address", "port", "pid")}
        self._members[rank] = connection.socket
        self._strangers.remove(connection)
        connection.rank = rank
        if self._aborted:
            send_message(connection.socket, {"abort": self._aborted})
        self._broadcast({"missing": [r for r in range(self._size) if r not in self._entries]})
        if len(self._entries) == self._size:
            self._broadcast({"roster": [self._entries[r] for r in range(self._size)]})

    def _handle(self, connection: _Connection, message: dict[str, Any]) -> None:
        if connection.rank < 0:
            self._let_in(connection, message)
        elif "board" in message:
            self._boards[str(message["host"])] = dict(message["board"])
            if set(self._boards) == {str(entry["host"]) for entry in self._entries.values()}:
                self._broadcast({"boards": self._boards})
        elif "connected" in message:
            self._connected.add(connection.rank)
        elif "abort" in message:
            self._abort(dict(message["abort"]))
        elif "waits" in message:
            labels = [bytes.fromhex(text) for text in message["last"]]
            first = int(message["waits"]) - len(labels) + 1
            self._compare(connection.rank, dict(enumerate(labels, first)))

    def _compare(self, rank: int, calls: dict[int, bytes]) -> None:
        """End the group if a rank's last collectives, by number, differ from those of another rank that waits too."""
        self._waiting[rank] = calls
        for other, theirs in self._waiting.items():
            for number in sorted(calls.keys() & theirs.keys()):
                if calls[number] != theirs[number]:
                    first, second = sorted((rank, other))
                    called = [
                        (caller, label_text(self._waiting[caller][number])) for caller in (first, second)
                    ]
                    self._abort(error_to_dict(different_collectives(*called)))
                    return

    def _abort(self, error: dict[str, Any]) -> None:
        if self._aborted is None:
            self._aborted = error
            self._broadcast({"abort": error})

    def _broadcast(self, message: Mapping[str, Any]) -> None:
        for sock in list(self._members.values()):
            with contextlib.suppress(OSError):  # the ranks that wait for a lost rank notice it themselves
                send_message(sock, message)

    def close(self) -> None:
        """Report that rank 0 leaves, and stop. Idempotent."""
        if self._thread.is_alive():
            self._waker.send(b"x")
            self._thread.join(10)
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._listener.close()
        self._selector.close()
        self._waker.close()
