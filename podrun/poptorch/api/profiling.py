"""Trace points of the host: ``poptorch.profiling.Channel``.

The variable PVTI_OPTIONS, a JSON object as for the SDK, switches them on (``{"enable": "true"}``): each
channel writes ``<directory>/<channel>.json`` when the process ends, in the format of Chrome's trace viewer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from podrun.core.documents import parse_json
from podrun.core.environment import environment
from podrun.core.errors import ConfigError, InternalError

VARIABLE = "PVTI_OPTIONS"


def _directory() -> Path | None:
    """The folder for traces, or None."""
    text = environment().get(VARIABLE)
    if not text:
        return None
    try:
        settings = parse_json(text, VARIABLE)
    except ConfigError:
        settings = {}
    if not isinstance(settings, dict):
        settings = {}
    if str(settings.get("enable", "true")).lower() not in ("true", "1"):
        return None
    return Path(str(settings.get("directory", ".")))


class Channel:
    """A named channel of trace points."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._events: list[dict[str, Any]] = []
        self._folder = _directory()
        if self._folder is not None:
            atexit.register(self._write)

    def instrument(self, obj: object, *methods: str) -> None:
        """Trace calls of an object's methods. AttributeError for a method that it does not have."""
        for method in methods:
            plain = getattr(obj, method)

            @functools.wraps(plain)
            def traced(
                *args: object, _plain: Callable[..., Any] = plain, _name: str = method, **kwargs: object
            ) -> Any:
                with self.tracepoint(_name):
                    return _plain(*args, **kwargs)

            setattr(obj, method, traced)

    @contextlib.contextmanager
    def tracepoint(self, name: str) -> Iterator[None]:
        """Trace the code inside."""
        started = time.monotonic_ns()
        try:
            yield
        finally:
            if self._folder is not None:
                spent = time.monotonic_ns() - started
                self._events.append(
                    {"name": name, "cat": self.name, "ph": "X", "pid": os.getpid(), "tid": 0}
                    | {"ts": started / 1e3, "dur": spent / 1e3}
                )

    def _write(self) -> None:
        if self._folder is None:
            raise InternalError("a channel without a folder is written")
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', self.name)}.json"
        file.write_text(json.dumps({"traceEvents": self._events}), encoding="utf-8")
