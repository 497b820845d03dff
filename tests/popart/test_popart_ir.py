"""The IR of a session, sessions from it, the serialised program, and weights in files beside the model."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from popart_sessions import INPUTS, MICRO_BATCH, linear, options, training, weights

import podrun.popart as popart


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
    np.testing.assert_array_equal(again._weights.get(saved.w), now)


def test_moves_that_cannot_be(device_of, saved, tmp_path):
    session = training(saved, [], device_of(1))
    (tmp_path / "there.data").write_bytes(b"x")
    old, new, there = (str(tmp_path / f"{name}.data") for name in ("old", "new", "there"))
    for words, match in (
        ((old, there), "already exists"),
        ((str(tmp_path / "gone.data"), new), "no file"),
        ((there, new), "No tensor"),
    ):
        with pytest.raises(popart.popart_exception, match=match):
            session.updateExternallySavedTensorLocations(*words)
    session.updateExternallySavedTensorLocations(old, new)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(popart.popart_exception, match="not below the folder"):
        session.modelToHost(str(tmp_path / "elsewhere" / "model.onnx"))
