"""A rank's connection to the registrar: roster and boards come in, reports of what it waits for go out."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrun.collectives.connection_security import dialled
from podrun.collectives.group import GroupError, RankLostError, RankMissingError, within_limits
from podrun.collectives.registrar import INTRODUCTION_S, JsonLines, proof_of, send_message
from podrun.collectives.tcp_link import dial, listen
from podrun.core.error_codec import error_from_dict, error_to_dict
from podrun.core.tls import credentials, explain_connection_failure


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
        self._introduced.wait(INTRODUCTION_S)  # A registrar takes nothing else before.
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
        self._introduced.wait(INTRODUCTION_S)
        self._closing = True
        self._introduced.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()
        self.listener.close()
