"""Lowering: which tensors become parameters or constants, and which models are refused, in which words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from podrun.core.errors import PodrunError, UnimplementedError, UnsupportedError, UsageError
from podrun.onnx_models.lowering import lower

node = helper.make_node


def model(
    nodes: list[Any],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: list[str],
    initializers: dict[str, np.ndarray] | None = None,
    opset: int = 13,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [helper.make_empty_tensor_value_info(o) for o in outputs],
        [numpy_helper.from_array(v, n) for n, v in (initializers or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("ai.graphcore", 1)]
    return helper.make_model(graph, opset_imports=imports)


FLOAT = TensorProto.FLOAT
X = {"x": (FLOAT, [2, 6])}


def test_initializers_that_decide_shapes_are_baked_in_and_the_others_are_parameters() -> None:
    w = np.ones((3, 2), np.float32)
    lowered = lower(
        model(
            [
                node("Concat", ["a", "b"], ["s"], axis=0),
                node("Reshape", ["x", "s"], ["r"]),
                node("MatMul", ["r", "w"], ["y"]),
            ],
            X,
            ["y"],
            {"a": np.array([4]), "b": np.array([3]), "w": w},
        )
    )
    assert set(lowered.parameters) == {"w"}
    assert set(lowered.constants) == {"a", "b"}
    assert lowered.outputs["y"].shape == (4, 2)
    got = lowered.forward({"w": w}, {"x": np.ones((2, 6), np.float32)}, jax.random.key(0))
    np.testing.assert_array_equal(got["y"], np.full((4, 2), 3.0))


def test_shape_computations_leave_no_trace() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axes"], ["u"]),
        node("Concat", ["u", "minus"], ["t"], axis=0),
        node("Reshape", ["x", "t"], ["y"]),
    ]
    given = {"zero": np.array(0), "axes": np.array([0]), "minus": np.array([-1])}
    lowered = lower(model(nodes, {"x": (FLOAT, [2, 3, 4])}, ["y"], given))
    jaxpr = jax.make_jaxpr(lowered.forward)({}, {"x": np.zeros((2, 3, 4), np.float32)}, jax.random.key(0))
    assert [e.primitive.name for e in jaxpr.eqns] == ["name", "reshape", "name"]


def test_large_ends_of_slices_survive_narrowing() -> None:
    given = {"s": np.array([1]), "e": np.array([np.iinfo(np.int64).max]), "a": np.array([1])}
    lowered = lower(model([node("Slice", ["x", "s", "e", "a"], ["y"])], X, ["y"], given))
    assert lowered.outputs["y"].shape == (2, 5)


def test_int64_becomes_int32_unless_it_does_not_fit() -> None:
    nodes = [node("Add", ["x", "c"], ["y"])]
    inputs = {"x": (TensorProto.INT64, [2])}
    lowered = lower(model(nodes, inputs, ["y"], {"c": np.array([1, 2])}))
    assert lowered.inputs["x"].dtype == lowered.parameters["c"].dtype == lowered.outputs["y"].dtype == "int32"
    with pytest.raises(UnsupportedError, match="'c' holds 1099511627776, which does not fit INT32"):
        lower(model(nodes, inputs, ["y"], {"c": np.array([1, 2**40])}))
    with pytest.raises(UnsupportedError, match="INT64, which is not a device type"):
        lower(model(nodes, inputs, ["y"], {"c": np.array([1, 2])}), casting=False)


def test_double_is_refused_on_the_device_and_computed_with_x64() -> None:
    doubles = model([node("Exp", ["x"], ["y"])], {"x": (TensorProto.DOUBLE, [2])}, ["y"])
    with pytest.raises(UnsupportedError, match="DOUBLE"):
        lower(doubles)
    assert lower(doubles, x64=True).outputs["y"].dtype == "float64"


def test_missing_operator_is_named_with_its_place() -> None:
    broken = model(
        [node("Relu", ["x"], ["a"]), node("Frobnicate", ["a"], ["y"], name="f")], X, ["y"], opset=13
    )
    with pytest.raises(
        UnimplementedError, match=r"ai.onnx.Frobnicate of opset 13.*'f' \(node 2 of 2 .*making 'y'"
    ):
        lower(broken)


def test_dynamic_shape_is_refused_by_name() -> None:
    dynamic = model([node("Reshape", ["x", "s"], ["y"])], {**X, "s": (TensorProto.INT64, [2])}, ["y"])
    with pytest.raises(UnsupportedError, match="needs the value of its input 1, 's', while compiling"):
        lower(dynamic)


def test_unknown_dimension_is_refused_until_given() -> None:
    symbolic = model([node("Relu", ["x"], ["y"])], {"x": (FLOAT, ["batch", 3])}, ["y"])
    with pytest.raises(UsageError, match="'x' has unknown dimensions batch"):
        lower(symbolic)
    assert lower(symbolic, input_shapes={"x": (4, 3)}).outputs["y"].shape == (4, 3)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("MatMul", ["x", "x"], ["y"])], r"ai.onnx.MatMul .* cannot take float32\[2, 6\]"),
        ([node("Add", ["x", "i"], ["y"])], "different types"),
        ([node("Add", ["x", "nowhere"], ["y"])], "reads tensor 'nowhere', which nothing makes"),
        ([node("Softmax", ["x"], ["y"], axis=5)], r"axis 5 is outside \[-2, 2\)"),
        ([node("Dropout", ["x"], ["y"], seed=1)], "seed"),
    ],
)
def test_errors_name_the_node_that_is_wrong(nodes: list[Any], words: str) -> None:
    inputs = {**X, "i": (TensorProto.INT32, [2, 6])}
    with pytest.raises(PodrunError, match=words):
        lower(
            model(nodes, inputs, ["y"], {"r": np.asarray(0.5, np.float32), "t": np.asarray(True)}),
            training=True,
        )


def test_placement_is_a_name_scope() -> None:
    placed = node("Exp", ["x"], ["y"], name="e", __ipu_number=1, __pipeline_stage=2)
    lowered = lower(model([placed], X, ["y"]))
    jaxpr = jax.make_jaxpr(lowered.forward)({}, {"x": np.zeros((2, 6), np.float32)}, jax.random.key(0))
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "exp"]
    assert str(equation.source_info.name_stack).startswith("ipu:1/stage:2/e")


def test_only_what_is_asked_for_is_computed() -> None:
    nodes = [node("Exp", ["x"], ["a"]), node("Log", ["x"], ["b"]), node("Frobnicate", ["a"], ["c"])]
    lowered = lower(model(nodes, X, ["c"]), outputs=["a"])
    assert list(lowered.outputs) == ["a"]
    assert set(lowered.tensors) == {"x", "a"}
    with pytest.raises(UsageError, match="'nope' is asked for"):
        lower(model(nodes, X, ["c"]), outputs=["nope"])


def test_random_numbers_follow_the_key() -> None:
    drop = lower(
        model([node("Dropout", ["x"], ["y"])], {"x": (FLOAT, [100])}, ["y"], opset=10), training=True
    )
    assert drop.uses_random
    run = jax.jit(lambda key: drop.forward({}, {"x": jnp.ones(100)}, key)["y"])
    one, again, other = run(jax.random.key(1)), run(jax.random.key(1)), run(jax.random.key(2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    assert set(np.unique(one)) == {0.0, 2.0}
    still = lower(model([node("Dropout", ["x"], ["y"])], {"x": (FLOAT, [100])}, ["y"], opset=10))
    assert not still.uses_random


def test_two_random_nodes_draw_different_numbers() -> None:
    nodes = [node("RandomUniform", [], [o], shape=[50]) for o in ("a", "b")]
    lowered = lower(model(nodes, {}, ["a", "b"]))
    got = lowered.forward({}, {}, jax.random.key(0))
    assert (got["a"] != got["b"]).all()


def test_keys_made_together_are_those_made_one_by_one() -> None:
    nodes = [node("RandomUniform", [], [o], shape=[5]) for o in ("a", "b", "c")]
    key = jax.random.key(7)
    got = lower(model(nodes, {}, ["a", "b", "c"])).forward({}, {}, key)
    for index, name in enumerate(("a", "b", "c")):
        alone = jax.random.uniform(jax.random.fold_in(key, index), (5,))
        np.testing.assert_array_equal(got[name], alone)


def test_running_statistics_are_state_updates() -> None:
    stats = {n: np.ones(3, np.float32) for n in ("scale", "bias", "mean", "var")}
    names = ["y", "new_mean", "new_var", "saved_mean", "saved_var"]
    batch = model(
        [node("BatchNormalization", ["x", *stats], names, momentum=0.5)],
        {"x": (FLOAT, [4, 3, 2])},
        ["y"],
        stats,
        opset=9,
    )
    lowered = lower(batch, training=True, outputs=["y", "new_mean", "new_var"])
    assert lowered.state_updates == {"mean": "new_mean", "var": "new_var"}
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    got = lowered.forward(lowered.initial, {"x": x}, jax.random.key(0))
    np.testing.assert_allclose(got["new_mean"], 0.5 + 0.5 * x.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(got["new_var"], 0.5 + 0.5 * x.var((0, 2)), rtol=1e-5)


def test_half_products_keep_float32_partials_unless_asked_otherwise() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(0, 1, s).astype(np.float16) for s in ((4, 512), (512, 4)))
    inputs = {"a": (TensorProto.FLOAT16, [4, 512]), "b": (TensorProto.FLOAT16, [512, 4])}
    exact = a.astype(np.float64) @ b.astype(np.float64)
    errors = {}
    for partials in ("FLOAT", "HALF"):
        lowered = lower(model([node("MatMul", ["a", "b"], ["y"], __partials_type=partials)], inputs, ["y"]))
        got = np.asarray(jax.jit(lowered.forward)({}, {"a": a, "b": b}, jax.random.key(0))["y"])
        assert got.dtype == np.float16
        errors[partials] = np.abs(got - exact).max()
    assert errors["FLOAT"] <= np.spacing(np.float16(exact.max())) / 2 * 1.01
    assert errors["HALF"] > errors["FLOAT"]


def test_folded_replicas_share_weights_and_sum_gradients() -> None:
    """``vjp(vmap(forward))`` with unbatched weights gives the sum of the replicas' gradients, max-pooling included."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(4, 2, 3, 3)).astype(np.float32)}
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("MaxPool", ["c"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("ReduceSumSquare", ["p"], ["y"], keepdims=0),
    ]
    lowered = lower(model(nodes, {"x": (FLOAT, [3, 2, 8, 8])}, ["y"], weights), training=True)
    xs = rng.normal(size=(5, 3, 2, 8, 8)).astype(np.float32)

    def one(w: Any, x: Any) -> Any:
        return lowered.forward({"w": w}, {"x": x}, jax.random.key(0))["y"]

    together = jax.jit(jax.grad(lambda w: jax.vmap(one, (None, 0))(w, xs).sum()))(weights["w"])
    apart = sum(jax.jit(jax.grad(one))(weights["w"], x) for x in xs)
    np.testing.assert_allclose(together, apart, rtol=1e-4, atol=1e-3)


def test_loop_that_data_end_runs_on() -> None:
    value = helper.make_empty_tensor_value_info
    body = helper.make_graph(
        [
            node("Add", ["v", "v"], ["w"]),
            node("ReduceSum", ["w"], ["t"], keepdims=0),
            node("Less", ["t", "limit"], ["again"]),
        ],
        "body",
        [value("i"), value("go"), value("v")],
        [value("again"), value("w")],
    )
    loop = model(
        [node("Loop", ["", "", "x"], ["y"], body=body)], X, ["y"], {"limit": np.asarray(100, np.float32)}
    )
    lowered = lower(loop)
    got = jax.jit(lowered.forward)(lowered.initial, {"x": np.ones((2, 6), np.float32)}, jax.random.key(0))
    np.testing.assert_array_equal(got["y"], np.full((2, 6), 16.0))
