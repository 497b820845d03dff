"""The SDK's optimizers beside TensorFlow against formulas in NumPy and Keras on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import tensorflow as tf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
_random = np.random.RandomState(3)


@pytest.fixture(autouse=True)
def scope(ipu_device: None) -> Iterator[None]:
    from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

    with IPUStrategyV1().scope():
        yield


GRADIENTS = [_random.randn(4, 3).astype(np.float32) for _ in range(6)]
START = _random.randn(4, 3).astype(np.float32)


def plus_tenth(pairs):
    return [(g + 0.1, v) for g, v in pairs]


def updated(make: Callable[[], object], count: int = 6) -> np.ndarray:
    """A variable after updates with `GRADIENTS` on the IPU."""
    import tensorflow as tf

    variable, optimizer = tf.Variable(START, name="w"), make()

    @tf.function
    def step(gradient: tf.Tensor) -> None:
        optimizer.apply_gradients([(gradient, variable)])

    for gradient in GRADIENTS[:count]:
        tf.distribute.get_strategy().run(step, args=[tf.constant(gradient)])
    return np.asarray(variable.numpy())


def _adam(debiasing: bool, amsgrad: bool = False) -> np.ndarray:
    w, m, v, most = START.astype(float), 0.0, 0.0, 0.0
    for t, g in enumerate(GRADIENTS, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.astype(float) ** 2
        first, second = (m / (1 - 0.9**t), v / (1 - 0.999**t)) if debiasing else (m, v)
        most = np.maximum(most, second)
        w = w - 0.01 * first / (np.sqrt(most if amsgrad else second) + 1e-7)
    return w


@pytest.mark.parametrize(("debiasing", "amsgrad"), [(True, False), (False, False), (True, True)])
def test_adam_updates_as_its_formula(debiasing: bool, amsgrad: bool) -> None:
    from podrun.tensorflow.addons.state_optimizers import AdamIpuOptimizer

    mine = updated(lambda: AdamIpuOptimizer(0.01, debiasing=debiasing, amsgrad=amsgrad))
    np.testing.assert_allclose(mine, _adam(debiasing, amsgrad), rtol=1e-5, atol=1e-5)


def test_adam_keeps_moments_in_their_types() -> None:
    import tensorflow as tf

    from podrun.tensorflow.addons.state_optimizers import AdamIpuOptimizer

    optimizer = AdamIpuOptimizer(0.01, m_dtype=tf.float16)
    mine = updated(lambda: optimizer)
    assert [w.dtype.base_dtype for w in optimizer.weights[1:]] == [tf.float16, tf.float32]
    np.testing.assert_allclose(mine, _adam(True), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_lamb_updates_as_its_formula(clip: float | None) -> None:
    from podrun.tensorflow.addons.state_optimizers import LAMBIpuOptimizer

    w, m, v = START.astype(float), 0.0, 0.0
    for t, g in enumerate(GRADIENTS, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.astype(float) ** 2
        step = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.1 * w
        norm = np.linalg.norm(w) if clip is None else min(np.linalg.norm(w), clip)
        w = w - 0.01 * norm / np.linalg.norm(step) * step
    mine = updated(lambda: LAMBIpuOptimizer(0.01, weight_decay_rate=0.1, weight_norm_clip=clip))
    np.testing.assert_allclose(mine, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_updates_as_its_formula(nesterov: bool) -> None:
    from podrun.tensorflow.addons.state_optimizers import SGDIpuOptimizer

    w, m = START.astype(float), 0.0
    for g in GRADIENTS:
        m = 0.9 * m - 0.1 * g
        w = w + (0.9 * m - 0.1 * g if nesterov else m)
    mine = updated(lambda: SGDIpuOptimizer(0.1, 0.9, nesterov))
    np.testing.assert_allclose(mine, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["SUM", "MEAN", "RUNNING_MEAN"])
def test_an_accumulating_optimizer(method: str) -> None:
    import tf_keras

    from podrun.tensorflow.addons.accumulating_wrappers import KerasGradientAccumulation

    optimizer = KerasGradientAccumulation(tf_keras.optimizers.legacy.SGD(0.1), 3, reduction_method=method)
    part = 1 if method == "SUM" else 3
    expected = START - 0.1 * (sum(GRADIENTS[:3]) + sum(GRADIENTS[3:])) / part
    np.testing.assert_allclose(updated(lambda: optimizer), expected, rtol=1e-5, atol=1e-5)
    assert int(optimizer.iterations.numpy()) == 2
    with pytest.raises(ValueError, match="OptimizerV2"):
        KerasGradientAccumulation(None, 3)


def test_an_accumulating_optimizer_clips_each_gradient() -> None:
    """As in the SDK, whose wrapper accumulates where the wrapped optimizer applies what it has transformed."""
    import tf_keras

    from podrun.tensorflow.addons.accumulating_wrappers import KerasGradientAccumulation

    sgd = tf_keras.optimizers.legacy.SGD

    def expected(one: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return START - 0.1 * sum(one(gradient.astype(float)) for gradient in GRADIENTS)

    for options, one in (
        ({"clipvalue": 0.5}, lambda g: np.clip(g, -0.5, 0.5)),
        ({"clipnorm": 1.0}, lambda g: g / max(1.0, np.linalg.norm(g))),
        ({"gradient_transformers": [plus_tenth]}, lambda g: g + 0.1),
    ):
        mine = updated(lambda o=options: KerasGradientAccumulation(sgd(0.1, **o), 3))
        np.testing.assert_allclose(mine, expected(one), rtol=1e-5, atol=1e-5)

    class Reversed(sgd):  # type: ignore[misc]
        def _transform_gradients(self, pairs):
            return super()._transform_gradients([(-g, v) for g, v in pairs])

    mine = updated(lambda: KerasGradientAccumulation(Reversed(0.1, clipvalue=0.5), 3))
    np.testing.assert_allclose(mine, expected(lambda g: np.clip(-g, -0.5, 0.5)), rtol=1e-5, atol=1e-5)
    alone = sgd(0.1)
    assert KerasGradientAccumulation(alone, 1) is alone


def test_wrapped_optimizers_may_have_updates_of_their_own() -> None:
    """Their ``apply_gradients`` names its arguments as it likes, and need not take all of Keras'."""
    import tf_keras

    from podrun.tensorflow.addons.accumulating_wrappers import KerasGradientAccumulation
    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer

    class Doubles(tf_keras.optimizers.legacy.SGD):  # type: ignore[misc]
        def apply_gradients(self, pairs, name=None):
            return super().apply_gradients([(2.0 * g, v) for g, v in pairs], name)

    expected = START - 0.2 * sum(GRADIENTS)
    accumulating = KerasGradientAccumulation(Doubles(0.1), 3)
    np.testing.assert_allclose(updated(lambda: accumulating), expected, rtol=1e-5, atol=1e-5)
    assert int(accumulating.iterations.numpy()) == 2
    scaling = ALSOptimizer(Doubles(0.1), 4, update_frequency=100)
    around = KerasGradientAccumulation(ALSOptimizer(Doubles(0.1), 4, update_frequency=100), 3)
    for optimizer in (scaling, around):
        unscaled = START - 0.2 * sum(GRADIENTS) / 4
        np.testing.assert_allclose(updated(lambda o=optimizer: o), unscaled, rtol=1e-5, atol=1e-5)


