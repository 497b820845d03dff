"""A recurrent layer as one operation of a program, and what layers of both families check."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.capture.markers import mark

ACTIVATIONS = ("tanh", "relu", "softmax", "sigmoid", "hard_sigmoid")
"""The activations of new values; those of gates are the same without relu."""


@dataclass(frozen=True, slots=True)
class LayerCell:
    """The cell of a layer: ``kind`` lstm or gru, and the names of its activations. ``reset_after``: a GRU's reset gate
    multiplies the product of the state.
    """

    kind: str
    activation: str = "tanh"
    recurrent_activation: str = "sigmoid"
    reset_after: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("activation", self.activation, ACTIVATIONS),
            ("recurrent_activation", self.recurrent_activation, tuple(a for a in ACTIVATIONS if a != "relu")),
        ):
            if value not in known:
                raise ValueError(
                    f"Invalid {name} {value!r}: an IPU's recurrent layer knows {', '.join(known)}."
                )

    @property
    def gates(self) -> int:
        """How many gates the cell has."""
        return 4 if self.kind == "lstm" else 3

    @property
    def states(self) -> int:
        """How many values go from step to step."""
        return 2 if self.kind == "lstm" else 1


def activation_name(value: object) -> str:
    """The name of an activation that is a name or a function of Keras."""
    return value if isinstance(value, str) else str(getattr(value, "__name__", value))


def check_recurrent_type(dtype: tf.DType) -> None:
    """ValueError for a type in which IPUs compute no recurrent layer."""
    if tf.as_dtype(dtype) not in (tf.float16, tf.float32):
        raise ValueError(f"Only support float16 and float32, not {tf.as_dtype(dtype).name}.")


def recurrent_call(
    cell: LayerCell,
    x: tf.Tensor,
    weights: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    lengths: tf.Tensor | None = None,
    attention: tf.Tensor | None = None,
    memory_share: float = 0.0,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """All outputs ``[time, batch, units]`` and the last states of x ``[time, batch, input]``. ``weights``: kernel, the
    state's kernel, bias; ``lengths`` ``[batch]``: outputs behind them are 0; ``attention`` ``[time, batch]``;
    ``memory_share``: the part of the tiles for temporary data, which may not be negative.
    """
    x = tf.convert_to_tensor(x)
    units = int(weights[1].shape[0])
    more = [t for t in (lengths, attention) if t is not None]
    batch = tf.TensorSpec([x.shape[1], units], x.dtype)
    outputs = mark(
        "recurrence",
        [x, *(tf.convert_to_tensor(w) for w in weights), *state, *more],
        [tf.TensorSpec([*x.shape[:2], units], x.dtype), *[batch] * cell.states],
        cell=cell.kind,
        activation=cell.activation,
        recurrent_activation=cell.recurrent_activation,
        reset_after=cell.reset_after,
        lengths=lengths is not None,
        attention=attention is not None,
        memory_share=memory_share,
    )
    return outputs[0], list(outputs[1:])


def zero_states(cell: LayerCell, x: tf.Tensor, batch_axis: int, units: int) -> list[tf.Tensor]:
    """States of zeros for a batch."""
    size = x.shape[batch_axis]
    if size is None:
        size = tf.shape(x)[batch_axis]
    return [tf.zeros([size, units], x.dtype) for _ in range(cell.states)]


def least_share(options: Mapping[str, object], options_bwd: Mapping[str, object]) -> float:
    """The smallest ``availableMemoryProportion`` of the options, numbers or their texts, of the forward and the
    backward pass; 0 without one. ValueError for what is no number.
    """
    shares: list[float] = []
    for argument, chosen in (("options", options), ("options_bwd", options_bwd)):
        share = chosen.get("availableMemoryProportion")
        try:
            shares += [float(str(share))] if share else []
        except ValueError:
            raise ValueError(
                f"availableMemoryProportion of `{argument}` must be a number, but is {share!r}. Say which part of the "
                f"tiles' memory is for temporary data: {argument}={{'availableMemoryProportion': 0.3}}"
            ) from None
    return min(shares, default=0.0)


def _library_call(
    cell: LayerCell,
    inputs: tf.Tensor,
    kernel: tf.Tensor,
    biases: tf.Tensor,
    state: Sequence[tf.Tensor],
    lengths: tf.Tensor | None,
    attention: tf.Tensor | None,
    options: Mapping[str, object],
) -> tuple[tf.Tensor | None, ...]:
    """Outputs, last states, and None for what a library keeps for the backward pass. ``kernel``: rows of the input,
    then of the state; ``biases`` ``[gates, units]``, or ``[gates, 2, units]`` for ``reset_after``.
    """
    kernel, biases = tf.convert_to_tensor(kernel), tf.convert_to_tensor(biases)
    size = int(tf.convert_to_tensor(inputs).shape[2])
    turned = tf.transpose(biases, [1, 0, 2]) if cell.reset_after else biases
    biases = tf.reshape(turned, [2, -1] if cell.reset_after else [-1])
    starts = [tf.convert_to_tensor(s) for s in state]
    weights = [kernel[:size], kernel[size:], biases]
    texts = (str(options.get(name) or "{}") for name in ("options", "options_bwd"))
    share = least_share(*(json.loads(text) or {} for text in texts))
    outputs, last = recurrent_call(cell, inputs, weights, starts, lengths, attention, share)
    return outputs, *last, None


def popnn_lstm_layer(
    inputs: tf.Tensor,
    kernel: tf.Tensor,
    biases: tf.Tensor,
    input_h_state: tf.Tensor,
    input_c_state: tf.Tensor,
    activation: str = "tanh",
    recurrent_activation: str = "sigmoid",
    seq_len: tf.Tensor | None = None,
    **options: object,
) -> tuple[tf.Tensor | None, ...]:
    """``gen_popnn_ops.popnn_lstm_layer``, and with lengths ``popnn_dynamic_lstm_layer``. Options (sizes, partial sums,
    names) change no values.
    """
    cell = LayerCell("lstm", activation, recurrent_activation)
    return _library_call(cell, inputs, kernel, biases, [input_h_state, input_c_state], seq_len, None, options)


def popnn_gru_layer(
    inputs: tf.Tensor,
    kernel: tf.Tensor,
    biases: tf.Tensor,
    initial_state: tf.Tensor,
    activation: str = "tanh",
    recurrent_activation: str = "sigmoid",
    reset_after: bool = False,
    seq_len: tf.Tensor | None = None,
    att_score: tf.Tensor | None = None,
    **options: object,
) -> tuple[tf.Tensor | None, ...]:
    """``gen_popnn_ops.popnn_gru_layer``; with lengths ``popnn_dynamic_gru_layer``, and with attention
    ``popnn_augru_layer``.
    """
    cell = LayerCell("gru", activation, recurrent_activation, reset_after)
    return _library_call(cell, inputs, kernel, biases, [initial_state], seq_len, att_score, options)


LIBRARY_LAYERS: dict[str, Callable[..., Any]] = {
    "popnn_lstm_layer": popnn_lstm_layer,
    "popnn_dynamic_lstm_layer": popnn_lstm_layer,
    "popnn_gru_layer": popnn_gru_layer,
    "popnn_dynamic_gru_layer": popnn_gru_layer,
    "popnn_augru_layer": popnn_gru_layer,
}
"""The operations of ``gen_popnn_ops``."""
