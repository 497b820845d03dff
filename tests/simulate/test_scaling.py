"""What a larger POD gives, from a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from podrun.core.command_line import run_command
from podrun.costmodel.batch import BatchWork, batch_seconds
from podrun.costmodel.target import GC200
from podrun.simulate.commands.scale import scale_verb
from podrun.simulate.scaling import pods_named, scale_points, write_scale_plan

WORK = BatchWork(5e6, stages=4, accumulation=64, weights=8e7, gradient_bytes=2.0, input_bytes=4e3)


def test_step_times_are_those_of_the_cost_model() -> None:
    points = scale_points(WORK, 2, pods_named("pod16..pod64k"))
    assert [point.ipus for point in points] == [16, 64, 256, 1024, 4096, 65_536]
    assert [point.extrapolated for point in points] == [False] * 3 + [True] * 3
    alone = sum(batch_seconds(GC200, BatchWork(**{**WORK_FIELDS, "replicas": 64})).values())
    assert points[2].step_s == pytest.approx(alone)
    assert all(point.step_low_s < point.step_s < point.step_high_s for point in points)
    assert points[0].efficiency == 1.0
    assert points[-1].efficiency < 1.0
    assert [p.ettr for p in points] == sorted((p.ettr for p in points), reverse=True)


WORK_FIELDS = {name: getattr(WORK, name) for name in WORK.__dataclass_fields__}


def test_the_command_reads_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, figures = tmp_path / "m.plan.json", tmp_path / "figures.json"
    write_scale_plan(plan, WORK, 2)
    assert run_command(scale_verb, [str(plan), "--pods", "pod64,pod64k", "--json", str(figures)]) == 0
    assert "extrapolated" in capsys.readouterr().out
    assert [p["pod"] for p in json.loads(figures.read_text())["pods"]] == ["pod64", "pod64k"]
    plan.write_text('{"work": {}}')
    assert run_command(scale_verb, [str(plan)]) == 2
    assert "is no plan" in capsys.readouterr().err
    assert run_command(scale_verb, [str(plan), "--pods", "pod3"]) == 2
    assert "there is no POD 'pod3'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ipus", "pods", "pod"), [("3", "pod64,pod16", "16 IPUs of pod16"), ("128", "pod64", "64 IPUs of pod64")]
)
def test_a_replica_that_no_pod_divides_into_is_refused_before_the_model_is_read(
    ipus: str, pods: str, pod: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "there_is_none.onnx")
    assert run_command(scale_verb, [model, "--pods", pods, "--ipus-per-replica", ipus]) == 2
    assert f"{ipus} IPUs per replica do not divide the {pod}" in capsys.readouterr().err
