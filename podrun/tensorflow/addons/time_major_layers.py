"""Recurrent layers of version 1: ``ipu_tensorflow_addons.v1.layers``, in older programs ``rnn_ops``.

Inputs are ``[time, batch, input]``. The kernel ``[input + units, gates * units]`` has the rows of the input first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from podrun.tensorflow.addons.recurrent_call import (
    LayerCell,
    check_recurrent_type,
    least_share,
    recurrent_call,
    zero_states,
)

WeightStart = Callable[..., tf.Tensor]
States: TypeAlias = tf.Tensor | Sequence[tf.Tensor] | None
_SHARE = "availableMemoryProportion"


def _with_memory_share(
    options: Mapping[str, object] | None, share: float | None, argument: str, phase: str
) -> dict[str, object]:
    """The options of a phase, with the part of the tiles for temporary data that an older argument gives, if they name
    none. -1 stands for none there.
    """
    chosen = dict(options or {})
    if share is None or share == -1:
        return chosen
    if _SHARE in chosen:
        tf.get_logger().warning(
            f"Both, `available_memory_proportion_{phase}={share}` and `{argument}[{_SHARE!r}]={chosen[_SHARE]}` are "
            f"set. The value in `{argument}` will be used. Unset `available_memory_proportion_{phase}` to silence "
            "this warning."
        )
    return {_SHARE: share, **chosen}


class _TimeMajorLayer:
    """Variables and call of a layer. ``weights_initializer``: Glorot's uniform one if None; biases are zeros."""

    cell_kind = "lstm"
    scope_name = "popnn_lstm"

    def __init__(
        self,
        num_units: int,
        dtype: tf.DType = tf.float32,
        partials_dtype: tf.DType = tf.float32,
        seed: int | None = None,
        weights_initializer: WeightStart | None = None,
        bias_initializer: WeightStart | None = None,
        activation: str = "tanh",
        recurrent_activation: str = "sigmoid",
        return_state: bool = True,
        name: str | None = None,
        reset_after: bool = False,
        options: Mapping[str, object] | None = None,
        options_bwd: Mapping[str, object] | None = None,
        available_memory_proportion_fwd: float | None = None,
        available_memory_proportion_bwd: float | None = None,
    ) -> None:
        check_recurrent_type(dtype)
        self.num_units, self.dtype, self.return_state = num_units, tf.as_dtype(dtype), return_state
        self.num_layers, self.saveable, self._input_size = 1, False, 0
        self.kernel: tf.Variable | None = None
        self.biases: tf.Variable | None = None
        self.cell = LayerCell(self.cell_kind, activation, recurrent_activation, reset_after)
        self._initializer = weights_initializer or tf.compat.v1.glorot_uniform_initializer(seed=seed)
        self._bias_initializer = bias_initializer or tf.compat.v1.zeros_initializer()
        self._name, self._scope = name, None
        forward, backward = available_memory_proportion_fwd, available_memory_proportion_bwd
        if backward is None and _SHARE not in (options_bwd or {}):
            backward = forward
        self._options_with_amp = _with_memory_share(options, forward, "options", "fwd")
        self._options_bwd_with_amp = _with_memory_share(options_bwd, backward, "options_bwd", "bwd")

    @property
    def variables(self) -> list[tf.Variable]:
        """The layer's variables, once it was called."""
        return [] if self._scope is None else list(self._made)

    trainable_variables = variables
    weights = variables

    @property
    def input_size(self) -> int:
        """How many numbers an element of a sequence has. ValueError before the variables are made."""
        if not self._input_size:
            raise ValueError("'input_size' is unknown since layer has not been built.")
        return self._input_size

    @property
    def canonical_weight_shape(self) -> list[int]:
        """The shape of the kernel. RuntimeError before the variables are made."""
        if not self._input_size:
            raise RuntimeError(
                f"{type(self).__name__}.canonical_weight_shape invoked before input shape is known"
            )
        return [self._input_size + self.num_units, self.num_units * self.cell.gates]

    @property
    def canonical_bias_shapes(self) -> list[int]:
        """The shape of the biases."""
        gates = self.cell.gates
        return [gates, 2, self.num_units] if self.cell.reset_after else [gates, self.num_units]

    def state_shape(self, batch_size: int) -> list[int] | tuple[list[int], ...]:
        """The shapes of the states of a batch."""
        shape = [batch_size, self.num_units]
        return shape if self.cell.states == 1 else (shape, list(shape))

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make the variables for inputs ``[time, batch, input]``. ValueError for another shape."""
        shape = tf.TensorShape(input_shape)
        if shape.rank != 3:
            raise ValueError(f"Expecting input_shape with 3 dims, got {shape.rank}")
        if shape[-1] is None:
            raise ValueError(
                "The last dimension of the inputs to `_PopnnRNN` should be defined. Found `None`."
            )
        self._input_size = int(shape[-1])
        with tf.compat.v1.variable_scope(
            self._scope, self._name or self.scope_name, reuse=None if self._scope is None else True
        ) as scope:
            self.kernel = self._variable("kernel", self.canonical_weight_shape, self._initializer)
            self.biases = self._biases()
            self._scope = scope

    def _biases(self) -> tf.Tensor:
        return self._variable("biases", self.canonical_bias_shapes, self._bias_initializer)

    def _first_state(self, inputs: tf.Tensor, initial_state: States) -> list[tf.Tensor]:
        """The states before the first element. ValueError for an LSTM's that is no ``LSTMStateTuple``."""
        if initial_state is None:
            return zero_states(self.cell, inputs, 1, self.num_units)
        if self.cell.kind == "lstm":
            memory, hidden = (getattr(initial_state, name, None) for name in ("c", "h"))
            if memory is None or hidden is None:
                raise ValueError(
                    f"Invalid initial_state type: `{type(initial_state)}`, expecting `LSTMStateTuple`."
                )
            state = [hidden, memory]
        else:
            state = list(initial_state) if isinstance(initial_state, (list, tuple)) else [initial_state]
        return [tf.convert_to_tensor(s, self.dtype) for s in state]

    def _variable(self, name: str, shape: list[int], initializer: WeightStart) -> tf.Tensor:
        variable = tf.compat.v1.get_variable(
            name, shape, self.dtype, initializer, use_resource=True, trainable=True
        )
        self._made = [*(v for v in getattr(self, "_made", []) if v is not variable), variable]
        return variable

    def _run(
        self,
        inputs: tf.Tensor,
        initial_state: States,
        lengths: tf.Tensor | None = None,
        attention: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        inputs = tf.convert_to_tensor(inputs, self.dtype)
        self.build(inputs.shape)
        size = self._input_size
        kernel, bias = tf.convert_to_tensor(self.kernel), tf.convert_to_tensor(self.biases)
        if self.cell.reset_after:
            bias = tf.transpose(bias, [1, 0, 2])
            bias = tf.reshape(bias, [2, -1])
        state = self._first_state(inputs, initial_state)
        weights = [
            kernel[:size],
            kernel[size:],
            tf.reshape(bias, [-1]) if not self.cell.reset_after else bias,
        ]
        share = least_share(self._options_with_amp, self._options_bwd_with_amp)
        return recurrent_call(self.cell, inputs, weights, state, lengths, attention, share)

    def _answer(self, outputs: tf.Tensor, states: Sequence[tf.Tensor]) -> object:
        if not self.return_state:
            return outputs
        if self.cell.kind == "lstm":
            hidden, memory = states
            return outputs, tf.compat.v1.nn.rnn_cell.LSTMStateTuple(memory, hidden)
        return outputs, states[0]


class TimeMajorLstm(_TimeMajorLayer):
    """``PopnnLSTM``: the outputs and ``LSTMStateTuple(c, h)``. Gates are in the order input, forget, memory, output."""

    def __call__(self, inputs: tf.Tensor, initial_state: States = None, training: bool = True) -> object:
        """Run over a batch of sequences."""
        return self._answer(*self._run(inputs, initial_state))

    call = __call__


class TimeMajorDynamicLstm(_TimeMajorLayer):
    """``PopnnDynamicLSTM``: outputs behind the length of a sequence are 0, and its state stays."""

    scope_name = "popnn_dynamic_lstm"

    def __call__(
        self, inputs: tf.Tensor, seq_len: tf.Tensor, initial_state: States = None, training: bool = True
    ) -> object:
        """Run over a batch of sequences of the lengths ``seq_len``."""
        return self._answer(*self._run(inputs, initial_state, seq_len))

    call = __call__


class TimeMajorGru(_TimeMajorLayer):
    """``PopnnGRU``: gates in the order update, reset, new state."""

    cell_kind, scope_name = "gru", "popnn_gru"

    def __call__(self, inputs: tf.Tensor, initial_state: States = None, training: bool = True) -> object:
        """Run over a batch of sequences."""
        return self._answer(*self._run(inputs, initial_state))

    call = __call__


class TimeMajorDynamicGru(_TimeMajorLayer):
    """``PopnnDynamicGRU``: outputs behind the length of a sequence are 0, and its state stays."""

    cell_kind, scope_name = "gru", "popnn_dynamic_gru"

    def __call__(
        self,
        inputs: tf.Tensor,
        seq_len: tf.Tensor,
        initial_state: States = None,
        training: bool = True,
        time_major: bool = True,
    ) -> object:
        """Run over a batch of sequences. ``time_major``: False for inputs ``[batch, time, ...]``; outputs are
        ``[time, batch, ...]`` in either case.
        """
        inputs = inputs if time_major else tf.transpose(inputs, [1, 0, 2])
        return self._answer(*self._run(inputs, initial_state, seq_len))

    call = __call__

    def _biases(self) -> tf.Tensor:
        """Those of the layer, which it does not read, and those that it reads: ones for both gates, else zeros."""
        super()._biases()
        ones, zeros = tf.compat.v1.ones_initializer(), tf.compat.v1.zeros_initializer()
        gates = self._variable("bias_r_u", [2, self.num_units], ones)
        biases = tf.concat([gates, self._variable("bias_c", [1, self.num_units], zeros)], 0)
        return tf.stack([biases, biases], 1) if self.cell.reset_after else biases


class TimeMajorAttentionGru(TimeMajorDynamicGru):
    """``PopnnAUGRU``: one minus the attention of a step multiplies the update gate."""

    scope_name = "popnn_augru"

    def __call__(  # type: ignore[override]
        self,
        inputs: tf.Tensor,
        seq_len: tf.Tensor,
        attention_score: tf.Tensor,
        initial_state: States = None,
        training: bool = True,
        time_major: bool = True,
    ) -> object:
        """Run over a batch of sequences with ``attention_score`` ``[time, batch]``; ``time_major``: False if both have
        the batch first. Outputs are ``[time, batch, ...]`` in either case.
        """
        if not time_major:
            inputs, attention_score = tf.transpose(inputs, [1, 0, 2]), tf.transpose(attention_score, [1, 0])
        return self._answer(*self._run(inputs, initial_state, seq_len, attention_score))

    call = __call__  # type: ignore[assignment]
