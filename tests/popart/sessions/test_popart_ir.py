"""The IR of a session, sessions from it, the serialised program, and weights in files beside the model."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import INPUTS, MICRO_BATCH, linear, options, training, weights


def inference(device, case):
    flow = popart.DataFlow(1, [case.y])
    return popart.InferenceSession(case.model, flow, device, userOptions=options(constantWeights=False))


def run(session, case):
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    x = np.random.default_rng(0).standard_normal((MICRO_BATCH, INPUTS)).astype(np.float32)
    session.run(popart.PyStepIO({case.x: x}, anchors))
    return anchors[case.y]


def test_a_session_from_an_ir_computes_the_same(device_of):
    case = linear()
    first = inference(device_of(1), case)
    first.writeWeights(popart.PyWeightsIO({case.w: np.full_like(case.start, 0.5)}))
    ir = first.getIr()
    graph = json.loads(ir.serialize())
    assert [op["type"] for op in graph["maingraph"]] == ["MatMul"]
    second = popart.InferenceSession.fromIr(ir, device_of(1))
    np.testing.assert_array_equal(run(first, case), run(second, case))


def test_a_training_session_has_an_ir_that_inference_refuses(device_of):
    ir = training(linear(), [], device_of(1)).getIr()
    assert ir.training
    assert '"L1"' in ir.serialize()
    with pytest.raises(popart.popart_exception, match="training session"):
        popart.InferenceSession.fromIr(ir, device_of(1))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        popart.InferenceSession.fromIr(b"", device_of(1))


def test_the_serialised_graph_is_the_program(device_of):
    case = linear()
    session = training(
        case, [case.loss], device_of(2), opts=options(enableReplicatedGraphs=True, replicatedGraphCount=2)
    )
    found = json.loads(session.getSerializedGraph())
    assert found["training"] is True
    assert case.w in {variable["spec"]["name"] for variable in found["variables"]}
    assert found["instructions"][0]
    unprepared = popart.InferenceSession(case.model, popart.DataFlow(1, [case.y]), device_of(1))
    with pytest.raises(popart.popart_exception, match="must have been prepared"):
        unprepared.getSerializedGraph()


@pytest.fixture
def saved(tmp_path):
    """A model whose weight lies in ``old.data``."""
    case = linear()
    builder = popart.Builder(case.model)
    builder.saveInitializersExternally([case.w], str(tmp_path / "old.data"))
    builder.saveModelProto(str(tmp_path / "model.onnx"))
    case.model = str(tmp_path / "model.onnx")
    return case


def test_tensors_move_to_another_file_with_their_state(device_of, saved, tmp_path):
    optimizer = popart.SGD({"defaultMomentum": (0.9, True)})
    session = training(saved, [], device_of(1), optimizer=optimizer)
    session.updateExternallySavedTensorLocations(str(tmp_path / "old.data"), str(tmp_path / "new.data"))
    before = (tmp_path / "old.data").read_bytes()
    session.run(popart.PyStepIO({saved.x: np.ones((MICRO_BATCH, INPUTS), np.float32)}, {}))
    session.modelToHost(str(tmp_path / "after.onnx"))
    (now,) = weights(session, saved.w)
    assert (tmp_path / "old.data").read_bytes() == before
    model = onnx.load(tmp_path / "after.onnx", load_external_data=False)
    places = {
        t.name: {e.key: e.value for e in t.external_data}.get("location") for t in model.graph.initializer
    }
    assert places == {saved.w: "new.data", f"Accl___{saved.w}": "new.data"}
    assert (tmp_path / "new.data").stat().st_size == 2 * now.nbytes
    saved.model = str(tmp_path / "after.onnx")
    again = training(saved, [], device_of(1), optimizer=optimizer)
    np.testing.assert_array_equal(again.parts.weights.get(saved.w), now)


def test_external_data_move_only_to_new_files_in_existing_folders(device_of, saved, tmp_path):
    session = training(saved, [], device_of(1))
    (tmp_path / "there.data").write_bytes(b"x")
    old, new, there = (str(tmp_path / f"{name}.data") for name in ("old", "new", "there"))
    for words, match in (
        ((old, there), "already exists"),
        ((str(tmp_path / "gone.data"), new), "gone.data' does not exist"),
        ((there, new), "No ONNX model initializers have external location set to"),
        ((old, str(tmp_path / "no" / "new.data")), "parent directory"),
    ):
        with pytest.raises(popart.popart_exception, match=match):
            session.updateExternallySavedTensorLocations(*words)
    session.updateExternallySavedTensorLocations(old, new)
    with pytest.raises(popart.popart_exception, match="No ONNX model initializers"):
        session.updateExternallySavedTensorLocations(old, str(tmp_path / "third.data"))


@pytest.mark.parametrize("made_from", ["bytes", "file"])
def test_data_beside_a_model_are_overwritten_where_they_lie(device, tmp_path, made_from):
    """As in PopART: weights in place, optimizer state behind them, and again at the same places."""
    builder = popart.Builder()
    wide, narrow = (
        builder.addInitializedInputTensor(np.arange(n, dtype=np.float32) + 1, f"w{n}") for n in (5, 3)
    )
    y = builder.aiOnnx.concat([wide, narrow], 0)
    loss = builder.aiGraphcore.l1loss([y], 0.5)
    (tmp_path / "data").mkdir()
    data = tmp_path / "data" / "weights.bin"
    builder.saveInitializersExternally([narrow, wide], str(data))
    model = builder.getModelProto()
    if made_from == "file":
        model = str(tmp_path / "data" / "start.onnx")
        builder.saveModelProto(model)

    def session(model):
        optimizer = popart.SGD({"defaultLearningRate": (0.5, True), "defaultMomentum": (0.5, True)})
        made = popart.TrainingSession(model, popart.DataFlow(1, [y]), loss, optimizer, device)
        made.prepareDevice()
        made.weightsFromHost()
        return made

    def run(session):
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({}, anchors))
        return anchors[y]

    first = session(model)
    run(first)
    for _ in range(2):
        first.modelToHost(str(tmp_path / "elsewhere.onnx"))
        held = {
            name: first.parts.weights.get(name)
            for name in (narrow, wide, f"Accl___{narrow}", f"Accl___{wide}")
        }
        found = np.fromfile(data, np.float32)
        np.testing.assert_array_equal(found[:8], np.concatenate([held[narrow], held[wide]]))
        np.testing.assert_array_equal(
            found[8:], np.concatenate([held[n] for n in sorted(held) if n.startswith("Accl___")])
        )
    expected = run(first)
    again = session(str(tmp_path / "elsewhere.onnx"))  # The data lie below, in another folder.
    np.testing.assert_array_equal(run(again), expected)


def test_two_models_may_name_their_files_alike(device, tmp_path):
    models = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        builder = popart.Builder()
        w = builder.addInitializedInputTensor(np.full(2, value, np.float32), "w")
        y = builder.aiOnnx.neg([w])
        builder.saveInitializersExternally([w], str(folder / "w"))
        models.append(builder.getModelProto())
    for value, model in zip((1, 2), models, strict=True):
        session = popart.InferenceSession(model, popart.DataFlow(1, [y]), device)
        session.prepareDevice()
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({}, anchors))
        np.testing.assert_array_equal(anchors[y], [-value, -value])


def test_graphs_are_in_the_ir_by_name(device):
    builder = popart.Builder()
    builder.setGraphName("outer")
    x, flag = builder.addInputTensor("FLOAT", [2]), builder.addInputTensor("BOOL", [])
    branches = []
    for name, operator in (("doubled", "add"), ("squared", "mul")):
        branch = builder.createSubgraphBuilder()
        branch.setGraphName(name)
        branch.addInputTensorFromParentGraph(x)
        branch.addOutputTensor(getattr(branch.aiOnnx, operator)([x, x]))
        branches.append(branch)
    (y,) = builder.aiOnnx.logical_if([flag], 1, *branches)
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device)
    graphs = json.loads(session._serializeIr(popart.IrSerializationFormat.JSON))
    assert {name: [op["type"] for op in ops] for name, ops in graphs.items()} == {
        "outer": ["If"],
        "doubled": ["Add"],
        "squared": ["Mul"],
    }


def test_graphs_are_drawn_where_options_or_the_environment_ask_for_it(device, tmp_path, monkeypatch):
    case = linear()

    def drawn(folder, **more):
        opts = options(logDir=str(tmp_path / folder), **more)
        (tmp_path / folder).mkdir()
        popart.InferenceSession(case.model, popart.DataFlow(1, [case.y]), device, userOptions=opts)
        return {path.name: path.read_text() for path in (tmp_path / folder).iterdir()}

    assert drawn("none") == {}
    (text,) = drawn("one", dotChecks={"Final"}).values()
    assert "MatMul" in text
    assert f'"{case.x}" -> "op0";' in text
    assert f'"op0" -> "{case.y}";' in text
    monkeypatch.setenv("POPART_DOT_CHECKS", "FWD0:FINAL")
    assert sorted(drawn("two")) == ["final.dot", "fwd0.dot"]
    monkeypatch.setenv("POPART_DOT_CHECKS", "ALL")
    assert len(drawn("all")) == 5
    with pytest.raises(popart.popart_exception, match="Unrecognised dot check 'Fwd9'"):
        drawn("wrong", dotChecks={"Fwd9"})


def _pipelined(recomputation=popart.RecomputationType.NoRecompute):
    """x @ w, relu on IPU 0; @ v, l1 on IPU 1; the operators of the main graph by type."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 3]), "x")
    w, v = (builder.addInitializedInputTensor(np.ones([3, 3], np.float32)) for _ in range(2))
    with builder.virtualGraph(0), builder.pipelineStage(0):
        hidden = builder.aiOnnx.relu([builder.aiOnnx.matmul([x, w])])
    with builder.virtualGraph(1), builder.pipelineStage(1):
        loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([hidden, v])], 0.1)
    opts = options(
        virtualGraphMode=popart.VirtualGraphMode.Manual,
        enablePipelining=True,
        autoRecomputation=recomputation,
    )
    opts.enableGradientAccumulation, opts.accumulationFactor = True, 3
    offline = popart.DeviceManager({}).createOfflineIPUDevice({"numIPUs": 2})
    session = popart.TrainingSession(
        builder.getModelProto(), popart.DataFlow(1, []), loss, popart.ConstSGD(0.1), offline, userOptions=opts
    )
    return json.loads(session._serializeIr(popart.IrSerializationFormat.JSON))["maingraph"]


