"""The SDK's layers where no strategy runs them, and those whose results are more than one operation, against NumPy."""

from __future__ import annotations

import importlib.util
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.usefixtures("ipu_device"),
]


def test_a_recurrent_layer_runs_in_eager_mode_and_in_functions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """AutoGraph, which converts the user's function, leaves alone what runs the layer's program."""
    import tensorflow as tf
    import tf_keras

    from podrun.private_apis.tensorflow import private_module
    from podrun.tensorflow.addons.recurrent_layers import PopnnGRU

    mine, plain = PopnnGRU(4), tf_keras.layers.GRU(4, unroll=True)
    x = tf.constant(np.random.RandomState(5).rand(2, 3, 3).astype(np.float32))
    mine.build(x.shape)
    plain.build(x.shape)
    mine.set_weights(plain.get_weights())

    def outcome(layer: tf_keras.layers.Layer) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = layer(x)
            loss = tf.reduce_sum(tf.square(result))
        return [result, *tape.gradient(loss, [x, *layer.trainable_variables])]

    converted: list[str] = []
    autograph = private_module("autograph.impl.api")
    convert = autograph._convert_actual

    def noted(entity: Any, context: Any) -> Any:
        converted.append(str(entity.__module__))
        return convert(entity, context)

    monkeypatch.setattr(autograph, "_convert_actual", noted)
    monkeypatch.setattr(tf.get_logger(), "propagate", True)
    expected = outcome(plain)
    for results in (outcome(mine), tf.function(lambda: outcome(mine))()):
        for a, b in zip(results, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert __name__ in converted
    assert [name for name in converted if name.startswith("podrun.tensorflow.execution.")] == []
    assert "AutoGraph" not in caplog.text


def test_a_stateful_layer_has_the_weights_of_keras_and_updates_for_a_session() -> None:
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.recurrent_layers import PopnnLSTM

    x = np.random.RandomState(5).rand(2, 3, 4).astype(np.float32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        outputs = []
        unrolled = partial(tf_keras.layers.LSTM, unroll=True)
        for kind, device in ((PopnnLSTM, "/device:IPU:0"), (unrolled, "/cpu:0")):
            with tf.device(device):
                fed = tf.compat.v1.placeholder(tf.float32, x.shape)
                options = {"kernel_initializer": "ones", "recurrent_initializer": "ones"}
                layer = kind(5, stateful=True, recurrent_activation="sigmoid", **options)
                result = layer(fed)
            session.run(tf.compat.v1.global_variables_initializer())
            outputs.append([session.run([result, layer.updates], {fed: x})[0] for _ in range(3)])
            assert [w.shape for w in layer.weights] == [(4, 20), (5, 20), (20,)]
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=2e-5, atol=2e-6)
    assert not np.allclose(outputs[0][0], outputs[0][1])


def test_effective_transformer_is_attention_between_sequences() -> None:
    from podrun.tensorflow.addons.attention_layers import EffectiveTransformer

    heads, size, lengths = 2, 3, ([4, 1, 2], [3, 5, 1])
    random = np.random.RandomState(5)
    sources, targets = (random.rand(3, n).astype(np.float32) for n in (4, 5))
    ends = [np.array(one, np.int32)[:, None] for one in lengths]
    mask = np.array([[1, 0], [1, 1], [0, 1]], bool)
    layer = EffectiveTransformer(
        6, 10, num_attention_heads=heads, attention_head_size=size, use_scale=True, layer_norm_output=False
    )
    output, context = layer([sources, ends[0], targets, ends[1], mask])

    def embedded(values: np.ndarray, end: np.ndarray, weights: list[np.ndarray]) -> np.ndarray:
        kernel, bias = (w.astype(float) for w in weights)
        rows = values[..., None] @ kernel + bias
        rows = rows * (np.arange(values.shape[1]) < end)[..., None]
        return rows.reshape(3, -1, heads, size).transpose(0, 2, 1, 3)

    query = embedded(sources, ends[0], layer._q_layer.get_weights())
    key, value = (embedded(targets, ends[1], one.get_weights()) for one in (layer._k_layer, layer._v_layer))
    scores = np.exp(query @ key.transpose(0, 1, 3, 2))
    attended = scores / scores.sum(-1, keepdims=True) @ value * mask[:, :, None, None]
    attended = attended.transpose(0, 2, 1, 3)
    np.testing.assert_allclose(context, attended, rtol=1e-5, atol=1e-6)
    kernel, bias = layer._output_layer.get_weights()
    np.testing.assert_allclose(output, attended.reshape(3, -1) @ kernel + bias, rtol=1e-4, atol=1e-5)
    packed = layer._unpad(np.array([[1.0, 1, 0], [2, 2, 2], [3, 0, 0]], np.float32), [2, 3, 1], 3)
    np.testing.assert_array_equal(packed, [[1, 1, 2], [2, 2, 3], [0, 0, 0]])
    assert EffectiveTransformer.from_config(layer.get_config()).get_config() == layer.get_config()
    for wrong, message in (
        ([sources[..., None], ends[0], targets, ends[1]], "equal rank"),
        ([sources[:2], ends[0][:2], targets, ends[1]], "an equal number of sequences"),
        ([sources, ends[0][:2], targets, ends[1]], "have lengths equal"),
        ([sources, ends[0], targets.astype(np.int32), ends[1]], "equal types"),
        ([sources, ends[0], targets, ends[1], mask[:, :1]], "q_mask must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            EffectiveTransformer(6, 10, num_attention_heads=heads)(wrong)


def test_layers_that_the_sdk_reduces_or_refuses() -> None:
    random = np.random.RandomState(5)
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.ctc_layers import CTCLoss
    from podrun.tensorflow.addons.layers import (
        Dropout,
        Embedding,
        GroupNormalization,
        LayerNormalization,
    )

    logits = random.randn(5, 3, 4).astype(np.float32)
    labels, ends = np.array([[1, 2], [3, 1], [2, 2]], np.int32), np.full(3, 5, np.int32)
    loss = CTCLoss(from_logits=True)(labels, logits, np.full(3, 2, np.int32), ends)
    expected = tf.nn.ctc_loss(tf.sparse.from_dense(labels), logits, None, ends, blank_index=0)
    assert loss.shape == [1]
    np.testing.assert_allclose(loss[0], np.mean(expected), rtol=1e-5)
    x = random.rand(2, 4, 3, 3).astype(np.float32)
    by_place, by_end = GroupNormalization(channels_axis=1), GroupNormalization(channels_axis=-3)
    np.testing.assert_array_equal(by_place(x), by_end(x))
    with pytest.raises(ValueError, match="Unsupported data format"):
        GroupNormalization(channels_axis=2)(x)
    with pytest.raises(ValueError, match=r"Input shape .* has unknown dimensions"):
        LayerNormalization()(tf_keras.Input((2, 2, 1)))
    with pytest.raises(NotImplementedError, match="gamma_regularizer"):
        LayerNormalization(gamma_regularizer="l2")
    with pytest.raises(ValueError, match="The input shape should be a tensor of shape"):
        Embedding(4, 2)(np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match=r"The rate must be in the range \[0, 1\), but was 1"):
        Dropout(1, ref=False)


def test_optimizers_are_those_of_keras_with_the_names_of_the_sdk() -> None:
    import tensorflow as tf
    from tf_keras.optimizers import legacy

    from podrun.tensorflow.addons.state_optimizers import AdamIpuOptimizer, LAMBIpuOptimizer, SGDIpuOptimizer

    assert isinstance(AdamIpuOptimizer(), legacy.Adam)
    assert isinstance(SGDIpuOptimizer(), legacy.SGD)
    kept = LAMBIpuOptimizer(weight_decay_rate=0.1, exclude_from_weight_decay=["bias"])
    assert not kept._do_use_weight_decay("bias")
    assert kept._do_layer_adaptation("bias")
    with pytest.raises(ValueError, match="a list of two elements"):
        LAMBIpuOptimizer(optimizer_compute_precisions=(tf.float32,))
    options = {"optimizer_compute_precisions": (tf.float16,), "outline_apply_gradients": True}
    again = AdamIpuOptimizer.from_config(AdamIpuOptimizer(**options).get_config())
    assert (again.opt_dtypes, again.outline_apply_gradients) == ((tf.float16,), True)
    variable = tf.Variable(tf.ones([2]))
    slot = AdamIpuOptimizer().add_slot_with_dtype(variable, "m", tf.float16)
    assert slot.dtype == tf.float16


def test_a_layer_of_version_1_tells_its_shapes_and_refuses_plain_states() -> None:
    import tensorflow as tf

    from podrun.tensorflow.addons.time_major_layers import TimeMajorGru, TimeMajorLstm

    with tf.Graph().as_default():
        layer = TimeMajorLstm(3, available_memory_proportion_fwd=0.5)
        with pytest.raises(ValueError, match="'input_size' is unknown"):
            _ = layer.input_size
        with pytest.raises(ValueError, match="Expecting input_shape with 3 dims, got 2"):
            layer.build([4, 5])
        layer.build([7, 2, 5])
        assert (layer.input_size, layer.canonical_weight_shape) == (5, [8, 12])
        assert layer.canonical_bias_shapes == [4, 3]
        assert layer.state_shape(2) == ([2, 3], [2, 3])
        assert TimeMajorGru(3).state_shape(2) == [2, 3]
        assert [v.name for v in layer.variables] == ["popnn_lstm/kernel:0", "popnn_lstm/biases:0"]
        states = [tf.zeros([2, 3])] * 2
        with pytest.raises(ValueError, match="expecting `LSTMStateTuple`"):
            layer(tf.zeros([7, 2, 5]), states)
        outputs, _ = layer(tf.zeros([7, 2, 5]), SimpleNamespace(c=states[0], h=states[1]))
        assert outputs.shape == [7, 2, 3]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {}),
        pytest.param("GRU", {}, marks=pytest.mark.slow),
        pytest.param("GRU", {"reset_after": False}, id="GRU-before"),
    ],
)
def test_layers_of_halves_are_close_to_those_of_floats(kind: str, options: dict[str, bool]) -> None:
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons import recurrent_layers

    x = np.random.RandomState(5).rand(2, 3, 3).astype(np.float16)
    mine = getattr(recurrent_layers, f"Popnn{kind}")(4, dtype=tf.float16, **options)
    plain = getattr(tf_keras.layers, kind)(4, unroll=True, **options)
    mine.build(x.shape)
    plain.build(x.shape)
    plain.set_weights([w.astype(np.float32) for w in mine.get_weights()])
    result = mine(tf.constant(x))
    assert result.dtype == tf.float16
    np.testing.assert_allclose(result, plain(x.astype(np.float32)), atol=2e-3)


def test_wrappers_of_optimizers_change_sparse_gradients_on_the_host() -> None:
    """On IPUs they are dense before they reach an optimizer."""
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.accumulating_wrappers import KerasCrossReplica, KerasMapGradient

    inner = KerasMapGradient(tf_keras.optimizers.legacy.SGD(1.0), lambda gradient, _: gradient + 10)
    optimizer, variable = KerasCrossReplica(inner), tf.Variable(tf.zeros([4, 2]))
    for rows in ([1, 3], [3, 3]):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(variable, rows))
        gradient = tape.gradient(loss, variable)
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_array_equal(variable.numpy()[:, 0], [-20, -21, -20, -23])
