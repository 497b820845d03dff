"""Training in this process against plain TensorFlow on the CPU: a loop of version 1 with queues, and a Keras fit.

Weights and losses agree within 1e-5 relative and 1e-6 absolute: both sides compute in float32, in other orders.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
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


def _changed_by_the_front_end() -> list[tuple[Any, tuple[str, ...]]]:
    """What podrun changes in TensorFlow and Keras: each owner with the names that it changes or adds."""
    import tensorflow as tf

    from podrun.private_apis.tensorflow import private_module
    from podrun.tensorflow.keras.accumulating_optimizers import OPTIMIZER_MODULES, OPTIMIZER_NAMES
    from podrun.tensorflow.keras.extensions import ModelExtension

    def load(name: str) -> Any:
        return importlib.import_module(name)

    steps = ("make_train_function", "make_test_function", "make_predict_function", "train_step")
    added = tuple(name for name in vars(ModelExtension) if name.startswith("set_"))
    model = load("tf_keras.src.engine.training").Model
    return [
        (private_module("ops.gradients_util"), ("_GradientsHelper",)),
        (tf.GradientTape, ("gradient",)),
        (private_module("client.session").BaseSession, ("run",)),
        (private_module("framework.ops").Graph, ("_apply_device_functions",)),
        (private_module("eager.context").Context, ("device",)),
        (model, (*steps, "fit", "evaluate", "predict", *added)),
        (load("tf_keras.src.engine.data_adapter").DataHandler, ("_infer_steps",)),
        (load("tf_keras.src.losses").Loss, ("_get_reduction",)),
        (load("tf_keras.src.optimizers.legacy.optimizer_v2").OptimizerV2, ("apply_gradients",)),
        (load("tf_keras.src.optimizers"), ("get",)),
        *((load(name), (*OPTIMIZER_NAMES, "get")) for name in OPTIMIZER_MODULES),
    ]


@pytest.fixture(scope="module")
def ipu_device() -> Iterator[None]:
    """One IPU with the front end; afterwards TensorFlow is as it was, and the IPU is given back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_USE_LEGACY_KERAS", "1")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
        places = _changed_by_the_front_end()
        before = [(owner, name, vars(owner).get(name)) for owner, names in places for name in names]
        from podrun.tensorflow.execution.device_table import DEVICES
        from podrun.tensorflow.keras.extensions import install_keras
        from podrun.tensorflow.sdk.config import IPUConfig
        from podrun.tensorflow.sdk.scopes import install_front_end

        install_front_end()
        install_keras()
        config = IPUConfig()
        config.auto_select_ipus = 1
        config.configure_ipu_system()
        try:
            yield
        finally:
            DEVICES.release()
            for owner, name, value in before:
                if value is not None:
                    setattr(owner, name, value)
                elif name in vars(owner):
                    delattr(owner, name)


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


@pytest.mark.slow  # In a process of its own: other tests leave podrun's stand-ins for TensorFlow's modules behind.
def test_a_keras_fit_trains_as_on_the_cpu(ipu_device: None) -> None:
    from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

    with IPUStrategyV1().scope():
        losses, weights = _keras_fit(STEPS)
    expected_losses, expected_weights = _keras_fit(1)
    np.testing.assert_allclose(weights, expected_weights, rtol=RELATIVE, atol=ABSOLUTE)
    np.testing.assert_allclose(losses, expected_losses, rtol=RELATIVE, atol=ABSOLUTE)
    assert np.abs(weights - WEIGHTS).max() > 0.01
