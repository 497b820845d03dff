"""Keras under an IPU strategy: callbacks, metrics, functions of the program's own, options, and what is refused."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.tensorflow.test_keras_rules import (
    FEATURES,
    POINTS,
    TARGETS,
    WEIGHTS,
    close,
    gradient,
    linear,
    one_ipu,
    trained,
    two_replicas,
)

if TYPE_CHECKING:
    from tf_keras import Model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
__all__ = ["one_ipu", "two_replicas"]


def test_callbacks_come_once_for_an_execution(one_ipu: None) -> None:
    calls = batches_of(linear(4), asynchronous=False)
    assert [(kind, batch) for kind, batch, _ in calls] == [("begin", 0), ("end", 3), ("begin", 4), ("end", 7)]


def test_asynchronous_callbacks_come_once_for_a_step(one_ipu: None) -> None:
    calls = batches_of(linear(4), asynchronous=True)
    assert [(kind, batch) for kind, batch, _ in calls] == [(k, b) for b in range(8) for k in ("begin", "end")]
    losses = [logs["loss"] for kind, _, logs in calls if kind == "end"]
    alone = [logs["loss"] for kind, _, logs in batches_of(linear(1), asynchronous=False) if kind == "end"]
    np.testing.assert_allclose(losses, alone, rtol=1e-6)


def batches_of(model: Model, asynchronous: bool) -> list[tuple[str, int, dict[str, float]]]:
    from tensorflow import keras

    calls: list[tuple[str, int, dict[str, float]]] = []

    class Watcher(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            calls.append(("begin", batch, {}))

        def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
            calls.append(("end", batch, dict(logs)))

    model.set_asynchronous_callbacks(asynchronous)
    model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, verbose=0, callbacks=[Watcher()])
    return calls


def test_an_error_of_an_asynchronous_callback_reaches_the_program(one_ipu: None) -> None:
    from tensorflow import keras

    def fail(batch: int, logs: object) -> None:
        raise KeyError("own error")

    model = linear(8)
    model.set_asynchronous_callbacks(True)
    with pytest.raises(KeyError, match="own error"):
        model.fit(
            POINTS,
            TARGETS,
            batch_size=4,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=fail)],
        )


def test_metrics_of_replicas_are_reduced_as_asked(two_replicas: None) -> None:
    model = linear(4)
    errors = ((POINTS @ WEIGHTS - TARGETS) ** 2).reshape(-1, 2, 4).mean((0, 2))  # Of each replica.
    expected = {"NONE": errors[-1], "LIST": errors, "SUM": errors.sum(), "mean": errors.mean()}
    for method, value in expected.items():
        model.set_replication_options(method)
        np.testing.assert_allclose(
            model.evaluate(POINTS, TARGETS, batch_size=4, verbose=0), value, rtol=1e-5, err_msg=method
        )
    with pytest.raises(ValueError, match="ReplicatedMetricReductionMethod"):
        model.set_replication_options("MAXIMUM")


def test_metrics_start_again_on_all_replicas(two_replicas: None) -> None:
    """Replica 0 is always wrong and replica 1 always right: the count of replica 0 never changes."""
    from tensorflow import keras

    model = keras.Sequential([keras.layers.Dense(2, use_bias=False, input_shape=(1,))])
    model.set_weights([np.array([[1.0, -1.0]], np.float32)])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=2)
    x, labels = np.ones((8, 1), np.float32), np.array([1, 1, 0, 0] * 2, np.int32)
    for _ in range(2):
        assert model.evaluate(x, labels, batch_size=2, verbose=0)[1] == 1.0


def test_custom_steps_are_honoured_without_accumulation(one_ipu: None) -> None:
    import tensorflow as tf
    from tensorflow import keras

    class Own(keras.Model):
        def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"own": loss}

        def predict_step(self, data: tf.Tensor) -> tf.Tensor:
            return self(data) + 1.0

    inputs = keras.Input(FEATURES)
    model = Own(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    model.set_weights([WEIGHTS])
    model.compile(keras.optimizers.SGD(0.1), steps_per_execution=4)
    history = model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, verbose=0)
    close(model, trained(4, sum, 1))
    assert list(history.history) == ["own"]
    shifted = model.predict(POINTS, batch_size=4, verbose=0)
    np.testing.assert_allclose(shifted, POINTS @ model.get_weights()[0] + 1, rtol=1e-5)
    model.set_gradient_accumulation_options(2)
    with pytest.raises(
        RuntimeError, match=r"The function `train_step` .* with gradient accumulation enabled"
    ):
        model.fit(POINTS, TARGETS, batch_size=4, verbose=0)


def test_overridden_functions_are_refused(one_ipu: None) -> None:
    from tensorflow import keras

    def overriding(name: str) -> Model:
        def own(self: Model, *args: object, **kwargs: object) -> object:
            return getattr(super(kind, self), name)(*args, **kwargs)

        kind = type("Overriding", (keras.Model,), {name: own, "__module__": __name__})
        inputs = keras.Input(FEATURES)
        model = kind(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    calls = {
        "train": lambda m: m.fit(POINTS, TARGETS, batch_size=4, verbose=0),
        "test": lambda m: m.evaluate(POINTS, TARGETS, batch_size=4, verbose=0),
        "predict": lambda m: m.predict(POINTS, batch_size=4, verbose=0),
    }
    for kind, call in calls.items():
        with pytest.raises(RuntimeError, match=f"The function `make_{kind}_function`"):
            call(overriding(f"make_{kind}_function"))
        for name in (f"{kind}_step", "call"):
            model = overriding(name)
            assignment = model.get_pipeline_stage_assignment()
            assignment[0].pipeline_stage = 0
            model.set_pipeline_stage_assignment(assignment)
            model.set_pipelining_options(gradient_accumulation_steps_per_replica=1)
            with pytest.raises(RuntimeError, match=f"The function `{name}`"):
                call(model)


def test_a_model_without_a_call_is_refused(one_ipu: None) -> None:
    from tensorflow import keras

    model = keras.Model()
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="The function `call`"):
        model.fit(POINTS, TARGETS, batch_size=4, verbose=0)


def test_an_own_minimize_is_refused_with_accumulation(one_ipu: None) -> None:
    from tensorflow import keras

    class Own(keras.optimizers.SGD):
        def minimize(self, *args: object, **kwargs: object) -> object:
            return super().minimize(*args, **kwargs)

    model = linear(4)
    model.compile(Own(0.1), "mse", steps_per_execution=4)
    model.fit(POINTS, TARGETS, batch_size=4, verbose=0)
    model.set_gradient_accumulation_options(2)
    with pytest.raises(ValueError, match="minimize"):
        model.fit(POINTS, TARGETS, batch_size=4, verbose=0)


def test_options_are_checked(one_ipu: None) -> None:
    model = linear()
    for steps in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="positive integer"):
            model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=steps)
        with pytest.raises(ValueError, match="positive integer"):
            model.set_pipelining_options(gradient_accumulation_steps_per_replica=steps)
    for name in ("opt", "num_mini_batches", "experimental_normalize_gradients"):
        with pytest.raises(ValueError, match=f"Found `{name}` key"):
            model.set_gradient_accumulation_options(2, **{name: 1})
    names = ["gradient_accumulation_count", "computational_stages", "repeat_count", "inputs", "infeed_queue"]
    for name in [*names, "outfeed_queue", "optimizer_function", "outfeed_loss", "outfeed_mask"]:
        with pytest.raises(ValueError, match=f"Found `{name}` key"):
            model.set_pipelining_options(2, **{name: 1})
    for mapping in ((0, 1), [0, "1"], 3):
        with pytest.raises(ValueError, match="`device_mapping` to be a list of integers"):
            model.set_pipelining_options(2, device_mapping=mapping)
    with pytest.raises(ValueError, match="Cannot parse"):
        model.set_gradient_accumulation_options(2, "most")
    with pytest.raises(ValueError, match="Found `dataset` key"):
        model.set_infeed_queue_options(dataset=1)
    with pytest.raises(ValueError, match="Found `outfeed_mode` key"):
        model.set_outfeed_queue_options(outfeed_mode=1)
    model.set_infeed_queue_options(prefetch_depth=5)
    model.set_outfeed_queue_options(buffer_depth=5)


def test_eager_execution_is_refused(one_ipu: None) -> None:
    with pytest.raises(RuntimeError, match="run_eagerly"):
        linear(run_eagerly=True).fit(POINTS, TARGETS, batch_size=4, verbose=0)


def test_single_batches_train_predict_and_evaluate(one_ipu: None) -> None:
    model = linear()
    model.train_on_batch(POINTS[:4], TARGETS[:4])
    close(model, WEIGHTS - 0.1 * gradient(WEIGHTS.astype(float), 0, 4))
    outputs = model.predict_on_batch(POINTS[:4])
    np.testing.assert_allclose(outputs, POINTS[:4] @ model.get_weights()[0], rtol=1e-5)


def test_a_schedule_steps_with_the_updates(one_ipu: None) -> None:
    from tensorflow import keras

    rates = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.0])
    model = linear()
    model.compile(keras.optimizers.SGD(rates), "mse", steps_per_execution=8)
    model.set_gradient_accumulation_options(4)
    model.fit(POINTS, TARGETS, batch_size=2, shuffle=False, verbose=0)
    weights = WEIGHTS.astype(float)
    for start in (
        0,
        8,
    ):  # Updates 0 and 1 have the rate 0.1, as in Keras: the boundary belongs to the first part.
        weights = weights - 0.1 * sum(gradient(weights, start + 2 * i, 2) for i in range(4))
    close(model, weights)
