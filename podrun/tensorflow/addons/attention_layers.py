"""``EffectiveTransformer``: attention between two sets of padded sequences of numbers.

The SDK's layer packs sequences to save the work on padding, in parts of ``sequences_per_iter`` sequences. Neither
changes a number: here padding is zero behind the embeddings, as it is there when packed sequences are padded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf
import tf_keras

from podrun.tensorflow.addons.layers import Dropout, KerasInitializer, LayerNormalization

_Activation: TypeAlias = object
_initializers, _activations = tf_keras.initializers, tf_keras.activations


class EffectiveTransformer(tf_keras.layers.Layer):  # type: ignore[misc]
    """Attention with ``num_attention_heads`` heads, a dense layer behind it, and layer norm with ``layer_norm_output``.

    Called with ``[from_sequences, from_lengths, to_sequences, to_lengths]``, and a mask of heads ``[sequences, heads]``
    after these. Gives ``[sequences, output_layer_size]`` and the context ``[sequences, from, heads, head size]``.
    ``use_scale``: a scale of the scores that is learnt. ValueError for shapes and types that do not go together.
    """

    def __init__(
        self,
        output_layer_size: int,
        max_batch_size: int,
        use_scale: bool = False,
        num_attention_heads: int = 1,
        attention_head_size: int = 1,
        sequences_per_iter: int = 1,
        qkv_activation: _Activation = None,
        attention_dropout_prob: float | None = None,
        output_activation: _Activation = None,
        output_dropout_prob: float | None = None,
        layer_norm_output: bool = True,
        embedding_initializer: KerasInitializer = "glorot_uniform",
        embedding_bias_initializer: KerasInitializer = "zeros",
        output_initializer: KerasInitializer = "glorot_uniform",
        output_bias_initializer: KerasInitializer = "zeros",
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        if sequences_per_iter > max_batch_size:
            raise ValueError("max_batch_size must be greater than sequences_per_iter")
        self._plain: dict[str, object] = {
            "output_layer_size": output_layer_size, "max_batch_size": max_batch_size, "use_scale": use_scale,
            "num_attention_heads": num_attention_heads, "attention_head_size": attention_head_size,
            "sequences_per_iter": sequences_per_iter, "attention_dropout_prob": attention_dropout_prob,
            "output_dropout_prob": output_dropout_prob, "layer_norm_output": layer_norm_output,
        }  # fmt: skip
        self.output_layer_size, self.max_batch_size = output_layer_size, max_batch_size
        self.heads, self.head_size, self.use_scale = num_attention_heads, attention_head_size, use_scale
        self.qkv_activation, self.output_activation = map(
            _activations.get, (qkv_activation, output_activation)
        )
        self._starts = {
            "embedding_initializer": _initializers.get(embedding_initializer),
            "embedding_bias_initializer": _initializers.get(embedding_bias_initializer),
            "output_initializer": _initializers.get(output_initializer),
            "output_bias_initializer": _initializers.get(output_bias_initializer),
        }
        self._norm = LayerNormalization() if layer_norm_output else None
        self._attention_dropout, self._output_dropout = (
            None if rate is None else Dropout(rate) for rate in (attention_dropout_prob, output_dropout_prob)
        )

    def _dense(self, name: str, size: int, activation: _Activation, width: int, start: str) -> object:
        layer = tf_keras.layers.Dense(
            size,
            activation,
            kernel_initializer=_another(self._starts[f"{start}_initializer"]),
            bias_initializer=_another(self._starts[f"{start}_bias_initializer"]),
            name=name,
        )
        layer.build((None, width))
        return layer

    def build(self, input_shapes: Sequence[tf.TensorShape]) -> None:
        """Make the layers inside. ValueError for another number of inputs."""
        if len(input_shapes) not in (4, 5):
            raise ValueError("EffectiveTransformer must be built with either four or five input shapes.")
        width = self.heads * self.head_size
        self._q_layer, self._k_layer, self._v_layer = (
            self._dense(f"{kind}_layer", width, self.qkv_activation, 1, "embedding")
            for kind in ("query", "key", "value")
        )
        if self.use_scale:
            self._scale = self.add_weight("scale", [1], initializer="ones")
        size = int(input_shapes[0][1]) * width
        self._output_layer = self._dense(
            "output_layer", self.output_layer_size, self.output_activation, size, "output"
        )
        if self._norm is not None:
            self._norm.build([self.max_batch_size, self.output_layer_size])
        super().build(input_shapes)

    def call(self, inputs: Sequence[tf.Tensor], training: bool = True) -> tuple[tf.Tensor, tf.Tensor]:
        """The output and the context."""
        sources, source_lengths, targets, target_lengths, head_mask = self._checked(inputs)
        query = self._embedding(sources, source_lengths, self._q_layer)
        key = self._embedding(targets, target_lengths, self._k_layer)
        value = self._embedding(targets, target_lengths, self._v_layer)
        scores = tf.matmul(query, key, transpose_b=True)
        if self.use_scale:
            scores = scores * tf.cast(self._scale, scores.dtype)
        context = tf.matmul(tf.nn.softmax(scores), value) * tf.cast(head_mask, scores.dtype)[:, :, None, None]
        if self._attention_dropout is not None:
            context = self._attention_dropout(context, training=training)
        context = tf.transpose(context, [0, 2, 1, 3])
        output = self._output_layer(tf.reshape(context, [int(context.shape[0]), -1]))  # type: ignore[operator]
        if self._output_dropout is not None:
            output = self._output_dropout(output, training=training)
        if self._norm is not None:
            output = self._norm(output, training=training)
        return output, context

    def _checked(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The inputs as tensors, with a mask of heads."""
        if len(inputs) not in (4, 5):
            raise ValueError("EffectiveTransformer must take either four or five inputs.")
        sources, source_lengths, targets, target_lengths = map(tf.convert_to_tensor, inputs[:4])
        if sources.shape.rank != targets.shape.rank:
            raise ValueError("from_sequences and to_sequences must be equal rank")
        count = sources.shape[0]
        if count != targets.shape[0]:
            raise ValueError("from_sequences and to_sequences must contain an equal number of sequences")
        if source_lengths.shape[0] != count or source_lengths.shape != target_lengths.shape:
            raise ValueError(
                "from_sequence_lengths and to_sequence_lengths must have lengths equal to the number of sequences "
                "provided."
            )
        if sources.dtype != targets.dtype:
            raise ValueError("from_sequences and to_sequences must be equal types")
        shape = [count, self.heads]
        mask = tf.ones(shape, tf.bool) if len(inputs) == 4 else tf.convert_to_tensor(inputs[4])
        if mask.shape.as_list() != shape:
            raise ValueError("q_mask must have shape [num_sequences, num_attention_heads]")
        return [sources, source_lengths, targets, target_lengths, mask]

    def _embedding(self, sequences: tf.Tensor, lengths: tf.Tensor, layer: object) -> tf.Tensor:
        """``[sequences, heads, length, head size]``, zero behind the end of a sequence."""
        count, length = (int(d) for d in sequences.shape)
        values = layer(tf.reshape(tf.cast(sequences, self.compute_dtype), [count * length, 1]))  # type: ignore[operator]
        values = tf.reshape(values, [count, length, self.heads, self.head_size])
        there = tf.cast(_within(lengths, length), values.dtype)
        return tf.transpose(values * there[:, :, None, None], [0, 2, 1, 3])

    @staticmethod
    def _unpad(sequences: tf.Tensor, sequence_lengths: tf.Tensor, slices_per_iter: int) -> tf.Tensor:
        """The sequences one behind the other in rows of their length, without padding, and zeros at the end."""
        rows = tf.convert_to_tensor(sequences)
        count, length = (int(d) for d in rows.shape)
        there = tf.reshape(_within(sequence_lengths, length), [-1])
        there = there & (tf.range(count * length) < slices_per_iter * length)
        places = tf.maximum(tf.cumsum(tf.cast(there, tf.int32)) - 1, 0)
        values = tf.reshape(rows, [-1]) * tf.cast(there, rows.dtype)
        return tf.reshape(tf.math.unsorted_segment_sum(values, places, count * length), [count, length])

    def get_config(self) -> dict[str, object]:
        """The constructor's arguments, which Keras writes to files of models."""
        return {
            **super().get_config(),
            **self._plain,
            "qkv_activation": _activations.serialize(self.qkv_activation),
            "output_activation": _activations.serialize(self.output_activation),
            **{name: _initializers.serialize(start) for name, start in self._starts.items()},
        }


def _another(initializer: Any) -> Any:
    """An equal initializer: one that is used twice gives the same numbers twice."""
    if not hasattr(initializer, "get_config"):
        return initializer
    return type(initializer).from_config(initializer.get_config())


def _within(lengths: tf.Tensor, length: int) -> tf.Tensor:
    """A mask ``[sequences, length]`` of bool: True for elements before the end of their sequence."""
    ends = tf.cast(tf.reshape(lengths, [-1, 1]), tf.int32)
    return tf.range(length, dtype=tf.int32)[None] < ends
