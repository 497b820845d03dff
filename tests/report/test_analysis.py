"""Profiles in the shape of the SDK's analysis library: the uses that its tutorials and tests make."""

from __future__ import annotations

import dataclasses

import pytest

from podrun.report.analysis import ProgramType
from tests.report.profiles import pipeline_profile


def test_tiles_of_all_ipus_with_their_bytes() -> None:
    report = pipeline_profile()
    found = report.compilation
    assert found.target.numTiles == len(found.tiles) == 2 * 1472
    assert found.target.totalMemory == 2 * found.target.bytesPerIpu == 2 * 1472 * found.target.bytesPerTile
    assert found.target.clockFrequency == 1.33e9
    assert [tile.id for tile in found.tiles] == list(range(2 * 1472))
    most = max(tile.memory.total.includingGaps for tile in found.tiles)
    fullest = report.fullest().memory
    assert most == max(interval.total_bytes for interval in fullest.by_tile)
    assert sum(tile.memory.total.excludingGaps for tile in found.tiles if tile.ipuId == 1) == sum(
        interval.total_bytes * (interval.end_tile - interval.first_tile) for interval in fullest.by_tile
    )
    steps = (step for stage in (*report.stages, *report.updates) for step in stage.timeline)
    assert found.graph.numComputeSets == sum(step.steps for step in steps)


def test_steps_add_up_to_the_cycles_of_each_ipu() -> None:
    report = pipeline_profile()
    steps = report.execution.steps
    for ipu in report.ipus:
        mine = [s for s in report.stages if s.ipu == ipu] * report.accumulation_factor
        mine += [s for s in report.updates if s.ipu == ipu]
        wanted = sum(step.total_cycles for stage in mine for step in stage.timeline)
        assert sum(step.ipus[ipu].cycles for step in steps) == wanted
    assert any(step.program.name.startswith("dense <1>/") for step in steps)


def test_memory_of_a_tile_by_liveness_and_category() -> None:
    found = pipeline_profile().compilation
    memory = found.tiles[0].memory
    assert memory.alwaysLiveBytes + memory.notAlwaysLiveBytes == memory.total.includingGaps
    assert memory.category.vertexCode.total > 0
    peak = max(step.notAlwaysLiveMemory.bytes for step in found.livenessProgramSteps)
    assert peak == max(max(stage.memory.over_time_bytes) for stage in pipeline_profile().stages)


def test_an_ipu_without_work_is_there_and_empty() -> None:
    profile = dataclasses.replace(pipeline_profile(), ipus_per_replica=3)
    assert profile.compilation.target.numIPUs == 3
    assert len(profile.compilation.ipus[2].tiles) == 1472
    assert sum(tile.memory.total.excludingGaps for tile in profile.compilation.ipus[2].tiles) == 0
    assert all(step.ipus[2].cycles == 0 for step in profile.execution.steps)
    assert {step.program.type for step in profile.execution.steps} == set(ProgramType)
    assert "podrun" in profile.poplarVersion.string


def test_what_is_not_modelled_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="programs"):
        _ = pipeline_profile().compilation.programs  # type: ignore[attr-defined]
