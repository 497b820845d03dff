"""Profiles in the shape of the SDK's analysis library: the uses that its tutorials and tests make."""

from __future__ import annotations

import pytest

from tests.report.profiles import pipeline_profile


def test_tiles_of_all_ipus_with_their_bytes() -> None:
    report = pipeline_profile()
    found = report.compilation
    assert found.target.numTiles == len(found.tiles) == 2 * 1472
    assert [tile.id for tile in found.tiles] == list(range(2 * 1472))
    most = max(tile.memory.total.includingGaps for tile in found.tiles)
    fullest = report.fullest().memory
    assert most == max(interval.total_bytes for interval in fullest.by_tile)
    assert sum(tile.memory.total.excludingGaps for tile in found.tiles if tile.ipu == 1) == sum(
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


def test_what_is_not_modelled_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="programs"):
        _ = pipeline_profile().compilation.programs  # type: ignore[attr-defined]
