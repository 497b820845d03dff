"""RNN, GRU and LSTM as ``lax.scan`` over time: inputs projected for all steps at once, one matrix product
a step.

Shapes (ONNX, ``layout`` 0): X ``[time, batch, input]``, W ``[directions, gates*hidden, input]``, R
``[directions,
gates*hidden, hidden]``, B ``[directions, 2*gates*hidden]``, states ``[directions, batch, hidden]``. With
layout 1 batch comes first. Halves are computed in float32 and rounded once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podrun.core.errors import InputMismatch, UnsupportedError
from podrun.numerics.precision import rounds_once
from podrun.onnx_models.ops.common import Array
from podrun.onnx_models.ops.indexing import reversed_within
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context

_log = logging.getLogger("podrun.popart.ops")

Activation = Callable[[Array], Array]

_ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "relu": lambda x, a, b: jnp.maximum(x, 0),
    "tanh": lambda x, a, b: jnp.tanh(x),
    "sigmoid": lambda x, a, b: jax.nn.sigmoid(x),
    "affine": lambda x, a, b: (1.0 if a is None else a) * x + (0.0 if b is None else b),
    "leakyrelu": lambda x, a, b: jnp.where(x >= 0, x, (0.01 if a is None else a) * x),
    "thresholdedrelu": lambda x, a, b: jnp.where(x > (1.0 if a is None else a), x, 0),
    "scaledtanh": lambda x, a, b: (1.0 if a is None else a) * jnp.tanh((1.0 if b is None else b) * x),
    "hardsigmoid": lambda x, a, b: jnp.clip((0.2 if a is None else a) * x + (0.5 if b is None else b), 0, 1),
    "elu": lambda x, a, b: jnp.where(x >= 0, x, (1.0 if a is None else a) * jnp.expm1(jnp.minimum(x, 0))),
    "softsign": lambda x, a, b: x / (1 + jnp.abs(x)),
    "softplus": lambda x, a, b: jax.nn.softplus(x),
}
_WITH_ALPHA = {"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"}
_WITH_BETA = {"affine", "scaledtanh", "hardsigmoid"}


@dataclass(frozen=True, slots=True)
class CellWeights:
    """The ingredients of one direction: its activations, and a function that clips values."""

    activations: tuple[Activation, ...]
    clip: Activation


def _cells(node: Node, directions: int, defaults: tuple[str, ...]) -> list[CellWeights]:
    names = [n.lower() for n in node.get("activations") or defaults * directions]
    if len(defaults) == 1 and names == ["tanh", "tanh"]:
        names = names[:directions]  # the schema's default for RNN, whatever the direction
    if len(names) != len(defaults) * directions:
        raise InputMismatch(f"{len(names)} activations are given; {len(defaults) * directions} are needed")
    alphas, betas = list(node.get("activation_alpha") or ()), list(node.get("activation_beta") or ())
    made: list[Activation] = []
    for name in names:
        if name not in _ACTIVATIONS:
            raise UnsupportedError(f"activation '{name}' of {node.describe()} is not known")
        a = alphas.pop(0) if name in _WITH_ALPHA and alphas else None
        b = betas.pop(0) if name in _WITH_BETA and betas else None
        made.append(functools.partial(_ACTIVATIONS[name], a=a, b=b))
    limit = node.get("clip")

    def clip(x: Array) -> Array:
        return x if limit is None else jnp.clip(x, -limit, limit)

    per = len(defaults)
    return [CellWeights(tuple(made[d * per : (d + 1) * per]), clip) for d in range(directions)]


Step = Callable[[Array, tuple[Array, ...]], tuple[Array, ...]]
"""From the projected input of a step and the state to the new state, whose first part is the output."""


def _run_direction(
    x: Array, lengths: Array | None, state: tuple[Array, ...], step: Step
) -> tuple[Array, tuple[Array, ...]]:
    """Scan a step over projected inputs ``[time, batch, ...]``: outputs (0 beyond each length) and the
    final state.
    """

    def body(carry: tuple[Array, ...], each: Any) -> Any:
        t, projected = each
        new = step(projected, carry)
        if lengths is None:
            return new, new[0]
        alive = (t < lengths)[:, None]
        kept = tuple(jnp.where(alive, n, c) for n, c in zip(new, carry, strict=True))
        return kept, jnp.where(alive, new[0], jnp.zeros((), new[0].dtype))

    final, outputs = lax.scan(body, state, (jnp.arange(x.shape[0], dtype=jnp.int32), x))
    return outputs, final


def _recurrent(
    node: Node,
    x: Array,
    states: tuple[Array | None, ...],
    lengths: Array | None,
    defaults: tuple[str, ...],
    project: Callable[[int, Array], Array],
    make_step: Callable[[int, CellWeights], Step],
    hidden: int,
) -> tuple[Array, ...]:
    """Run all directions: Y ``[time, directions, batch, hidden]`` and each final state ``[directions,
    batch, hidden]``.
    """
    direction = node.get("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        raise InputMismatch(f"direction '{direction}' is none of forward, reverse, bidirectional")
    first_batch = bool(node.get("layout", 0))
    if first_batch:
        x = jnp.swapaxes(x, 0, 1)
        states = tuple(None if s is None else jnp.swapaxes(s, 0, 1) for s in states)
    directions = 2 if direction == "bidirectional" else 1
    batch = x.shape[1]
    lengths = None if lengths is None else lengths.astype(jnp.int32)
    outputs, finals = [], []
    for d, cell in enumerate(_cells(node, directions, defaults)):
        backward = direction == "reverse" or d == 1
        start = tuple(jnp.zeros((batch, hidden), x.dtype) if s is None else s[d] for s in states)
        given = _backward(x, lengths) if backward else x
        y, final = _run_direction(project(d, given), lengths, start, make_step(d, cell))
        outputs.append(_backward(y, lengths) if backward else y)
        finals.append(final)
    stacked = jnp.stack(outputs, axis=1)
    last = tuple(jnp.stack([f[k] for f in finals], axis=0) for k in range(len(states)))
    if first_batch:
        return (jnp.transpose(stacked, (2, 0, 1, 3)), *(jnp.swapaxes(s, 0, 1) for s in last))
    return (stacked, *last)


def _backward(x: Array, lengths: Array | None) -> Array:
    return jnp.flip(x, 0) if lengths is None else reversed_within(x, lengths, 1, 0)


def _hidden(node: Node, r: Array) -> int:
    size = node.get("hidden_size", r.shape[-1])
    if size != r.shape[-1]:
        raise InputMismatch(f"hidden_size {size} does not fit recurrent weights {r.shape}")
    return int(size)


def _heeded(ctx: Context, node: Node, lengths: Array | None) -> Array | None:
    """The lengths of sequences. The SDK's RNN and GRU ignore them with a warning."""
    if lengths is None or ctx.sdk is None:
        return lengths
    _log.warning("optional input `sequence_lens' of %s will be ignored, as the SDK does", node.describe())
    return None


