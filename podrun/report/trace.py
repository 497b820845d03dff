"""A profile as a Chrome trace, which Perfetto and chrome://tracing open: one process per IPU, BSP phases as slices."""

from __future__ import annotations

import json
from typing import Any

from podrun.report.model import PHASES, Profile, Stage
from podrun.report.pipeline import runs, shown_micro_batches

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
            "micro_batches": profile.accumulation_factor,
            "micro_batches_shown": shown,
        },
    }


def _name(kind: str, ipu: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": ipu, "tid": thread, "args": {"name": name}}


def _event(
    stage: Stage, name: str, category: str, thread: int, start: float, cycles: int, scale: float
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
    stage: Stage, title: str, start: int, scale: float, micro_batch: int | None
) -> list[dict[str, Any]]:
    event = _event(stage, title, "segment", SEGMENTS, start, stage.cycles, scale)
    event["args"] |= {"micro_batch": micro_batch, "sent_bytes": stage.sent_bytes}
    return [event]


def _slices(stage: Stage, start: int, scale: float, micro_batch: int | None) -> list[dict[str, Any]]:
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