def test_wrappers_of_old_sdks_work_on_gradients_just_before_the_update() -> None:
    """Outermost first, after the gradient transformers of the wrapped optimizer."""
    import tf_keras

    from podrun.tensorflow.addons.accumulating_wrappers import (
        KerasCrossReplica,
        KerasGradientAccumulation,
        KerasMapGradient,
    )
    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer

    def wrapped():
        inner = tf_keras.optimizers.legacy.SGD(0.1, momentum=0.5, gradient_transformers=[plus_tenth])
        squared = KerasMapGradient(inner, lambda gradient, _: gradient * gradient)
        return KerasMapGradient(KerasCrossReplica(squared), lambda gradient, variable: gradient - variable)

    weights, momentum = START, np.zeros_like(START)
    for gradient in GRADIENTS:
        momentum = 0.5 * momentum - 0.1 * (gradient + 0.1 - weights) ** 2
        weights = weights + momentum
    np.testing.assert_allclose(updated(wrapped), weights, rtol=1e-5, atol=1e-5)
    optimizer = KerasCrossReplica(KerasCrossReplica(tf_keras.optimizers.legacy.SGD(0.1)))
    optimizer.learning_rate = 0.25
    again = KerasCrossReplica.from_config(optimizer.get_config())
    assert float(again.learning_rate) == 0.25
    for inner in (
        ALSOptimizer(tf_keras.optimizers.legacy.SGD(0.1)),
        KerasGradientAccumulation(tf_keras.optimizers.legacy.SGD(0.1), 2),
        tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.1)),
    ):
        with pytest.raises(ValueError, match=f"let {type(inner).__name__} wrap CrossReplicaOptimizer"):
            KerasCrossReplica(inner)

    class Plain(tf_keras.optimizers.legacy.Optimizer):  # type: ignore[misc]
        def _resource_apply_dense(self, grad, var):
            return var.assign_sub(0.1 * grad)

    np.testing.assert_allclose(
        updated(lambda: KerasCrossReplica(Plain("plain"))), START - 0.1 * sum(GRADIENTS), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(ValueError, match="must be a callable"):
        KerasMapGradient(tf_keras.optimizers.legacy.SGD(0.1), None)


def test_automatic_loss_scaling() -> None:
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer

    optimizer = ALSOptimizer(tf_keras.optimizers.legacy.SGD(0.1), 4, update_frequency=2)
    variable = tf.Variable(np.ones(2, np.float16))

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(variable * tf.cast(x, tf.float16)))
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    factors = []
    for size in (1.0, 1.0, 3000.0, 1.0, 1.0, 1.0):  # 3000 * 4 is above the edge.
        tf.distribute.get_strategy().run(step, args=[tf.constant(size)])
        factors.append(float(optimizer.loss_scaling_factor.numpy()))
    assert factors == [4, 4, 2, 2, 2, 4]  # Each third call, after two that only count.
    assert (int(optimizer.update_counter.numpy()), float(optimizer.previous_loss_scaling_factor.numpy())) == (
        0,
        2,
    )
    expected = 1 - 0.1 * np.array([1, 1, 3000, 1, 1, 1]).sum()
    np.testing.assert_allclose(variable.numpy().astype(float), expected, rtol=2e-3)
    with pytest.raises(ValueError, match="power of two"):
        ALSOptimizer(tf_keras.optimizers.legacy.SGD(), 3)