@operator(ONNX, "RNN", since=(1, 7, 14, 22))
@rounds_once
def rnn(
    ctx: Context,
    node: Node,
    x: Array,
    w: Array,
    r: Array,
    b: Array = None,
    lengths: Array = None,
    h: Array = None,
) -> tuple[Array, ...]:
    """h = f(W x + Wb + R h + Rb) (ONNX RNN): all outputs and the last."""
    n, lengths = _hidden(node, r), _heeded(ctx, node, lengths)

    def project(d: int, x: Array) -> Array:
        y = x @ w[d].T
        return y if b is None else y + (b[d, :n] + b[d, n:])

    def make(d: int, cell: CellWeights) -> Step:
        return lambda p, s: (cell.activations[0](cell.clip(p + s[0] @ r[d].T)),)

    return _recurrent(node, x, (h,), lengths, ("Tanh",), project, make, n)


@operator(ONNX, "GRU", since=(1, 7, 14, 22))
@rounds_once
def gru(
    ctx: Context,
    node: Node,
    x: Array,
    w: Array,
    r: Array,
    b: Array = None,
    lengths: Array = None,
    h: Array = None,
) -> tuple[Array, ...]:
    """Update gate z, reset gate r, candidate h (ONNX GRU): ``linear_before_reset`` as cuDNN and PyTorch
    have it.
    """
    n, lengths = _hidden(node, r), _heeded(ctx, node, lengths)
    after = bool(node.get("linear_before_reset", 0))

    def project(d: int, x: Array) -> Array:
        y = x @ w[d].T
        if b is None:
            return y
        extra = b[d, 3 * n :]
        extra = extra.at[2 * n :].set(0) if after else extra
        return y + b[d, : 3 * n] + extra

    def make(d: int, cell: CellWeights) -> Step:
        f, g = cell.activations

        def step(p: Array, s: tuple[Array, ...]) -> tuple[Array, ...]:
            (state,) = s
            gates = p[:, : 2 * n] + state @ r[d, : 2 * n].T
            z, reset = f(cell.clip(gates[:, :n])), f(cell.clip(gates[:, n:]))
            if after:
                inner = state @ r[d, 2 * n :].T + (0 if b is None else b[d, 5 * n :])
                candidate = p[:, 2 * n :] + reset * inner
            else:
                candidate = p[:, 2 * n :] + (reset * state) @ r[d, 2 * n :].T
            return ((1 - z) * g(cell.clip(candidate)) + z * state,)

        return step

    return _recurrent(node, x, (h,), lengths, ("Sigmoid", "Tanh"), project, make, n)


