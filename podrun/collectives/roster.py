"""How ranks on several hosts find each other, and how an error reaches all of them: one registrar, by rank 0.

The registrar listens where the token says. Every rank, rank 0 too, keeps one connection to it. First each
tells its host and where it listens for data; when all have, everyone gets the *roster*. Then the first rank
of each host makes the host's shared-memory group and hands in its token, and everyone gets all of them. From
then on the connection carries only errors: what one rank reports, all get, the first one only; and the
registrar tells when rank 0 leaves. Ranks that wait long tell what they last came to: where two of them differ, each
may wait for the other without a word between them, and only the registrar sees it.

Everything on these connections is a line of JSON. A line must come with the token's key first.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podrun.collectives.errors import (
    GroupError,
    RankLostError,
    RankMissingError,
    describe,
    different_collectives,
    restore,
)
from podrun.collectives.meeting import label_text
from podrun.collectives.wire import dial, listen

_MAX_LINE = 4 * 1024 * 1024


@dataclass(slots=True)
class _Member:
    """A connection to the registrar."""

    socket: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    rank: int = -1


class Registrar:
    """Rank 0's thread that brings the ranks together and spreads errors. Ends with `close`."""

    def __init__(self, address: str, port: int, size: int, key: str) -> None:
        self._listener = listen(address, port)
        self.port = int(self._listener.getsockname()[1])
        self._size, self._key = size, key
        self._entries: dict[int, dict[str, Any]] = {}
        self._boards: dict[str, dict[str, Any]] = {}
        self._members: dict[int, socket.socket] = {}
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
                    with contextlib.suppress(OSError):
                        sock, _ = self._listener.accept()
                        sock.settimeout(5.0)
                        self._selector.register(sock, selectors.EVENT_READ, _Member(sock))
                    continue
                self._read(key.data)

    def _read(self, member: _Member) -> None:
        try:
            data = member.socket.recv(65536)
        except OSError:
            data = b""
        member.buffer += data
        while b"\n" in member.buffer:
            line, _, rest = bytes(member.buffer).partition(b"\n")
            member.buffer = bytearray(rest)
            try:
                self._handle(member, json.loads(line))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                data = b""  # not one of ours: drop it
                break
        if not data or len(member.buffer) > _MAX_LINE:
            self._selector.unregister(member.socket)
            member.socket.close()
            self._members.pop(member.rank, None)

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        if member.rank < 0:
            rank = int(message["rank"])
            if not hmac.compare_digest(str(message["key"]), self._key) or not 0 <= rank < self._size:
                raise ValueError("not a member")
            if rank in self._entries:
                _say(member.socket, {"refused": f"rank {rank} of the group was already taken"})
                return
            member.rank = rank
            self._entries[rank] = {k: message[k] for k in ("host", "address", "port", "pid")}
            self._members[rank] = member.socket
            if self._aborted:
                _say(member.socket, {"abort": self._aborted})
            self._broadcast({"missing": [r for r in range(self._size) if r not in self._entries]})
            if len(self._entries) == self._size:
                self._broadcast({"roster": [self._entries[r] for r in range(self._size)]})
        elif "board" in message:
            self._boards[str(message["host"])] = dict(message["board"])
            if set(self._boards) == {str(entry["host"]) for entry in self._entries.values()}:
                self._broadcast({"boards": self._boards})
        elif "abort" in message:
            self._abort(dict(message["abort"]))
        elif "waits" in message:
            labels = [bytes.fromhex(text) for text in message["last"]]
            first = int(message["waits"]) - len(labels) + 1
            self._compare(member.rank, dict(enumerate(labels, first)))

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
                _say(sock, message)

    def close(self) -> None:
        """Tell the others that rank 0 leaves, and stop. Idempotent."""
        if self._thread.is_alive():
            self._waker.send(b"x")
            self._thread.join(10)
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._waker.close()