def test_a_training_pipeline_shows_what_it_stashes_and_restores():
    found = _pipelined()
    stashes = [op for op in found if op["type"] == "Stash"]
    assert {op["inputs"][0]["name"] for op in stashes} == {"x", "Relu:0"}
    assert {op["attributes"]["__ipu_number"] for op in stashes} == {"0"}
    restores = [op["outputs"][0] for op in found if op["type"] == "Restore"]
    assert {"name": "Restored___x", "shape": "[2 3]", "type": "FLOAT", "index": "0"} in restores


def test_operators_say_their_domain_and_whether_they_are_made_again():
    plain = {op["type"]: op for op in _pipelined() if op["type"] not in ("Stash", "Restore")}
    assert (plain["Relu"]["domain"], plain["L1"]["domain"]) == ("ai.onnx", "ai.graphcore")
    assert (plain["Relu"]["version"], plain["Relu"]["attributes"]["__pipeline_stage"]) == ("10", "0")
    assert {op["attributes"]["recompute"] for op in plain.values()} == {"NO"}
    again = {op["type"]: op["attributes"] for op in _pipelined(popart.RecomputationType.Pipeline)}
    assert (again["Relu"]["recompute"], again["L1"]["recompute"]) == ("YES", "NO")
    by_peak = {op["type"]: op["attributes"] for op in _pipelined(popart.RecomputationType.Standard)}
    assert "recompute" not in by_peak["Relu"]


def test_the_ir_has_one_format(device_of):
    with pytest.raises(TypeError, match="IrSerializationFormat"):
        inference(device_of(1), linear())._serializeIr("JSON")
