"""Convolutions of 1 to 3 dimensions and their transposes; recurrent networks whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

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
from podrun.poptorch.operators.table import Call, PerDimension, Sizes, aten, spread


@aten("convolution", "_convolution", kind="Conv")
def convolution(
    call: Call,
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: PerDimension,
    padding: PerDimension,
    dilation: PerDimension,
    transposed: bool,
    output_padding: PerDimension,
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
    result: Array = turned(image, widen(weight), groups, window, added, one_by_one=False)
    if bias is not None:
        result = result + along_channels(widen(bias), image.ndim)
    return result if x.ndim == weight.ndim else result[0]


def _window(kernel: Sizes, stride: PerDimension, padding: PerDimension, dilation: PerDimension) -> Window:
    """A window of torch's arguments: one number for all dimensions or one for each."""
    count = len(kernel)
    pads = tuple((p, p) for p in spread(padding, count))
    return Window(tuple(kernel), spread(stride, count), spread(dilation, count), pads, (0,) * count)


def _forward(
    call: Call,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: PerDimension = (1,),
    padding: PerDimension | str = (0,),
    dilation: PerDimension = (1,),
    groups: int = 1,
) -> Array:
    """A convolution by its own overloads, whose padding may be ``valid`` or ``same``."""
    window = _window(weight.shape[2:], stride, (0,) if isinstance(padding, str) else padding, dilation)
    if padding == "same":
        totals = [extent - 1 for extent in window.extents()]
        window = replace(window, pads=tuple((total // 2, total - total // 2) for total in totals))
    images = x if x.ndim == weight.ndim else x[None]
    result: Array = convolved(images, weight, bias, groups, window)
    return result if x.ndim == weight.ndim else result[0]


aten("conv1d", "conv2d", "conv3d", kind="Conv")(_forward)


@aten("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", kind="ConvTranspose")
def transposed_convolution(
    call: Call,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: PerDimension = (1,),
    padding: PerDimension = (0,),
    output_padding: PerDimension = (0,),
    groups: int = 1,
    dilation: PerDimension = (1,),
) -> Array:
    """The transpose of a convolution: each input element adds the kernel to the result."""
    return convolution(call, x, weight, bias, stride, padding, dilation, True, output_padding, groups)


@aten("im2col", kind="Gather")
def columns(
    call: Call,
    x: Array,
    kernel: PerDimension,
    dilation: PerDimension,
    padding: PerDimension,
    stride: PerDimension,
) -> Array:
    """Every window of an image as a column: ``[N, C * window, places]``."""
    if not x.size:
        return jnp.zeros(call.results[0].shape, x.dtype)
    window = _window(spread(kernel, 2), stride, padding, dilation)
    result: Array = columns_of(x if x.ndim == 4 else x[None], window)
    return result if x.ndim == 4 else result[0]


@aten("col2im", kind="Scatter")
def image_of_columns(
    call: Call,
    x: Array,
    size: Sizes,
    kernel: PerDimension,
    dilation: PerDimension,
    padding: PerDimension,
    stride: PerDimension,
) -> Array:
    """Columns added back to where they came from."""
    window = _window(spread(kernel, 2), stride, padding, dilation)
    result: Array = image_of(x if x.ndim == 3 else x[None], size, window)
    return result if x.ndim == 3 else result[0]


def _network(kind: str, gates: str, *activations: Activation) -> Callable[..., tuple[Array, ...]]:
    """Layers of a recurrent cell, each in one or two directions; between layers dropout while training."""
    cell = Cell(kind, gates, activations, product=product_with_rows)

    def run(
        call: Call,
        x: Array,
        start: Array | Sequence[Array],
        parameters: Sequence[Array],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Array, ...]:
        x = widen(x)
        starts = [widen(state) for state in (start if isinstance(start, (tuple, list)) else (start,))]
        if single := x.ndim == 2:
            x, starts = x[:, None], [state[:, None] for state in starts]
        elif batch_first:
            x = x.swapaxes(0, 1)
        directions = 2 if bidirectional else 1
        count = len(parameters) // (layers * directions)
        final: list[State] = []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                weights = _weights(parameters[index * count : (index + 1) * count])
                state = tuple(begin[index] for begin in starts)
                output, ended = recurrence(cell, weights, Sequences(x), state, backward=bool(direction))
                outputs.append(output)
                final.append(ended)
            x = jnp.concatenate(outputs, -1)
            if dropout and train and layer < layers - 1:
                x = dropped(call.key(), x, dropout, x.shape, below=True)[0]
        states = [jnp.stack([state[i] for state in final]) for i in range(len(starts))]
        if single:
            return x[:, 0], *(ended[:, 0] for ended in states)
        return (x.swapaxes(0, 1) if batch_first else x), *states

    return run


def _weights(parameters: Sequence[Array]) -> CellWeights:
    """Torch's parameters of one layer in one direction: weights, two biases or none, and a projection or none."""
    entering, recurrent, *rest = (widen(parameter) for parameter in parameters)
    biases, projection = (rest[:2], rest[2:]) if len(rest) > 1 else ([], rest)
    leaving = projection[0] if projection else None
    return CellWeights(entering, recurrent, tuple(biases[:1]), biases[1] if biases else None, leaving=leaving)


aten("lstm.input", kind="LSTM")(_network("lstm", "ifno", SIGMOID, TANH, TANH))
aten("gru.input", kind="GRU")(_network("gru", "rzn", SIGMOID, TANH))
aten("rnn_tanh.input", kind="RNN")(_network("rnn", "n", TANH))
aten("rnn_relu.input", kind="RNN")(_network("rnn", "n", jax.nn.relu))
