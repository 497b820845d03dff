"""Halves and bytes of initializers: packed as PopART packs them where its API shows or saves them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import podrun.popart as popart
from podrun.onnx_models.graph_reader import read_graph
from podrun.onnx_models.model_loader import read_light_onnx_model
from podrun.onnx_models.tensor_proto import to_array, to_proto
from podrun.popart.models.loader import standard_model

KINDS = (np.float16, np.int8, np.uint8, np.int16, np.uint16, np.bool_)


def as_published_programs_read(tensor: TensorProto) -> np.ndarray:
    """Graphcore's BERT and others: int32_data as raw halves."""
    return (
        np.asarray(tensor.int32_data, np.int32).view(np.float16)[: np.prod(tensor.dims)].reshape(tensor.dims)
    )


def builder_with(*arrays: np.ndarray) -> popart.Builder:
    builder = popart.Builder()
    for array in arrays:
        builder.addInitializedInputTensor(array)
    return builder


def initializers(data: bytes) -> list[TensorProto]:
    return list(onnx.load_from_string(data).graph.initializer)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (70, 90)])
def test_builder_packs_two_halves_into_an_entry(shape: tuple[int, ...], tmp_path: Path) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 16, shape, np.uint16)
    halves = np.asarray(bits).view(np.float16).reshape(shape)
    builder = builder_with(halves)
    (tensor,) = initializers(builder.getModelProto())
    assert len(tensor.int32_data) == -(-halves.size // 2)
    assert not tensor.raw_data
    assert as_published_programs_read(tensor).tobytes() == halves.tobytes()
    builder.saveModelProto(str(tmp_path / "m.onnx"))
    assert (tmp_path / "m.onnx").read_bytes() == builder.getModelProto()


@pytest.mark.parametrize("size", [6, 5000])
@pytest.mark.sample(2)
def test_model_to_host_and_back(size: int, tmp_path: Path) -> None:
    """What a program does between a checkpoint and the next session: it reads halves and writes halves."""
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT16", [size])
    w = builder.addInitializedInputTensor(np.linspace(-1, 1, size).astype(np.float16), "w")
    y = builder.aiOnnx.add([x, w])
    loss = builder.aiGraphcore.l1loss([y], 1.0)
    device = popart.DeviceManager().createCpuDevice()

    def session(model: bytes | str) -> popart.TrainingSession:
        made = popart.TrainingSession(
            model, popart.DataFlow(1, [y]), loss, popart.ConstSGD(0.5), deviceInfo=device
        )
        made.prepareDevice()
        made.weightsFromHost()
        return made

    first = session(builder.getModelProto())
    first.run(popart.PyStepIO({x: np.full(size, 9, np.float16)}, first.initAnchorArrays()))
    path = tmp_path / "m.onnx"
    first.modelToHost(str(path))
    model = onnx.load(str(path))
    (tensor,) = model.graph.initializer
    trained = as_published_programs_read(tensor)
    assert trained.shape == (size,)
    assert np.abs(trained.astype(np.float32) - np.linspace(-1, 1, size)).max() > 0
    tensor.int32_data[:] = (trained * 2).view(np.int32).tolist()
    second = session(model.SerializeToString())
    anchors = second.initAnchorArrays()
    second.run(popart.PyStepIO({x: np.zeros(size, np.float16)}, anchors))
    assert np.array_equal(anchors[y], trained * 2)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**32 - 1))
def test_both_forms_are_read_alike(kind: type, shape: list[int], seed: int) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(kind).itemsize), np.uint8)
    value = (raw % 2 if kind is np.bool_ else raw).view(kind).reshape(shape)
    (shown,) = initializers(builder_with(value).getModelProto())
    assert np.asarray(shown.int32_data, np.int32).tobytes()[: value.nbytes] == value.tobytes()
    graph = helper.make_graph([], "g", [], [], [to_proto("init_input", value)])
    plain = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)], ir_version=4)
    graph.initializer[0].CopyFrom(shown)
    other = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)], ir_version=4)
    for model in (plain, other):
        light = read_light_onnx_model(model.SerializeToString(), at_least=4)
        (tensor,) = light.proto.graph.initializer
        assert light.value(tensor).tobytes() == value.tobytes()
        assert to_array(model.graph.initializer[0]).tobytes() == value.tobytes()
        assert read_graph(model).initializers["init_input"].tobytes() == value.tobytes()
        (standard,) = initializers(standard_model(model.SerializeToString()))
        assert numpy_helper.to_array(standard).tobytes() == value.tobytes()


def test_halves_that_came_in_raw_data_stay_there() -> None:
    value = numpy_helper.from_array(np.ones(5000, np.float16), "w")
    graph = helper.make_graph([], "g", [], [], [value])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 10)], ir_version=4)
    (tensor,) = initializers(popart.Builder(model.SerializeToString()).getModelProto())
    assert tensor.raw_data == value.raw_data


def test_transformer_puts_the_halves_that_it_makes_into_raw_data() -> None:
    transformer = popart.GraphTransformer(builder_with(np.arange(5, dtype=np.float32)).getModelProto())
    transformer.convertFloatsToHalfs()
    (tensor,) = initializers(transformer.getModelProto())
    assert np.frombuffer(tensor.raw_data, np.float16).tolist() == [0, 1, 2, 3, 4]
