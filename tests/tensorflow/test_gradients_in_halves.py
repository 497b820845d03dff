"""Gradients of halves that overflow, with and without ``nanoo``, and gradients that share a forward pass with dropout.

An IPU's half saturates at 65504 where `floating_point_behaviour.nanoo` is off, which is the default, so that a dynamic
loss scale never sees a gradient that is not finite; with `nanoo` the overflow is NaN, and Keras skips the update and
halves the scale. Source: the SDK's tests of floating-point control; expected weights are closed formulas.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from tf_keras import Model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
LARGEST, SCALE, RATE = 65504.0, 32768.0, 0.25


def strategy_on_one_ipu(ipu: Any, nanoo: bool) -> Any:
    """A strategy on an IPU whose halves overflow to NaN, or saturate."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.floating_point_behaviour.nanoo = nanoo
    config.configure_ipu_system()
    return ipu.ipu_strategy.IPUStrategyV1()


def dense_model() -> Model:
    """One product: the gradient of its weights is the sum of 16 * 0.5 * 2 * the scale."""
    import tf_keras as keras

    return keras.Sequential([
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", input_shape=(4,)),
        keras.layers.Activation("linear", dtype="float32"),
    ])  # fmt: skip


def convolved_model() -> Model:
    """One convolution, which reads each of the points once for each of its four weights."""
    import tf_keras as keras

    return keras.Sequential([
        keras.layers.Reshape((4, 1, 1), input_shape=(4,)),
        keras.layers.Conv2D(1, (4, 1), use_bias=False, kernel_initializer="zeros"),
        keras.layers.Flatten(),
        keras.layers.Activation("linear", dtype="float32"),
    ])  # fmt: skip


@pytest.mark.parametrize("nanoo", [False, True])
@pytest.mark.parametrize("make", [dense_model, convolved_model])
def test_a_scaled_gradient_overflows(ipu: Any, make: Callable[[], Model], nanoo: bool) -> None:
    import tf_keras as keras

    x, y = np.full((2, 4), 16, np.float32), np.full((2, 1), -0.5, np.float32)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        with strategy_on_one_ipu(ipu, nanoo).scope():
            model = make()
            scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.legacy.SGD(RATE))
            model.compile(scaled, "mse")
            model.fit(x, y, batch_size=2, verbose=0)
            scale, (weights,) = float(scaled.loss_scale.numpy()), model.get_weights()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert scale == (SCALE / 2 if nanoo else SCALE)
    assert np.allclose(weights, 0 if nanoo else -RATE * LARGEST / SCALE, rtol=1e-6, atol=0)


@pytest.mark.parametrize("nanoo", [False, True])
def test_sums_of_gradients_saturate_too(ipu: Any, nanoo: bool) -> None:
    import tensorflow as tf

    strategy = strategy_on_one_ipu(ipu, nanoo)

    @tf.function(jit_compile=True)
    def gradient(x: tf.Tensor) -> tf.Tensor:
        half = tf.cast(x, tf.float16)
        with tf.GradientTape() as tape:
            tape.watch(half)
            # Each of two uses gives 40000, and behind them is a factor that would make NaN of an infinity.
            used = half * [1.0, 0.0]
            total = tf.reduce_sum(
                used * tf.constant(40000.0, tf.float16) + used * tf.constant(40000.0, tf.float16)
            )
        return tf.cast(tape.gradient(total, half), tf.float32)

    with strategy.scope():
        result = strategy.run(gradient, args=[tf.zeros(2)]).numpy()
    expected = [np.nan, np.nan] if nanoo else [LARGEST, 0.0]
    assert np.array_equal(result, np.asarray(expected, np.float32), equal_nan=True)


@pytest.mark.parametrize("by", ["ipu", "tensorflow"])
def test_gradients_of_one_forward_pass_have_one_mask(ipu: Any, by: str) -> None:
    import tensorflow as tf

    ones = np.ones(64, np.float32)
    strategy = strategy_on_one_ipu(ipu, False)
    with strategy.scope():
        first, second = tf.Variable(ones), tf.Variable(ones)

        @tf.function(jit_compile=True)
        def step(x: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape(persistent=True) as tape:
                scaled = x * first
                kept = (
                    ipu.ops.rand_ops.dropout(scaled, rate=0.5) if by == "ipu" else tf.nn.dropout(scaled, 0.5)
                )
                out = kept * second
                one, two = tf.reduce_sum(out), tf.reduce_sum(2 * out)
            gradients = [tape.gradient(one, first), tape.gradient(two, first) / 2, tape.gradient(one, second)]
            return [kept, *gradients, tf.gradients(two, second)[0] / 2]

        masks = [t.numpy() for t in strategy.run(step, args=[ones])]
        later = strategy.run(step, args=[ones])[0].numpy()
    assert set(masks[0]) == {0.0, 2.0}
    assert all(np.array_equal(masks[0], mask) for mask in masks)
    assert not np.array_equal(masks[0], later)


def test_gradients_stop_where_they_are_told_to_and_are_zeros_where_asked_for(ipu: Any) -> None:
    import tensorflow as tf

    values = np.arange(8, dtype=np.float32)
    strategy = strategy_on_one_ipu(ipu, False)
    with strategy.scope():

        @tf.function(jit_compile=True)
        def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
            inner = x * x
            stopped = tf.gradients(inner * x, x, stop_gradients=[inner])
            return stopped + tf.gradients(inner * x, [x, y], unconnected_gradients="zero")

        stopped, whole, unconnected = (t.numpy() for t in strategy.run(step, args=[values, values]))
    np.testing.assert_allclose(stopped, values**2, rtol=1e-6)
    np.testing.assert_allclose(whole, 3 * values**2, rtol=1e-6)
    np.testing.assert_array_equal(unconnected, np.zeros(8))


def test_gradients_pass_products_and_sums_that_overflow(ipu: Any) -> None:
    """As in the SDK, whose gradients of a product are made of its inputs; they were zero."""
    import tensorflow as tf

    ipu.config.IPUConfig().configure_ipu_system()
    weight = tf.Variable(tf.constant([[300.0], [2.0]], tf.float16))

    @tf.function(jit_compile=True)
    def gradients(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            scaled = x * 300.0
            total = tf.reduce_sum(scaled) - tf.matmul(scaled[tf.newaxis], weight)[0, 0]
        return total, tape.gradient(total, [x, weight])

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        total, (by_input, by_weight) = strategy.run(gradients, args=[tf.constant([250.0, 0.5], tf.float16)])
    assert total.numpy() == 0  # Both parts are the greatest half.
    np.testing.assert_array_equal(by_input, [-65504, 300 * (1 - 2)])
    np.testing.assert_array_equal(np.ravel(by_weight), [-65504, -150])
