"""Recurrent networks whole, as scans over time: all layers and directions of ``lstm``, ``gru`` and ``rnn``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podrun.poptorch.operators.products import product_with_rows
from podrun.poptorch.operators.randomness import dropped
from podrun.poptorch.operators.table import Array, Call, aten, widened

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
