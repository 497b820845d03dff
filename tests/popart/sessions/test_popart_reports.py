"""What sessions report: summary and values, files for autoReport, unknown engine options, out of memory."""

from __future__ import annotations

import json

import numpy as np
import pytest

import podrun.popart as popart
from podrun.costmodel import planners
from podrun.report import Profile
from podrun.report.document import load_profile
from tests.popart.popart_sessions import MICRO_BATCH, linear, options, training

OFFLINE = popart.DeviceManager({}).createOfflineIPUDevice({"numIPUs": 1})


@pytest.fixture(autouse=True)
def _outside_of_podrun(monkeypatch):
    for name in ("POPLAR_ENGINE_OPTIONS", "POPDIST_NUM_TOTAL_REPLICAS", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


def session(opts=None, device=OFFLINE, **values):
    case = linear()
    flow = popart.DataFlow(1, [case.y])
    opts = opts or options(**values)
    return popart.TrainingSession(case.model, flow, case.loss, popart.ConstSGD(0.1), device, userOptions=opts)


def prepared(**values):
    made = session(**values)
    made.prepareDevice()
    return made


def test_the_report_is_values_and_the_summary_is_its_text():
    made = prepared()
    profile = made.getReport()
    assert isinstance(profile, Profile)
    assert profile.seconds == pytest.approx(sum(profile.seconds_by_cause.values()))
    assert profile.samples_per_batch == profile.accumulation_factor * MICRO_BATCH
    text = made.getSummaryReport()
    assert text.startswith(f"{profile.name} on gc200, 1 IPU per replica\n")
    assert f"{profile.cycles:,} cycles" in text


def test_no_files_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepared()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", ["environment", "session"])
def test_auto_report_writes_a_folder_for_each_session(source, tmp_path, monkeypatch):
    wanted = {"autoReport.all": "true", "autoReport.directory": str(tmp_path / "report")}
    if source == "environment":
        monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(wanted))
        made = prepared()
    else:
        made = prepared(engineOptions=wanted)
    folder = tmp_path / "report" / "training"
    names = ["profile.html", "profile.json", "profile.pop", "summary.txt", "trace.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert load_profile(folder / "profile.json") == made.getReport()
    assert (folder / "summary.txt").read_text(encoding="utf-8") == made.getSummaryReport()


def test_the_execution_profile_alone_decides_about_the_trace(tmp_path):
    prepared(engineOptions={"autoReport.outputGraphProfile": "true", "autoReport.directory": str(tmp_path)})
    assert sorted(path.name for path in (tmp_path / "training").iterdir()) == [
        "profile.html",
        "profile.json",
        "profile.pop",
        "summary.txt",
    ]


def test_instances_write_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    wanted = {"autoReport.all": "true", "autoReport.directory": str(tmp_path / "report")}
    prepared(engineOptions=wanted)
    assert (tmp_path / "report__instance_1" / "training" / "profile.json").is_file()


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ({"autoReport.directoy": "x"}, "Unrecognised option 'autoReport.directoy'$"),
        ({"autoReport.all": "yes"}, "'true' or 'false'"),
    ],
)
def test_unknown_engine_options_are_refused_at_prepare_device(wanted, word):
    made = session(engineOptions=wanted)
    with pytest.raises(popart.poplar_exception, match=word):
        made.prepareDevice()


