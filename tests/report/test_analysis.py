"""The SDK's analysis names over podrun's tile report."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from podrun.device.tiles.cost import cost_jaxpr
from podrun.errors import ConfigError
from podrun.report.analysis import ProgramType, Report


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    half = jax.ShapeDtypeStruct((512, 512), jnp.float16)
    return cost_jaxpr(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w) @ w)(half, half), "bow")


def test_what_programs_read_most(raw: dict[str, Any]) -> None:
    report = Report(raw)
    tiles = report.compilation.tiles
    assert len(tiles) == report.compilation.target.numTiles == 1472
    assert [tile.id for tile in tiles] == list(range(1472))
    held = sum(tile.memory.total.excludingGaps for tile in tiles)
    assert held == pytest.approx(raw["memory"]["total_bytes"], rel=0.05)
    assert all(tile.memory.total.includingGaps >= tile.memory.alwaysLiveBytes for tile in tiles)
    assert tiles[0].memory.category.vertexCode.total > 0
    assert report.compilation.graph.numComputeSets > 2
    assert report.compilation.target.clockFrequency == 1.85e9
    assert max(s.notAlwaysLiveMemory.bytes for s in report.compilation.livenessProgramSteps) > 0


def test_steps_hold_the_cycles_of_a_micro_batch(raw: dict[str, Any]) -> None:
    report = Report(raw)
    cycles = sum(step.ipus[0].cycles for step in report.execution.steps)
    assert cycles == pytest.approx(raw["step"]["cycles"], abs=20)
    kinds = {step.program.type for step in report.execution.steps}
    assert {ProgramType.OnTileExecute, ProgramType.DoExchange} <= kinds


def test_an_ipu_without_work_is_there_and_empty(raw: dict[str, Any]) -> None:
    segments = {"step": raw["step"], "segments": [{"ipu": 1, "cycle": 0, "sent_bytes": 0, "report": raw}]}
    report = Report(segments)
    assert report.compilation.target.numIPUs == 2
    assert sum(tile.memory.total.excludingGaps for tile in report.compilation.ipus[0].tiles) == 0
    assert report.execution.steps[0].ipus[0].cycles == 0


def test_a_report_is_still_plain_data(raw: dict[str, Any]) -> None:
    report = Report(raw)
    assert report["step"] == raw["step"]
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(raw))
    with pytest.raises(ConfigError):
        _ = Report({}).compilation
