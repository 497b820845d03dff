"""How ranks on several hosts find each other, and how an error reaches all of them: one registrar, by rank 0.

The registrar (`podrun.collectives.registrar`) listens where the token says. Every rank, rank 0 too, keeps one
connection to it, a `Member`. First each tells its host and where it listens for data; when all have, everyone gets the
*roster*. Then the first rank of each host makes the host's shared-memory group and hands in its token, and everyone
gets all of them. Who is lost before it has said that it is connected to all others ends the group. From then on the
connection carries only errors: what one rank reports, all get, the first one only; and the registrar tells when rank 0
leaves. Ranks that wait long tell what they last came to: where two of them differ, each may wait for the other without
a word between them, and only the registrar sees it.

Everything on these connections is a line of JSON (`podrun.collectives.lines`), the first one with the token's key.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrun.collectives.errors import (
    GroupError,
    RankLostError,
    RankMissingError,
    describe,
    restore,
    within_limits,
)
from podrun.collectives.lines import Lines, say
from podrun.collectives.wire import dial, listen


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
            say(self._socket, message)

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
        lines = Lines()
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
