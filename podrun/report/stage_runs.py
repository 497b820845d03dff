"""When each stage of a pipeline works on which micro-batch in a modelled step, and the pipeline's shape."""

from __future__ import annotations

from podrun.core.quick_dataclass import dataclass
from podrun.report.model import Profile, ReportStage

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


def stage_runs(profile: Profile, micro_batches: int) -> list[StageRun]:
    """The segments of the first ``micro_batches`` micro-batches, in order of time; copies take no time."""
    stages = sorted(profile.stages, key=lambda stage: stage.pipeline_cycle)
    if not profile.pipelined:
        return _one_after_the_other(stages, micro_batches)
    if profile.schedule == INTERLEAVED:
        return _in_turns(stages, micro_batches)
    return _in_slots(stages, micro_batches)


def pipeline_shape(profile: Profile) -> Shape | None:
    """The shape of a profile's pipeline over all micro-batches that are in it together; None if the profile has no
    pipeline.
    """
    if not profile.pipelined:
        return None
    total = profile.micro_batches_per_pass
    runs = stage_runs(profile, total)
    length = max(run.end_cycles for run in runs) or 1
    busy: dict[int, int] = {}
    for run in runs:
        busy[run.stage.ipu] = busy.get(run.stage.ipu, 0) + run.stage.cycles
    idle = {ipu: 1 - cycles / length for ipu, cycles in sorted(busy.items())}
    filling = max(stage.pipeline_cycle for stage in profile.stages)
    period = 2 if profile.schedule == INTERLEAVED else 1
    main = max(0, period * (total - 1) + 1 - filling)
    return Shape(profile.schedule, filling, main, filling, sum(idle.values()) / len(idle), idle)


MOST_SHOWN = 16
"""Micro-batches that a chart has room for."""


def shown_micro_batches(profile: Profile) -> int:
    """How many micro-batches a chart shows: all that are in the pipeline together, but no more than it has room for."""
    return min(profile.micro_batches_per_pass, MOST_SHOWN)


def _one_after_the_other(stages: list[ReportStage], micro_batches: int) -> list[StageRun]:
    runs: list[StageRun] = []
    now = 0
    for micro_batch in range(micro_batches):
        for stage in stages:
            runs.append(StageRun(stage, micro_batch, now))
            now += stage.cycles
    return runs


def _in_slots(stages: list[ReportStage], micro_batches: int) -> list[StageRun]:
    runs: list[StageRun] = []
    now = 0
    for slot in range(micro_batches + stages[-1].pipeline_cycle):
        busy: dict[int, int] = {}
        for stage in stages:
            micro_batch = slot - stage.pipeline_cycle
            if 0 <= micro_batch < micro_batches:
                begun = busy.get(stage.ipu, 0)
                runs.append(StageRun(stage, micro_batch, now + begun))
                busy[stage.ipu] = begun + stage.cycles
        now += max(busy.values(), default=0)
    return sorted(runs, key=lambda run: run.start_cycles)


def _in_turns(stages: list[ReportStage], micro_batches: int) -> list[StageRun]:
    order = sorted(
        (stage.pipeline_cycle + 2 * m, -stage.pipeline_cycle, place, m)
        for place, stage in enumerate(stages)
        for m in range(micro_batches)
    )
    free: dict[int, int] = {}
    arrived = [0] * micro_batches
    runs = []
    for _, _, place, m in order:
        run = StageRun(stages[place], m, max(free.get(stages[place].ipu, 0), arrived[m]))
        free[run.stage.ipu] = arrived[m] = run.end_cycles
        runs.append(run)
    return sorted(runs, key=lambda run: run.start_cycles)
