"""RNN, GRU and LSTM of ONNX, and PopART's LSTM: attributes of `podrun.numerics.recurrence`, directions and layouts.

Shapes (ONNX, ``layout`` 0): X ``[time, batch, input]``, W ``[directions, gates*hidden, input]``, R ``[directions,
gates*hidden, hidden]``, B ``[directions, 2*gates*hidden]``, states ``[directions, batch, hidden]``. With layout 1 batch
comes first. Halves are computed in float32 and rounded once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from podrun.core.errors import InputMismatch, UnsupportedError
from podrun.numerics.precision import rounds_once
from podrun.numerics.recurrence import (
    ACTIVATIONS,
    SIGMOID,
    TANH,
    Cell,
    CellWeights,
    Sequences,
    State,
    cell_activations,
    recurrence,
)
from podrun.onnx_models.ops.common import Array
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.kept_traces import warn_of_graph
from podrun.runtime.operators import Context

_log = logging.getLogger("podrun.onnx_models")


def _cells(node: Node, directions: int, kind: str, gates: str, defaults: tuple[str, ...]) -> list[Cell]:
    """The cell of each direction. Raises InputMismatch and UnsupportedError for activations that do not fit."""
    names = tuple(node.get("activations") or defaults * directions)
    if len(defaults) == 1 and [n.lower() for n in names] == ["tanh", "tanh"]:
        names = names[:directions]  # the schema's default for RNN, whatever the direction
    if len(names) != len(defaults) * directions:
        raise InputMismatch(f"{len(names)} activations are given; {len(defaults) * directions} are needed")
    parameters = (tuple(node.get(f"activation_{name}") or ()) for name in ("alpha", "beta"))
    for name in names:
        if name.lower() not in ACTIVATIONS:
            raise UnsupportedError(f"activation '{name.lower()}' of {node.describe()} is not known")
    functions = cell_activations(names, *parameters)
    per = len(defaults)
    return [
        Cell(
            kind,
            gates,
            functions[d * per : (d + 1) * per],
            clip=node.get("clip"),
            reset_after=bool(node.get("linear_before_reset", 0)),
            coupled=bool(node.get("input_forget", 0)),
            turns=True,
            apart=True,
        )
        for d in range(directions)
    ]


def _hidden(node: Node, r: Array) -> int:
    size = node.get("hidden_size", r.shape[-1])
    if size != r.shape[-1]:
        raise InputMismatch(f"hidden_size {size} does not fit recurrent weights {r.shape}")
    return int(size)


def _directions(
    node: Node,
    x: Array,
    states: tuple[Array | None, ...],
    lengths: Array | None,
    weights: Callable[[int], CellWeights],
    cells: Callable[[int], list[Cell]],
) -> tuple[Array, ...]:
    """Run all directions: Y ``[time, directions, batch, hidden]`` and each final state ``[directions, batch,
    hidden]``.
    """
    direction = node.get("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        raise InputMismatch(f"direction '{direction}' is none of forward, reverse, bidirectional")
    first_batch = bool(node.get("layout", 0))
    if first_batch:
        x = jnp.swapaxes(x, 0, 1)
        states = tuple(None if s is None else jnp.swapaxes(s, 0, 1) for s in states)
    lengths = None if lengths is None else lengths.astype(jnp.int32)
    outputs, finals = [], []
    for d, cell in enumerate(cells(2 if direction == "bidirectional" else 1)):
        cell_weights = weights(d)
        zeros = jnp.zeros((x.shape[1], cell_weights.recurrent.shape[-1]), x.dtype)
        start = tuple(zeros if s is None else s[d] for s in states)
        backward = direction == "reverse" or d == 1
        y, final = recurrence(cell, cell_weights, Sequences(x, lengths), start, backward=backward)
        outputs.append(y)
        finals.append(final)
    stacked = jnp.stack(outputs, axis=1)
    last = tuple(jnp.stack([f[k] for f in finals], axis=0) for k in range(len(states)))
    if first_batch:
        return (jnp.transpose(stacked, (2, 0, 1, 3)), *(jnp.swapaxes(s, 0, 1) for s in last))
    return (stacked, *last)


def _used_lengths(ctx: Context, node: Node, lengths: Array | None) -> Array | None:
    """The lengths of sequences. The SDK's RNN and GRU ignore them with a warning."""
    if lengths is None or ctx.sdk is None:
        return lengths
    line = "optional input `sequence_lens' of %s will be ignored, as the SDK does"
    warn_of_graph(_log, line, node.describe())
    return None


