"""Layers that capture gradients, and the optimizers around loss scaling, that programs copy, save and load."""

from __future__ import annotations

import copy
import importlib.util
import typing
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
        copies.append(tf_keras.models.load_model(path))
    for model in copies:
        assert isinstance(model.layers[0], CaptureActivationGradients)
        np.testing.assert_allclose(model(POINTS), expected, rtol=1e-6)


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


def _config_of(source: str, tmp_path: Path) -> Any:
    """An object of the class ``Own`` of options whose ``__init__`` has those lines."""
    from podrun.tensorflow.sdk.config_classes import _ConfigBase

    body = "".join(f"        {line}\n" for line in source.splitlines())
    path = tmp_path / "own.py"
    path.write_text(f"class Own(_ConfigBase):\n    def __init__(self):\n{body}")
    names: dict[str, Any] = {"_ConfigBase": _ConfigBase, "typing": typing}
    exec(compile(path.read_text(), str(path), "exec"), names)  # noqa: S102 - a program's source
    return names["Own"]()


def test_options_are_described_wherever_they_are_assigned(ipu_device: None, tmp_path: Path) -> None:
    branches = """if False:
    pass
else:
    'In else.'
    self.a: typing.Union[int, str] = 1
try:
    raise KeyError
except KeyError:
    'In except.'
    self.b: typing.List[int] = [1]
finally:
    'In finally.'
    self.c: typing.Union[float, str] = 0.5
self._hidden = 3
self._finalize_base_config()"""
    config = _config_of(branches, tmp_path)
    config.a, config.c = "x", "y"
    descriptions = [config.get_attribute_metadata(name).__doc__ for name in "abc"]
    assert descriptions == ["In else.", "In except.", "In finally."]
    config.b.append(2)
    assert config.get_attribute_metadata("b").default == [1]
    assert config.to_dict() == {"a": "x", "b": [1, 2], "c": "y", "_hidden": 3}
    assert "_hidden" not in type(config).__doc__


@pytest.mark.parametrize("hint", ["typing.Dict[str, int]", "typing.Any", "typing.Literal[1]", "'int'"])
def test_annotations_that_cannot_be_compared_are_refused(ipu_device: None, hint: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Unsupported 'typing' attribute"):
        _config_of(f"self.a: {hint} = 1", tmp_path)


def test_signatures_are_parsed_as_messages_are(ipu_device: None) -> None:
    from google.protobuf.message import DecodeError

    from podrun.tensorflow.sdk.application_signature import PoplarExecutableProto, signature_blob

    message = PoplarExecutableProto()
    for junk in (b"junk", b"[]", b"\xff", b'{"inputs": 3}'):
        with pytest.raises(DecodeError, match="no signature"):
            message.ParseFromString(junk)
    blob = signature_blob({"inputs": ["a"], "later": ["b"]})
    assert message.ParseFromString(blob) == len(blob)
    assert [own.name for own in message.embedded_runtime_config.signature.inputs] == ["a"]


def test_inputs_of_a_program_in_a_file_are_of_its_kind_of_numbers(ipu_device: None) -> None:
    from podrun.core.errors import UsageError
    from podrun.tensorflow.sdk.application_signature import taken_input

    floats = np.dtype(np.float32)
    assert taken_input(0, [1, 2], floats).dtype == "float32"
    assert taken_input(0, np.ones(2), floats).numpy().tolist() == [1.0, 1.0]
    for value, kind in (("text", "string"), (np.ones(2, np.int32), "int32"), (np.ones(2, bool), "bool")):
        with pytest.raises(UsageError, match=f"Input 1 has type {kind}; the program takes float32"):
            taken_input(1, value, floats)
    with pytest.raises(UsageError, match="Input 1 is no tensor"):
        taken_input(1, object(), floats)
