"""Keras under an IPU strategy, rule by rule: steps, data, replicas and accumulation.

Numbers are compared with a loop over gradients on the CPU, from the same weights and data.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

if TYPE_CHECKING:
    from tf_keras import Model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
Array = npt.NDArray[np.float32]
SAMPLES, FEATURES = 32, 3
_random = np.random.RandomState(0)
POINTS = _random.rand(SAMPLES, FEATURES).astype(np.float32)
TARGETS = POINTS.sum(1, keepdims=True) + 1
WEIGHTS = _random.rand(FEATURES, 1).astype(np.float32)


def configure(ipus: int) -> None:
    from podrun.tensorflow.sdk.config import IPUConfig

    config = IPUConfig()
    config.auto_select_ipus = ipus
    config.configure_ipu_system()


@pytest.fixture
def one_ipu(ipu_device: None) -> Iterator[None]:
    from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

    configure(1)
    with IPUStrategyV1().scope():
        yield


@pytest.fixture
def two_replicas(ipu_device: None) -> Iterator[None]:
    from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

    configure(2)
    with IPUStrategyV1().scope():
        yield


def linear(steps: int = 1, **options: object) -> Model:
    from tensorflow import keras

    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, input_shape=(FEATURES,))])
    model.set_weights([WEIGHTS])
    model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=steps, **options)
    return model


def gradient(weights: Array, start: int, size: int) -> Array:
    """Of the mean squared error of samples from ``start`` on, in float64."""
    x, y = POINTS[start : start + size].astype(float), TARGETS[start : start + size]
    return 2 * x.T @ (x @ weights - y) / size


def trained(batch: int, update: Callable[[list[Array]], Array], together: int, epochs: int = 1) -> Array:
    """The weights after SGD, where ``together`` gradients of batches make one update."""
    weights = WEIGHTS.astype(float)
    for _ in range(epochs):
        for start in range(0, SAMPLES - SAMPLES % (batch * together), batch * together):
            grads = [gradient(weights, start + i * batch, batch) for i in range(together)]
            weights = weights - 0.1 * update(grads)
    return weights


def close(model: Model, expected: Array) -> None:
    np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-5, atol=1e-6)


def test_steps_per_execution_must_divide_the_steps_of_an_epoch(one_ipu: None) -> None:
    with pytest.raises(ValueError, match="must be a divisor"):
        linear(3).fit(POINTS, TARGETS, batch_size=4, verbose=0)
    with pytest.raises(ValueError, match="must be a divisor"):
        linear(2).fit(POINTS, TARGETS, batch_size=4, steps_per_epoch=3, verbose=0)


def test_more_steps_per_execution_than_an_epoch_has_are_cut(
    one_ipu: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = linear(100)
    model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, verbose=0)
    close(model, trained(4, sum, 1))
    assert int(model._steps_per_execution.numpy()) == 100


def test_too_little_data_is_refused(one_ipu: None) -> None:
    import tensorflow as tf

    for epochs in (1, 2):
        with pytest.raises(ValueError, match="does not have enough data"):
            linear().fit(POINTS, TARGETS, batch_size=4, steps_per_epoch=9, epochs=epochs, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((POINTS, TARGETS)).batch(4, drop_remainder=True)
    with pytest.raises(ValueError, match="at least 10 batches"):
        linear().fit(data, steps_per_epoch=5, epochs=2, verbose=0)


def test_arrays_last_for_every_epoch_that_says_its_steps(one_ipu: None) -> None:
    for options in ({"epochs": 2}, {"epochs": 3, "initial_epoch": 1}):
        model = linear(8)
        model.fit(POINTS, TARGETS, batch_size=4, steps_per_epoch=8, shuffle=False, verbose=0, **options)
        close(model, trained(4, sum, 1, epochs=2))


def test_data_of_unknown_size_need_steps(one_ipu: None) -> None:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((POINTS, TARGETS)).filter(lambda x, y: True)
    with pytest.raises(ValueError, match="Could not infer the size of the data"):
        linear().fit(data.batch(4, drop_remainder=True), verbose=0)
    model = linear(4)
    model.fit(data.repeat().batch(4, drop_remainder=True), steps_per_epoch=8, verbose=0)
    close(model, trained(4, sum, 1))


def test_partial_batches_and_generators_are_refused(one_ipu: None) -> None:
    import tensorflow as tf

    model = linear()
    with pytest.raises(ValueError, match="has a partial batch"):
        model.fit(POINTS, TARGETS, batch_size=5, verbose=0)
    with pytest.raises(ValueError, match="not fully defined"):
        model.fit(tf.data.Dataset.from_tensor_slices((POINTS, TARGETS)).batch(4), verbose=0)
    with pytest.raises(
        ValueError, match=r"generator is not supported .* use `tf\.data\.Dataset\.from_generator\(\)`"
    ):
        model.fit(((POINTS, TARGETS) for _ in range(3)), verbose=0)

    class Batches(tf.keras.utils.Sequence):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[Array, Array]:
            return POINTS, TARGETS

    with pytest.raises(ValueError, match="Batches is not supported"):
        model.fit(Batches(), verbose=0)


def test_data_of_doubles_become_floats(one_ipu: None) -> None:
    model = linear(8)
    model.fit(POINTS.astype(float), TARGETS.astype(float), batch_size=4, shuffle=False, verbose=0)
    close(model, trained(4, sum, 1))


def test_an_element_of_one_tuple_stays_one(ipu_device: None) -> None:
    """Data with integers of 64 bits are narrowed, in whichever structure they are."""
    import tensorflow as tf

    from podrun.tensorflow.keras.data_rules import IPUDataHandler

    whole, real = np.arange(3), np.arange(3.0)
    for element in (((whole, real),), (whole, real), {"a": whole}, (whole,), whole):
        (epoch,) = IPUDataHandler(tf.data.Dataset.from_tensors(element)).enumerate_epochs()
        taken = next(epoch[1])
        tf.nest.assert_same_structure(taken, element)
        assert {t.dtype for t in tf.nest.flatten(taken)} <= {tf.int32, tf.float32}


def test_replicas_sum_gradients_of_consecutive_elements(two_replicas: None) -> None:
    model = linear(4)
    model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, epochs=2, verbose=0)
    close(model, trained(4, sum, 2, epochs=2))


def test_epochs_of_all_data_start_again_with_replicas(two_replicas: None) -> None:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((POINTS, TARGETS)).batch(4, drop_remainder=True)
    model = linear(4)
    model.fit(data, steps_per_epoch=8, epochs=3, verbose=0)  # All eight batches: four steps of two replicas.
    close(model, trained(4, sum, 2, epochs=3))
    with pytest.raises(ValueError, match="can generate at least 10 batches"):
        linear().fit(data, steps_per_epoch=10, verbose=0)
    with pytest.raises(ValueError, match="all 2 replicas are requested to run 1 steps each"):
        linear().fit(data, steps_per_epoch=1, verbose=0)
    with pytest.raises(ValueError, match="at least 18 batches"):
        linear().fit(data, steps_per_epoch=6, epochs=3, verbose=0)
    assert linear(2).predict(POINTS, batch_size=2, steps=2).shape == (4, 1)


def test_steps_that_replicas_cannot_share_are_dropped(two_replicas: None) -> None:
    model = linear(1)
    count = 28  # Seven batches: three steps of two replicas.
    outputs = model.predict(POINTS[:count], batch_size=4, verbose=0)
    assert outputs.shape == (24, 1)
    np.testing.assert_allclose(outputs, POINTS[:24] @ WEIGHTS, rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "update"),
    [("sum", sum), ("MEAN", lambda g: sum(g) / len(g)), ("running_mean", lambda g: sum(g) / len(g))],
)
def test_accumulation_reduces_gradients(
    one_ipu: None, method: str, update: Callable[[list[Array]], Array]
) -> None:
    model = linear(8)
    model.set_gradient_accumulation_options(4, method)
    model.fit(POINTS, TARGETS, batch_size=2, shuffle=False, verbose=0)
    close(model, trained(2, update, 4))
    assert int(model.optimizer.iterations.numpy()) == 4


def test_accumulation_must_divide_an_execution(one_ipu: None) -> None:
    model = linear(4)
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=3)
    with pytest.raises(RuntimeError, match="not divisible"):
        model.fit(POINTS, TARGETS, batch_size=4, verbose=0)
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=4)
    model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, verbose=0)
    close(model, trained(4, sum, 4))


def test_accumulation_with_replicas(two_replicas: None) -> None:
    model = linear(4)
    model.set_gradient_accumulation_options(2, "mean")
    model.fit(POINTS, TARGETS, batch_size=4, shuffle=False, verbose=0)
    close(model, trained(4, lambda g: sum(g) / 2, 4))
