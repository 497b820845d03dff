"""Chrome traces, which Perfetto and chrome://tracing open: of a profile, and of what the host did.

In the trace of a profile each IPU is a process and BSP phases are slices; times are modelled.

A program's own tracepoints, graphs and heatmaps, as the SDK's libpvti takes them, are in wall time.
``PVTI_OPTIONS='{"enable": "true", "directory": "DIR"}'`` switches them on (also ``channels``, a list, and ``duration``
in seconds); ``DIR/tracepoints-PID.json`` is written at the end of the process. Otherwise they cost next to nothing.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from podrun.core.documents import parse_json
from podrun.core.environment import environment
from podrun.core.errors import ConfigError
from podrun.core.quick_dataclass import dataclass
from podrun.report.model import PHASES, Profile, ReportStage
from podrun.report.stage_runs import shown_micro_batches, stage_runs

DETAILED = 2
"""Micro-batches whose BSP steps are in the trace; of later ones only whole segments."""
SEGMENTS = len(PHASES)
"""The thread that shows whole segments; below it one for each phase."""


def to_trace(profile: Profile) -> str:
    """The trace as JSON text."""
    return json.dumps(chrome_trace(profile), separators=(",", ":")) + "\n"


def chrome_trace(profile: Profile) -> dict[str, Any]:
    """Trace events of one batch (its first micro-batches, then the update). Times are modelled microseconds."""
    events: list[dict[str, Any]] = []
    for ipu in profile.ipus:
        events.append(_name("process_name", ipu, 0, f"IPU {ipu}"))
        events += [_name("thread_name", ipu, i, name) for i, name in enumerate((*PHASES, "segments"))]
    scale = 1e6 / profile.clock_hz
    shown = shown_micro_batches(profile)
    end = 0
    for run in stage_runs(profile, shown):
        title = f"{run.stage.name}, micro-batch {run.micro_batch}"
        events += _whole(run.stage, title, run.start_cycles, scale, run.micro_batch)
        if run.micro_batch < DETAILED:
            events += _slices(run.stage, run.start_cycles, scale, run.micro_batch)
        end = max(end, run.end_cycles)
    for stage in profile.updates:
        events += _whole(stage, "update", end, scale, None)
        events += _slices(stage, end, scale, None)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "metadata": {
            "modelled": True,
            "target": profile.target,
            "micro_batches": profile.micro_batches_per_pass,
            "micro_batches_shown": shown,
        },
    }


def _name(kind: str, ipu: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": ipu, "tid": thread, "args": {"name": name}}


def _event(
    stage: ReportStage, name: str, category: str, thread: int, start: float, cycles: int, scale: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": stage.ipu,
        "tid": thread,
        "ts": round(start * scale, 4),
        "dur": round(cycles * scale, 4),
        "args": {"cycles": cycles, "segment": stage.name},
    }


def _whole(
    stage: ReportStage, title: str, start: int, scale: float, micro_batch: int | None
) -> list[dict[str, Any]]:
    event = _event(stage, title, "segment", SEGMENTS, start, stage.cycles, scale)
    event["args"] |= {"micro_batch": micro_batch, "sent_bytes": stage.sent_bytes}
    return [event]


def _slices(stage: ReportStage, start: int, scale: float, micro_batch: int | None) -> list[dict[str, Any]]:
    events = []
    now = start
    for step in stage.timeline:
        for thread, phase in enumerate(PHASES):
            cycles = step.cycles(phase)
            if not cycles:
                continue
            name = f"{step.operator} {step.scope}".strip()
            event = _event(stage, name, phase, thread, now, cycles, scale)
            event["args"] |= {"micro_batch": micro_batch, "steps": step.steps}
            events.append(event)
            now += cycles
    return events


F = TypeVar("F", bound=Callable[..., Any])
OPTIONS = "PVTI_OPTIONS"


class TraceChannel:
    """A named row of tracepoints, on unless ``PVTI_OPTIONS`` names other channels alone."""

    def __init__(self, name: str, enabled: bool = True) -> None:
        self.name = name
        self.enabled = enabled and recorder().takes(name)
        _channels.append(self)


_channels: list[TraceChannel] = []
"""The channels of this process, in the order in which they were made."""


class TracepointLog:
    """Collects tracepoints of this process and writes them as a Chrome trace.

    ``channels``: names of those that are on at first; empty for all. ``duration``: seconds after which nothing is
    recorded; 0 for no limit.
    """

    def __init__(
        self,
        directory: Path | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        channels: Collection[str] = (),
        duration: float = 0.0,
    ) -> None:
        self._directory, self._clock = directory, clock
        self._channels = frozenset(channels)
        self._until = clock() + duration if duration > 0 else math.inf
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    @property
    def on(self) -> bool:
        """True iff tracepoints are kept."""
        return self._directory is not None

    @property
    def path(self) -> Path | None:
        """The file that is written; None if tracepoints are not kept."""
        return None if self._directory is None else self._directory / f"tracepoints-{os.getpid()}.json"

    def takes(self, channel: str) -> bool:
        """Whether a channel of this name is on at first."""
        return not self._channels or channel in self._channels

    def note(self, channel: TraceChannel, name: str, phase: str) -> None:
        """Record a tracepoint. ``phase``: B at the beginning, E at the end, i for a moment."""
        if self._directory is not None and channel.enabled:
            self._add(phase, name, channel.name, {})

    def count(self, name: str, values: Mapping[str, float]) -> None:
        """Record values of a graph, by name of the series."""
        if self._directory is not None:
            self._add("C", name, "graph", {"args": dict(values)})

    def _add(self, phase: str, name: str, category: str, more: Mapping[str, Any]) -> None:
        now = self._clock()
        if now > self._until:
            return
        event = {
            "ph": phase,
            "name": name,
            "cat": category,
            "pid": os.getpid(),
            "tid": threading.get_native_id(),
            "ts": now * 1e6,
            **more,
        }
        with self._lock:
            self._events.append(event)

    def write(self) -> Path | None:
        """Write the file; None if there is nothing to write."""
        path = self.path
        if path is None or not self._events:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"})
        path.write_text(text, encoding="utf-8")
        return path

    def close(self) -> None:
        """Write the file, and record nothing from now on."""
        self.write()
        self._directory = None


def log_of(environ: Mapping[str, str]) -> TracepointLog:
    """The recorder that PVTI_OPTIONS asks for. As in the SDK, options that cannot be read, and options without
    ``enable``, switch tracepoints on with all defaults.
    """
    text = environ.get(OPTIONS)
    if not text:
        return TracepointLog(None)
    try:
        options = parse_json(text, OPTIONS)
    except ConfigError:
        options = {}
    if not isinstance(options, dict):
        options = {}
    if str(options.get("enable", "true")).lower() not in ("true", "1"):
        return TracepointLog(None)
    channels, duration = options.get("channels"), options.get("duration")
    return TracepointLog(
        Path(str(options.get("directory") or ".")).expanduser(),
        channels=[str(name) for name in channels] if isinstance(channels, list) else (),
        duration=float(duration) if isinstance(duration, (int, float)) else 0.0,
    )


@functools.cache
def recorder() -> TracepointLog:
    """The process's recorder, which writes its file when the process ends."""
    log = log_of(environment())
    if log.on:
        atexit.register(_write_at_exit, log)
    return log


