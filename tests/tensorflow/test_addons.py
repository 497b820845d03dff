"""The SDK's layers beside TensorFlow against NumPy and Keras on the CPU, over generated shapes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
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
        bias = np.concatenate(weights[2:])
        assert weights[1].shape == bias.shape == (3, units)
        np.testing.assert_array_equal(bias, [[1.0] * units] * 2 + [[0.0] * units])
        expected = _reference_gru(x, weights[0], bias, lengths, score)
        agree([outputs], [expected])
        agree([state], [expected[lengths - 1, np.arange(batch)]])


def test_outputs_have_time_first_where_inputs_have_the_batch_first() -> None:
    import tensorflow as tf

    from podrun.tensorflow.addons.time_major_layers import TimeMajorAttentionGru, TimeMajorDynamicGru

    x, attention = (_random.rand(*shape).astype(np.float32) for shape in ((2, 4, 3), (2, 4)))
    lengths = np.array([4, 2], np.int32)
    for kind in (TimeMajorAttentionGru, TimeMajorDynamicGru):
        more = [attention] if kind is TimeMajorAttentionGru else []

        def both(x: tf.Tensor, lengths: tf.Tensor, *more: tf.Tensor, kind: type = kind) -> list[tf.Tensor]:
            layer = kind(5, name=f"batch_first_{kind.__name__}", bias_initializer=tf.ones_initializer())
            turned = [tf.transpose(score) for score in more]
            outputs, state = layer(x, lengths, *more, time_major=False)
            same, _ = layer(tf.transpose(x, [1, 0, 2]), lengths, *turned)
            return [outputs, same, state]

        outputs, same, state = on_ipu(both, x, lengths, *more)
        assert outputs.shape == (4, 2, 5)
        np.testing.assert_array_equal(outputs, same)
        np.testing.assert_array_equal(outputs[[3, 1], [0, 1]], state)


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
