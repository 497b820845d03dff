"""Normalisations by known statistics become part of the weights before them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import podrun.onnx_backend as backend
from podrun.onnx_models.folding import hoist
from podrun.onnx_models.lowering import lower

RNG = np.random.default_rng(3)


def model(groups: int = 1, wanted: tuple[str, ...] = ("y",)) -> onnx.ModelProto:
    """Conv, BatchNormalization, a factor and an addend for each channel, Relu."""
    values = {
        "w": RNG.normal(size=(12, 6 // groups, 3, 3)),
        "b": RNG.normal(size=12),
        "scale": RNG.uniform(0.5, 2, size=12),
        "bias": RNG.normal(size=12),
        "mean": RNG.normal(size=12),
        "var": RNG.uniform(0.5, 2, size=12),
        "factor": RNG.normal(size=(12, 1, 1)),
        "addend": RNG.normal(size=(1, 12, 1, 1)),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], group=groups, pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Div", ["n", "factor"], ["m"]),
        helper.make_node("Add", ["addend", "m"], ["a"]),
        helper.make_node("Relu", ["a"], ["y"]),
    ]
    shapes = {name: helper.make_tensor_value_info(name, 1, [1, 12, 20, 20]) for name in ("y", "n", "c")}
    graph = helper.make_graph(
        nodes,
        "folding",
        [helper.make_tensor_value_info("x", 1, [1, 6, 20, 20])],
        [shapes[name] for name in wanted],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in values.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)])


def equations(made: onnx.ModelProto, x: Any) -> list[str]:
    """Primitives that are left to do for each input, names aside."""
    lowered = lower(made, input_values={"x": x}, grouped=True)
    key = jax.random.key(0)
    split = hoist(lowered.forward, lowered.initial, {"x": x}, key)
    kept = split.prepare(lowered.initial)
    traced = jax.make_jaxpr(split.run)(kept, {"x": x}, key)
    return [e.primitive.name for e in traced.eqns if e.primitive.name != "name"]


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.sample(2)
def test_one_product_and_one_addition_are_left(groups: int) -> None:
    x = RNG.normal(size=(1, 6, 20, 20)).astype(np.float32)
    made = model(groups)
    left = equations(made, x)
    assert left[:2] == ["conv_general_dilated", "add"]
    assert not {"mul", "div", "sub", "rsqrt"} & set(left)
    expected = ReferenceEvaluator(made).run(None, {"x": x})[0]
    np.testing.assert_allclose(backend.run_model(made, {"x": x})[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wanted", [("y", "n"), ("c", "y"), ("n", "c", "y")])
@pytest.mark.sample(3)
def test_what_is_asked_for_is_still_there(wanted: tuple[str, ...]) -> None:
    x = RNG.normal(size=(1, 6, 20, 20)).astype(np.float32)
    made = model(wanted=wanted)
    expected = ReferenceEvaluator(made).run(None, {"x": x})
    for got, want in zip(backend.run_model(made, {"x": x}), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
