"""When each segment of each micro-batch runs: what the pipeline chart and the trace show, and the bubble.

The compiler's timeline (`podrun.compiler.costs.timeline`) puts a batch together the same way. Without pipelining one
segment runs after the other. Grouped: in time slots, each as long as its busiest IPU. Interleaved: forward and backward
work take turns, and a segment begins when its IPU is free and the one before it is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from podrun.report.model import Profile, Stage

INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True)
class Run:
    """One segment of one micro-batch; begins ``start_cycles`` after the batch did."""

    stage: Stage
    micro_batch: int
    start_cycles: int

    @property
    def end_cycles(self) -> int:
        """When it ends."""
        return self.start_cycles + self.stage.cycles


@dataclass(frozen=True, slots=True)
class Shape:
    """A pipeline's slots: while it fills, runs full and flushes; and the bubble.

    ``idle_share``: the part of a batch's compute time in which an IPU does nothing, on average over those with work.
    ``idle_share_by_ipu``: for each of them.
    """

    schedule: str
    fill_slots: int
    main_slots: int
    flush_slots: int
    idle_share: float
    idle_share_by_ipu: dict[int, float]


def runs(profile: Profile, micro_batches: int) -> list[Run]:
    """The runs of the first ``micro_batches`` micro-batches of a batch, in order of time; copies take no time."""
    stages = sorted(profile.stages, key=lambda stage: stage.pipeline_cycle)
    if not profile.pipelined:
        return _one_after_the_other(stages, micro_batches)
    if profile.schedule == INTERLEAVED:
        return _in_turns(stages, micro_batches)
    return _in_slots(stages, micro_batches)


def shape(profile: Profile) -> Shape | None:
    """The shape of a profile's pipeline over a whole batch; None if it is no pipeline."""
    if not profile.pipelined:
        return None
    total = profile.accumulation_factor
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
    """How many micro-batches a chart shows: all of a batch, but no more than ``most``."""
    return min(profile.accumulation_factor, most)


def _one_after_the_other(stages: list[Stage], micro_batches: int) -> list[Run]:
    found: list[Run] = []
    now = 0
    for micro_batch in range(micro_batches):
        for stage in stages:
            found.append(Run(stage, micro_batch, now))
            now += stage.cycles
    return found


def _in_slots(stages: list[Stage], micro_batches: int) -> list[Run]:
    found: list[Run] = []
    now = 0
    for slot in range(micro_batches + stages[-1].pipeline_cycle):
        busy: dict[int, int] = {}
        for stage in stages:
            micro_batch = slot - stage.pipeline_cycle
            if 0 <= micro_batch < micro_batches:
                begun = busy.get(stage.ipu, 0)
                found.append(Run(stage, micro_batch, now + begun))
                busy[stage.ipu] = begun + stage.cycles
        now += max(busy.values(), default=0)
    return sorted(found, key=lambda run: run.start_cycles)


def _in_turns(stages: list[Stage], micro_batches: int) -> list[Run]:
    order = sorted(
        (stage.pipeline_cycle + 2 * m, -stage.pipeline_cycle, place, m)
        for place, stage in enumerate(stages)
        for m in range(micro_batches)
    )
    free: dict[int, int] = {}
    arrived = [0] * micro_batches
    found = []
    for _, _, place, m in order:
        run = Run(stages[place], m, max(free.get(stages[place].ipu, 0), arrived[m]))
        free[run.stage.ipu] = arrived[m] = run.end_cycles
        found.append(run)
    return sorted(found, key=lambda run: run.start_cycles)