_KINDS = {
    "RNN": ("rnn", "n", ("Tanh",)),
    "GRU": ("gru", "zrn", ("Sigmoid", "Tanh")),
    "LSTM": ("lstm", "iofn", ("Sigmoid", "Tanh", "Tanh")),
}
"""Kind and gates of `podrun.numerics.recurrence`, and the default activations, by operator."""
_VERSIONS = (1, 7, 14, 22)


def _biases(node: Node, b: Array | None, n: int, direction: int) -> tuple[tuple[Array, ...], Array | None]:
    """What is added to all gates, and the biases of which the new state's is added before the reset (GRU)."""
    if b is None:
        return (), None
    half = b.shape[1] // 2
    own, recurrent = b[direction, :half], b[direction, half:]
    if node.op_type != "GRU":
        return (own + recurrent,), None
    if not node.get("linear_before_reset", 0):
        return (own, recurrent), None
    return (own, recurrent.at[2 * n :].set(0)), b


@operator(ONNX, "RNN", since=_VERSIONS)
@operator(ONNX, "GRU", since=_VERSIONS)
@operator(ONNX, "LSTM", since=_VERSIONS)
@rounds_once
def onnx_recurrent_layer(
    ctx: Context,
    node: Node,
    x: Array,
    w: Array,
    r: Array,
    b: Array = None,
    lengths: Array = None,
    h: Array = None,
    c: Array = None,
    peepholes: Array = None,
) -> tuple[Array, ...]:
    """All outputs, the last one, and for LSTM the last cell state.

    RNN: ``h = f(W x + Wb + R h + Rb)``. GRU: update gate z, reset gate r, new state; ``linear_before_reset`` as cuDNN
    and PyTorch have it. LSTM: gates input, output, forget, cell; ``c`` and ``peepholes`` are its alone.
    """
    n = _hidden(node, r)
    kind, gates, activations = _KINDS[node.op_type]
    is_lstm = kind == "lstm"

    def weights(d: int) -> CellWeights:
        biases, before_reset = _biases(node, b, n, d)
        looks = None if peepholes is None else tuple(jnp.split(peepholes[d], 3))
        return CellWeights(w[d], r, biases, before_reset, peepholes=looks, part=d)

    return _directions(
        node,
        x,
        (h, c) if is_lstm else (h,),
        lengths if is_lstm else _used_lengths(ctx, node, lengths),
        weights,
        lambda count: _cells(node, count, kind, gates, activations),
    )


_POPLIBS = Cell("lstm", "fino", (SIGMOID, TANH, TANH), product=jnp.matmul)


@operator(GRAPHCORE, "LSTM")
@rounds_once
def graphcore_lstm(
    ctx: Context, node: Node, x: Array, weights: Array, bias: Array = None, state: Array = None
) -> Any:
    """poplibs' LSTM: x ``[time, batch, input]``, weights ``[4, input + hidden, hidden]``, gates forget, input, cell,
    output.

    bias ``[4, hidden]``, initial state ``[2, batch, hidden]`` (output, cell). Returns all outputs (or, with
    ``outputFullSequence=0``, the last) and the last cell state (PopART LSTM).
    """
    inputs, n = x.shape[2], weights.shape[2]
    start: State = tuple(jnp.zeros((2, x.shape[1], n), x.dtype) if state is None else state)
    columns = jnp.transpose(weights, (1, 0, 2)).reshape(inputs + n, 4 * n)
    biases = (jnp.zeros((), x.dtype) if bias is None else bias.reshape(-1),)
    parts = CellWeights(columns[:inputs], columns, biases, part=slice(inputs, None))
    y, (last, cell) = recurrence(_POPLIBS, parts, Sequences(x), start)
    return (y if node.get("outputFullSequence", 1) else last), cell
