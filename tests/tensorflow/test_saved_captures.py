"""Layers that capture gradients, and the optimizers around loss scaling, that programs copy, save and load."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)

POINTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


@pytest.fixture
def curved(ipu: Any) -> Any:
    """A model whose hidden layer captures the gradients of its activation."""
    import tf_keras

    from podrun.tensorflow.addons.capturing import CaptureActivationGradients

    hidden = CaptureActivationGradients(tf_keras.layers.Dense(2, activation="tanh", name="hidden"), tag="t")
    return tf_keras.Sequential([tf_keras.Input((3,)), hidden, tf_keras.layers.Dense(1)])


def test_a_layer_whose_gradients_are_captured_is_made_again_from_its_configuration(ipu: Any) -> None:
    import tf_keras

    from podrun.tensorflow.addons.capturing import ActivationCapture, CaptureActivationGradients

    layer = CaptureActivationGradients(tf_keras.layers.Dense(2, activation="tanh", name="hidden"), tag="t")
    config: Any = layer.get_config()
    assert (config["layer"]["config"]["activation"], config["tag"]) == ("tanh", "t")
    assert isinstance(layer.layer.activation, ActivationCapture), "it still captures"
    again = CaptureActivationGradients.from_config(config)
    assert (again.tag, again.name, list(again._wrapped_activations)) == ("t", "t", ["activation"])
    assert isinstance(again.layer.activation, ActivationCapture)


def test_models_whose_gradients_are_captured_are_cloned_and_loaded(curved: Any, tmp_path: Path) -> None:
    import tf_keras

    from podrun.tensorflow.addons.capturing import CaptureActivationGradients

    names = {"CaptureActivationGradients": CaptureActivationGradients}
    expected = curved.predict(POINTS, verbose=0)
    first, second = curved.get_weights()[0], curved.get_weights()[2]
    np.testing.assert_allclose(expected, np.tanh(POINTS @ first) @ second, rtol=1e-5, atol=1e-6)
    with tf_keras.utils.custom_object_scope(names):
        copies = [
            tf_keras.models.clone_model(curved),
            tf_keras.Sequential.from_config(curved.get_config()),
        ]
    for model in copies:
        model.set_weights(curved.get_weights())
    for ending in ("keras", "h5"):
        path = str(tmp_path / f"model.{ending}")
        curved.save(path)
        copies.append(tf_keras.models.load_model(path, custom_objects=names))
    for model in copies:
        assert isinstance(model.layers[0], CaptureActivationGradients)
        np.testing.assert_allclose(model.predict(POINTS, verbose=0), expected, rtol=1e-6)


def test_a_layer_that_has_values_keeps_them_where_its_gradients_are_captured(ipu: Any) -> None:
    import tf_keras

    from podrun.tensorflow.addons.capturing import CaptureActivationGradients

    layer = tf_keras.layers.Dense(2, activation="tanh")
    expected = layer(POINTS).numpy()
    np.testing.assert_array_equal(CaptureActivationGradients(layer)(POINTS).numpy(), expected)


def test_accumulating_optimizers_take_keywords_and_are_copied(ipu: Any) -> None:
    import tf_keras

    from podrun.tensorflow.addons.accumulating_wrappers import KerasGradientAccumulation
    from podrun.tensorflow.addons.capturing import ALSGradientAccumulationOptimizer, ALSOptimizerSGD

    scaling = ALSOptimizerSGD(0.25)
    scaled = ALSGradientAccumulationOptimizer(als_optimizer=scaling, num_mini_batches=4)
    assert scaled.als_optimizer is scaling
    assert ALSGradientAccumulationOptimizer(als_optimizer=scaling, num_mini_batches=1) is scaling
    plain = KerasGradientAccumulation(tf_keras.optimizers.legacy.SGD(0.25), num_mini_batches=4)
    assert copy.copy(plain)._opt is plain._opt
    for optimizer in (plain, copy.copy(plain), copy.deepcopy(plain), copy.copy(scaled)):
        assert optimizer.get_config()["num_mini_batches"] == 4
        assert float(optimizer.learning_rate) == 0.25


def test_options_of_loss_scaling_are_attributes_that_are_read_when_they_are_used(ipu_device: None) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.scaling_optimizer import AutomaticLossScalingOptimizer

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        optimizer = AutomaticLossScalingOptimizer(v1.train.GradientDescentOptimizer(0.5), update_frequency=8)
        optimizer.update_frequency, optimizer.increase_factor = 1, 4.0
        weight = v1.get_variable("weight", initializer=tf.constant([1.0, 2.0], tf.float16), use_resource=True)
        step = optimizer.minimize(tf.reduce_sum(tf.cast(weight, tf.float32)))
        session.run(v1.global_variables_initializer())
        session.run(step)
        assert session.run(optimizer.loss_scaling_factor) == 4.0
        assert session.run(optimizer.histogram_levels).tolist() == [65504.0]
        with pytest.raises(AttributeError):
            optimizer.__match_args__  # noqa: B018


def test_values_of_halves_are_counted_up_to_an_edge(ipu_device: None) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.scaling_optimizer import _EDGE, counted_halves

    halves = tf.constant([1.0, 65472.0, -65504.0, np.inf, np.nan], tf.float16)
    assert counted_halves([halves, tf.ones(3)], _EDGE).numpy().tolist() == [2.0, 3.0]
    assert counted_halves([halves], 1.0).numpy().tolist() == [1.0, 4.0]
