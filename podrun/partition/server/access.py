"""Who may call a server, and the audit log of what they ask for.

The log notes who asked the service for which change, and the outcome: lines of JSON that are only ever appended. Each
call that changes something has two: one before it is carried out, without which it is not, and one with its outcome.
Calls that are refused are there too. The file has mode 0600; access keys are in no line.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.errors import PodrunError, ServiceError
from podrun.core.identity import Caller
from podrun.core.quick_dataclass import dataclass
from podrun.partition.server.sharing import CallRoom, Sharing
from podrun.partition.state.accounts import Account, Accounts

if TYPE_CHECKING:
    from google.protobuf.message import Message


@dataclass(frozen=True, slots=True)
class AccountCaller(Caller):
    """The caller of a request at a server with users of its own."""

    account: Account


READING = ("Get", "List", "Watch", "Hold")
"""Calls whose names begin with these words change nothing, or come every few seconds as signs of life."""
LONGEST = 2000
"""Most characters of a call's arguments in a line."""


class AuditLog:
    """An open audit log; ``path`` None writes nothing. Safe to use from several threads."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._file = -1
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ServiceError(
                    f"the audit log {path} cannot be written: {error.strerror}",
                    hint="Make room there, or name another file: --audit-log FILE",
                ) from error

    @contextmanager
    def call(self, method: str, who: str, request: Message) -> Iterator[None]:
        """Note a call of ``who``, before and after the context. Raises ServiceError if it cannot be noted before."""
        if self._file < 0 or method.startswith(READING):
            yield
            return
        number = next(self._numbers)
        asked = {
            "call": method,
            "who": who,
            "request": arguments(request),
            "process": os.getpid(),
            "number": number,
        }
        self._write({**asked, "outcome": "asked"})
        outcome = "failed"
        try:
            yield
            outcome = "done"
        except PodrunError as error:
            outcome = f"{type(error).__name__}: {error.message}"
            raise
        finally:
            self._write({"process": os.getpid(), "number": number, "outcome": outcome}, needed=False)

    def refused(self, method: str, who: str, request: Message, error: PodrunError) -> None:
        """Note a call that was refused before it began."""
        if self._file >= 0:
            said = {
                "call": method,
                "who": who,
                "request": arguments(request),
                "outcome": f"refused: {error.message}",
            }
            self._write(said, needed=False)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _write(self, line: dict[str, Any], *, needed: bool = True) -> None:
        text = json.dumps({"time_s": round(self._clock(), 3), **line}) + "\n"
        try:
            with self._lock:
                if os.write(self._file, text.encode()) < len(text.encode()):
                    raise OSError(28, "only a part of a line could be written")
                os.fsync(self._file)
        except OSError as error:
            if needed:
                raise ServiceError(
                    f"the audit log {self._path} cannot be written: {error.strerror}; nothing was changed",
                    hint="Make room on its file system, then try again.",
                ) from error


def arguments(request: Message) -> dict[str, Any] | str:
    """A request's fields that are set, for the log."""
    from google.protobuf.json_format import MessageToDict

    plain = MessageToDict(request, preserving_proto_field_name=True)
    return plain if len(str(plain)) <= LONGEST else f"{str(plain)[:LONGEST]}..."


@dataclass(slots=True)
class FrontDesk:
    """Who may call a server, and what of it is noted. ``sharing``: other users of the host; ``accounts``: users with
    access keys, None without --secure; ``admin_port``: where calls for administrators alone are answered (0: a free
    port), None: with all others."""

    sharing: Sharing = field(default_factory=Sharing)
    accounts: Accounts | None = None
    audit: AuditLog = field(default_factory=lambda: AuditLog(None))
    admin_port: int | None = None
    room: CallRoom = field(default_factory=CallRoom)
