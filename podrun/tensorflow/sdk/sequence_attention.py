"""``tf.contrib.seq2seq``: attention over a memory, and the cell that reads it in each step.

Luong: a score is the product of the query and the key. Bahdanau: ``v . tanh(query W + key)``. Source: the documentation
of TensorFlow 1.15, and the papers that it names (arXiv:1508.04025, arXiv:1409.0473).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

_v1 = tf.compat.v1
KeysAndValues = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""A function of a program that makes keys and values of a mechanism's own."""


class MemoryAttention:
    """``AttentionMechanism``: keys are a dense layer of the memory ``[batch, time, depth]``, of which the steps after
    ``memory_sequence_length`` are masked. ``custom_key_value_fn`` gets keys ``[batch, time, num_units]`` and values
    ``[batch, time, depth]``, the memory with its masked steps 0, and returns the keys and values to use instead.
    """

    query_layer: object | None = None

    def __init__(
        self,
        num_units: int,
        memory: tf.Tensor,
        memory_sequence_length: tf.Tensor | None = None,
        probability_fn: Callable[[tf.Tensor], tf.Tensor] | None = None,
        score_mask_value: float | None = None,
        dtype: tf.DType = tf.float32,
        custom_key_value_fn: KeysAndValues | None = None,
    ) -> None:
        self._num_units, self.dtype = num_units, dtype
        self._probability_fn = probability_fn or tf.nn.softmax
        self._mask_value = -math.inf if score_mask_value is None else score_mask_value
        self._mask: tf.Tensor | None = None
        values = tf.convert_to_tensor(memory)
        if memory_sequence_length is not None:
            self._mask = tf.sequence_mask(memory_sequence_length, _steps_of(values))
            values *= tf.cast(self._mask, values.dtype)[:, :, tf.newaxis]
        self.memory_layer = _v1.layers.Dense(num_units, use_bias=False, name="memory_layer", dtype=dtype)
        self.values, self.keys = values, self.memory_layer(values)
        if custom_key_value_fn is not None:
            self.keys, self.values = custom_key_value_fn(self.keys, self.values)
        self.batch_size = tf.compat.dimension_value(values.shape[0])
        self.alignments_size = self.state_size = _steps_of(self.keys)

    def score(self, query: tf.Tensor) -> tf.Tensor:
        """The score of each step of the memory: ``[batch, time]``."""
        raise NotImplementedError

    def __call__(self, query: tf.Tensor, state: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """The weights of the memory's steps, and the next state, which is the same."""
        scores = self.score(query)
        if self._mask is not None:
            scores = _v1.where_v2(self._mask, scores, tf.cast(self._mask_value, scores.dtype))
        alignments = self._probability_fn(scores)
        return alignments, alignments

    def initial_alignments(self, batch_size: int, dtype: tf.DType) -> tf.Tensor:
        """``[batch_size, alignments_size]``: zeros, the weights of the memory before the first step."""
        return tf.zeros([batch_size, self.alignments_size], dtype)

    def initial_state(self, batch_size: int, dtype: tf.DType) -> tf.Tensor:
        """The mechanism's state before the first step: its weights."""
        return self.initial_alignments(batch_size, dtype)


def _steps_of(memory: tf.Tensor) -> int | tf.Tensor:
    """How many steps ``[batch, time, depth]`` has: a number, or where it is not known a scalar that a run finds out."""
    steps = tf.compat.dimension_value(memory.shape[1])
    return tf.shape(memory)[1] if steps is None else int(steps)


class ProductAttention(MemoryAttention):
    """``LuongAttention``. ValueError for a query whose depth is not ``num_units``."""

    def __init__(
        self,
        num_units: int,
        memory: tf.Tensor,
        memory_sequence_length: tf.Tensor | None = None,
        scale: bool = False,
        probability_fn: Callable[[tf.Tensor], tf.Tensor] | None = None,
        score_mask_value: float | None = None,
        dtype: tf.DType = tf.float32,
        custom_key_value_fn: KeysAndValues | None = None,
        name: str = "LuongAttention",
    ) -> None:
        super().__init__(
            num_units,
            memory,
            memory_sequence_length,
            probability_fn,
            score_mask_value,
            dtype,
            custom_key_value_fn,
        )
        self._scale = scale

    def score(self, query: tf.Tensor) -> tf.Tensor:
        """Products, times a learnt number if they are scaled."""
        if query.shape[-1] != self._num_units:
            raise ValueError(
                f"Incompatible or unknown inner dimensions between query and keys. Query has units: {query.shape[-1]}. "
                f"Keys have units: {self._num_units}. Perhaps you need to set num_units to the keys' dimension"
            )
        scores = tf.squeeze(tf.matmul(query[:, tf.newaxis, :], self.keys, transpose_b=True), [1])
        if self._scale:
            with _v1.variable_scope(None, "luong_attention"):
                scores *= _v1.get_variable("attention_g", [], query.dtype, _v1.ones_initializer())
        return scores


class AdditiveAttention(MemoryAttention):
    """``BahdanauAttention``; ``normalize`` learns the length of v, and adds a bias."""

    def __init__(
        self,
        num_units: int,
        memory: tf.Tensor,
        memory_sequence_length: tf.Tensor | None = None,
        normalize: bool = False,
        probability_fn: Callable[[tf.Tensor], tf.Tensor] | None = None,
        score_mask_value: float | None = None,
        dtype: tf.DType = tf.float32,
        custom_key_value_fn: KeysAndValues | None = None,
        name: str = "BahdanauAttention",
    ) -> None:
        super().__init__(
            num_units,
            memory,
            memory_sequence_length,
            probability_fn,
            score_mask_value,
            dtype,
            custom_key_value_fn,
        )
        self.query_layer = _v1.layers.Dense(num_units, use_bias=False, name="query_layer", dtype=dtype)
        self._normalize = normalize

    def score(self, query: tf.Tensor) -> tf.Tensor:
        """``v . tanh(query W + key)``."""
        with _v1.variable_scope(None, "bahdanau_attention"):
            hidden = self.query_layer(query)[:, tf.newaxis, :] + self.keys  # type: ignore[operator]
            v = _v1.get_variable("attention_v", [self._num_units], query.dtype)
            if self._normalize:
                first = _v1.constant_initializer(math.sqrt(1.0 / self._num_units))
                length = _v1.get_variable("attention_g", [], query.dtype, first)
                bias = _v1.get_variable(
                    "attention_b", [self._num_units], query.dtype, _v1.zeros_initializer()
                )
                v, hidden = length * v * tf.math.rsqrt(tf.reduce_sum(tf.square(v))), hidden + bias
        return tf.reduce_sum(v * tf.tanh(hidden), [2])


class AttentionState(NamedTuple):
    """``AttentionWrapperState``: the cell's state, the last attention and weights, and the number of steps so far."""

    cell_state: object
    attention: object
    time: tf.Tensor
    alignments: object
    alignment_history: object
    attention_state: object

    def clone(self, **values: object) -> AttentionState:
        """A copy with the values of some fields replaced, as ``cell_state=...``."""
        return self._replace(**values)


class AttentionWrapper(_v1.nn.rnn_cell.RNNCell):  # type: ignore[misc, name-defined]
    """The cell reads its input beside the last attention, which is the memory weighted by the
    mechanism, after a dense layer of ``attention_layer_size`` with the cell's output if that is given. The state's
    ``alignment_history`` is a ``TensorArray`` of all steps' weights if it is asked for; it grows, so it is the host's.
    """

    def __init__(
        self,
        cell: object,
        attention_mechanism: MemoryAttention,
        attention_layer_size: int | None = None,
        alignment_history: bool = False,
        cell_input_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None,
        output_attention: bool = True,
        initial_cell_state: object | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        if not isinstance(attention_mechanism, MemoryAttention):
            raise TypeError(
                f"attention_mechanism must be one AttentionMechanism, saw type: {type(attention_mechanism).__name__}"
            )
        self._cell, self._attention_mechanism, self._keeps = cell, attention_mechanism, alignment_history
        self._cell_input_fn = cell_input_fn or (lambda inputs, attention: tf.concat([inputs, attention], -1))
        self._output_attention, self._initial_cell_state = output_attention, initial_cell_state
        self._attention_layer = None
        self._attention_size = int(attention_mechanism.values.shape[-1])
        if attention_layer_size is not None:
            self._attention_size = attention_layer_size
            self._attention_layer = _v1.layers.Dense(
                attention_layer_size, use_bias=False, name="attention_layer", dtype=attention_mechanism.dtype
            )

    def _batch_size_checks(self, batch_size: object, error_message: str) -> list[tf.Operation]:
        """Checks while running: none, since shapes are static."""
        return []

    @property
    def output_size(self) -> object:
        """The last dimension of the outputs."""
        return self._attention_size if self._output_attention else self._cell.output_size  # type: ignore[attr-defined]

    @property
    def state_size(self) -> AttentionState:
        """The last dimension of each part of the state."""
        mechanism = self._attention_mechanism
        return AttentionState(
            cell_state=self._cell.state_size,  # type: ignore[attr-defined]
            attention=self._attention_size,
            time=tf.TensorShape([]),
            alignments=mechanism.alignments_size,
            alignment_history=mechanism.alignments_size if self._keeps else (),
            attention_state=mechanism.state_size,
        )

    def zero_state(self, batch_size: int, dtype: tf.DType) -> AttentionState:
        """The wrapper's state before the first step, for ``batch_size`` sequences: the cell's, and zeros."""
        start = self._initial_cell_state
        mechanism = self._attention_mechanism
        first = mechanism.initial_alignments(batch_size, dtype)
        history = (
            tf.TensorArray(dtype, 0, dynamic_size=True, element_shape=first.shape) if self._keeps else ()
        )
        return AttentionState(
            cell_state=self._cell.zero_state(batch_size, dtype) if start is None else start,  # type: ignore[attr-defined]
            attention=tf.zeros([batch_size, self._attention_size], dtype),
            time=tf.zeros([], tf.int32),
            alignments=first,
            alignment_history=history,
            attention_state=mechanism.initial_state(batch_size, dtype),
        )

    def call(self, inputs: tf.Tensor, state: AttentionState) -> tuple[tf.Tensor, AttentionState]:
        """Run the cell for one step: its output or the attention, and the next state."""
        mechanism = self._attention_mechanism
        read = self._cell_input_fn(inputs, state.attention)
        output, cell_state = self._cell(read, state.cell_state)  # type: ignore[operator]
        alignments, attention_state = mechanism(output, state=state.attention_state)
        attention = tf.squeeze(tf.matmul(alignments[:, tf.newaxis, :], mechanism.values), [1])
        if self._attention_layer is not None:
            attention = self._attention_layer(tf.concat([output, attention], 1))
        history = state.alignment_history
        if self._keeps:
            history = history.write(state.time, alignments)  # type: ignore[attr-defined]
        following = AttentionState(
            cell_state=cell_state,
            attention=attention,
            time=state.time + 1,
            alignments=alignments,
            alignment_history=history,
            attention_state=attention_state,
        )
        return (attention if self._output_attention else output), following


NAMES = {
    "AttentionMechanism": MemoryAttention,
    "LuongAttention": ProductAttention,
    "BahdanauAttention": AdditiveAttention,
    "AttentionWrapper": AttentionWrapper,
    "AttentionWrapperState": AttentionState,
}
"""Names of contrib -> classes."""
