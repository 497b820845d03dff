"""The audit log: who asked the service to change what, and what came of it. Lines of JSON that are only ever appended.

Two lines for each call that changes something: one before it is carried out, without which it is not, and one with its
outcome. Calls that are refused are there too. The file has mode 0600; access keys are in no line.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podrun.core.errors import PodrunError, ServiceError

READING = ("Get", "List", "Watch")
"""Calls whose names begin so change nothing."""
LONGEST = 2000
"""Characters of a call's arguments in a line."""


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
    def call(self, method: str, who: str, request: Any) -> Iterator[None]:
        """A call of ``who`` for as long as the context lasts. Raises ServiceError if it cannot be noted before."""
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

    def refused(self, method: str, who: str, request: Any, error: PodrunError) -> None:
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


def arguments(request: Any) -> dict[str, Any] | str:
    """A request's fields that are set, for the log."""
    from google.protobuf.json_format import MessageToDict

    plain = MessageToDict(request, preserving_proto_field_name=True)
    return plain if len(str(plain)) <= LONGEST else f"{str(plain)[:LONGEST]}..."