class Member:
    """A rank's connection to the registrar; a thread listens for what it says. ``on_abort`` gets an error's
    data.
    """

    def __init__(
        self,
        token: Mapping[str, Any],
        rank: int,
        host: str,
        pid: int,
        on_abort: Callable[[dict[str, Any]], None],
    ) -> None:
        deadline = time.monotonic() + float(token["timeout"])
        try:
            self._socket = dial(str(token["address"]), int(token["port"]), deadline)
        except OSError as error:
            raise RankLostError(
                f"cannot reach rank 0 at {token['address']}:{token['port']}: {error.strerror or error}",
                rank=0,
                hint="Is the process that made the group still there, and reachable from this host?",
            ) from error
        self._socket.settimeout(None)
        self.address = str(self._socket.getsockname()[0])
        self.listener = listen(self.address)
        self.host, self._rank, self._size = host, rank, int(token["size"])
        self._on_abort = on_abort
        self._news = threading.Condition()
        self._heard: dict[str, Any] = {}
        self._closing = False
        self._telling = threading.Lock()
        port = int(self.listener.getsockname()[1])
        entry = {
            "key": token["key"],
            "rank": rank,
            "host": host,
            "pid": pid,
            "address": self.address,
            "port": port,
        }
        self._tell(entry)
        self._thread = threading.Thread(target=self._listen, name="group-member", daemon=True)
        self._thread.start()

    def roster(self, deadline: float) -> list[dict[str, Any]]:
        """Every rank's host and address, when all have come."""
        found: list[dict[str, Any]] = self._hear("roster", deadline, "all ranks to join")
        return found

    def boards(self, deadline: float) -> dict[str, dict[str, Any]]:
        """The token of every host's own group."""
        found: dict[str, dict[str, Any]] = self._hear("boards", deadline, "every host's first rank")
        return found

    def hand_in(self, token: Mapping[str, Any]) -> None:
        """Say what this host's group is."""
        self._tell({"host": self.host, "board": dict(token)})

    def abort(self, error: Mapping[str, Any]) -> None:
        """Have the error told to all ranks."""
        with contextlib.suppress(OSError):  # rank 0 is gone: the others find out by themselves
            self._tell({"abort": dict(error)})

    def waits(self, calls: int, last: Sequence[str]) -> None:
        """Tell what the last collectives were, as labels in hexadecimal; ``calls`` counts all so far."""
        with contextlib.suppress(OSError):  # rank 0 is gone: that is found out elsewhere
            self._tell({"waits": calls, "last": list(last)})

    def _tell(self, message: Mapping[str, Any]) -> None:
        with self._telling:  # `abort` may come from any thread
            _say(self._socket, message)

    def _hear(self, what: str, deadline: float, whom: str) -> Any:
        with self._news:
            while what not in self._heard:
                if "refused" in self._heard:
                    raise GroupError(str(self._heard["refused"]), hint="Each rank joins once.")
                if "failed" in self._heard:
                    raise self._heard["failed"]
                left = deadline - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    missing = tuple(self._heard.get("missing", ()))
                    named = f": rank {', '.join(map(str, missing))} never joined" if missing else ""
                    raise RankMissingError(
                        f"rank {self._rank} of {self._size} waited in vain for {whom}{named}",
                        ranks=missing,
                        hint="See what those ranks do; give the group a longer timeout if they only need more time.",
                    )
            return self._heard[what]

    def _listen(self) -> None:
        buffer = bytearray()
        while True:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._end()
                return
            buffer += data
            while b"\n" in buffer:
                line, _, rest = bytes(buffer).partition(b"\n")
                buffer = bytearray(rest)
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "abort" in message:
            self._on_abort(message["abort"])
            message = {"failed": self._heard.get("failed", restore(message["abort"]))}
        with self._news:
            self._heard.update(message)
            self._news.notify_all()

    def _end(self) -> None:
        """The connection is closed: by us, by rank 0 that leaves, or because rank 0 died."""
        if self._closing or "bye" in self._heard:
            return
        error = RankLostError(
            f"rank 0 of {self._size} died or can no longer be reached", rank=0, hint="Make a new group."
        )
        with self._news:
            self._heard.setdefault("failed", error)
            self._news.notify_all()
        self._on_abort(describe(error))

    def close(self) -> None:
        """Leave. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()
        self.listener.close()


def _say(sock: socket.socket, message: Mapping[str, Any]) -> None:
    sock.sendall(json.dumps(message, default=str).encode() + b"\n")
