"""Convolutions of 1 to 3 dimensions and their transposes; recurrent networks whole, as scans over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podrun.poptorch.operators.factories import dropped
from podrun.poptorch.operators.linear_algebra import product_with_rows
from podrun.poptorch.operators.table import Array, Call, aten, spread, widened


@aten("convolution", "_convolution", kind="Conv")
def convolution(
    call: Call,
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    *rest: object,
) -> Array:
    """``[N, C, *in]`` (or ``[C, *in]``) with ``[M, C / groups, *kernel]``; transposed: ``[C, M / groups, *kernel]``."""
    batched = x.ndim == weight.ndim
    image = widened(x if batched else x[None])
    count = image.ndim - 2
    stride, padding, dilation, output_padding = (
        spread(each, count) for each in (stride, padding, dilation, output_padding)
    )
    if transposed:
        made = _transposed(image, widened(weight), stride, padding, dilation, output_padding, groups)
    else:
        made = correlate(image, widened(weight), stride, [(p, p) for p in padding], dilation, groups)
    if bias is not None:
        made = made + widened(bias).reshape((-1,) + (1,) * count)
    return made if batched else made[0]


def correlate(
    image: Array, weight: Array, stride: Any, pads: list[tuple[int, int]], dilation: Any, groups: int
) -> Array:
    """A convolution in the formulation that PopART's operators use (`podrun.onnx_models.ops.conv`)."""
    from podrun.onnx_models.ops.conv import correlate as formulated
    from podrun.onnx_models.ops.pooling import Window

    nothing = (0,) * len(pads)
    window = Window(tuple(weight.shape[2:]), tuple(stride), tuple(dilation), tuple(pads), nothing)
    return formulated(image, weight, groups, window)


def _transposed(
    image: Array, weight: Array, stride: Any, padding: Any, dilation: Any, extra: Any, groups: int
) -> Array:
    count, kernel = image.ndim - 2, weight.shape[2:]
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
    turned = jnp.flip(grouped.reshape(groups * weight.shape[1], -1, *kernel), tuple(range(2, 2 + count)))
    pads = [
        (d * (k - 1) - p, d * (k - 1) - p + more)
        for d, k, p, more in zip(dilation, kernel, padding, extra, strict=True)
    ]
    return lax.conv_general_dilated(
        image,
        turned,
        (1,) * count,
        pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )


