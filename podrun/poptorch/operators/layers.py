"""Convolutions of 1 to 3 dimensions and their transposes; recurrent networks whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from podrun.numerics.convolution import along_channels, columns_of, convolved, image_of
from podrun.numerics.convolution import transposed as turned
from podrun.numerics.norms import dropped
from podrun.numerics.precision import product_with_rows, widen
from podrun.numerics.recurrence import (
    SIGMOID,
    TANH,
    Activation,
    Cell,
    CellWeights,
    Sequences,
    State,
    recurrence,
)
from podrun.numerics.windows import Window
from podrun.poptorch.operators.table import Array, Call, aten, spread


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
    if not transposed:
        return _forward(call, x, weight, bias, stride, padding, dilation, groups)
    count = weight.ndim - 2
    image = widen(x if x.ndim == weight.ndim else x[None])
    window = _window(weight.shape[2:], stride, padding, dilation)
    added = spread(output_padding, count)
    result = turned(image, widen(weight), groups, window, added, one_by_one=False)
    if bias is not None:
        result = result + along_channels(widen(bias), image.ndim)
    return result if x.ndim == weight.ndim else result[0]


def _window(kernel: Any, stride: Any, padding: Any, dilation: Any) -> Window:
    """A window of torch's arguments: one number for all dimensions or one for each."""
    count = len(kernel)
    pads = tuple((p, p) for p in spread(padding, count))
    return Window(tuple(kernel), spread(stride, count), spread(dilation, count), pads, (0,) * count)


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
    window = _window(weight.shape[2:], stride, (0,) if isinstance(padding, str) else padding, dilation)
    if padding == "same":
        totals = [extent - 1 for extent in window.extents()]
        window = replace(window, pads=tuple((total // 2, total - total // 2) for total in totals))
    if x.ndim == weight.ndim:
        return convolved(x, weight, bias, groups, window)
    return convolved(x[None], weight, bias, groups, window)[0]


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
    if not x.size:
        return jnp.zeros(call.results[0].shape, x.dtype)
    window = _window(spread(kernel, 2), stride, padding, dilation)
    return columns_of(x, window) if x.ndim == 4 else columns_of(x[None], window)[0]


@aten("col2im", kind="Scatter")
def image_of_columns(
    call: Call, x: Array, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> Array:
    """Columns added back to where they came from."""
    window = _window(spread(kernel, 2), stride, padding, dilation)
    return image_of(x, size, window) if x.ndim == 3 else image_of(x[None], size, window)[0]


def _network(kind: str, gates: str, *activations: Activation) -> Callable[..., tuple[Array, ...]]:
    """Layers of a recurrent cell, each in one or two directions; between layers dropout while training."""
    cell = Cell(kind, gates, activations, product=product_with_rows)

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
        x = widen(x)
        starts = [widen(each) for each in (start if isinstance(start, (tuple, list)) else (start,))]
        if single := x.ndim == 2:
            x, starts = x[:, None], [each[:, None] for each in starts]
        elif batch_first:
            x = x.swapaxes(0, 1)
        directions = 2 if bidirectional else 1
        count = len(parameters) // (layers * directions)
        final: list[State] = []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                at = layer * directions + direction
                weights = _weights(parameters[at * count : (at + 1) * count])
                state = tuple(each[at] for each in starts)
                output, ended = recurrence(cell, weights, Sequences(x), state, backward=bool(direction))
                outputs.append(output)
                final.append(ended)
            x = jnp.concatenate(outputs, -1)
            if dropout and train and layer < layers - 1:
                x = dropped(call.key(), x, dropout, x.shape, below=True)[0]
        states = [jnp.stack([state[i] for state in final]) for i in range(len(starts))]
        if single:
            return x[:, 0], *(each[:, 0] for each in states)
        return (x.swapaxes(0, 1) if batch_first else x), *states

    return run


def _weights(parameters: Sequence[Array]) -> CellWeights:
    """Torch's parameters of one layer in one direction: weights, two biases or none, and a projection or none."""
    entering, recurrent, *rest = (widen(each) for each in parameters)
    biases, projection = (rest[:2], rest[2:]) if len(rest) > 1 else ([], rest)
    leaving = projection[0] if projection else None
    return CellWeights(entering, recurrent, tuple(biases[:1]), biases[1] if biases else None, leaving=leaving)


aten("lstm.input", kind="LSTM")(_network("lstm", "ifno", SIGMOID, TANH, TANH))
aten("gru.input", kind="GRU")(_network("gru", "rzn", SIGMOID, TANH))
aten("rnn_tanh.input", kind="RNN")(_network("rnn", "n", TANH))
aten("rnn_relu.input", kind="RNN")(_network("rnn", "n", jax.nn.relu))
