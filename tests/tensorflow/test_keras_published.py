"""What published programs and tests of Keras on IPUs expect beyond the rules: messages, warnings, callbacks, seeds."""

from __future__ import annotations

import importlib.util
import inspect
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.tensorflow.staged_models import staged_sequential
from tests.tensorflow.test_keras_rules import POINTS, TARGETS, WEIGHTS, close, linear, trained
from tests.tensorflow.test_keras_rules import one_ipu as one_ipu
from tests.tensorflow.test_keras_rules import two_replicas as two_replicas

if TYPE_CHECKING:
    from tf_keras import Model
    from tf_keras.layers import Layer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


def test_empty_arrays_are_no_data_set_of_a_known_length(one_ipu: None) -> None:
    with pytest.raises(TypeError, match="dataset length is unknown"):
        linear().fit(np.zeros((0, 3), np.float32), np.zeros((0, 1), np.float32), verbose=0)
    with pytest.raises(TypeError, match="dataset length is unknown"):
        linear().predict(np.array([]), verbose=0)


def test_a_model_with_losses_of_its_own_needs_no_target(one_ipu: None) -> None:
    import tensorflow as tf

    model = linear()
    with pytest.raises(ValueError, match="Target data is missing"):
        model.fit(POINTS, batch_size=4, verbose=0)
    model.add_loss(lambda: tf.reduce_sum(model.layers[0].kernel))
    model.fit(POINTS[:4], batch_size=4, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], WEIGHTS - 0.1, rtol=1e-6)


def test_asynchronous_callbacks_come_for_every_replica(two_replicas: None) -> None:
    from tensorflow import keras

    seen: list[tuple[int, float]] = []
    watcher = keras.callbacks.LambdaCallback(
        on_batch_end=lambda batch, logs: seen.append((batch, logs["loss"]))
    )
    model = linear(2)
    model.set_asynchronous_callbacks(True)
    model.optimizer.learning_rate.assign(0.0)
    model.fit(POINTS[:16], TARGETS[:16], batch_size=4, shuffle=False, verbose=0, callbacks=[watcher])
    errors = ((POINTS[:16] @ WEIGHTS - TARGETS[:16]) ** 2).reshape(2, 2, 4).mean(2)
    assert [batch for batch, _ in seen] == [0, 0, 1, 1]
    np.testing.assert_allclose([v for _, v in seen], [*errors[0], *errors.mean(0)], rtol=1e-5)
    seen.clear()
    model.set_replication_options("mean")
    model.fit(POINTS[:16], TARGETS[:16], batch_size=4, shuffle=False, verbose=0, callbacks=[watcher])
    np.testing.assert_allclose([v for _, v in seen], [errors[0].mean(), errors.mean()], rtol=1e-5)


def test_initial_weights_follow_the_seed_of_the_program(one_ipu: None) -> None:
    import tensorflow as tf
    from tensorflow import keras

    def made() -> list[np.ndarray]:
        tf.random.set_seed(7)
        layers: list[Layer] = [
            keras.layers.Dense(3),
            keras.layers.Dense(2, kernel_initializer="random_normal"),
        ]
        for layer, size in zip(layers, (2, 3), strict=True):
            layer.build((None, size))
        return [layer.kernel.numpy() for layer in layers]

    first, second = made(), made()
    tf.random.set_seed(7)
    limit = np.sqrt(6 / 5)
    expected = [
        tf.random.uniform((2, 3), -limit, limit).numpy(),
        tf.random.normal((3, 2), stddev=0.05).numpy(),
    ]
    for one, other, value in zip(first, second, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, value, rtol=1e-6)
    seeded = keras.initializers.RandomNormal(seed=3)((2, 2)).numpy()
    expected_seeded = tf.random.stateless_normal((2, 2), [3, 0], stddev=0.05)
    np.testing.assert_allclose(seeded, expected_seeded, rtol=1e-6)


def test_initial_weights_without_an_ipu_leave_the_seed_of_the_program(ipu_device: None) -> None:
    import tensorflow as tf
    from tensorflow import keras

    drawn = []
    for build in (False, True):
        tf.random.set_seed(7)
        if build:
            keras.layers.Dense(3).build((None, 2))
        drawn.append(float(tf.random.uniform([])))
    assert drawn[0] == drawn[1]
    initializer = keras.initializers.RandomUniform()
    values = tf.function(lambda: initializer((2,)))
    np.testing.assert_array_equal(values(), values())


def test_methods_of_models_keep_their_signatures(one_ipu: None) -> None:
    import tensorflow as tf
    from tensorflow import keras

    names = list(inspect.signature(keras.Model.compile).parameters)
    assert names[:3] == ["self", "optimizer", "loss"]
    assert list(inspect.signature(keras.Model.build).parameters) == ["self", "input_shape"]
    assert "x" in inspect.signature(keras.Model.fit).parameters
    model = linear()
    before = names[3 : names.index("steps_per_execution")]
    model.compile("sgd", "mse", *[None for _ in before], tf.constant(2))
    assert int(model._steps_per_execution.numpy()) == 2


