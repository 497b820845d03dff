"""GraphTransformer: types, constants, unused inputs; and debug information, operator lists."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import podrun.popart as popart


def model_of(dtype=np.float32, value=None):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    value = np.array([1, 2, 3], dtype) if value is None else value
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"]), helper.make_node("Identity", ["y"], ["z"])],
        "g",
        [helper.make_tensor_value_info(name, kind, [3]) for name in ("x", "unused")],
        [helper.make_tensor_value_info("z", kind, [3])],
        [numpy_helper.from_array(value, "w"), numpy_helper.from_array(value, "unread")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=7)


def transformed(model, call, *args, **kwargs):
    transformer = popart.GraphTransformer(model.SerializeToString())
    getattr(transformer, call)(*args, **kwargs)
    return onnx.load_from_string(transformer.getModelProto())


@pytest.mark.parametrize(
    ("call", "old", "new"),
    [
        ("convertFloatsToHalfs", np.float32, np.float16),
        ("convertDoublesToFloats", np.float64, np.float32),
        ("convertDoublesToHalfs", np.float64, np.float16),
        ("convertINT8ToINT32", np.int8, np.int32),
        ("convertUINT8ToINT32", np.uint8, np.int32),
        ("convertINT16ToINT32", np.int16, np.int32),
        ("convertUINT16ToINT32", np.uint16, np.int32),
        ("convertINT64ToINT32", np.int64, np.int32),
    ],
)
def test_conversions_change_inputs_outputs_and_values(call, old, new):
    made = transformed(model_of(old), call)
    onnx.checker.check_model(made)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(new))
    for value in (*made.graph.input, *made.graph.output):
        assert value.type.tensor_type.elem_type == kind
    np.testing.assert_array_equal(numpy_helper.to_array(made.graph.initializer[0]), np.array([1, 2, 3], new))


def test_a_converted_model_runs(device):
    made = transformed(model_of(), "convertFloatsToHalfs")
    session = popart.InferenceSession(made.SerializeToString(), popart.DataFlow(1, ["z"]), device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({"x": np.ones(3, np.float16)}, anchors))
    assert anchors["z"].dtype == np.float16
    np.testing.assert_array_equal(anchors["z"], [2, 3, 4])


def test_types_in_attributes_follow():
    model = model_of()
    model.graph.node.append(helper.make_node("Cast", ["y"], ["c"], to=TensorProto.FLOAT))
    node = transformed(model, "convertFloatsToHalfs").graph.node[-1]
    assert node.attribute[0].i == TensorProto.FLOAT16


def test_integers_that_do_not_fit():
    model = model_of(np.int64, np.array([1, -(2**40), 2**40]))
    with pytest.raises(popart.popart_exception, match="clip"):
        transformed(model, "convertINT64ToINT32")
    made = transformed(model, "convertINT64ToINT32", clip=True)
    expected = [1, np.iinfo(np.int32).min, np.iinfo(np.int32).max]
    np.testing.assert_array_equal(numpy_helper.to_array(made.graph.initializer[0]), expected)


def test_unused_inputs_and_initializers_are_removed():
    made = transformed(model_of(), "removeUnusedInputs")
    assert [value.name for value in made.graph.input] == ["x"]
    assert [tensor.name for tensor in made.graph.initializer] == ["w"]


def test_initializers_become_constants():
    made = transformed(model_of(), "convertInitializersToConstants", ["w"])
    onnx.checker.check_model(made)
    assert made.graph.node[0].op_type == "Constant"
    assert [tensor.name for tensor in made.graph.initializer] == ["unread"]
    with pytest.raises(popart.popart_exception, match=r"^TensorId .* not in the model initalizers$"):
        transformed(model_of(), "convertInitializersToConstants", ["x"])
    made = transformed(model_of(np.int32), "convertAllFixedPointInitializersToConstants")
    assert not made.graph.initializer


def test_values_go_outside_and_come_back(tmp_path):
    transformer = popart.GraphTransformer(model_of().SerializeToString())
    transformer.saveInitializersExternally(["w"], str(tmp_path / "w.bin"))
    path = tmp_path / "m.onnx"
    path.write_bytes(transformer.getModelProto())
    again = popart.GraphTransformer(str(path))
    tensor = onnx.load_from_string(again.getModelProto()).graph.initializer[0]
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), [1, 2, 3])


def test_debug_information_is_collected(tmp_path):
    path = tmp_path / "debug.json"
    popart.initializePoplarDebugInfo(str(path), "json")
    info = popart.DebugInfo(popart.DebugContext("layer0"), "test")
    assert info.setValue("k", "v")
    assert not info.setValue("k", "w")
    popart.closePoplarDebugInfo()
    popart.closePoplarDebugInfo()
    written = json.loads(path.read_text())
    (entry,) = written["contexts"]
    assert (written["stringTable"][entry["name"]], entry["layer"], entry["k"]) == ("layer0", "test", "v")
    builder = popart.Builder()
    assert builder.addInputTensor("FLOAT", [1], popart.DebugContext("data")) == "data"


def test_debug_information_says_where_it_comes_from(tmp_path):
    path = tmp_path / "debug.json"
    popart.initializePoplarDebugInfo(str(path))

    def part(context):
        outer = popart.DebugInfo(context, "outer layer")
        popart.DebugInfo(popart.DebugContext(outer, "inside"), "inner layer")

    part(popart.DebugContext("whole"))
    popart.closePoplarDebugInfo()
    written = json.loads(path.read_text())
    text = written["stringTable"]
    inner, outer = written["contexts"]
    assert (text[inner["name"]], text[outer["name"]], inner["parentId"]) == ("inside", "whole", outer["id"])
    places = [text[entry["location"]["functionName"]] for entry in (inner, outer)]
    assert places == ["part", "test_debug_information_says_where_it_comes_from"]
    assert all(text[entry["location"]["fileName"]] == __file__ for entry in (inner, outer))
    assert inner["location"]["lineNumber"] < outer["location"]["lineNumber"]


def test_calls_of_a_builder_are_in_the_debug_information(tmp_path):
    path = tmp_path / "debug.json"
    popart.initializePoplarDebugInfo(str(path))
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [2], "data")
    w = builder.addInitializedInputTensor(np.ones(2, np.float32), "weights")
    builder.aiOnnx.add([x, w], "sum")
    popart.closePoplarDebugInfo()
    written = json.loads(path.read_text())
    text = written["stringTable"]
    assert {(text[entry["name"]], entry["api"]) for entry in written["contexts"]} == {
        ("data", "addInputTensor"),
        ("weights", "addInitializedInputTensor"),
        ("sum", "add"),
    }
    assert {text[entry["location"]["fileName"]] for entry in written["contexts"]} == {__file__}


def test_supported_and_unsupported_operators_are_listed():
    supported = popart.getSupportedOperations(False)
    assert popart.OperatorIdentifier("ai.onnx", "Relu", 6) in supported
    assert any(item.domain == "ai.graphcore" for item in supported)
    names = {item.type for item in popart.getUnsupportedOperations(11)}
    assert "Relu" not in names
    definition = popart.getSupportedOperationsDefinition(False)
    assert definition[popart.OperatorIdentifier("ai.onnx", "Add", 7)].inputs == ["A", "B"]
