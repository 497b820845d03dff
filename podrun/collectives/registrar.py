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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podrun.collectives.barrier import label_text
from podrun.collectives.connection_security import MOST_STRANGERS, accepted, dialled
from podrun.collectives.group import (
    GroupError,
    HostLimitError,
    RankLostError,
    RankMissingError,
    different_collectives,
    for_rank,
    within_limits,
)
from podrun.collectives.tcp_link import dial, listen
from podrun.core.errors import error_from_dict, error_to_dict
from podrun.core.tls import credentials, explain_connection_failure

_MAX_LINE = 4 * 1024 * 1024
_INTRODUCTION_S = 5.0
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


class RegistrarClient:
    """A rank's connection to the registrar, with a thread that receives. ``on_abort`` gets the data of an error."""

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
                self._socket = dial(str(token["address"]), int(token["port"]), deadline, retry=True)
        except OSError as error:
            raise RankLostError(
                f"cannot reach rank 0 at {token['address']}:{token['port']}: {error.strerror or error}",
                rank=0,
                hint="Check that the process that made the group runs and can be reached from this host.",
            ) from error
        self._where = f"{token['address']}:{token['port']}"
        self.address = str(self._socket.getsockname()[0])
        self._socket = dialled(self._socket, str(token["address"]), credentials())
        self._socket.settimeout(None)
        self.listener = listen(self.address)
        self.host, self._rank, self._size = host, rank, int(token["size"])
        self._on_abort = on_abort
        self._news = threading.Condition()
        self._received: dict[str, Any] = {}
        self._closing = False
        self._sending = threading.Lock()
        port = int(self.listener.getsockname()[1])
        self._key = str(token["key"]).encode(errors="replace")
        self._number = secrets.token_hex(16)
        self._entry = {
            "rank": rank,
            "host": host,
            "pid": pid,
            "address": self.address,
            "port": port,
        }
        self._introduced = threading.Event()
        with contextlib.suppress(OSError):  # The thread that receives finds out why.
            send_message(self._socket, {"number": self._number})
        self._thread = threading.Thread(target=self._listen, name="group-member", daemon=True)
        self._thread.start()

    def roster(self, deadline: float) -> list[dict[str, Any]]:
        """Every rank's host and address, after all ranks have joined."""
        entries: list[dict[str, Any]] = self._await("roster", deadline, "all ranks to join")
        return entries

    def boards(self, deadline: float) -> dict[str, dict[str, Any]]:
        """The token of every host's own group."""
        by_host: dict[str, dict[str, Any]] = self._await("boards", deadline, "every host's first rank")
        return by_host

    def send_board(self, token: Mapping[str, Any]) -> None:
        """Report the token of this host's group."""
        self._send({"host": self.host, "board": dict(token)})

    def connected(self) -> None:
        """Report that this rank is connected to all others."""
        with contextlib.suppress(OSError):  # rank 0 is gone, which is noticed elsewhere
            self._send({"connected": True})

    def abort(self, error: Mapping[str, Any]) -> None:
        """Report an error, which all ranks then get."""
        with contextlib.suppress(OSError):  # rank 0 is gone, which the others notice themselves
            self._send({"abort": dict(error)})

    def report_waiting(self, calls: int, last: Sequence[str]) -> None:
        """Report the last collectives, as labels in hexadecimal; ``calls`` counts all so far."""
        with contextlib.suppress(OSError):  # rank 0 is gone, which is noticed elsewhere
            self._send({"waits": calls, "last": list(last)})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._introduced.wait(_INTRODUCTION_S)  # A registrar takes nothing else before.
        with self._sending:  # any thread may call `abort`
            send_message(self._socket, message)

    def _await(self, what: str, deadline: float, whom: str) -> Any:
        with self._news:
            while what not in self._received:
                if "refused" in self._received:
                    raise GroupError(str(self._received["refused"]), hint="Each rank joins once.")
                if "failed" in self._received:
                    raise self._received["failed"]
                left = deadline - time.monotonic()
                if left <= 0 or not self._news.wait(left):
                    missing = tuple(self._received.get("missing", (0,) if what == "roster" else ()))
                    gone = "never joined" if "missing" in self._received else "does not answer"
                    named = f": rank {', '.join(map(str, missing))} {gone}" if missing else ""
                    raise RankMissingError(
                        f"rank {self._rank} of {self._size} waited for {whom} beyond its timeout{named}",
                        ranks=missing,
                        hint="Check what those ranks do; give the group a longer timeout if they only need more time.",
                    )
            return self._received[what]

    def _listen(self) -> None:
        lines = JsonLines()
        while True:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            try:
                for message in lines.more(data):
                    self._take(message)
            except ValueError:  # not a registrar
                data = b""
            if not data:
                self._end()
                return

    def _introduce(self, message: Mapping[str, Any]) -> None:
        """Prove to a registrar that this rank knows the key, after the registrar has proved it. Raises ValueError if it
        has not.
        """
        wanted = proof_of(self._key, "registrar", self._number)
        if not hmac.compare_digest(str(message.get("answer")).encode(errors="replace"), wanted.encode()):
            raise ValueError("not the registrar of this group")
        proof = proof_of(self._key, f"rank {self._rank}", str(message.get("number")))
        with contextlib.suppress(OSError), self._sending:  # rank 0 is gone, which is noticed elsewhere
            send_message(self._socket, {**self._entry, "proof": proof})
        self._introduced.set()

    def _take(self, message: dict[str, Any]) -> None:
        if not self._introduced.is_set():
            self._introduce(message)
            return
        if "abort" in message:
            self._on_abort(message["abort"])
            message = {
                "failed": self._received.get("failed", error_from_dict(message["abort"], unknown=GroupError))
            }
        with self._news:
            self._received.update(message)
            self._news.notify_all()

    def _end(self) -> None:
        """Handle the end of the connection: this rank or rank 0 has left, or rank 0 died."""
        self._introduced.set()
        if self._closing or "bye" in self._received:
            return
        error = self._why_ended()
        with self._news:
            self._received.setdefault("failed", error)
            self._news.notify_all()
        self._on_abort(error_to_dict(error))

    def _why_ended(self) -> RankLostError:
        if self._received:
            reason, hint = "died or can no longer be reached", "Make a new group."
        else:
            reason = f"died, or what listens at {self._where} is another group and did not let rank {self._rank} in"
            hint = "Check that this rank has the token of that group, and that the maker of the group still runs."
            if why := explain_connection_failure(self._where):
                reason, hint = f"cannot be reached: {why}", "All ranks of a group use TLS, or none."
        return RankLostError(f"rank 0 of {self._size} {reason}", rank=0, hint=hint)

    def close(self) -> None:
        """Leave. Idempotent. A rank that leaves at once is introduced first, so that its loss is noticed."""
        self._introduced.wait(_INTRODUCTION_S)
        self._closing = True
        self._introduced.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()
        self.listener.close()