@operator(ONNX, "LSTM", since=(1, 7, 14, 22))
@rounds_once
def lstm(
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
    """Gates input, output, forget, cell (ONNX LSTM): all outputs, the last output, the last cell state."""
    n = _hidden(node, r)
    coupled = bool(node.get("input_forget", 0))

    def project(d: int, x: Array) -> Array:
        y = x @ w[d].T
        return y if b is None else y + (b[d, : 4 * n] + b[d, 4 * n :])

    def make(d: int, cell: CellWeights) -> Step:
        f, g, out = cell.activations
        look = (
            [jnp.zeros((), x.dtype)] * 3
            if peepholes is None
            else [peepholes[d, k * n : (k + 1) * n] for k in range(3)]
        )

        def step(p: Array, s: tuple[Array, ...]) -> tuple[Array, ...]:
            state, memory = s
            i, o, forget, new = (v for v in jnp.split(p + state @ r[d].T, 4, axis=-1))
            i = f(cell.clip(i + look[0] * memory))
            forget = 1 - i if coupled else f(cell.clip(forget + look[2] * memory))
            memory = forget * memory + i * g(cell.clip(new))
            return f(cell.clip(o + look[1] * memory)) * out(memory), memory

        return step

    return _recurrent(node, x, (h, c), lengths, ("Sigmoid", "Tanh", "Tanh"), project, make, n)


@operator(GRAPHCORE, "LSTM")
@rounds_once
def graphcore_lstm(
    ctx: Context, node: Node, x: Array, weights: Array, bias: Array = None, state: Array = None
) -> Any:
    """poplibs' LSTM: x ``[time, batch, input]``, weights ``[4, input + hidden, hidden]``, gates forget,
    input, cell, output.

    bias ``[4, hidden]``, initial state ``[2, batch, hidden]`` (output, cell). Returns all outputs (or, with
    ``outputFullSequence=0``, the last) and the last cell state (PopART LSTM).
    """
    inputs, n = x.shape[2], weights.shape[2]
    batch = x.shape[1]
    start = jnp.zeros((2, batch, n), x.dtype) if state is None else state
    kernel = jnp.transpose(weights, (1, 0, 2)).reshape(inputs + n, 4 * n)
    offset = 0 if bias is None else bias.reshape(-1)
    projected = x @ kernel[:inputs] + offset

    def step(p: Array, s: tuple[Array, ...]) -> tuple[Array, ...]:
        h, c = s
        forget, i, new, o = jnp.split(p + h @ kernel[inputs:], 4, axis=-1)
        c = jax.nn.sigmoid(forget) * c + jax.nn.sigmoid(i) * jnp.tanh(new)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    y, (last, cell) = _run_direction(projected, None, (start[0], start[1]), step)
    return (y if node.get("outputFullSequence", 1) else last), cell
