"""Profiles in the shape of the SDK's analysis library: the uses that its tutorials and tests make."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from podrun.compat import COMPAT_PATH
from podrun.core.errors import ConfigError
from podrun.report.analysis import KINDS
from podrun.report.analysis_profile import Report
from podrun.report.document import open_report, write_report
from podrun.report.library.compilation import IPU, Target
from podrun.report.library.execution import LibraryProgram, NotModelledError, ProgramVisitor
from podrun.report.model import IpuUse, TileInterval
from tests.report.profiles import pipeline_profile

_REPORT = Report(pipeline_profile())


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
    assert {step.program.type for step in profile.execution.steps} == set(KINDS.values())
    assert "podrun" in profile.poplarVersion.string


REFUSED = [
    "compilation.graph.numVertices",
    "compilation.graph.numEdges",
    "compilation.graph.numVars",
    "compilation.livenessProgramSteps.0.program",
    "compilation.livenessProgramSteps.0.notAlwaysLiveMemory.variables",
    "compilation.programs.0.codeBytesByTile",
    "compilation.computeSets.0.vertices",
    "compilation.tiles.0.memory.category.stack",
    "compilation.alwaysLiveVariablesForTile",
    "execution.steps.0.ipus.0.tileBalance",
    "execution.steps.0.ipus.0.dataIn",
    "poplarVersion.packageHash",
]


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[int(name)] if name.isdigit() else getattr(value, name)
    return value


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_modelled_is_refused_by_name(path: str) -> None:
    owner, _, name = path.rpartition(".")
    found = _at(_REPORT, owner)
    assert not hasattr(found, name)
    with pytest.raises(NotModelledError, match=rf"\.{name} is not modelled: \w"):
        getattr(found, name)
    with pytest.raises(AttributeError, match="nowhere"):
        _ = found.nowhere


def test_a_report_names_its_target_and_version() -> None:
    target = _REPORT.compilation.target
    assert (target.type, target.architecture) == (Target.Type.IpuModel, IPU.Architecture.Ipu2)
    assert (target.numReplicas, target.ipusPerReplica, target.tilesPerReplica) == (4, 2, 2944)
    assert target.memoryPerReplica == target.totalMemory
    bow = dataclasses.replace(_REPORT.profile, target="bow").compilation.target
    assert bow.architecture is IPU.Architecture.Ipu2
    version = _REPORT.poplarVersion
    assert version.string.startswith(f"{version.major}.{version.minor}.{version.point}")
    assert not _REPORT.version.isUnstableFormat
    assert _REPORT.instrumentationSettings.compute.name == "Off"


def test_programs_are_those_that_run_and_each_runs_once_in_a_micro_batch() -> None:
    programs = _REPORT.compilation.programs
    ran = Counter(step.program for step in _REPORT.execution.steps)
    assert set(ran) == set(programs)
    assert len(set(programs)) == len(programs)
    updates = sum(len(stage.timeline) for stage in _REPORT.profile.updates)
    assert Counter(ran.values())[6] == len(programs) - Counter(ran.values())[1]
    assert Counter(ran.values())[1] >= updates > 0
    assert len(_REPORT.compilation.computeSets) == sum(
        p.type is LibraryProgram.Type.OnTileExecute for p in programs
    )


def test_steps_of_an_ipu_follow_each_other() -> None:
    for ipu in (0, 1):
        mine = [step.ipus[ipu].activeCycles for step in _REPORT.execution.steps if step.ipu == ipu]
        for before, after in itertools.pairwise(mine):
            assert before.cyclesFrom.max < before.cyclesTo.max <= after.cyclesFrom.min


def test_always_live_variables_add_up_to_what_tiles_hold() -> None:
    tiles = sum(tile.memory.alwaysLiveBytes for tile in _REPORT.compilation.tiles)
    named = sum(variable.size for variable in _REPORT.compilation.alwaysLiveVariables)
    assert named == pytest.approx(tiles, rel=0.01)
    (step, *_) = _REPORT.compilation.livenessProgramSteps
    assert step.notAlwaysLiveMemoryForIpu(0) == step.notAlwaysLiveMemory
    assert step.notAlwaysLiveMemoryForIpu(1).bytes == 0


def test_a_tile_that_overflows_says_by_how_much() -> None:
    interval = TileInterval(0, 1472, {"always_live": 700_000})
    use = IpuUse(0, dataclasses.replace(_REPORT.profile.held()[0].memory, by_tile=(interval,)))
    full = dataclasses.replace(_REPORT.profile, ipu_memory=(use,)).compilation
    assert full.tiles[0].memory.overflowed.excludingGaps == 700_000 - full.target.bytesPerTile
    assert full.tiles[1472].memory.overflowed.includingGaps == 0


def test_a_report_file_opens_as_the_librarys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = pipeline_profile()
    path = write_report(profile, tmp_path)
    assert path.name == "profile.pop"
    monkeypatch.syspath_prepend(COMPAT_PATH)
    import pva

    report = pva.openReport(str(path), str(tmp_path / "debug.cbor"))
    assert report.compilation == profile.compilation
    assert report.execution == profile.execution
    assert report.compilation is report.compilation
    assert report.compilation.target.bytesPerIPU == report.compilation.target.bytesPerIpu
    (run,) = report.execution.runs
    assert run.name == profile.name
    assert run.microseconds.end - run.microseconds.start == pytest.approx(profile.seconds * 1e6)
    assert report.execution.totalCycles.total == profile.cycles
    assert any("dense <1>" in compute_set.name for compute_set in report.compilation.computeSets)


def test_visitors_see_every_step_by_its_kind() -> None:
    seen: Counter[str] = Counter()

    class Counting(ProgramVisitor):
        def visitOnTileExecute(self, program: LibraryProgram) -> None:
            seen["compute"] += 1

        def visitDoExchange(self, program: LibraryProgram) -> None:
            seen["exchange"] += 1

    steps = pipeline_profile().execution.steps
    for step in steps:
        step.program.accept(Counting())
        assert step.program.children == ()
    kinds = Counter(step.program.type for step in steps)
    assert seen["compute"] == kinds[LibraryProgram.Type.OnTileExecute] > 0
    assert seen["exchange"] == kinds[LibraryProgram.Type.DoExchange] > 0


def test_what_is_no_report_is_refused_by_name(tmp_path: Path) -> None:
    for content in (b"\x89\x00poplar", b"{}", b"[1]"):
        (tmp_path / "profile.pop").write_bytes(content)
        with pytest.raises(ConfigError, match=r"profile\.pop"):
            open_report(tmp_path / "profile.pop")
    with pytest.raises(ConfigError, match=r"none\.pop"):
        open_report(tmp_path / "none.pop")


@pytest.mark.system
def test_a_script_imports_it_as_podrun_runs_it(tmp_path: Path) -> None:
    write_report(pipeline_profile(), tmp_path)
    script = tmp_path / "look.py"
    script.write_text(
        "import pva\n"
        "report = pva.openReport('profile.pop')\n"
        "print(report.compilation.target.numTiles, sum(s.ipus[0].cycles for s in report.execution.steps) > 0)\n"
        "assert report.compilation.target.type == pva.Target.Type.IpuModel\n"
        "live = sum(v.size for v in report.compilation.alwaysLiveVariables)\n"
        "curve = [live + step.notAlwaysLiveMemory.bytes for step in report.compilation.livenessProgramSteps]\n"
        "assert max(curve) < report.compilation.target.totalMemory\n"
        "work = [p.name for p in report.compilation.programs if p.type == pva.Program.Type.OnTileExecute]\n"
        "assert not [p for p in report.compilation.programs if p.type == pva.Program.Type.GlobalExchange]\n"
        "class Visitor(pva.ProgramVisitor):\n"
        "    def visitOnTileExecute(self, program):\n"
        "        assert program.computeset.name in work\n"
        "for step in report.execution.runs[0].steps:\n"
        "    step.program.accept(Visitor())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "podrun.compat", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["2944", "True"]
