"""A profile as a Chrome trace, which Perfetto and chrome://tracing open: one process per IPU, BSP phases as slices."""

from __future__ import annotations

from typing import Any

from podrun.device.target import chip
from podrun.report.read import Profile, Stage

PHASES = ("sync", "exchange", "compute")
"""The order of a BSP step; each is a thread of its own in the trace."""


def chrome_trace(profile: Profile) -> dict[str, Any]:
    """Trace events of one micro-batch, then of the update. Times are modelled microseconds."""
    events: list[dict[str, Any]] = []
    for ipu in profile.ipus:
        events.append(_name("process_name", ipu, 0, f"IPU {ipu}"))
        events += [_name("thread_name", ipu, index, phase) for index, phase in enumerate(PHASES)]
    clock = 1e6 / chip(profile.target).clock_hz
    now = 0.0
    for stage in sorted(profile.stages, key=lambda s: s.cycle):
        now = _slices(events, stage, now, clock)
    for stage in profile.updates:
        _slices(events, stage, now, clock)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "metadata": {"modelled": True, "target": profile.target},
    }


def _name(kind: str, ipu: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": ipu, "tid": thread, "args": {"name": name}}


def _slices(events: list[dict[str, Any]], stage: Stage, start: float, scale: float) -> float:
    now = start
    for entry in stage.report["timeline"]:
        for thread, phase in enumerate(PHASES):
            cycles = entry[phase]
            if not cycles:
                continue
            events.append(
                {
                    "ph": "X",
                    "name": f"{entry['operator']} {entry['scope']}".strip(),
                    "cat": phase,
                    "pid": stage.ipu,
                    "tid": thread,
                    "ts": round(now, 4),
                    "dur": round(cycles * scale, 4),
                    "args": {"cycles": cycles, "steps": entry["steps"], "segment": stage.name},
                }
            )
            now += cycles * scale
    return now
