"""Invalid models: each is refused by name, before memory is taken, and no other error is ever raised."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import podrun.popart as popart
from tests.popart.popart_sessions import linear

OFFLINE = popart.DeviceManager({}).createOfflineIPUDevice({"numIPUs": 1})


def session(model, anchors=("y",), **kwargs):
    data = model if isinstance(model, (bytes, str)) else model.SerializeToString()
    return popart.InferenceSession(data, popart.DataFlow(1, list(anchors)), OFFLINE, **kwargs)


def model_of(*nodes, inputs=(("x", [2]),), initializers=(), opsets=(("", 11),), dtype=TensorProto.FLOAT):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs],
        [helper.make_tensor_value_info("y", dtype, None)],
        list(initializers),
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid(*opset) for opset in opsets], ir_version=8
    )


RELU = helper.make_node("Relu", ["x"], ["y"], name="act")


@pytest.mark.parametrize("source", ["no/such/file.onnx", "x" * 5000, b"", b"not a model", b"\x08\x01" * 40])
def test_files_and_bytes_that_are_no_model_are_refused(source):
    with pytest.raises(popart.popart_exception, match="Failed to load a ModelProto"):
        session(source)


def test_a_model_of_a_wrong_type_is_refused():
    with pytest.raises(TypeError, match="incompatible function arguments"):
        popart.InferenceSession(7, popart.DataFlow(1, ["y"]), OFFLINE)


def test_operators_that_are_not_there_are_named_with_their_place():
    model = model_of(RELU, helper.make_node("Mine", ["y"], ["z"], name="there", domain="my.domain"))
    model.opset_import.append(helper.make_opsetid("my.domain", 3))
    with pytest.raises(popart.popart_exception, match=r"my\.domain\.Mine.*'there'.*node 2 of 2") as caught:
        session(model, ["z"])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (model_of(helper.make_node("NoSuchOp", ["x"], ["y"])), "NoSuchOp"),
        (model_of(helper.make_node("Relu", ["nothing"], ["y"])), "nothing"),
        (model_of(helper.make_node("Relu", ["y"], ["y"])), "y"),
        (model_of(RELU, RELU), "y"),
        (model_of(RELU, inputs=[("x", ["n", 2])]), "InputShapeInfo"),
        (model_of(RELU, inputs=[("x", None)]), "x"),
        (model_of(RELU, opsets=[("", 9999)]), "9999"),
        (
            model_of(
                helper.make_node("Add", ["x", "x"], ["y"]), inputs=[("x", [2])], dtype=TensorProto.STRING
            ),
            "x",
        ),
        (
            model_of(helper.make_node("MatMul", ["x", "w"], ["y"]), inputs=[("x", [2, 3]), ("w", [4, 5])]),
            "MatMul",
        ),
    ],
)
def test_models_that_contradict_themselves(model, word):
    with pytest.raises(popart.popart_exception, match=word):
        session(model)


def test_attributes_of_a_program_s_own_are_warned_about(caplog):
    mine = helper.make_node("Relu", ["x"], ["y"], name="act", alpha=1.0)
    assert session(model_of(mine)).getInfo("y").shape() == [2]
    assert "Relu 'act': ONNX has no attribute 'alpha'" in caplog.text


def test_names_that_popart_reserves_are_refused():
    for name in ("Gradient___x", "Step___x", "learningRate___default___FLOAT", "randomSeed___"):
        model = model_of(helper.make_node("Relu", ["x"], [name]), helper.make_node("Relu", [name], ["y"]))
        with pytest.raises(popart.popart_exception, match="reserves"):
            session(model)


def test_symbolic_shapes_are_fixed_by_input_shape_info():
    model = model_of(RELU, inputs=[("x", ["n", 2])])
    info = popart.InputShapeInfo()
    info.add("x", popart.TensorInfo("FLOAT", [3, 2]))
    assert session(model, inputShapeInfo=info).getInfo("y").shape() == [3, 2]
    for wrong in (popart.TensorInfo("FLOAT", [3, 4]), popart.TensorInfo("FLOAT16", [3, 2])):
        info.add("x", wrong)
        with pytest.raises(popart.popart_exception, match="InputShapeInfo says"):
            session(model, inputShapeInfo=info)


@pytest.mark.parametrize("dims", [[2**40, 2**10], [3], [-1], [2**62, 4]])
def test_tensors_that_claim_more_than_they_bring(dims):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims, raw_data=bytes(8))
    model = model_of(helper.make_node("Add", ["x", "w"], ["y"]), initializers=[tensor])
    with pytest.raises(popart.popart_exception, match="'w'"):
        session(model)


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret", "a/../../secret", "missing", ""])
def test_external_data_stay_in_the_models_folder(tmp_path, location):
    folder = tmp_path / "models"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(8))
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    model = model_of(helper.make_node("Add", ["x", "w"], ["y"]), initializers=[tensor])
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(popart.popart_exception, match="'w'"):
        session(str(folder / "m.onnx"))


GOOD = linear().model
ONLY = (popart.popart_exception, popart.poplar_exception)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_models_raise_popart_exceptions_only(data):
    """Truncated, flipped or spliced bytes: a session is made, or a popart_exception says why not."""
    damaged = bytearray(GOOD)
    kind = data.draw(st.sampled_from(["cut", "flip", "insert"]))
    place = data.draw(st.integers(0, len(damaged) - 1))
    if kind == "cut":
        del damaged[place:]
    elif kind == "flip":
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    else:
        damaged[place:place] = data.draw(st.binary(min_size=1, max_size=12))
    with contextlib.suppress(*ONLY):
        session(bytes(damaged), ["MatMul:0"])


def test_the_fuzzed_model_is_good_to_begin_with():
    assert session(GOOD, ["MatMul:0"]).getInfo("MatMul:0").shape() == [3, 2]
    onnx.checker.check_model(onnx.load_from_string(GOOD), full_check=False)


@settings(max_examples=60, deadline=None)
@given(
    dims=st.lists(st.integers(-4, 2**63 - 1), max_size=6),
    kind=st.integers(0, 30),
    held=st.binary(max_size=32),
)
def test_initializers_that_claim_other_sizes_end_in_popart_s_errors(dims, kind, held):
    tensor = TensorProto(name="w", data_type=kind, dims=dims, raw_data=held)
    model = model_of(helper.make_node("Identity", ["w"], ["y"]), initializers=[tensor])
    try:
        session(model)
    except ONLY:
        pass
    else:
        assert np.prod(dims, dtype=object) <= 32 * 4
