"""Gradients of halves whose results overflow: those that TensorFlow makes of inputs are what they are without overflow.

Expected values are TensorFlow's on the CPU, in float32, where nothing overflows.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import tensorflow as tf

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
Case = tuple[Callable[..., Any], tuple[Any, ...]]
LARGE = np.array([300.0, 280.0])
ROWS = np.array([[300.0, 310.0, 290.0]])
IMAGE, KERNEL = np.full((1, 2, 2, 1), 300.0), np.full((2, 2, 1, 1), 260.0)
VOLUME, VOLUME_KERNEL = np.full((1, 2, 2, 2, 1), 300.0), np.full((2, 2, 2, 1, 1), 260.0)
SUMS = np.array([[40000.0], [50000.0]])
RULES_OF_THEIR_OWN = (
    "Einsum", "Cross", "MulNoNan", "Exp", "Conv2DBackpropInput", "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropInput", "Conv3DBackpropInputV2", "BiasAddGrad", "UnsortedSegmentSum", "ScatterNd",
    "TensorScatterSub", "Xlogy", "Xlog1py", "Xdivy",
    "DivNoNan", "Erfinv", "Ndtri", "Digamma", "L2Loss", "LeakyRelu", "LogSoftmax",
    "SparseSoftmaxCrossEntropyWithLogits",
)  # fmt: skip
"""Cases of which each is computed by code that no other test computes with. The others run in slow tests."""
PARTS = 4
"""Programs in which the others are computed."""


def cases() -> dict[str, Case]:
    """Operation -> a call whose result is greater than halves, and its arguments that gradients are taken of."""
    import tensorflow as tf

    raw, half, place = tf.raw_ops, [0, 0], [[0], [0]]
    twice: dict[str, Callable[..., Any]] = {
        "Add": lambda x, y: raw.Add(x=x, y=y),
        "AddV2": lambda x, y: raw.AddV2(x=x, y=y),
        "AddN": lambda x, y: raw.AddN(inputs=[x, y]),
        "Sub": lambda x, y: raw.Sub(x=x, y=-y),
        "BiasAdd": lambda x, y: raw.BiasAdd(value=x, bias=y[0]),
        "BiasAddV1": lambda x, y: raw.BiasAddV1(value=x, bias=y[0]),
    }
    sums: dict[str, Callable[..., Any]] = {
        "Sum": lambda x: raw.Sum(input=x, axis=0),
        "Cumsum": lambda x: raw.Cumsum(x=x, axis=0),
        "BiasAddGrad": lambda x: raw.BiasAddGrad(out_backprop=x),
        "SegmentSum": lambda x: raw.SegmentSum(data=x, segment_ids=half),
        "UnsortedSegmentSum": lambda x: raw.UnsortedSegmentSum(data=x, segment_ids=half, num_segments=1),
        "ScatterNd": lambda x: raw.ScatterNd(indices=place, updates=x, shape=[1, 1]),
    }
    products: dict[str, Callable[..., Any]] = {
        "Mul": lambda x, y: raw.Mul(x=x, y=y),
        "MulNoNan": lambda x, y: raw.MulNoNan(x=x, y=y),
        "Cross": lambda x, y: raw.Cross(a=x, b=y * [-1.0, 1.0, 1.0]),
        "MatMul": lambda x, y: raw.MatMul(a=x, b=y, transpose_b=True),
        "BatchMatMul": lambda x, y: raw.BatchMatMul(x=x, y=y, adj_y=True),
        "BatchMatMulV2": lambda x, y: raw.BatchMatMulV2(x=x, y=y, adj_y=True),
        "BatchMatMulV3": lambda x, y: raw.BatchMatMulV3(x=x, y=y, adj_y=True, Tout=x.dtype),
        "Einsum": lambda x, y: raw.Einsum(inputs=[x, y], equation="ij,kj->ik"),
    }
    large = np.array([[40000.0], [30000.0]])
    return {
        **{name: (call, (large, large)) for name, call in twice.items()},
        **{name: (call, (SUMS,)) for name, call in sums.items()},
        **{name: (call, (ROWS, ROWS)) for name, call in products.items()},
        **convolutions(),
        "Square": (lambda x: raw.Square(x=x), (LARGE,)),
        "L2Loss": (lambda x: raw.L2Loss(t=x), (LARGE,)),
        "LeakyRelu": (lambda x: raw.LeakyRelu(features=x, alpha=300.0), (-LARGE,)),
        "SquaredDifference": (lambda x, y: raw.SquaredDifference(x=x, y=y), (LARGE, -LARGE)),
        "Pow": (lambda x: raw.Pow(x=x, y=tf.constant(2, x.dtype)), (LARGE,)),
        "RealDiv": (lambda x: raw.RealDiv(x=x, y=tf.constant(2**-10, x.dtype)), (LARGE,)),
        "Div": (lambda x: raw.Div(x=x, y=tf.constant(2**-10, x.dtype)), (LARGE,)),
        **functions_of_one_place(),
        "Prod": (lambda x: raw.Prod(input=x, axis=[0]), (np.array([300.0, 290.0, 2.0]),)),
        "LogSoftmax": (lambda x: raw.LogSoftmax(logits=x), (np.array([[60000.0, -60000.0, 59999.0]]),)),
        "SoftmaxCrossEntropyWithLogits": (
            lambda x: raw.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.constant([[0, 1]], x.dtype))[0],
            (np.array([[60000.0, -60000.0]]),),
        ),
        "SparseSoftmaxCrossEntropyWithLogits": (
            lambda x: raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=[1])[0],
            (np.array([[60000.0, -60000.0]]),),
        ),
        "TensorScatterAdd": (
            lambda x, y: raw.TensorScatterAdd(tensor=x, indices=[[0]], updates=y),
            (SUMS, SUMS[:1]),
        ),
        "TensorScatterSub": (
            lambda x, y: raw.TensorScatterSub(tensor=x, indices=[[0]], updates=-y),
            (SUMS, SUMS[:1]),
        ),
        "Cast": (lambda x: tf.cast(tf.cast(x, tf.float32) * 300.0, x.dtype), (LARGE,)),
        "Mean": (lambda x: raw.Mean(input=x, axis=0), (SUMS,)),
        "Lgamma": (lambda x: raw.Lgamma(x=x), (SUMS,)),
    }


def functions_of_one_place() -> dict[str, Case]:
    """The part of `cases` whose elements are functions of an element, or of two, at the edge of what halves hold."""
    import tensorflow as tf

    raw = tf.raw_ops
    return {
        "Sinh": (lambda x: raw.Sinh(x=x), (np.array([11.789, -11.785]),)),
        "Cosh": (lambda x: raw.Cosh(x=x), (np.array([11.789, -11.785]),)),
        "Expm1": (lambda x: raw.Expm1(x=x), (np.array([11.095]),)),
        "Exp": (lambda x: raw.Exp(x=x), (np.array([11.095, 9.0]),)),
        "Reciprocal": (lambda x: raw.Reciprocal(x=x), (np.array([1e-5, -1e-5, 0.1]),)),
        "Inv": (lambda x: raw.Inv(x=x), (np.array([1e-5, -1e-5, 0.1]),)),
        "Rsqrt": (lambda x: raw.Rsqrt(x=x), (np.array([0.0, 0.5]),)),
        "Log": (lambda x: raw.Log(x=x), (np.array([0.0, 0.5]),)),
        "Log1p": (lambda x: raw.Log1p(x=x), (np.array([-1.0, 0.5]),)),
        "Atanh": (lambda x: raw.Atanh(x=x), (np.array([1.0, -1.0, 0.5]),)),
        "Digamma": (lambda x: raw.Digamma(x=x), (np.array([1e-5, 0.5]),)),
        "Erfinv": (lambda x: raw.Erfinv(x=x), (np.array([1.0, 0.5]),)),
        "Ndtri": (lambda x: raw.Ndtri(x=x), (np.array([1.0, 0.25]),)),
        "DivNoNan": (lambda x, y: raw.DivNoNan(x=x, y=y), (np.array([300.0, 1.0]), np.array([2**-10, 0.0]))),
        "Xlogy": (lambda x, y: raw.Xlogy(x=x, y=y), (np.array([40000.0, 0.0]), np.array([10.0, 0.0]))),
        "Xlog1py": (lambda x, y: raw.Xlog1py(x=x, y=y), (np.array([40000.0, 0.0]), np.array([10.0, -1.0]))),
        "Xdivy": (lambda x, y: raw.Xdivy(x=x, y=y), (np.array([300.0, 0.0]), np.array([2**-10, 0.0]))),
    }


def convolutions() -> dict[str, Case]:
    """The part of `cases` with images and volumes."""
    import tensorflow as tf

    raw, one = tf.raw_ops, {"strides": [1, 1, 1, 1], "padding": "VALID"}
    five = {"strides": [1, 1, 1, 1, 1], "padding": "VALID"}
    kernels: dict[str, Callable[..., Any]] = {
        "Conv2D": lambda x, w: raw.Conv2D(input=x, filter=w, **one),
        "DepthwiseConv2dNative": lambda x, w: raw.DepthwiseConv2dNative(input=x, filter=w, **one),
        "Conv2DBackpropInput": lambda y, w: raw.Conv2DBackpropInput(
            input_sizes=[1, 3, 3, 1], filter=w, out_backprop=y, **one
        ),
        "Conv2DBackpropFilter": lambda y, w: raw.Conv2DBackpropFilter(
            input=y, filter_sizes=[1, 1, 1, 1], out_backprop=tf.reshape(w, [1, 2, 2, 1]), **one
        ),
        "DepthwiseConv2dNativeBackpropInput": lambda y, w: raw.DepthwiseConv2dNativeBackpropInput(
            input_sizes=[1, 3, 3, 1], filter=w, out_backprop=y, **one
        ),
        "DepthwiseConv2dNativeBackpropFilter": lambda y, w: raw.DepthwiseConv2dNativeBackpropFilter(
            input=y, filter_sizes=[1, 1, 1, 1], out_backprop=tf.reshape(w, [1, 2, 2, 1]), **one
        ),
    }
    volumes: dict[str, Callable[..., Any]] = {
        "Conv3D": lambda x, w: raw.Conv3D(input=x, filter=w, **five),
        "Conv3DBackpropInputV2": lambda y, w: raw.Conv3DBackpropInputV2(
            input_sizes=[1, 3, 3, 3, 1], filter=w, out_backprop=y, **five
        ),
        "Conv3DBackpropFilterV2": lambda y, w: raw.Conv3DBackpropFilterV2(
            input=y, filter_sizes=[1, 1, 1, 1, 1], out_backprop=tf.reshape(w, [1, 2, 2, 2, 1]), **five
        ),
    }
    return {
        **{name: (call, (IMAGE, KERNEL)) for name, call in kernels.items()},
        **{name: (call, (VOLUME, VOLUME_KERNEL)) for name, call in volumes.items()},
    }


def gradients(call: Callable[..., Any], arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(arguments)
        result = call(*arguments)
    return list(tape.gradient(result, arguments))


def test_every_operation_has_a_case() -> None:
    from podrun.tensorflow.operators import overflow

    without_kernel = {"AccumulateNV2"}
    assert set(cases()) == (overflow._LINEAR | set(overflow._SLOPES)) - without_kernel


@pytest.mark.parametrize(
    "part", [None, *(pytest.param(part, marks=pytest.mark.slow) for part in range(PARTS))]
)
def test_gradients_pass_what_overflows(ipu: Any, part: int | None) -> None:
    import tensorflow as tf

    every = cases()
    others = [name for name in every if name not in RULES_OF_THEIR_OWN]
    chosen = {name: every[name] for name in (RULES_OF_THEIR_OWN if part is None else others[part::PARTS])}
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()

    @tf.function(autograph=False, jit_compile=True)
    def program(arguments: dict[str, list[tf.Tensor]]) -> Any:
        return {name: gradients(chosen[name][0], values) for name, values in arguments.items()}

    halves = {
        name: [tf.constant(a, tf.float16) for a in arguments] for name, (_, arguments) in chosen.items()
    }
    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        results = strategy.run(program, args=[halves])
    wrong = []
    for name, (call, _) in chosen.items():
        values = [tf.cast(half, tf.float32) for half in halves[name]]
        assert name == "Mean" or np.abs(call(*values)).max() > 65504, name
        for own, expected in zip(results[name], gradients(call, values), strict=True):
            if not np.allclose(own, np.clip(expected, -65504, 65504), rtol=4e-3):
                wrong.append((name, own.numpy(), expected.numpy()))
    assert not wrong


@pytest.mark.parametrize("most", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_gradient_of_zero_stays_zero_where_the_slope_overflows(ipu: Any, most: int) -> None:
    import tensorflow as tf

    @tf.function(autograph=False, jit_compile=True)
    def program(x: tf.Tensor, small: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, small])
            parts = [tf.square(x), x**4, x / small, tf.math.sinh(x), tf.math.expm1(x)]
            parts += [tf.exp(x), tf.math.reciprocal(small * 0.1), tf.math.log(small * 0.0)]
            total = tf.add_n([tf.reduce_sum(part * tf.zeros_like(x)) for part in parts[:most]])
        return tape.gradient(total, [x, small])

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        given = [tf.constant([40000.0], tf.float16), tf.constant([1e-4], tf.float16)]
        for gradient in strategy.run(program, args=given):
            np.testing.assert_array_equal(gradient, [0])


def test_random_words_of_all_widths_have_the_shape_that_is_asked_for(ipu: Any) -> None:
    import tensorflow as tf

    widths = ["int64", "uint64", "uint32"]

    def drawn(seed: tf.Tensor, width: str) -> Any:
        words = tf.raw_ops.StatelessRandomUniformFullInt(shape=[64, 2], seed=seed, dtype=tf.as_dtype(width))
        return words, tf.cast(words // 2**16, tf.int32)

    @tf.function(autograph=False, jit_compile=True)
    def program(seed: tf.Tensor) -> Any:
        return [drawn(seed, width) for width in widths]

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        results = strategy.run(program, args=[tf.constant([1, 2])])
    for width, (words, halves) in zip(widths, results, strict=True):
        assert words.shape == halves.shape == (64, 2)
        assert words.dtype == width
        assert len(np.unique(words)) > 100
