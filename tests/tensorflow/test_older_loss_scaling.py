"""Loss scaling of SDKs before `ALSOptimizer`: when its factor changes, and that updates do not depend on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


@pytest.fixture(autouse=True)
def scope(ipu_device: None) -> Iterator[None]:
    from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

    with IPUStrategyV1().scope():
        yield


def test_loss_scaling_of_older_sdks() -> None:
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.older_loss_scaling import KerasLossScaling

    optimizer = KerasLossScaling(tf_keras.optimizers.legacy.SGD(0.125), 4, 2, 2.0, 0.25)
    variable = tf.Variable(np.ones(2, np.float16))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> None:
        optimizer.minimize(lambda: tf.reduce_sum(variable * tf.cast(x, tf.float16)), [variable])

    factors = []
    for size in (1.0, 2.0, 40000.0, 1.0, 1.0, 1.0):  # 40000 * 8 overflows.
        tf.distribute.get_strategy().run(step, args=[tf.constant(size)])
        factors.append(float(optimizer.loss_scaling_factor.numpy()))
    assert factors == [4, 8, 8, 2, 2, 4]  # Each second call, with the counts of both.
    assert (int(optimizer.update_counter.numpy()), optimizer.histogram.numpy().tolist()) == (1, [0, 0])
    assert [optimizer.decrease_factor, optimizer.normalized_histogram.numpy().tolist()] == [0.25, [0, 0]]
    optimizer.update_frequency = 3
    again = KerasLossScaling.from_config(optimizer.get_config())
    assert (again.update_frequency, again.decrease_factor) == (3, 0.25)
    optimizer.reset()
    assert (float(optimizer.loss_scaling_factor.numpy()), int(optimizer.update_counter.numpy())) == (4, 0)
    several = optimizer.get_unscaled_gradients(g for g in (tf.constant(8.0), None))
    assert [g if g is None else float(g) for g in several] == [2.0, None]
    with pytest.raises(ValueError, match="increase_factor must be greater than decrease_factor"):
        optimizer.decrease_factor = 2.0
    with pytest.raises(ValueError, match="histogram is a read only property"):
        optimizer.histogram = 0
    with pytest.raises(ValueError, match="decrease_factor must be nonzero and positive"):
        KerasLossScaling(tf_keras.optimizers.legacy.SGD(0.1), decrease_factor=0)


@pytest.mark.parametrize("older", [True, False])
def test_an_accumulating_optimizer_around_one_that_scales_the_loss(older: bool) -> None:
    """Two gradients of 1 with the rate 1/8: from 1 to 3/4, whatever the scale."""
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.accumulating_wrappers import KerasGradientAccumulation
    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer
    from podrun.tensorflow.addons.older_loss_scaling import KerasLossScaling

    scaling = (KerasLossScaling if older else ALSOptimizer)(tf_keras.optimizers.legacy.SGD(0.125), 4)
    optimizer = KerasGradientAccumulation(scaling, 2)
    variable = tf.Variable([1.0])

    @tf.function(autograph=False)
    def step() -> None:
        optimizer.minimize(lambda: tf.reduce_sum(variable), [variable])

    for _ in range(2):
        tf.distribute.get_strategy().run(step)
    assert variable.numpy().tolist() == [0.75]


@pytest.mark.slow
def test_the_scale_of_older_sdks_leaves_updates_as_they_are() -> None:
    """Of a model, whose gradients accumulate too: weights are those without scaling."""
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.older_loss_scaling import KerasLossScaling

    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(12, 2)

    def trained(scaled: bool) -> np.ndarray:
        tf.keras.utils.set_random_seed(1)
        sgd = tf_keras.optimizers.legacy.SGD(0.125)
        model = tf_keras.Sequential([tf_keras.layers.Dense(3, input_shape=(2,))])
        model.compile(KerasLossScaling(sgd, 4, 2) if scaled else sgd, "mse", steps_per_execution=2)
        model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=2)
        model.fit(x, x.sum(1), batch_size=2, epochs=2, shuffle=False, verbose=0)
        if scaled:
            assert float(model.optimizer.loss_scaling_factor.numpy()) == 4 * 2**3
        return np.asarray(model.get_weights()[0])

    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-6)
