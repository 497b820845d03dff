"""A profile as a Chrome trace, which Perfetto and chrome://tracing open, and the times of its pipeline segments.

Each IPU is a process; BSP phases are slices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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
    """A pipeline's slots: while it fills, runs full and flushes; and the bubble.

    ``idle_share``: the part of the compute time in which an IPU does nothing, on average over those with work.
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
    """The shape of a profile's pipeline over all micro-batches that are in it together; None if it is no pipeline."""
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
