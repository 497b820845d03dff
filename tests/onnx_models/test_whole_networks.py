"""A model that is one network is computed without XLA, from inputs as they come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import podrun.onnx_backend as backend
from podrun.device.xla.convolutions import available

RNG = np.random.default_rng(7)
pytestmark = pytest.mark.skipif(not available(), reason="no oneDNN here")


def classifier() -> onnx.ModelProto:
    """Convolutions, poolings and a concatenation, and the softmax of their means, as SqueezeNet has them."""
    values = {
        "w": RNG.normal(size=(24, 3, 3, 3)) / 5,
        "b": RNG.normal(size=24),
        "one": RNG.normal(size=(16, 24, 1, 1)) / 5,
        "three": RNG.normal(size=(16, 24, 3, 3)) / 15,
        "last": RNG.normal(size=(40, 32, 1, 1)) / 5,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[3, 3], strides=[2, 2]),
        helper.make_node("Conv", ["p", "one"], ["l"]),
        helper.make_node("Conv", ["p", "three"], ["s"], pads=[1, 1, 1, 1]),
        helper.make_node("Concat", ["l", "s"], ["t"], axis=1),
        helper.make_node("Conv", ["t", "last"], ["f"]),
        helper.make_node("GlobalAveragePool", ["f"], ["g"]),
        helper.make_node("Softmax", ["g"], ["y"], axis=1),
    ]
    weights = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()]
    x = helper.make_tensor_value_info("x", 1, [1, 3, 65, 67])
    y = helper.make_tensor_value_info("y", 1, [1, 40, 1, 1])
    graph = helper.make_graph(nodes, "classifier", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_a_model_that_is_one_network_takes_inputs_as_they_come() -> None:
    model = classifier()
    x = RNG.normal(size=(1, 3, 65, 67)).astype(np.float32)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    ours = backend.prepare(model)
    (first,) = ours.run([x])
    assert all(compiled.direct for forms in ours._compiled.values() for compiled in forms)
    np.testing.assert_allclose(first, expected, rtol=2e-5, atol=1e-7)
    elsewhere = np.empty(x.size + 1, np.float32)[1:].reshape(x.shape)
    elsewhere[:] = x
    kinds: list[Any] = [elsewhere, np.asfortranarray(x), np.flip(np.flip(x, 2).copy(), 2), {"x": x}]

    def bits(given: Any) -> bytes:
        (result,) = ours.run(given if isinstance(given, dict) else [given])
        return bytes(np.asarray(result).tobytes())

    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(bits, kinds * 3)) == {np.asarray(first).tobytes()}


def test_results_of_one_run_stay_after_the_next() -> None:
    ours = backend.prepare(classifier())
    one, two = (RNG.normal(size=(1, 3, 65, 67)).astype(np.float32) for _ in range(2))
    (kept,) = ours.run([one])
    before = kept.copy()
    (other,) = ours.run([two])
    np.testing.assert_array_equal(kept, before)
    assert not np.array_equal(kept, other)
