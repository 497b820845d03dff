"""Rank 0's side of coming together: the registrar, to which every rank keeps a connection (`podrun.collectives.roster`
says what goes over it).
"""

from __future__ import annotations

import contextlib
import hmac
import operator
import selectors
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podrun.collectives.admission import MOST_STRANGERS
from podrun.collectives.errors import (
    HostLimitError,
    RankLostError,
    describe,
    different_collectives,
    for_rank,
    within_limits,
)
from podrun.collectives.lines import Lines, say
from podrun.collectives.meeting import label_text
from podrun.collectives.wire import listen


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection to the registrar."""

    socket: socket.socket
    lines: Lines = field(default_factory=Lines)
    rank: int = -1


class Registrar:
    """Rank 0's thread that brings the ranks together and spreads errors. Ends with `close`."""

    def __init__(self, address: str, port: int, size: int, key: str) -> None:
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
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_end:
                    self._broadcast({"bye": True})
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data.socket.fileno() >= 0:  # not dropped meanwhile
                    self._read(key.data)

    def _accept(self) -> None:
        try:
            with for_rank(0), within_limits("connection for a rank that comes"):
                sock, _ = self._listener.accept()
        except HostLimitError as error:
            self._selector.unregister(self._listener)  # it would be ready for ever
            self._abort(describe(error))
            return
        except OSError:  # whoever it was has gone again
            return
        sock.settimeout(5.0)
        stranger = _Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        self._strangers.append(stranger)
        if len(self._strangers) > MOST_STRANGERS + self._size:
            self._drop(self._strangers[0])

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(65536)
        except OSError:
            data = b""
        try:
            for message in connection.lines.more(data):
                self._handle(connection, message)
        except (OSError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError):
            data = b""  # not one of ours
        if not data:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        """Close a connection. If it is that of a rank that others still wait for, it ends the group."""
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
            self._abort(describe(lost))

    def _let_in(self, connection: _Connection, message: dict[str, Any]) -> None:
        """Take a rank that says who it is, and tell the others who is still missing, or who is where."""
        if not hmac.compare_digest(str(message["key"]).encode(errors="replace"), self._key):
            raise ValueError("not a member")
        rank = operator.index(message["rank"])
        if not 0 <= rank < self._size:
            raise ValueError("no rank of this group")
        if rank in self._entries:
            say(connection.socket, {"refused": f"rank {rank} of the group was already taken"})
            return
        self._entries[rank] = {k: message[k] for k in ("host", "address", "port", "pid")}
        self._members[rank] = connection.socket
        self._strangers.remove(connection)
        connection.rank = rank
        if self._aborted:
            say(connection.socket, {"abort": self._aborted})
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
        """End the group if a rank's last collectives, by number, are not those of another that waits too."""
        self._waiting[rank] = calls
        for other, theirs in self._waiting.items():
            for number in sorted(calls.keys() & theirs.keys()):
                if calls[number] != theirs[number]:
                    first, second = sorted((rank, other))
                    called = [(each, label_text(self._waiting[each][number])) for each in (first, second)]
                    self._abort(describe(different_collectives(*called)))
                    return

    def _abort(self, error: dict[str, Any]) -> None:
        if self._aborted is None:
            self._aborted = error
            self._broadcast({"abort": error})

    def _broadcast(self, message: Mapping[str, Any]) -> None:
        for sock in list(self._members.values()):
            with contextlib.suppress(OSError):  # whoever is gone is found out by those who wait for it
                say(sock, message)

    def close(self) -> None:
        """Tell the others that rank 0 leaves, and stop. Idempotent."""
        if self._thread.is_alive():
            self._waker.send(b"x")
            self._thread.join(10)
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._listener.close()
        self._selector.close()
        self._waker.close()
