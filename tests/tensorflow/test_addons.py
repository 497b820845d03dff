"""The SDK's layers and optimizers beside TensorFlow against NumPy and Keras on the CPU, over generated shapes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import tensorflow as tf
    from tf_keras.layers import Layer

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


def on_ipu(function: Callable[..., object], *args: np.ndarray) -> list[np.ndarray]:
    """Results of a function in a program, flat."""
    import tensorflow as tf

    program = tf.function(function)
    results = tf.distribute.get_strategy().run(program, args=[tf.constant(a) for a in args])
    return [np.asarray(r) for r in tf.nest.flatten(results)]


def with_gradients(layer: Layer, *args: np.ndarray, **options: object) -> Callable[..., list[tf.Tensor]]:
    """A function that gives a layer's results, and gradients of their weighted sum for inputs and weights."""
    import tensorflow as tf

    def run(*inputs: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(inputs[0])
            results = tf.nest.flatten(layer(*inputs, **options))
            loss = tf.add_n([tf.reduce_sum(tf.sin(r)) for r in results])
        grads = tape.gradient(loss, [inputs[0], *layer.trainable_variables])
        return [*results, *grads]

    return run


def agree(mine: list[np.ndarray], expected: list[np.ndarray], rtol: float = 2e-5, atol: float = 2e-5) -> None:
    assert len(mine) == len(expected)
    for a, b in zip(mine, expected, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), rtol=rtol, atol=atol)


RECURRENT = [
    ("LSTM", (3, 4, 2), 5, {}),
    ("LSTM", (1, 6, 3), 2, {"return_sequences": True, "return_state": True}),
    ("LSTM", (2, 3, 4), 3, {"activation": "relu", "recurrent_activation": "hard_sigmoid"}),
    ("GRU", (3, 4, 2), 5, {"return_state": True}),
    ("GRU", (2, 5, 3), 4, {"reset_after": False, "return_sequences": True}),
]


@pytest.mark.parametrize(("kind", "shape", "units", "options"), RECURRENT)
def test_recurrent_layers_are_those_of_keras(
    kind: str, shape: tuple[int, ...], units: int, options: dict[str, object]
) -> None:
    import tf_keras

    from podrun.tensorflow.addons import recurrent_layers

    x = _random.randn(*shape).astype(np.float32)
    mine = getattr(recurrent_layers, f"Popnn{kind}")(units, **options)
    plain = getattr(tf_keras.layers, kind)(units, implementation=2, **options)
    plain.build(shape)
    mine.build(shape)
    values = [_random.randn(*w.shape).astype(np.float32) * 0.5 for w in plain.get_weights()]
    assert [w.shape for w in mine.get_weights()] == [v.shape for v in values]
    mine.set_weights(values)
    plain.set_weights(values)
    agree(on_ipu(with_gradients(mine), x), with_gradients(plain)(np_to_tensor(x)))


def np_to_tensor(x: np.ndarray) -> tf.Tensor:
    import tensorflow as tf

    return tf.constant(x)


def test_a_new_lstm_starts_as_that_of_keras() -> None:
    from podrun.tensorflow.addons.recurrent_layers import PopnnLSTM

    layer = PopnnLSTM(3)
    layer.build((2, 4, 5))
    np.testing.assert_array_equal(layer.get_weights()[2], [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0])
    assert PopnnLSTM.from_config(layer.get_config()).units == 3


def test_recurrent_layers_take_states_time_first_and_refuse_the_rest() -> None:
    import tf_keras

    from podrun.tensorflow.addons.recurrent_layers import PopnnGRU, PopnnLSTM

    x = _random.randn(4, 2, 3).astype(np.float32)
    start = [_random.randn(2, 5).astype(np.float32) for _ in range(2)]
    mine, plain = PopnnLSTM(5, time_major=True), tf_keras.layers.LSTM(5)
    mine.build(x.shape)
    plain.build((2, 4, 3))
    plain.set_weights(mine.get_weights())
    agree(
        on_ipu(lambda x, h, c: mine(x, initial_state=[h, c]), x, *start),
        [plain(x.swapaxes(0, 1), initial_state=[np_to_tensor(s) for s in start])],
    )
    for wrong in (
        {"use_bias": False}, {"recurrent_dropout": 0.1}, {"go_backwards": True}, {"unroll": True},
        {"kernel_regularizer": "l2"}, {"activation": "elu"}, {"recurrent_activation": "relu"}, {"dtype": "float64"},
    ):  # fmt: skip
        for kind in (PopnnLSTM, PopnnGRU):
            with pytest.raises(ValueError, match=r"support|Invalid"):
                kind(3, **wrong)


