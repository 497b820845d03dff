"""When each segment of each micro-batch runs: what the pipeline chart and the trace show.

The compiler's cost model (`podrun.compiler.cost`) puts a batch together the same way: without pipelining one
segment after the other; with it in time slots, each as long as its busiest IPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from podrun.report.model import Profile, Stage


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


def runs(profile: Profile, micro_batches: int) -> list[Run]:
    """The runs of the first ``micro_batches`` micro-batches of a batch, in order of time; copies take no time."""
    stages = sorted(profile.stages, key=lambda stage: stage.pipeline_cycle)
    found: list[Run] = []
    now = 0
    if not profile.pipelined:
        for micro_batch in range(micro_batches):
            for stage in stages:
                found.append(Run(stage, micro_batch, now))
                now += stage.cycles
        return found
    last = stages[-1].pipeline_cycle
    for slot in range(micro_batches + last):
        busy: dict[int, int] = {}
        for stage in stages:
            micro_batch = slot - stage.pipeline_cycle
            if 0 <= micro_batch < micro_batches:
                begun = busy.get(stage.ipu, 0)
                found.append(Run(stage, micro_batch, now + begun))
                busy[stage.ipu] = begun + stage.cycles
        now += max(busy.values(), default=0)
    return found


def shown_micro_batches(profile: Profile, most: int = 16) -> int:
    """How many micro-batches a chart shows: all of a batch, but no more than ``most``."""
    return min(profile.accumulation_factor, most)