def too_large():
    """Activations of more bytes than an IPU holds; nothing of that size is ever allocated."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [8192, 32768]))
    y = builder.aiOnnx.relu([x], "dense")
    builder.addOutputTensor(y)
    return builder.getModelProto(), y


def test_out_of_memory_says_what_and_leaves_the_report(tmp_path):
    model, y = too_large()
    wanted = {"autoReport.all": "true", "autoReport.directory": str(tmp_path)}
    made = popart.InferenceSession(
        model, popart.DataFlow(1, [y]), OFFLINE, userOptions=options(engineOptions=wanted)
    )
    with pytest.raises(popart.popart_exception, match="Out of memory on tile 0: ") as caught:
        made.prepareDevice()
    error = caught.value
    assert error.getProfilePath() == str(tmp_path / "inference" / "profile.pop")
    assert f"Profile saved to: {error.getProfilePath()}" in str(error)
    assert not load_profile(tmp_path / "inference" / "profile.json").fits
    assert "DOES NOT FIT" in (tmp_path / "inference" / "summary.txt").read_text(encoding="utf-8")


def test_out_of_memory_can_be_allowed():
    model, y = too_large()
    opts = options(engineOptions={"debug.allowOutOfMemory": "true"})
    made = popart.InferenceSession(model, popart.DataFlow(1, [y]), OFFLINE, userOptions=opts)
    made.prepareDevice()
    assert not made.getReport().fits


@pytest.fixture
def unknown(monkeypatch):
    """``unknown(**options)``: a session with an operator that no tile planner knows, for once."""
    monkeypatch.delitem(planners.PLANNERS, "cumsum")

    def made(**values):
        builder = popart.Builder(opsets={"ai.onnx": 11, "ai.graphcore": 1})
        x = builder.addInputTensor(popart.TensorInfo("FLOAT", [8, 16]))
        axis = builder.aiOnnx.constant(np.asarray(1, np.int32))
        y = builder.aiOnnx.cumsum([x, axis], debugContext="volume")
        flow = popart.DataFlow(1, [y])
        return popart.InferenceSession(builder.getModelProto(), flow, OFFLINE, userOptions=options(**values))

    return made


def test_what_no_planner_knows_is_counted_and_shown_everywhere(tmp_path, unknown):
    made = unknown(engineOptions={"autoReport.all": "true", "autoReport.directory": str(tmp_path)})
    made.prepareDevice()
    (bound,) = made.getReport().bounds()
    assert bound.count == 1
    assert "volume" in bound.scopes[0]
    assert bound.cycles > 0
    folder = tmp_path / "inference"
    for name in ("summary.txt", "profile.html", "profile.json"):
        text = (folder / name).read_text(encoding="utf-8")
        assert bound.name in text
        assert "volume" in text
    assert f"Bounded, no planner: {bound.name} x 1" in made.getSummaryReport()
    assert "Costed by a bound" in (folder / "profile.html").read_text(encoding="utf-8")
    assert load_profile(folder / "profile.json").bounds() == (bound,)


@pytest.mark.parametrize("source", ["environment", "session"])
def test_strict_mode_refuses_it_by_name_and_place_and_leaves_the_report(
    source, tmp_path, monkeypatch, unknown
):
    wanted = {"podrun.strict": "true", "autoReport.all": "true", "autoReport.directory": str(tmp_path)}
    if source == "environment":
        monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(wanted))
    made = unknown(engineOptions=wanted if source == "session" else {})
    with pytest.raises(popart.popart_exception, match=r"no tile planner knows 1 kind.*cumsum x 1 \(volume"):
        made.prepareDevice()
    assert load_profile(tmp_path / "inference" / "profile.json").bounds()


def test_strict_mode_is_content_with_what_planners_know():
    made = prepared(engineOptions={"podrun.strict": "true"})
    assert made.getReport().bounds() == ()


def test_a_compiled_step_is_never_costed_again(tmp_path, monkeypatch, device_of):
    """Training after prepareDevice, and preparing from the executable cache, ask the tile model for nothing."""
    from podrun.costmodel import cost

    opts = options(enableEngineCaching=True, cachePath=str(tmp_path / "cache"))
    costed = []
    make = cost.make_schedule
    monkeypatch.setattr(cost, "make_schedule", lambda *a: costed.append(1) or make(*a))
    case = linear()
    made = training(case, [case.y], device_of(1), opts=opts)
    assert costed
    costed.clear()
    x = np.ones((MICRO_BATCH, 4), np.float32)
    anchors = made.initAnchorArrays()
    for _ in range(3):
        made.run(popart.PyStepIO({case.x: x}, anchors))
    assert made.getReport().cycles > 0
    training(case, [case.y], device_of(1), opts=opts)
    assert costed == []
