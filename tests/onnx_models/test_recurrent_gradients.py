"""Gradients of ONNX's recurrent layers add up as they always have: their last bits are recorded."""

from __future__ import annotations

from typing import Any

import pytest

from podrun.runtime.environment import import_jax

import_jax()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, find_onnx_operator  # noqa: E402
from podrun.runtime.graph import Node  # noqa: E402

TIME, BATCH, INPUT, HIDDEN, DIRECTIONS = 2, 1, 3, 2, 2
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


class _Context:
    sdk = None


def _numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


def _scanned_shapes(op: str, **attributes: Any) -> list[tuple[int, ...]]:
    """Shapes of what the loops of the backward pass return."""
    node = Node(op, "", "", (), (), {"direction": "bidirectional", **attributes}, 14)
    operator = find_onnx_operator(ONNX, op, 14)
    rows = GATES[op] * HIDDEN

    def loss(x: jax.Array, w: jax.Array, r: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(operator.function(_Context(), node, x, w, r, b)[0])

    arrays = (
        _numbers(TIME, BATCH, INPUT),
        _numbers(DIRECTIONS, rows, INPUT),
        _numbers(DIRECTIONS, rows, HIDDEN),
        _numbers(DIRECTIONS, 2 * rows),
    )
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays)
    loops = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    return [variable.aval.shape for equation in loops for variable in equation.outvars]


@pytest.mark.parametrize("op", GATES)
def test_gradients_of_recurrent_weights_add_up_in_the_array_of_all_directions(op: str) -> None:
    shapes = _scanned_shapes(op)
    assert shapes.count((DIRECTIONS, GATES[op] * HIDDEN, HIDDEN)) == DIRECTIONS


def test_gradients_of_a_gru_bias_inside_the_reset_add_up_in_the_array_of_all_directions() -> None:
    shapes = _scanned_shapes("GRU", linear_before_reset=1)
    assert shapes.count((DIRECTIONS, 2 * 3 * HIDDEN)) == DIRECTIONS


def test_gradients_of_popart_lstm_weights_add_up_in_the_array_of_all_weights() -> None:
    node = Node("LSTM", "", "", (), (), {}, 1)
    operator = find_onnx_operator(GRAPHCORE, "LSTM", 1)

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(operator.function(_Context(), node, x, weights)[0])

    weights = _numbers(4, INPUT + HIDDEN, HIDDEN)
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=1))(_numbers(TIME, BATCH, INPUT), weights)
    (backward,) = (e for e in jaxpr.eqns if e.primitive.name == "scan" and e.params["reverse"])
    assert (INPUT + HIDDEN, 4 * HIDDEN) in [variable.aval.shape for variable in backward.outvars]