def _write_at_exit(log: TracepointLog) -> None:
    try:
        log.write()
    except OSError as error:
        sys.stderr.write(f"podrun: tracepoints cannot be written to {log.path}: {error.strerror}\n")


def createTraceChannel(name: str) -> TraceChannel:
    """A channel for tracepoints."""
    return TraceChannel(name)


def listTraceChannel() -> list[list[Any]]:
    """All channels: name, and whether it is on."""
    return [[channel.name, channel.enabled] for channel in _channels]


def checkTraceChannel(channel: TraceChannel) -> bool:
    """Whether tracepoints of a channel are kept."""
    return recorder().on and channel.enabled


def enableTraceChannels(channels: TraceChannel | Iterable[TraceChannel]) -> None:
    """Keep tracepoints of one or several channels from now on."""
    for channel in [channels] if isinstance(channels, TraceChannel) else channels:
        channel.enabled = True


def disableTraceChannels(channels: TraceChannel | Iterable[TraceChannel]) -> None:
    """Keep no more tracepoints of one or several channels."""
    for channel in [channels] if isinstance(channels, TraceChannel) else channels:
        channel.enabled = False


def getCurrentTraceFilename() -> str:
    """The file that is written when the process ends; empty if tracepoints are not kept."""
    return str(recorder().path or "")


def closeTrace() -> None:
    """Write the file now; later tracepoints are not kept."""
    recorder().close()


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a `Graph`."""

    _graph: Graph
    _name: str

    def add(self, value: float) -> None:
        """The value from now on."""
        if self._graph.enabled:
            recorder().count(self._graph.title, {self._name: float(value)})


@dataclass(frozen=True, slots=True)
class Graph:
    """Values over time: ``Graph("Loss").addSeries("training").add(0.5)``."""

    name: str
    unit: str = ""
    enabled: bool = True

    @property
    def title(self) -> str:
        """The graph's name, with its unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def addSeries(self, name: str) -> Series:
        """A line of the graph."""
        return Series(self, name)


class Heatmap:
    """How values spread over bins, over time: ``Heatmap("weights", [0, 0.5, 1]).add(values)``.

    ``edges``: those of the bins, in ascending order; values outside are not counted.
    """

    def __init__(self, name: str, edges: Sequence[float], unit: str = "") -> None:
        self._title, self._edges = (f"{name} ({unit})" if unit else name), [float(edge) for edge in edges]

    def add(self, values: Sequence[float]) -> None:
        """Count these values, each in the bucket that it falls into."""
        if not recorder().on:
            return
        import numpy as np

        counts, _ = np.histogram(np.asarray(values, np.float64), self._edges)
        bins = zip(self._edges, self._edges[1:], counts.tolist(), strict=False)
        recorder().count(self._title, {f"{low:g} to {high:g}": count for low, high, count in bins})


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
        """Note the end of the tracepoint."""
        self.end(self._channel, self._name)

    @staticmethod
    def begin(channel: TraceChannel, name: str) -> None:
        """Note the beginning of a tracepoint."""
        recorder().note(channel, name, "B")

    @staticmethod
    def end(channel: TraceChannel, name: str) -> None:
        """Note the end of a tracepoint."""
        recorder().note(channel, name, "E")

    @staticmethod
    def event(channel: TraceChannel, name: str) -> None:
        """Note that something happens now."""
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
