"""Tracepoints of a program, as the SDK's libpvti takes them: what the host did, in seconds of wall time.

``PVTI_OPTIONS='{"enable": "true", "directory": "DIR"}'`` switches them on; ``DIR/tracepoints-PID.json`` is written at
the end of the process, and ui.perfetto.dev opens it beside a report's ``trace.json``. Otherwise they cost next to
nothing.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from podrun.core.environment import environment

F = TypeVar("F", bound=Callable[..., Any])
OPTIONS = "PVTI_OPTIONS"


@dataclass(frozen=True, slots=True)
class TraceChannel:
    """A named row of tracepoints."""

    name: str


class TracepointLog:
    """Collects tracepoints of this process and writes them as a Chrome trace."""

    def __init__(self, directory: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    @property
    def on(self) -> bool:
        """True iff tracepoints are kept."""
        return self._directory is not None

    def note(self, channel: TraceChannel, name: str, phase: str) -> None:
        """``phase``: B at the beginning, E at the end, i for a moment."""
        if self._directory is None:
            return
        event = {
            "ph": phase,
            "name": name,
            "cat": channel.name,
            "pid": os.getpid(),
            "tid": threading.get_native_id(),
            "ts": self._clock() * 1e6,
        }
        with self._lock:
            self._events.append(event)

    def write(self) -> Path | None:
        """Write the file; None if there is nothing to write."""
        if self._directory is None or not self._events:
            return None
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"tracepoints-{os.getpid()}.json"
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}), encoding="utf-8")
        return path


def log_of(environ: Mapping[str, str]) -> TracepointLog:
    """The recorder that PVTI_OPTIONS asks for; one that keeps nothing for options that cannot be read."""
    try:
        options = json.loads(environ.get(OPTIONS) or "{}")
    except ValueError:
        options = {}
    if not isinstance(options, dict) or str(options.get("enable", "false")).lower() not in ("true", "1"):
        return TracepointLog(None)
    return TracepointLog(Path(str(options.get("directory") or ".")).expanduser())


@functools.cache
def recorder() -> TracepointLog:
    """The process's own, which writes its file when the process ends."""
    made = log_of(environment())
    if made.on:
        atexit.register(made.write)
    return made


def createTraceChannel(name: str) -> TraceChannel:
    """A channel for tracepoints."""
    return TraceChannel(name)


class Tracepoint:
    """``with Tracepoint(channel, "load data"): ...``; or `begin` and `end`."""

    def __init__(self, channel: TraceChannel, name: str) -> None:
        self._channel, self._name = channel, name

    def __enter__(self) -> Tracepoint:
        self.begin(self._channel, self._name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(self._channel, self._name)

    enter = __enter__

    def leave(self) -> None:
        """The end of it."""
        self.end(self._channel, self._name)

    @staticmethod
    def begin(channel: TraceChannel, name: str) -> None:
        """Something begins."""
        recorder().note(channel, name, "B")

    @staticmethod
    def end(channel: TraceChannel, name: str) -> None:
        """It ends."""
        recorder().note(channel, name, "E")

    @staticmethod
    def event(channel: TraceChannel, name: str) -> None:
        """Something happens."""
        recorder().note(channel, name, "i")


def instrument_fn(channel: TraceChannel) -> Callable[[F], F]:
    """A decorator: each call of the function is a tracepoint."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with Tracepoint(channel, function.__qualname__):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def instrument(target: Any, methods: list[str], channel: TraceChannel) -> None:
    """Make each call of these methods of a class or object a tracepoint."""
    for name in methods:
        setattr(target, name, instrument_fn(channel)(getattr(target, name)))
