"""How ranks on several hosts find each other, and how an error reaches all of them: one registrar, by rank 0.

The registrar listens where the token says. Every rank, rank 0 too, keeps one connection to it. First each
tells its host and where it listens for data; when all have, everyone gets the *roster*. Then the first rank
of each host makes the host's shared-memory group and hands in its token, and everyone gets all of them. Who is
lost before it has said that it is connected to all others ends the group. From
then on the connection carries only errors: what one rank reports, all get, the first one only; and the
registrar tells when rank 0 leaves. Ranks that wait long tell what they last came to: where two of them differ, each
may wait for the other without a word between them, and only the registrar sees it.

Everything on these connections is a line of JSON. A line must come with the token's key first.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import operator
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podrun.collectives.errors import (
    GroupError,
    HostLimitError,
    RankLostError,
    RankMissingError,
    describe,
    different_collectives,
    restore,
    within_limits,
)
from podrun.collectives.meeting import label_text
from podrun.collectives.wire import dial, listen

_MAX_LINE = 4 * 1024 * 1024
_MOST_STRANGERS = 256
"""Connections that have not shown the key, beyond as many as ranks are awaited: the oldest then goes."""


class _Lines:
    """Messages from the bytes of a connection, in whatever parts they come."""

    def __init__(self) -> None:
        self._rest = b""

    def more(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that these bytes complete. Raises ValueError for what is none."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise ValueError("a line without an end")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("brackets in brackets") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("no message")
        return messages


@dataclass(slots=True, eq=False)
class _Member:
    """A connection to the registrar."""

    socket: socket.socket
    lines: _Lines = field(default_factory=_Lines)
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
        self._strangers: deque[_Member] = deque()
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
            with within_limits("connection for a rank that comes"):
                sock, _ = self._listener.accept()
        except HostLimitError as error:
            self._selector.unregister(self._listener)  # it would be ready for ever
            self._abort(describe(HostLimitError(f"rank 0 gets {error.message}", hint=error.hint)))
            return
        except OSError:  # whoever it was has gone again
            return
        sock.settimeout(5.0)
        stranger = _Member(sock)
        self._selector.register(sock, selectors.EVENT_READ, stranger)
        self._strangers.append(stranger)
        if len(self._strangers) > _MOST_STRANGERS + self._size:
            self._drop(self._strangers[0])

    def _read(self, member: _Member) -> None:
        try:
            data = member.socket.recv(65536)
        except OSError:
            data = b""
        try:
            for message in member.lines.more(data):
                self._handle(member, message)
        except (OSError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError):
            data = b""  # not one of ours
        if not data:
            self._drop(member)

    def _drop(self, member: _Member) -> None:
        """Close a connection. If it is that of a rank that others still wait for, it ends the group."""
        if member in self._strangers:
            self._strangers.remove(member)
        self._selector.unregister(member.socket)
        member.socket.close()
        if self._members.pop(member.rank, None) is not None and member.rank not in self._connected:
            lost = RankLostError(
                f"rank {member.rank} of {self._size} died or left before all ranks were connected",
                rank=member.rank,
                hint="Close this group, replace the rank and make a new group.",
            )
            self._abort(describe(lost))

    def _handle(self, member: _Member, message: dict[str, Any]) -> None:
        if member.rank < 0:
            if not hmac.compare_digest(str(message["key"]).encode(errors="replace"), self._key):
                raise ValueError("not a member")
            rank = operator.index(message["rank"])
            if not 0 <= rank < self._size:
                raise ValueError("no rank of this group")
            if rank in self._entries:
                _say(member.socket, {"refused": f"rank {rank} of the group was already taken"})
                return
            self._entries[rank] = {k: message[k] for k in ("host", "address", "port", "pid")}
            self._members[rank] = member.socket
            self._strangers.remove(member)
            member.rank = rank
            if self._aborted:
                _say(member.socket, {"abort": self._aborted})
            self._broadcast({"missing": [r for r in range(self._size) if r not in self._entries]})
            if len(self._entries) == self._size:
                self._broadcast({"roster": [self._entries[r] for r in range(self._size)]})
        elif "board" in message:
            self._boards[str(message["host"])] = dict(message["board"])
            if set(self._boards) == {str(entry["host"]) for entry in self._entries.values()}:
                self._broadcast({"boards": self._boards})
        elif "connected" in message:
            self._connected.add(member.rank)
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
            with within_limits(f"connection to rank 0 for rank {rank}"):
                self._socket = dial(str(token["address"]), int(token["port"]), deadline, comes=True)
        except OSError as error:
            raise RankLostError(
                f"cannot reach rank 0 at {token['address']}:{token['port']}: {error.strerror or error}",
                rank=0,
                hint="Is the process that made the group still there, and reachable from this host?",
            ) from error
        self._socket.settimeout(None)
        self._where = f"{token['address']}:{token['port']}"
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

    def connected(self) -> None:
        """Say that this rank needs nobody any more to come to it."""
        with contextlib.suppress(OSError):  # rank 0 is gone: that is found out elsewhere
            self._tell({"connected": True})

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
                    missing = tuple(self._heard.get("missing", (0,) if what == "roster" else ()))
                    gone = "never joined" if "missing" in self._heard else "does not answer"
                    named = f": rank {', '.join(map(str, missing))} {gone}" if missing else ""
                    raise RankMissingError(
                        f"rank {self._rank} of {self._size} waited in vain for {whom}{named}",
                        ranks=missing,
                        hint="See what those ranks do; give the group a longer timeout if they only need more time.",
                    )
            return self._heard[what]

    def _listen(self) -> None:
        lines = _Lines()
        while True:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            try:
                for message in lines.more(data):
                    self._take(message)
            except ValueError:  # nobody of ours
                data = b""
            if not data:
                self._end()
                return

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
        error = self._why_ended()
        with self._news:
            self._heard.setdefault("failed", error)
            self._news.notify_all()
        self._on_abort(describe(error))

    def _why_ended(self) -> RankLostError:
        if self._heard:
            said, hint = "died or can no longer be reached", "Make a new group."
        else:
            said = f"died, or what is at {self._where} is another group and did not let rank {self._rank} in"
            hint = "See whether this rank has the token of that group, and that group's maker still runs."
        return RankLostError(f"rank 0 of {self._size} {said}", rank=0, hint=hint)

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
