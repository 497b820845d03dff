"""The recurrent layers of the SDK, each one operator: `podrun.numerics.recurrence` over a whole sequence.

Gates are in the order of Keras: an LSTM's input, forget, new memory, output; a GRU's update, reset, new state. Halves
are multiplied as they are, with sums in float32, and states of a layer of halves are halves from step to step, as on an
IPU; all else, also halves with kernels of floats, is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from podrun.core.errors import InvalidOptionError
from podrun.numerics.recurrence import (
    Cell,
    CellWeights,
    Sequences,
    cell_activations,
    recurrence,
    rows_product,
)
from podrun.tensorflow.operators.table import computes

if TYPE_CHECKING:
    from podrun.runtime.graph import Node
    from podrun.runtime.operators import Context

_Activation = Callable[[jax.Array], jax.Array]
_ONNX_NAMES = {"hard_sigmoid": "hardsigmoid"}


def _activation(name: str) -> _Activation:
    if name == "softmax":
        return lambda x: jax.nn.softmax(x, axis=-1)
    return cell_activations((_ONNX_NAMES.get(name, name),))[0]


def _sums_of_halves(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b.T`` of halves, in float32."""
    halves = a.astype(b.dtype)
    return lax.dot_general(
        halves, b, (((a.ndim - 1,), (b.ndim - 1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _sums_by_columns(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` of halves, in float32: weights as they lie."""
    return lax.dot_general(
        a.astype(b.dtype), b, (((a.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )


def _rounded_to_half(x: jax.Array) -> jax.Array:
    """The half next to each number, as float32; gradients pass as they are."""
    return x + lax.stop_gradient(x.astype(jnp.float16).astype(x.dtype) - x)


def _wide(x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


@computes(
    "Podrun:recurrence",
    attributes="cell activation recurrent_activation reset_after lengths attention memory_share",
)
def _recurrence(ctx: Context, node: Node, x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
    """From x ``[time, batch, input]``, the kernels ``[input, g*h]`` and ``[h, g*h]``, the bias ``[g*h]`` (``[2, g*h]``
    for a GRU that resets after its product) and the states: all outputs and the last states, in the type of x.
    """
    share = node.get("memory_share", 0)
    if share < 0:
        raise InvalidOptionError(
            f"availableMemoryProportion of a recurrent layer is {share}. Value must be greater than or equal to 0."
        )
    dtype = jnp.asarray(x).dtype
    lstm = node["cell"] == "lstm"
    entering, recurrent = (jnp.asarray(value) for value in rest[:2])
    halves = all(value.dtype == jnp.float16 for value in (jnp.asarray(x), entering, recurrent))
    if not halves:
        entering, recurrent = _wide(entering), _wide(recurrent)
    bias, *others = [_wide(value) for value in rest[2:]]
    state = tuple(others[: 2 if lstm else 1])
    others = others[2 if lstm else 1 :]
    lengths = others.pop(0).astype(jnp.int32) if node["lengths"] else None
    attention = others.pop(0) if node["attention"] else None
    cell, weights = _cell(node, halves), _weights(node, halves, entering, recurrent, bias)
    outputs, last = recurrence(cell, weights, Sequences(_wide(x), lengths, attention), state)
    return tuple(value.astype(dtype) for value in (outputs, *last))


def _cell(node: Node, halves: bool) -> Cell:
    """The cell of a layer, with Keras' order of gates. ``halves``: whether inputs and kernels are."""
    product = _sums_of_halves if halves else rows_product
    new, gate = _activation(node["activation"]), _activation(node["recurrent_activation"])
    rounded = _rounded_to_half if halves else None
    if node["cell"] == "lstm":
        product = _sums_by_columns if halves else rows_product
        return Cell("lstm", "ifno", (gate, new, new), product=product, rounded=rounded)
    return Cell("gru", "zrn", (gate, new), reset_after=node["reset_after"], product=product, rounded=rounded)


def _weights(
    node: Node, halves: bool, entering: jax.Array, recurrent: jax.Array, bias: jax.Array
) -> CellWeights:
    """Kernels whose rows are gates, as the recurrence takes them; Keras' columns are gates.

    A GRU that resets after its product has two biases, ``[2, g*h]``: the second one is added to the product of the
    state, so that the reset gate multiplies it too. Layers of version 1 have a row for each gate, ``[g, h]``.
    """
    if node["cell"] == "lstm" and halves:  # As `_sums_by_columns` takes them.
        return CellWeights(entering, recurrent, (bias.reshape(-1),))
    if node["cell"] == "gru" and node["reset_after"]:
        return CellWeights(entering.T, recurrent.T, (bias[0],), bias[1])
    return CellWeights(entering.T, recurrent.T, (bias.reshape(-1),))