def test_automatic_loss_scaling_of_accumulated_gradients() -> None:
    """The factor may change with each mini-batch, as in the SDK: what is accumulated is divided by it before."""
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.capturing import ALSGradientAccumulationOptimizer
    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer

    scaling = ALSOptimizer(tf_keras.optimizers.legacy.SGD(0.1), 4, update_frequency=1)
    optimizer = ALSGradientAccumulationOptimizer(scaling, 2)
    variable = tf.Variable(np.ones(2, np.float16))

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(variable * tf.cast(x, tf.float16)))
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    factors, values = [], []
    for size in (1.0, 2.0, 3.0, 4.0):
        tf.distribute.get_strategy().run(step, args=[tf.constant(size)])
        factors.append(float(scaling.loss_scaling_factor.numpy()))
        values.append(float(variable.numpy()[0]))
    assert factors == [8, 16, 32, 64]
    np.testing.assert_allclose(values, [1, 1 - 0.1 * 3, 1 - 0.1 * 3, 1 - 0.1 * 10], atol=2e-3)
    counting = ALSOptimizer(
        tf_keras.optimizers.legacy.SGD(0.1), update_frequency=64, captured_grads_only=True
    )
    around = ALSGradientAccumulationOptimizer(counting, 2)

    @tf.function
    def captured() -> None:
        gradient = tf.ones(3, tf.float16)
        around.apply_gradients([(gradient[:2], variable)], captured_grads={"a": gradient})

    for _ in range(3):
        tf.distribute.get_strategy().run(captured)
    assert counting.histogram.numpy().tolist() == [9, 0]
    assert (int(counting.update_counter.numpy()), int(counting.iterations.numpy())) == (3, 1)
    unscaled = optimizer.get_unscaled_gradients([tf.constant(32.0), None])
    assert [None if g is None else float(g) for g in unscaled] == [0.5, None]
    with pytest.raises(ValueError, match="must only wrap an instance of ALSOptimizer"):
        ALSGradientAccumulationOptimizer(tf_keras.optimizers.legacy.SGD(0.1), 2)  # type: ignore[arg-type]