def test_public_modules_of_keras_give_what_is_of_keras_alone() -> None:
    from podrun.compat._keras_names import _MODULES_OF_CLASSES, _inner_attribute

    for name in ("os", "json", "np", "tf", "keras_export", "__path__"):
        for module in _MODULES_OF_CLASSES:
            with pytest.raises(AttributeError, match=f"keras.{module}' has no attribute '{name}'"):
                _inner_attribute(module, name)
    for module, name in (
        ("losses", "losses_utils"),
        ("losses", "LossFunctionWrapper"),
        ("callbacks", "backend"),
        ("utils", "np_utils"),
    ):
        assert _inner_attribute(module, name) is not None


@pytest.mark.parametrize(("momentum", "count"), [(1.0, 0), (0.0, 0), (0.5, 1)])
def test_a_pipeline_warns_of_moving_statistics(
    two_replicas: None, monkeypatch: pytest.MonkeyPatch, momentum: float, count: int
) -> None:
    from tensorflow import keras

    from podrun.private_apis.tensorflow import private_module

    warnings: list[str] = []
    monkeypatch.setattr(private_module("platform.tf_logging"), "warn", warnings.append)
    norm = keras.layers.BatchNormalization(momentum=momentum, name="norm", input_shape=POINTS.shape[1:])
    model = keras.Sequential([norm, keras.layers.Dense(1)])
    model.set_pipeline_stage_assignment([0, 1])
    model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=4)
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
    model.predict(POINTS, batch_size=4, verbose=0)
    assert warnings == []
    model.fit(POINTS, TARGETS, batch_size=4, verbose=0)
    assert len(warnings) == count
    assert all("The moving statistics" in text and "norm" in text for text in warnings)


def test_an_optimizer_that_cannot_accumulate_is_refused_first(two_replicas: None) -> None:
    from tensorflow import keras

    class Own(keras.optimizers.SGD):
        def minimize(self, *_: object, **__: object) -> int:
            return 0

    model = staged_sequential()
    model.compile(Own(0.1), "mse", steps_per_execution=2)
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=2)
    with pytest.raises(ValueError, match=r"must not override OptimizerV2\.minimize"):
        model.fit(POINTS, TARGETS, batch_size=4, verbose=0)


def test_options_that_do_not_fit_are_named(one_ipu: None) -> None:
    model = linear()
    for call, name, text in (
        (model.set_pipelining_options, "experimental_normalize_gradients", "has now been removed"),
        (model.set_infeed_queue_options, "element_spec", "automatically set by Keras"),
        (model.set_outfeed_queue_options, "outfeed_mode", "not compatible with Keras"),
    ):
        with pytest.raises(ValueError, match=f"Found `{name}` .*{text}"):
            call(**{name: True})


def test_captured_gradients_reach_optimizers_and_loss_scaling(one_ipu: None) -> None:
    import tensorflow as tf
    from tensorflow import keras

    from podrun.tensorflow.addons.capturing import CaptureActivationGradients
    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer

    class Watching(keras.optimizers.SGD):
        supports_captured_grads = True
        seen: list[str]

        def apply_gradients(
            self, grads_and_vars: object, captured_grads: dict[str, object] | None = None
        ) -> object:
            self.seen = sorted(captured_grads or {})
            return super().apply_gradients(grads_and_vars)

    def model_with(optimizer: object) -> Model:
        inputs = keras.Input((3,))
        layer = CaptureActivationGradients(
            keras.layers.Dense(2, activation="relu", dtype=tf.float16, name="inner")
        )
        model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(layer(inputs)))
        model.compile(optimizer, "mse", steps_per_execution=2)
        return model

    watching = Watching(0.1)
    model_with(watching).fit(POINTS, TARGETS, batch_size=4, verbose=0)
    assert watching.seen == ["inner_cag_activation"]
    watching = Watching(0.1)
    model = model_with(watching)
    model.set_gradient_accumulation_options(2)
    model.fit(POINTS, TARGETS, batch_size=4, verbose=0)
    assert watching.seen == ["inner_cag_activation"]
    assert int(watching.iterations.numpy()) == 4
    for alone, together, count in (
        (False, 1, (3 * 2 + 2 + 4 * 2) * 2),
        (True, 1, 4 * 2 * 2),
        (True, 2, 4 * 2),
    ):
        scaling = ALSOptimizer(keras.optimizers.SGD(0.1), update_frequency=64, captured_grads_only=alone)
        model = model_with(scaling)
        if together > 1:
            model.set_gradient_accumulation_options(together)
        model.fit(POINTS[:8], TARGETS[:8], batch_size=4, verbose=0)
        assert int(scaling.iterations.numpy()) == 2 // together
        assert int(scaling.update_counter.numpy()) == 2 // together
        assert float(tf.reduce_sum(scaling.histogram)) == count