def _same_padding(x: Array, weight: Array, dilation: Any, count: int) -> list[tuple[int, int]]:
    totals = [d * (k - 1) for d, k in zip(spread(dilation, count), weight.shape[2:], strict=True)]
    return [(total // 2, total - total // 2) for total in totals]


def _forward(
    call: Call,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Any = (1,),
    padding: Any = (0,),
    dilation: Any = (1,),
    groups: int = 1,
) -> Array:
    """A convolution by its own overloads, whose padding may be ``valid`` or ``same``."""
    count = weight.ndim - 2
    batched = x.ndim == weight.ndim
    image = widened(x if batched else x[None])
    if padding == "same":
        pads = _same_padding(image, weight, dilation, count)
    else:
        pads = [(p, p) for p in spread((0,) if padding == "valid" else padding, count)]
    made = correlate(image, widened(weight), spread(stride, count), pads, spread(dilation, count), groups)
    if bias is not None:
        made = made + widened(bias).reshape((-1,) + (1,) * count)
    return made if batched else made[0]


aten("conv1d", "conv2d", "conv3d", kind="Conv")(_forward)


@aten("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", kind="ConvTranspose")
def transposed_convolution(
    call: Call,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Any = (1,),
    padding: Any = (0,),
    output_padding: Any = (0,),
    groups: int = 1,
    dilation: Any = (1,),
) -> Array:
    """The transpose of convolution."""
    return convolution(call, x, weight, bias, stride, padding, dilation, True, output_padding, groups)


@aten("im2col", kind="Gather")
def columns(call: Call, x: Array, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Array:
    """Every window of an image as a column: ``[N, C * window, places]``."""
    batched = x.ndim == 4
    image = x if batched else x[None]
    kernel, dilation, padding, stride = (spread(each, 2) for each in (kernel, dilation, padding, stride))
    if not x.size:
        return jnp.zeros(call.results[0].shape, x.dtype)
    patches = lax.conv_general_dilated_patches(
        image, kernel, stride, [(p, p) for p in padding], rhs_dilation=dilation
    )
    made = patches.reshape(*patches.shape[:2], -1)
    return made if batched else made[0]


@aten("col2im", kind="Scatter")
def image_of_columns(
    call: Call, x: Array, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> Array:
    """Columns added back to where they came from."""
    batched = x.ndim == 3
    parts = x if batched else x[None]
    kernel, dilation, padding, stride = (spread(each, 2) for each in (kernel, dilation, padding, stride))
    channels = parts.shape[1] // (kernel[0] * kernel[1])
    outs = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(size, padding, dilation, kernel, stride, strict=True)
    ]
    parts = parts.reshape(parts.shape[0], channels, *kernel, *outs)
    wide = jnp.zeros((parts.shape[0], channels, size[0] + 2 * padding[0], size[1] + 2 * padding[1]), x.dtype)
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            rows = slice(row * dilation[0], row * dilation[0] + (outs[0] - 1) * stride[0] + 1, stride[0])
            columns_ = slice(
                column * dilation[1], column * dilation[1] + (outs[1] - 1) * stride[1] + 1, stride[1]
            )
            wide = wide.at[:, :, rows, columns_].add(parts[:, :, row, column])
    made = wide[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]
    return made if batched else made[0]


State = tuple[Array, ...]
Cell = Callable[[State, Array, Array, Any], tuple[State, Array]]
"""State, input's part of the gates, recurrent weights and bias -> next state, output."""


def _lstm_cell(state: State, gates: Array, weight: Array, bias: Any) -> tuple[State, Array]:
    hidden, memory = state
    gates = gates + product_with_rows(hidden, weight) + bias
    enter, forget, new, leave = jnp.split(gates, 4, -1)
    memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
    hidden = jax.nn.sigmoid(leave) * jnp.tanh(memory)
    return (hidden, memory), hidden


def _gru_cell(state: State, gates: Array, weight: Array, bias: Any) -> tuple[State, Array]:
    (hidden,) = state
    recurrent = product_with_rows(hidden, weight) + bias
    reset_x, update_x, new_x = jnp.split(gates, 3, -1)
    reset_h, update_h, new_h = jnp.split(recurrent, 3, -1)
    update = jax.nn.sigmoid(update_x + update_h)
    new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
    hidden = (1 - update) * new + update * hidden
    return (hidden,), hidden


def _plain_cell(activation: Callable[[Array], Array]) -> Cell:
    def cell(state: State, gates: Array, weight: Array, bias: Any) -> tuple[State, Array]:
        hidden = activation(gates + product_with_rows(state[0], weight) + bias)
        return (hidden,), hidden

    return cell


def _direction(
    cell: Cell, x: Array, start: State, weights: list[Array], backwards: bool
) -> tuple[State, Array]:
    """One layer in one direction: x ``[time, batch, features]``."""
    entering, recurrent = weights[:2]
    bias_x, bias_h = weights[2:4] if len(weights) > 3 else (0.0, 0.0)
    gates = product_with_rows(x, entering) + bias_x
    return lax.scan(lambda s, g: cell(s, g, recurrent, bias_h), start, gates, reverse=backwards)


def _network(cell: Cell) -> Callable[..., tuple[Array, ...]]:
    def run(
        call: Call,
        x: Array,
        start: Any,
        parameters: Any,
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Array, ...]:
        x = widened(x)
        starts = [widened(each) for each in (start if isinstance(start, (tuple, list)) else (start,))]
        if single := x.ndim == 2:
            x, starts = x[:, None], [each[:, None] for each in starts]
        elif batch_first:
            x = x.swapaxes(0, 1)
        directions = 2 if bidirectional else 1
        each_has = (len(parameters)) // (layers * directions)
        final: list[State] = []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                at = layer * directions + direction
                weights = [widened(w) for w in parameters[at * each_has : (at + 1) * each_has]]
                state = tuple(each[at] for each in starts)
                ended, output = _direction(cell, x, state, weights, bool(direction))
                outputs.append(output)
                final.append(ended)
            x = jnp.concatenate(outputs, -1)
            if dropout and train and layer < layers - 1:
                x = dropped(call, x, dropout)[0]
        states = [jnp.stack([state[i] for state in final]) for i in range(len(starts))]
        if single:
            return x[:, 0], *(each[:, 0] for each in states)
        return (x.swapaxes(0, 1) if batch_first else x), *states

    return run


aten("lstm.input", kind="LSTM")(_network(_lstm_cell))
aten("gru.input", kind="GRU")(_network(_gru_cell))
aten("rnn_tanh.input", kind="RNN")(_network(_plain_cell(jnp.tanh)))
aten("rnn_relu.input", kind="RNN")(_network(_plain_cell(jax.nn.relu)))
