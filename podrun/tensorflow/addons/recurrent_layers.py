"""Recurrent layers of Keras as one operator on an IPU: ``PopnnLSTM`` and ``PopnnGRU`` of ``ipu_tensorflow_addons``.

Weights, the order of gates and the arguments are Keras' own; what an IPU's layer does not have is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf
import tf_keras

from podrun.tensorflow.addons.recurrent_call import (
    LayerCell,
    activation_name,
    check_recurrent_type,
    recurrent_call,
    zero_states,
)
from podrun.tensorflow.sdk.layer_ops import seeded_dropout

_REFUSED = (
    "kernel_regularizer", "recurrent_regularizer", "bias_regularizer", "activity_regularizer", "kernel_constraint",
    "recurrent_constraint", "bias_constraint",
)  # fmt: skip
_UNSET = {"recurrent_dropout": 0.0, "go_backwards": False, "unroll": False}
_IGNORED = (
    "implementation", "partials_dtype", "seed", "options", "options_bwd", "available_memory_proportion_fwd",
    "available_memory_proportion_bwd",
)  # fmt: skip
_STATES: TypeAlias = Sequence[tf.Tensor] | tf.Tensor | None


class _HeldStates:
    """Variables that a layer does not track."""

    def __init__(self) -> None:
        self.states: list[tf.Variable] = []


class _PopnnLayer(tf_keras.layers.Layer):  # type: ignore[misc]
    """What both layers have. Inputs are ``[batch, time, input]``, or ``[time, batch, input]`` with ``time_major``."""

    kind = "lstm"

    def __init__(
        self,
        units: int,
        activation: object = "tanh",
        recurrent_activation: object = "sigmoid",
        use_bias: bool = True,
        kernel_initializer: object = "glorot_uniform",
        recurrent_initializer: object = "orthogonal",
        bias_initializer: object = "zeros",
        unit_forget_bias: bool = True,
        dropout: float = 0.0,
        return_sequences: bool = False,
        return_state: bool = False,
        stateful: bool = False,
        time_major: bool = False,
        reset_after: bool = True,
        **kwargs: object,
    ) -> None:
        refusal = f"IPU custom {self.kind.upper()} layer does not support"
        if not use_bias:
            raise ValueError(f"{refusal} use_bias = False.")
        for name in _REFUSED:
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"{refusal} {name}.")
        for name, value in _UNSET.items():
            if kwargs.pop(name, value) not in (value, None):
                raise ValueError(f"{refusal} {name}.")
        self._dropout_seed = kwargs.pop("dropout_seed", None)
        for name in _IGNORED:
            kwargs.pop(name, None)
        super().__init__(**kwargs)
        check_recurrent_type(self.compute_dtype)
        names = activation_name(activation), activation_name(recurrent_activation)
        self.cell_of_layer = LayerCell(self.kind, *names, self.kind == "gru" and reset_after)
        self.units, self.dropout, self.unit_forget_bias = int(units), float(dropout), unit_forget_bias
        initializers = tf_keras.initializers
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.recurrent_initializer = initializers.get(recurrent_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.return_sequences, self.return_state = return_sequences, return_state
        self.stateful, self.time_major = stateful, time_major
        self._held = _HeldStates()

    @property
    def states(self) -> list[tf.Variable]:
        """The states of a stateful layer, which are no weights, as in Keras."""
        return self._held.states

    def build(self, input_shape: tf.TensorShape) -> None:
        """Make the weights, with a state if the layer is stateful."""
        if isinstance(input_shape, list):
            input_shape = input_shape[0]
        shape = tf.TensorShape(input_shape)
        width = self.cell_of_layer.gates * self.units
        self.kernel = self.add_weight("kernel", [int(shape[-1]), width], initializer=self.kernel_initializer)
        self.recurrent_kernel = self.add_weight(
            "recurrent_kernel", [self.units, width], initializer=self.recurrent_initializer
        )
        rows = [2, width] if self.cell_of_layer.reset_after else [width]
        self.bias = self.add_weight("bias", rows, initializer=self._bias_start)
        if self.stateful:
            batch = shape[1 if self.time_major else 0]
            if batch is None:
                raise ValueError("A stateful layer needs a fixed batch size: give its inputs a batch_size.")
            with tf.init_scope():
                self._held.states = [
                    tf_keras.backend.zeros([batch, self.units], self.compute_dtype)
                    for _ in range(self.cell_of_layer.states)
                ]
        self.built = True

    def _bias_start(self, shape: Sequence[int], dtype: tf.DType | None = None, **_: object) -> tf.Tensor:
        start = self.bias_initializer(shape, dtype=dtype)
        if self.kind != "lstm" or not self.unit_forget_bias:
            return start
        forget = tf.ones([self.units], start.dtype)
        return tf.concat([start[: self.units], forget, start[2 * self.units :]], 0)

    def call(
        self,
        inputs: tf.Tensor,
        mask: tf.Tensor | None = None,
        training: bool | None = None,
        initial_state: _STATES = None,
    ) -> object:
        """Run over a batch of sequences. ``initial_state``: the output, and for an LSTM the memory. NotImplementedError
        for a mask.
        """
        if mask is not None:
            raise NotImplementedError(f"{type(self).__name__} does not support masks.")
        if isinstance(inputs, (list, tuple)):
            inputs, *given_states = inputs
            initial_state = given_states or initial_state
        x = inputs if self.time_major else tf.transpose(inputs, [1, 0, 2])
        if self.dropout and training:
            x = seeded_dropout(x, self.dropout, [1, *x.shape[1:]], self._dropout_seed)
        state = self._start(x, initial_state)
        weights = [tf.cast(w, x.dtype) for w in (self.kernel, self.recurrent_kernel, self.bias)]
        outputs, last = recurrent_call(self.cell_of_layer, x, weights, state)
        for variable, value in zip(self.states, last, strict=False):
            update = variable.assign(tf.cast(value, variable.dtype))
            if not tf.executing_eagerly() and not tf.inside_function():  # A session runs the layer's updates.
                self.add_update(update)
        result = last[0]
        if self.return_sequences:
            result = outputs if self.time_major else tf.transpose(outputs, [1, 0, 2])
        return (result, *last) if self.return_state else result

    def _start(self, x: tf.Tensor, initial_state: _STATES) -> list[tf.Tensor]:
        if initial_state is not None:
            states = list(initial_state) if isinstance(initial_state, (list, tuple)) else [initial_state]
            if len(states) != self.cell_of_layer.states:
                raise ValueError(
                    f"{type(self).__name__} takes {self.cell_of_layer.states} initial states, not {len(states)}."
                )
            return [tf.cast(s, x.dtype) for s in states]
        if self.states:
            return [tf.cast(s, x.dtype) for s in self.states]
        return zero_states(self.cell_of_layer, x, 1, self.units)

    def reset_states(self) -> None:
        """Let the state of a stateful layer be zeros again."""
        for state in self.states:
            state.assign(tf.zeros_like(state))

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        initializers = tf_keras.initializers
        cell = self.cell_of_layer
        own: dict[str, object] = {
            "units": self.units, "activation": cell.activation, "recurrent_activation": cell.recurrent_activation,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "recurrent_initializer": initializers.serialize(self.recurrent_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer), "dropout": self.dropout,
            "return_sequences": self.return_sequences, "return_state": self.return_state, "stateful": self.stateful,
            "time_major": self.time_major,
        }  # fmt: skip
        name, value = (
            ("unit_forget_bias", self.unit_forget_bias)
            if self.kind == "lstm"
            else ("reset_after", cell.reset_after)
        )
        return {**super().get_config(), **own, name: value}


class PopnnLSTM(_PopnnLayer):
    """Long short-term memory with Keras' weights: gates input, forget, memory, output."""


class PopnnGRU(_PopnnLayer):
    """Gated recurrent unit with Keras' weights: gates update, reset, new state."""

    kind = "gru"