def test_wrapping_optimizers_come_back_from_their_configurations(one_ipu: None) -> None:
    from tensorflow import keras

    from podrun.tensorflow.addons.accumulating_wrappers import KerasGradientAccumulation
    from podrun.tensorflow.addons.capturing import ALSGradientAccumulationOptimizer
    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer

    scaling = ALSOptimizer(keras.optimizers.SGD(0.25), 16, lpf_alpha=0.5)
    for optimizer in (
        scaling,
        KerasGradientAccumulation(keras.optimizers.SGD(0.25), 2, "THREESTATE_OFF", "THREESTATE_OFF"),
        ALSGradientAccumulationOptimizer(scaling, 2),
    ):
        config = {**optimizer.get_config(), "name": "other"}
        again = type(optimizer).from_config(config)
        assert again.get_config() == config
        assert float(again.learning_rate) == 0.25
        with pytest.raises(AttributeError, match="can't set attribute"):
            optimizer.weights = 1
    assert again.decrease_factor == 0.5
    with pytest.raises(ValueError, match="decrease_factor is a read only property"):
        scaling.decrease_factor = 2
    with pytest.raises(ValueError, match="initial_loss_scaling_factor x increase_factor must be less"):
        ALSOptimizer(keras.optimizers.SGD(), 1, increase_factor=4, max_loss_scaling_factor=4)


def test_synthetic_data_predict_zeros(two_replicas: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_POPLAR_FLAGS", "--use_synthetic_data")
    outputs = linear(2).predict(POINTS[:16], batch_size=4, verbose=0)
    np.testing.assert_array_equal(outputs, np.zeros((16, 1), np.float32))


def test_doubles_are_refused_where_nothing_converts_them(one_ipu: None) -> None:
    import tensorflow as tf
    from tf_keras.src.engine import base_layer_utils

    data = tf.data.Dataset.from_tensor_slices((POINTS.astype(float), TARGETS)).batch(4, drop_remainder=True)
    before = base_layer_utils.v2_dtype_behavior_enabled()
    base_layer_utils.disable_v2_dtype_behavior()
    try:
        with pytest.raises(tf.errors.FailedPreconditionError, match="Unsupported datatype double on index 0"):
            linear().evaluate(data, verbose=0)
    finally:
        if before:
            base_layer_utils.enable_v2_dtype_behavior()


@pytest.mark.parametrize("second", [False, True])
def test_accumulated_gradients_are_clipped_once_or_at_each_step(two_replicas: None, second: bool) -> None:
    """Each step, with the wrapper of Keras that ``use_v2_gradient_accumulation_optimizer`` asks for; else their sum."""
    from tensorflow import keras

    model = keras.Sequential(
        [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", input_shape=(1,))]
    )
    model.compile(keras.optimizers.SGD(1.0, clipvalue=1.5), lambda y, p: p * y, steps_per_execution=2)
    model.set_gradient_accumulation_options(2, use_v2_gradient_accumulation_optimizer=second)
    slopes = np.array([[0.5], [0.25], [2.0], [3.0]], np.float32)  # Of two steps of two replicas.
    model.fit(np.ones((4, 1), np.float32), slopes, batch_size=1, shuffle=False, verbose=0)
    assert model.get_weights()[0].item() == (-0.75 - 1.5 if second else -1.5)


def test_optimizers_of_version_1_accumulate(two_replicas: None) -> None:
    import tensorflow as tf

    for optimizer in (
        tf.compat.v1.train.GradientDescentOptimizer(0.1),
        tf.compat.v1.train.MomentumOptimizer(0.1, 0.0),
    ):
        model = linear()
        model.compile(optimizer, "mse", steps_per_execution=4)
        model.set_gradient_accumulation_options(2, "mean")
        model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, verbose=0)
        close(model, trained(4, lambda g: sum(g) / 2, 4))
        assert int(model.optimizer.iterations.numpy()) == 2


def test_gradients_that_an_optimizer_computes_itself_accumulate(one_ipu: None) -> None:
    """Of version 1 ``compute_gradients``, of Keras ``get_gradients``: an optimizer of a program, or of the SDK."""
    import tensorflow as tf
    from tensorflow import keras

    from podrun.tensorflow.sdk.wrapping_optimizers import MapGradientOptimizer

    class Doubling(tf.compat.v1.train.GradientDescentOptimizer):
        def compute_gradients(self, loss: tf.Tensor, *args: object, **kwargs: object) -> list[object]:
            return [(2 * g, v) for g, v in super().compute_gradients(loss, *args, **kwargs)]

    class KerasDoubling(keras.optimizers.SGD):
        def get_gradients(self, loss: tf.Tensor, params: list[tf.Variable]) -> list[tf.Tensor]:
            return [2 * g for g in super().get_gradients(loss, params)]

    plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    mapping = MapGradientOptimizer(plain, lambda gradient, variable: 2 * gradient)
    for optimizer in (Doubling(0.1), mapping, KerasDoubling(0.1)):
        model = linear()
        model.compile(optimizer, "mse", steps_per_execution=4)
        model.set_gradient_accumulation_options(2, "mean")
        model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, verbose=0)
        close(model, trained(4, lambda g: sum(g), 2))