def test_a_stateful_layer_goes_on() -> None:
    import tf_keras

    from podrun.tensorflow.addons.recurrent_layers import PopnnLSTM

    x = _random.randn(2, 6, 3).astype(np.float32)
    mine, plain = PopnnLSTM(4, stateful=True), tf_keras.layers.LSTM(4)
    mine.build((2, 3, 3))
    plain.build((2, 6, 3))
    plain.set_weights(mine.get_weights()[:3])
    import tensorflow as tf

    program = tf.function(lambda x: mine(x))
    run = tf.distribute.get_strategy().run
    run(program, args=[tf.constant(x[:, :3])])
    agree([run(program, args=[tf.constant(x[:, 3:])])], [plain(x)])
    mine.reset_states()
    agree([run(program, args=[tf.constant(x[:, :3])])], [plain(x[:, :3])])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _reference_gru(
    x: np.ndarray, kernel: np.ndarray, bias: np.ndarray, lengths: np.ndarray, attention: np.ndarray
) -> np.ndarray:
    """Outputs in float64 of a GRU that resets before its product, with attention."""
    units = bias.shape[-1]
    wide, hidden, outputs = kernel.astype(float), np.zeros((x.shape[1], units)), []
    for t in range(len(x)):
        both = np.concatenate([x[t], hidden], 1)
        z, r = (_sigmoid(both @ wide[:, i * units : (i + 1) * units] + bias[i]) for i in range(2))
        both = np.concatenate([x[t], r * hidden], 1)
        new = np.tanh(both @ wide[:, 2 * units :] + bias[2])
        z = (1 - attention[t][:, None]) * z
        alive = (t < lengths)[:, None]
        hidden = np.where(alive, (1 - z) * new + z * hidden, hidden)
        outputs.append(np.where(alive, hidden, 0))
    return np.stack(outputs)


@pytest.mark.parametrize(("time", "batch", "size", "units"), [(4, 3, 2, 5), (1, 1, 3, 2)])
def test_attention_and_lengths_in_version_1(time: int, batch: int, size: int, units: int) -> None:
    from podrun.tensorflow.addons.time_major_layers import TimeMajorAttentionGru, TimeMajorDynamicGru

    x = _random.randn(time, batch, size).astype(np.float32)
    attention = _random.rand(time, batch).astype(np.float32)
    lengths = _random.randint(1, time + 1, batch).astype(np.int32)
    for kind, score in ((TimeMajorAttentionGru, attention), (TimeMajorDynamicGru, np.zeros_like(attention))):
        layer = kind(units, name=f"cell{time}{units}{kind.__name__}")
        more = [score] if kind is TimeMajorAttentionGru else []
        outputs, state, *weights = on_ipu(
            lambda *a, layer=layer: (*layer(*a), *[v.read_value() for v in layer.variables]),
            x,
            lengths,
            *more,
        )
        bias = np.concatenate(weights[1:])
        assert bias.shape == (3, units)
        expected = _reference_gru(x, weights[0], bias, lengths, score)
        agree([outputs], [expected])
        agree([state], [expected[lengths - 1, np.arange(batch)]])


def test_an_lstm_of_version_1_gives_its_state_tuple() -> None:
    from podrun.tensorflow.addons.time_major_layers import TimeMajorLstm

    layer = TimeMajorLstm(4, name="lstm_of_version_1")
    x = _random.randn(3, 2, 5).astype(np.float32)

    def run(x: tf.Tensor) -> object:
        outputs, state = layer(x)
        assert state._fields == ("c", "h")
        return outputs, state.c, state.h, *[v.read_value() for v in layer.variables]

    outputs, memory, hidden, kernel, bias = on_ipu(run, x)
    assert (kernel.shape, bias.shape) == ((9, 16), (4, 4))
    h = c = np.zeros((2, 4))
    for step in x:
        i, f, new, o = np.split(np.concatenate([step, h], 1) @ kernel.astype(float) + bias.reshape(-1), 4, 1)
        c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(new)
        h = _sigmoid(o) * np.tanh(c)
    agree([outputs[-1], hidden, memory], [h, h, c])


