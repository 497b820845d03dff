"""Training in this process against plain TensorFlow on the CPU: a loop of version 1 with queues, and a Keras fit.

Weights and losses agree within 1e-5 relative and 1e-6 absolute: both sides compute in float32, in other orders.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
RELATIVE, ABSOLUTE = 1e-5, 1e-6
STEPS, BATCH = 6, 4
_random = np.random.RandomState(0)
POINTS = _random.rand(STEPS * BATCH, 3).astype(np.float32)
TARGETS = POINTS.sum(1, keepdims=True)
WEIGHTS = _random.rand(3, 1).astype(np.float32)


def _version_1_step(x: Any, y: Any) -> tuple[Any, Any]:
    """Loss and update of a linear model with momentum."""
    import tensorflow.compat.v1 as tf

    weights = tf.get_variable(
        "weights", [3, 1], initializer=tf.constant_initializer(WEIGHTS), use_resource=True
    )
    loss = tf.reduce_mean(tf.square(tf.matmul(x, weights) - y))
    return loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)


def _on_ipu_in_version_1() -> tuple[np.ndarray, np.ndarray]:
    import tensorflow.compat.v1 as tf

    from podrun.tensorflow.sdk import ipu_compiler, loops
    from podrun.tensorflow.sdk.ipu_infeed_queue import IPUInfeedQueue
    from podrun.tensorflow.sdk.ipu_outfeed_queue import IPUOutfeedQueue
    from podrun.tensorflow.sdk.scopes import ipu_scope

    with tf.Graph().as_default() as graph, tf.Session(graph=graph) as session:
        dataset = tf.data.Dataset.from_tensor_slices((POINTS, TARGETS)).batch(BATCH, drop_remainder=True)
        infeed, outfeed = IPUInfeedQueue(dataset), IPUOutfeedQueue()

        def step(x: Any, y: Any) -> Any:
            loss, train = _version_1_step(x, y)
            with tf.control_dependencies([train]):
                return outfeed.enqueue(loss)

        with ipu_scope("/device:IPU:0"):
            run = ipu_compiler.compile(lambda: loops.repeat_loop(STEPS, step, infeed_queue=infeed))
        losses = outfeed.dequeue()
        session.run(tf.global_variables_initializer())
        session.run(infeed.initializer)
        session.run(run)
        return session.run(losses), session.run(tf.global_variables()[0])


def _on_cpu_in_version_1() -> tuple[np.ndarray, np.ndarray]:
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default() as graph, tf.Session(graph=graph) as session:
        x, y = tf.placeholder(tf.float32, [BATCH, 3]), tf.placeholder(tf.float32, [BATCH, 1])
        loss, train = _version_1_step(x, y)
        session.run(tf.global_variables_initializer())
        batches = zip(POINTS.reshape(STEPS, BATCH, 3), TARGETS.reshape(STEPS, BATCH, 1), strict=True)
        losses = [session.run([loss, train], {x: points, y: targets})[0] for points, targets in batches]
        return np.array(losses), session.run(tf.global_variables()[0])


def test_a_loop_with_queues_trains_as_on_the_cpu(ipu_device: None) -> None:
    losses, weights = _on_ipu_in_version_1()
    expected_losses, expected_weights = _on_cpu_in_version_1()
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE, atol=ABSOLUTE)
    np.testing.assert_allclose(weights, expected_weights, rtol=RELATIVE, atol=ABSOLUTE)
    assert np.abs(weights - WEIGHTS).max() > 0.01


def _keras_fit(steps_per_execution: int) -> tuple[list[float], np.ndarray]:
    from tensorflow import keras

    from podrun.tensorflow.keras.accumulating_optimizers import on_ipu

    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, input_shape=(3,))])
    model.set_weights([WEIGHTS])
    model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=steps_per_execution)
    assert on_ipu(model) is (steps_per_execution > 1)
    history = model.fit(POINTS, TARGETS, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()[0]


@pytest.mark.slow
def test_a_keras_fit_trains_as_on_the_cpu(ipu_device: None) -> None:
    from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

    with IPUStrategyV1().scope():
        losses, weights = _keras_fit(STEPS)
    expected_losses, expected_weights = _keras_fit(1)
    np.testing.assert_allclose(weights, expected_weights, rtol=RELATIVE, atol=ABSOLUTE)
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE, atol=ABSOLUTE)
    assert np.abs(weights - WEIGHTS).max() > 0.01