def test_settings_of_loss_scaling_change_and_broken_gradients_count() -> None:
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer

    optimizer = ALSOptimizer(tf_keras.optimizers.legacy.SGD(0.0), 4, update_frequency=1)
    variable = tf.Variable(np.ones(4, np.float16))

    @tf.function
    def step(gradient: tf.Tensor, captured: tf.Tensor) -> None:
        optimizer.apply_gradients([(gradient, variable)], captured_grads={"a": captured})

    def factor_after(gradient: float, captured: float = 1.0) -> float:
        sizes = [tf.fill([4], tf.cast(size, tf.float16)) for size in (gradient, captured)]
        tf.distribute.get_strategy().run(step, args=sizes)
        return float(optimizer.loss_scaling_factor.numpy())

    assert [factor_after(x) for x in (1.0, np.nan, np.inf, np.nan)] == [8, 4, 2, 1]
    optimizer.increase_factor = 4
    assert factor_after(1.0) == 4  # In a program that was traced before.
    assert optimizer.decrease_factor == 0.25
    optimizer.ratio_threshold = 0.4
    assert factor_after(10000.0, 10000.0) == 1
    optimizer.ratio_threshold = 0.6
    assert factor_after(10000.0) == 4  # Half of the values.
    optimizer.lpf_alpha = (
        0.75  # A quarter of the gradients counts, and all of what is captured when it is due.
    )
    assert float(optimizer.loss_scaling_factor.numpy()) == 4
    assert factor_after(1.0, 10000.0) == 1  # Four fifths.
    assert factor_after(10000.0) == 4  # One fifth.
    optimizer.update_frequency = 3
    assert [factor_after(1.0) for _ in range(4)] == [4, 4, 4, 16]
    for name, value, message in (
        ("update_frequency", 0, "nonzero and positive"), ("increase_factor", 3, "power of two"),
        ("ratio_threshold", 1.0, "greater than zero"), ("lpf_alpha", 2.0, "between 0 and 1"),
        ("max_loss_scaling_factor", 4, "must be less than max"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            setattr(optimizer, name, value)
    assert (optimizer.update_frequency, optimizer.increase_factor, optimizer.lpf_alpha) == (3, 4, 0.75)


def test_wrapping_optimizers_come_back_from_files(tmp_path: Path) -> None:
    import tf_keras

    from podrun.tensorflow.addons.accumulating_wrappers import KerasCrossReplica, KerasGradientAccumulation
    from podrun.tensorflow.addons.capturing import ALSGradientAccumulationOptimizer, ALSOptimizerAdam
    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer

    sgd = tf_keras.optimizers.legacy.SGD
    for optimizer in (
        ALSOptimizer(sgd(0.25), 4),
        KerasCrossReplica(sgd(0.25)),
        KerasGradientAccumulation(ALSOptimizer(sgd(0.25), 4), 3),
        ALSGradientAccumulationOptimizer(ALSOptimizerAdam(0.25, beta_1=0.5, update_frequency=3), 3),
    ):
        model = tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(3,))])
        model.compile(optimizer, "mse")
        for name in ("model.h5", "folder"):
            model.save(tmp_path / name)
            loaded = tf_keras.models.load_model(tmp_path / name).optimizer
            assert type(loaded) is type(optimizer)
            assert loaded.get_config() == optimizer.get_config()


def test_functions_of_gradients_come_back_from_files(tmp_path: Path) -> None:
    """By their names, which programs register or give to ``load_model``."""
    import tf_keras

    from podrun.tensorflow.addons.accumulating_wrappers import KerasGradientAccumulation, KerasMapGradient

    sgd = tf_keras.optimizers.legacy.SGD
    own, given = {"halved": halved}, {"custom_objects": {"halved": halved}}
    for optimizer in (
        KerasMapGradient(sgd(0.25), halved),
        KerasGradientAccumulation(KerasMapGradient(sgd(0.25), halved), 3),
    ):
        again = type(optimizer).from_config(optimizer.get_config(), own)
        mapping = again if isinstance(again, KerasMapGradient) else again._opt
        assert mapping.gradient_mapping_function is halved
        model = tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(3,))])
        model.compile(optimizer, "mse")
        for name in ("model.h5", "folder"):
            model.save(tmp_path / name)
            loaded = tf_keras.models.load_model(tmp_path / name, **given).optimizer
            assert loaded.get_config() == optimizer.get_config()
            with pytest.raises(ValueError, match=r"the function `halved`.*register_keras_serializable"):
                tf_keras.models.load_model(tmp_path / name)
    nameless = KerasGradientAccumulation(KerasMapGradient(sgd(0.25), lambda gradient, _: gradient), 3)
    with pytest.raises(ValueError, match="the function `<lambda>`"):
        KerasGradientAccumulation.from_config(nameless.get_config())


def halved(gradient: Any, variable: Any) -> Any:
    return gradient / 2
