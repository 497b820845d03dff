"""Chrome traces, which Perfetto and chrome://tracing open: of a profile, and of what the host did.

In the trace of a profile each IPU is a process and BSP phases are slices; times are modelled.

A program's own tracepoints, as the SDK's libpvti takes them, are in wall time.
``PVTI_OPTIONS='{"enable": "true", "directory": "DIR"}'`` switches them on; ``DIR/tracepoints-PID.json`` is written at
the end of the process. Otherwise they cost next to nothing.
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

from podrun.core.documents import parse_json
from podrun.core.environment import environment
from podrun.core.errors import ConfigError
from podrun.report.model import PHASES, Profile, ReportStage

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
    for run in runs(profile, shown):
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
    found = []
    now = start
    for step in stage.timeline:
        for thread, phase in enumerate(PHASES):
            cycles = step.cycles(phase)
            if not cycles:
                continue
            name = f"{step.operator} {step.scope}".strip()
            event = _event(stage, name, phase, thread, now, cycles, scale)
            event["args"] |= {"micro_batch": micro_batch, "steps": step.steps}
            found.append(event)
            now += cycles
    return found


INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True)
class StageRun:
    """One segment of one micro-batch; begins ``start_cycles`` after the first micro-batch did."""

    stage: ReportStage
    micro_batch: int
    start_cycles: int

    @property
    def end_cycles(self) -> int:
        """Cycles from the start of the first micro-batch to the end of the segment."""
        return self.start_cycles + self.stage.cycles


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipeline's slots (while it fills, runs full and flushes) and the bubble.

    ``idle_share``: the share of the compute time in which an IPU does nothing, on average over the IPUs with work.
    ``idle_share_by_ipu``: for each of them.
    """

    schedule: str
    fill_slots: int
    main_slots: int
    flush_slots: int
    idle_share: float
    idle_share_by_ipu: dict[int, float]


def runs(profile: Profile, micro_batches: int) -> list[StageRun]:
    """The segments of the first ``micro_batches`` micro-batches, in order of time; copies take no time."""
    stages = sorted(profile.stages, key=lambda stage: stage.pipeline_cycle)
    if not profile.pipelined:
        return _one_after_the_other(stages, micro_batches)
    if profile.schedule == INTERLEAVED:
        return _in_turns(stages, micro_batches)
    return _in_slots(stages, micro_batches)


def shape(profile: Profile) -> Shape | None:
    """The shape of a profile's pipeline over all micro-batches that are in it together; None if the profile has no
    pipeline.
    """
    if not profile.pipelined:
        return None
    total = profile.micro_batches_per_pass
    found = runs(profile, total)
    length = max(run.end_cycles for run in found) or 1
    busy: dict[int, int] = {}
    for run in found:
        busy[run.stage.ipu] = busy.get(run.stage.ipu, 0) + run.stage.cycles
    idle = {ipu: 1 - cycles / length for ipu, cycles in sorted(busy.items())}
    filling = max(stage.pipeline_cycle for stage in profile.stages)
    period = 2 if profile.schedule == INTERLEAVED else 1
    main = max(0, period * (total - 1) + 1 - filling)
    return Shape(profile.schedule, filling, main, filling, sum(idle.values()) / len(idle), idle)


def shown_micro_batches(profile: Profile, most: int = 16) -> int:
    """How many micro-batches a chart shows: all that are in the pipeline together, but no more than ``most``."""
    return min(profile.micro_batches_per_pass, most)


def _one_after_the_other(stages: list[ReportStage], micro_batches: int) -> list[StageRun]:
    found: list[StageRun] = []
    now = 0
    for micro_batch in range(micro_batches):
        for stage in stages:
            found.append(StageRun(stage, micro_batch, now))
            now += stage.cycles
    return found


def _in_slots(stages: list[ReportStage], micro_batches: int) -> list[StageRun]:
    found: list[StageRun] = []
    now = 0
    for slot in range(micro_batches + stages[-1].pipeline_cycle):
        busy: dict[int, int] = {}
        for stage in stages:
            micro_batch = slot - stage.pipeline_cycle
            if 0 <= micro_batch < micro_batches:
                begun = busy.get(stage.ipu, 0)
                found.append(StageRun(stage, micro_batch, now + begun))
                busy[stage.ipu] = begun + stage.cycles
        now += max(busy.values(), default=0)
    return sorted(found, key=lambda run: run.start_cycles)


def _in_turns(stages: list[ReportStage], micro_batches: int) -> list[StageRun]:
    order = sorted(
        (stage.pipeline_cycle + 2 * m, -stage.pipeline_cycle, place, m)
        for place, stage in enumerate(stages)
        for m in range(micro_batches)
    )
    free: dict[int, int] = {}
    arrived = [0] * micro_batches
    found = []
    for _, _, place, m in order:
        run = StageRun(stages[place], m, max(free.get(stages[place].ipu, 0), arrived[m]))
        free[run.stage.ipu] = arrived[m] = run.end_cycles
        found.append(run)
    return sorted(found, key=lambda run: run.start_cycles)


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
        """Record a tracepoint. ``phase``: B at the beginning, E at the end, i for a moment."""
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
    """The recorder that PVTI_OPTIONS asks for; a recorder that keeps nothing if the options cannot be read."""
    try:
        options = parse_json(environ.get(OPTIONS) or "{}", OPTIONS)
    except ConfigError:
        options = {}
    if not isinstance(options, dict) or str(options.get("enable", "false")).lower() not in ("true", "1"):
        return TracepointLog(None)
    return TracepointLog(Path(str(options.get("directory") or ".")).expanduser())


@functools.cache
def recorder() -> TracepointLog:
    """The process's recorder, which writes its file when the process ends."""
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
        """Note a moment."""
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