def _moments(x: np.ndarray, axes: tuple[int, ...], epsilon: float) -> np.ndarray:
    wide = x.astype(float)
    return (wide - wide.mean(axes, keepdims=True)) / np.sqrt(wide.var(axes, keepdims=True) + epsilon)


@pytest.mark.parametrize("axis", [-1, 1])
def test_norms_of_channels(axis: int) -> None:
    from podrun.tensorflow.addons.layers import GroupNormalization, InstanceNormalization

    x = _random.randn(2, 6, 4, 6).astype(np.float32)
    last = np.moveaxis(x, axis, -1)
    for strided in (True, False):
        split = (2, 3) if strided else (3, 2)  # Channel c of group c % 3, or c // 2.
        grouped = last.reshape(2, -1, *split)
        expected = _moments(grouped, (1, 2 if strided else 3), 1e-3).reshape(last.shape)
        layer = GroupNormalization(3, axis, strided_channel_grouping=strided)
        agree(on_ipu(layer, x), [np.moveaxis(expected, -1, axis)], atol=1e-4)
    places = tuple(i for i in (1, 2, 3) if i != axis % 4)
    agree(on_ipu(InstanceNormalization(axis), x), [_moments(x, places, 1e-3)], atol=1e-4)
    for groups, text in ((7, "Invalid groups"), (4, "commensurate")):
        with pytest.raises(ValueError, match=text):
            GroupNormalization(groups).build(x.shape)


def test_layer_norm_dense_and_embedding() -> None:
    import tf_keras

    from podrun.tensorflow.addons.layers import Embedding, LayerNormalization, SerialDense

    x = _random.randn(3, 4, 5).astype(np.float32)
    agree(on_ipu(LayerNormalization(axis=[1, 2]), x), [_moments(x, (1, 2), 1e-3)], atol=1e-4)
    mine, plain = SerialDense(6, 2, "input_rows_kernel_columns", "relu"), tf_keras.layers.Dense(6, "relu")
    mine.build(x.shape)
    plain.build(x.shape)
    plain.set_weights(mine.get_weights())
    agree(on_ipu(mine, x), [plain(x)])
    table, ids = Embedding(10, 3, serialization_factor=2), np.array([[1, 9], [0, 1]], np.int32)
    table.build(ids.shape)
    agree(on_ipu(table, ids), [table.get_weights()[0][ids]])
    with pytest.raises(ValueError, match="serialization_factor"):
        Embedding(10, 3, serialization_factor=0)
    with pytest.raises(NotImplementedError, match="mask_zero"):
        Embedding(10, 3, mask_zero=True)
    with pytest.raises(ValueError, match="serialization_dimension"):
        SerialDense(6, 2, "rows")


def test_dropout_and_hints(ipu: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    from podrun.tensorflow.addons.layers import AssumeEqualAcrossReplicas, Dropout, RecomputationCheckpoint

    x = np.ones((64, 64), np.float32)
    (kept,) = on_ipu(lambda x: Dropout(0.25)(x, training=True), x)
    assert set(np.unique(kept)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((kept == 0).mean() - 0.25) < 0.05
    for layer in (Dropout(0.25), RecomputationCheckpoint(), AssumeEqualAcrossReplicas()):
        agree(on_ipu(layer, x), [x])
    public, asked = "tensorflow.python.ipu.ops.cross_replica_ops", []

    def noted(inputs: tf.Tensor, inplace: bool) -> tf.Tensor:
        asked.append(inplace)
        return inputs

    monkeypatch.delitem(sys.modules, public, raising=False)
    AssumeEqualAcrossReplicas()(x)
    monkeypatch.setattr(sys.modules[public], "assume_equal_across_replicas", noted)
    AssumeEqualAcrossReplicas(inplace=True)(x)
    assert asked == [True]


GRADIENTS = [_random.randn(4, 3).astype(np.float32) for _ in range(6)]
START = _random.randn(4, 3).astype(np.float32)


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

    def plus_tenth(pairs):
        return [(g + 0.1, v) for g, v in pairs]

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
    """The factor changes with the updates, so the gradients of one have been scaled alike."""
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
    assert factors == [4, 8, 8, 16]
    np.testing.assert_allclose(values, [1, 1 - 0.1 * 3, 1 - 0.1 * 3, 1 - 0.1 * 10], atol=2e-3)
    unscaled = optimizer.get_unscaled_gradients([tf.constant(32.0), None])
    assert [None if g is None else float(g) for g in unscaled] == [2, None]
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
