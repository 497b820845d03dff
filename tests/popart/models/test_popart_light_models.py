"""Models whose large initial values lie beside them: nothing is lost in reading or writing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import podrun.popart as popart
from podrun.core.errors import UsageError
from podrun.onnx_models.light_model import LightModel
from podrun.onnx_models.model_loader import read_light_onnx_model, read_onnx_model
from podrun.onnx_models.tensor_proto import set_apart, to_array, to_proto
from podrun.popart.values.exceptions import popart_exception
from tests.sampling import examples

KINDS = (np.float32, np.float16, np.float64, np.int32, np.int64)


@st.composite
def tensors(draw: st.DrawFn, name: str) -> TensorProto:
    """A tensor of any type, in raw_data or in its own field, with or without a description behind the data."""
    dims = draw(st.lists(st.integers(0, 4), max_size=3))
    value = np.arange(np.prod(dims, dtype=int)).reshape(dims).astype(draw(st.sampled_from(KINDS))) - 3
    made = numpy_helper.from_array(value, name) if draw(st.booleans()) else to_proto(name, value)
    made.doc_string = draw(st.sampled_from(["", "of the tensor"]))
    return made


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    held = [draw(tensors(f"w{index}")) for index in range(draw(st.integers(0, 4)))]
    nodes = [helper.make_node("Identity", [tensor.name], [f"y{tensor.name}"]) for tensor in held]
    outputs = [helper.make_empty_tensor_value_info(f"y{tensor.name}") for tensor in held]
    graph = helper.make_graph(
        nodes, "graph", [], outputs, held, doc_string=draw(st.sampled_from(["", "of it"]))
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)], ir_version=4)
    helper.set_model_props(model, {"key": "value"})
    return model


def values_of(light: LightModel) -> dict[str, bytes]:
    return {t.name: light.value(t).tobytes() for t in light.proto.graph.initializer}


@settings(max_examples=examples(60))
@given(models())
def test_a_light_model_says_what_the_whole_one_says(model: onnx.ModelProto) -> None:
    data = model.SerializeToString(deterministic=True)
    light = read_light_onnx_model(data, at_least=2)
    assert values_of(light) == {t.name: numpy_helper.to_array(t).tobytes() for t in model.graph.initializer}
    great = {
        t.name
        for t in model.graph.initializer
        if np.prod(t.dims, dtype=int) > 2 and t.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16)
    }
    assert set(light.values) == great
    assert light.to_bytes(standard=True) == data
    whole = onnx.ModelProto.FromString(light.to_bytes())  # Halves and bytes are packed as PopART packs them.
    assert {t.name: to_array(t).tobytes() for t in whole.graph.initializer} == values_of(light)


@settings(max_examples=examples(150))
@given(models(), st.data())
def test_damaged_bytes_are_read_alike_with_values_beside_the_model_or_in_it(
    model: onnx.ModelProto, draws: st.DataObject
) -> None:
    data = bytearray(model.SerializeToString())
    for _ in range(draws.draw(st.integers(1, 3))):
        data[draws.draw(st.integers(0, len(data) - 1))] = draws.draw(st.integers(0, 255))
    damaged = bytes(data[: draws.draw(st.integers(len(data) // 2, len(data)))])
    try:
        whole = read_onnx_model(damaged)
    except UsageError:
        with pytest.raises(UsageError):
            read_light_onnx_model(damaged, at_least=2)
        return
    light = read_light_onnx_model(damaged, at_least=2)
    for tensor, plain in zip(light.proto.graph.initializer, whole.graph.initializer, strict=True):
        try:
            expected = numpy_helper.to_array(plain)
        except (TypeError, ValueError, KeyError):
            continue
        assert light.value(tensor).tobytes() == expected.tobytes()


def test_what_is_taken_lies_in_the_bytes_that_were_given() -> None:
    weights = np.arange(10_000, dtype=np.float32)
    graph = helper.make_graph([], "graph", [], [], [to_proto("w", weights)])
    data = helper.make_model(graph).SerializeToString()
    thin, values = set_apart(data, 4096)
    assert len(thin) < 200
    assert np.shares_memory(values["w"], np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        values["w"][0] = 1
    assert set_apart(data, 10_000) == (data, {})


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_weight_comes_out_of_a_builder_as_it_was_given(dtype: type) -> None:
    builder, weights = popart.Builder(), np.linspace(-1, 1, 6000).astype(dtype).reshape(60, 100)
    name = builder.addInitializedInputTensor(weights)
    given_then = weights.copy()
    weights[:] = 0  # What the program does with its array afterwards is its own business.
    data = builder.getModelProto()
    model = onnx.load_from_string(data)
    assert np.array_equal(to_array(model.graph.initializer[0]), given_then)
    assert not model.graph.initializer[0].HasField("raw_data")
    assert model.SerializeToString(deterministic=True) == data
    assert popart.Builder(data).getModelProto() == data
    assert name == "init_input"


def test_a_model_beyond_what_protobuf_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podrun.onnx_models.light_model._MOST_BYTES", 20_000)
    builder = popart.Builder()
    builder.addInitializedInputTensor(np.zeros(5000, np.float32))
    with pytest.raises(popart_exception, match="at most 20000") as caught:
        builder.getModelProto()
    assert "saveInitializersExternally" in str(caught.value.hint)
