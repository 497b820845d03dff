"""Pipelines in reports: both schedules against the compiler's timeline, the bubble in text and on the page."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from podrun.compiler.program import PipelineOrder
from podrun.compiler.timeline import SegmentTask, idle_share, makespan
from podrun.report.document import from_json, profile_to_json
from podrun.report.html import page
from podrun.report.model import Profile
from podrun.report.stage_runs import pipeline_shape, stage_runs
from podrun.report.text import summary

from .profiles import pipeline_profile


def even(schedule: str, stages: int = 4, micro_batches: int = 10) -> Profile:
    """Forward and backward work of 100 cycles on each stage; 200 on the last, which does both."""
    profile = pipeline_profile()
    last = stages - 1
    turn = 2 * last + (schedule == "interleaved")
    cycles = [(s, s, 100) for s in range(last)] + [(last, last, 200)]
    cycles += [(s, turn - s, 100) for s in reversed(range(last))]
    made = tuple(
        dataclasses.replace(profile.stages[0], ipu=ipu, pipeline_cycle=cycle, cycles=size)
        for ipu, cycle, size in cycles
    )
    return dataclasses.replace(
        profile, stages=made, updates=(), schedule=schedule, pipelined=True, accumulation_factor=micro_batches
    )


@pytest.mark.parametrize("schedule", ["grouped", "interleaved"])
def test_runs_are_those_of_the_compiler(schedule: str) -> None:
    profile = even(schedule)
    tasks = [SegmentTask(s.ipu, s.pipeline_cycle, float(s.cycles), 0.0) for s in profile.stages]
    found = stage_runs(profile, 10)
    assert max(run.end_cycles for run in found) == makespan(tasks, 10, PipelineOrder(schedule))
    drawn = pipeline_shape(profile)
    assert drawn is not None
    assert drawn.idle_share == pytest.approx(idle_share(tasks, 10, PipelineOrder(schedule)))
    assert sorted(run.start_cycles for run in found) == [run.start_cycles for run in found]


def test_interleaved_work_takes_turns() -> None:
    found = [run for run in stage_runs(even("interleaved"), 10) if run.stage.ipu == 0]
    directions = ["backward" if run.stage.pipeline_cycle else "forward" for run in found]
    assert directions == ["forward"] * 4 + ["backward", "forward"] * 6 + ["backward"] * 4
    assert all(a.end_cycles <= b.start_cycles for a, b in itertools.pairwise(found))


def test_summary_and_page_tell_how_long_a_pipeline_fills_and_idles() -> None:
    grouped = pipeline_shape(even("grouped"))
    assert grouped is not None
    assert (grouped.fill_slots, grouped.main_slots, grouped.flush_slots) == (6, 4, 6)
    assert "Pipeline, grouped: 6 pipeline cycles to fill, 4 full, 6 to flush" in summary(even("grouped"))
    assert f"IPUs idle {grouped.idle_share:.1%} of the time" in summary(even("grouped"))
    html = page(even("interleaved"))
    assert "Schedule interleaved" in html
    assert html.count("idle</title>") == 4
    alone = dataclasses.replace(even("grouped"), pipelined=False)
    assert pipeline_shape(alone) is None
    assert "Pipeline," not in summary(alone)


def test_the_schedule_is_in_the_document() -> None:
    profile = even("interleaved")
    assert from_json(profile_to_json(profile)) == profile
