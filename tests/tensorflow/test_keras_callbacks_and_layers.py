"""Keras' callbacks, layers that learn from data or draw, and outfeeds that pipelines add up, beside plain Keras and
closed formulas.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.tensorflow.staged_models import staged_sequential
from tests.tensorflow.test_keras_rules import (
    POINTS,
    TARGETS,
    WEIGHTS,
    close,
    configure,
    gradient,
    linear,
    trained,
)
from tests.tensorflow.test_keras_rules import one_ipu as one_ipu
from tests.tensorflow.test_keras_rules import two_replicas as two_replicas

if TYPE_CHECKING:
    import tensorflow as tf
    from tf_keras import Model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


def still(**options: object) -> Model:
    """A pipeline of two stages whose updates change no weights; 8 steps are an execution and 4 an update."""
    model = staged_sequential()
    model.set_pipelining_options(4, **options)
    model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=8)
    model.optimizer.learning_rate.assign(0.0)
    return model


def running_means(model: Model) -> np.ndarray:
    """The loss after each of the 8 steps, which is a mean since the epoch began."""
    errors = ((model(POINTS).numpy().astype(float) - TARGETS) ** 2).reshape(8, 4).mean(1)
    return np.cumsum(errors) / np.arange(1, 9)


def test_a_pipeline_that_accumulates_its_outfeed_reports_the_mean_of_an_updates_metrics(
    two_replicas: None,
) -> None:
    model = still(accumulate_outfeed=True)
    history = model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, verbose=0).history
    means = running_means(model)
    np.testing.assert_allclose(history["loss"], [means[4:].mean()], rtol=1e-5)
    assert abs(means[4:].mean() / means[-1] - 1) > 1e-3
    losses = model.evaluate(POINTS, TARGETS, batch_size=4, verbose=0)
    np.testing.assert_allclose(losses[0], means.mean(), rtol=1e-5)


def test_the_type_of_an_accumulated_outfeed(two_replicas: None) -> None:
    import tensorflow as tf

    model = still(accumulate_outfeed=True, accumulate_outfeed_dtype=np.float16)
    history = model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, verbose=0).history
    shares = (running_means(model)[4:] / 4).astype(np.float16)
    assert history["loss"] == [pytest.approx(float(shares.sum(dtype=np.float16)), rel=1e-3)]
    assert history["loss"][0] == float(np.float16(history["loss"][0]))
    names: list[str] = []

    def halves_of_the_second(value: tf.Tensor) -> tf.DType:
        names.append(value.name)
        return tf.float16 if value.name.endswith("PipelineStage:2") else value.dtype

    model.set_pipelining_options(4, accumulate_outfeed_dtype=halves_of_the_second)
    history = model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, verbose=0).history
    assert [name.rpartition("/")[2] for name in names] == ["PipelineStage:1", "PipelineStage:2"]
    assert history["loss"][0] != float(np.float16(history["loss"][0]))
    assert history["mae"][0] == float(np.float16(history["mae"][0]))


def test_training_goes_on_after_an_interruption(one_ipu: None, tmp_path: Path) -> None:
    from tensorflow import keras

    class Interrupts(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        linear(8).fit(
            POINTS,
            TARGETS,
            batch_size=4,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[backup, Interrupts()],
        )
    model = linear(8)
    history = model.fit(
        POINTS, TARGETS, batch_size=4, epochs=3, shuffle=False, verbose=0,
        callbacks=[keras.callbacks.BackupAndRestore(tmp_path)],
    )  # fmt: skip
    assert history.epoch == [1, 2]
    close(model, trained(4, sum, 1, epochs=3))


def test_layers_learn_from_data_under_a_strategy(one_ipu: None) -> None:
    from tensorflow import keras

    layer = keras.layers.Normalization()
    layer.adapt(POINTS, batch_size=5)
    model = keras.Sequential([keras.Input(3), layer])
    expected = (POINTS - POINTS.mean(0, dtype=float)) / POINTS.std(0, dtype=float)
    np.testing.assert_allclose(model.predict(POINTS, batch_size=4, verbose=0), expected, rtol=1e-4, atol=1e-5)


def test_numbers_become_classes_by_boundaries(one_ipu: None) -> None:
    from tensorflow import keras

    limits = [0.2, 0.5, 0.8]
    model = keras.Sequential([keras.Input(4), keras.layers.Discretization(limits)])
    values = np.float32([[-1, 0.2, 0.19, 0.5], [0.79, 0.8, 7, 0.3]])
    outputs = model.predict(values, batch_size=1, verbose=0)
    np.testing.assert_array_equal(outputs, np.digitize(values, np.float32(limits)))


LAYERS = {
    "flip": lambda layers: layers.RandomFlip("horizontal"),
    "contrast": lambda layers: layers.RandomContrast(0.5),
    "brightness": lambda layers: layers.RandomBrightness(0.3, value_range=(0, 1)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_change_images_draw_on_the_device(
    one_ipu: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf
    from tensorflow import keras

    make: Callable[[object], keras.layers.Layer] = LAYERS[name]
    image = np.tile(np.linspace(0.1, 0.6, 4, dtype=np.float32)[None, None, :, None], (16, 4, 1, 3))
    model = keras.Sequential([keras.Input((4, 4, 3)), make(keras.layers)])
    model.compile(steps_per_execution=16)
    monkeypatch.setattr(model, "predict_step", lambda data: model(data, training=True))
    drawn = model.predict(tf.data.Dataset.from_tensor_slices(image).batch(1, True), verbose=0)
    assert drawn.shape == image.shape
    assert 1 < len({sample.tobytes() for sample in drawn}) <= 16
    if name == "flip":
        assert all(np.array_equal(s, image[0]) or np.array_equal(s, image[0][:, ::-1]) for s in drawn)


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch", "predict_on_batch"])
def test_one_batch_is_too_little_for_several_steps_or_replicas(two_replicas: None, method: str) -> None:
    import tensorflow as tf

    model = linear(3)
    data = (POINTS[:4],) if method == "predict_on_batch" else (POINTS[:4], TARGETS[:4])
    words = (
        f"`{method}` takes one batch, but an execution of the model .* takes 6: `steps_per_execution` is 3"
    )
    with pytest.raises(tf.errors.OutOfRangeError, match=words):
        getattr(model, method)(*data)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_update_of_the_programs_own_sees_what_is_accumulated(ipu_device: None, replicas: int) -> None:
    """It clips the sum of three gradients of its replica, gives it to an outfeed, and adds up those of the replicas."""
    from tensorflow import keras

    from podrun.tensorflow.sdk.ipu_outfeed_queue import IPUOutfeedQueue
    from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

    queue = IPUOutfeedQueue()

    class Clips(keras.optimizers.SGD):  # type: ignore[misc]
        def apply_gradients(self, grads_and_vars: object, name: str | None = None) -> object:
            import tensorflow as tf

            pairs = [(tf.clip_by_value(g, -2.0, 2.0), v) for g, v in grads_and_vars]  # type: ignore[attr-defined]
            queue.enqueue(pairs[0][0])
            return super().apply_gradients(pairs)

    configure(replicas)
    with IPUStrategyV1().scope():
        model = linear(3)
        model.compile(Clips(0.1), "mse", steps_per_execution=3)
        model.set_gradient_accumulation_options(3)
        model.fit(POINTS[:24], TARGETS[:24], batch_size=8 // replicas, shuffle=False, verbose=0)
    size = 8 // replicas
    sums = [
        sum(gradient(WEIGHTS, (step * replicas + replica) * size, size) for step in range(3))
        for replica in range(replicas)
    ]
    clipped = np.clip(np.array(sums), -2, 2)
    assert (np.abs(np.array(sums)) > 2).any()
    sent = np.asarray(queue.dequeue())
    np.testing.assert_allclose(sent.reshape(replicas, -1), clipped.reshape(replicas, -1), rtol=1e-5)
    close(model, WEIGHTS - 0.1 * clipped.sum(0))


@pytest.mark.parametrize("case", ["class of Keras", "class of the program", "static"])
def test_an_update_that_stands_on_the_optimizer_is_called_once_for_an_update(
    one_ipu: None, case: str
) -> None:
    from tensorflow import keras

    def clipped(pairs: object, name: str | None = None) -> object:
        import tensorflow as tf

        changed = [(tf.clip_by_value(g, -2.0, 2.0), v) for g, v in pairs]  # type: ignore[attr-defined]
        return keras.optimizers.SGD.apply_gradients(optimizer, changed, name)

    class Passes(keras.optimizers.SGD):  # type: ignore[misc]
        def apply_gradients(self, pairs: object, name: str | None = None) -> object:
            return super().apply_gradients(pairs, name)

    class Alone(keras.optimizers.SGD):  # type: ignore[misc]
        apply_gradients = staticmethod(clipped)

    kinds = {"class of Keras": keras.optimizers.SGD, "class of the program": Passes, "static": Alone}
    for steps in (1, 2):
        optimizer = kinds[case](0.1)
        if case != "static":
            optimizer.apply_gradients = clipped
        total = sum(gradient(WEIGHTS, step * 8, 8) for step in range(steps))
        assert (np.abs(total) > 2).any()
        model = linear()
        model.compile(optimizer, "mse", steps_per_execution=steps)
        model.set_gradient_accumulation_options(steps)
        model.fit(POINTS[: 8 * steps], TARGETS[: 8 * steps], batch_size=8, shuffle=False, verbose=0)
        close(model, WEIGHTS - 0.1 * np.clip(total, -2, 2))
