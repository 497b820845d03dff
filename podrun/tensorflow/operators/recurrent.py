"""The recurrent layers of the SDK, each one operator: `podrun.numerics.recurrence` over a whole sequence.

Gates are in the order of Keras: an LSTM's input, forget, new memory, output; a GRU's update, reset, new state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from podrun.numerics.recurrence import Cell, CellWeights, Sequences, cell_activations, recurrence
from podrun.tensorflow.operators.table import computes

if TYPE_CHECKING:
    from podrun.runtime.graph import Node

Activation = Callable[[jax.Array], jax.Array]
_ONNX_NAMES = {"hard_sigmoid": "hardsigmoid"}


def _activation(name: str) -> Activation:
    if name == "softmax":
        return lambda x: jax.nn.softmax(x, axis=-1)
    return cell_activations((_ONNX_NAMES.get(name, name),))[0]


def _wide(x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


@computes(
    "Podrun:recurrence", attributes="cell activation recurrent_activation reset_after lengths attention"
)
def _recurrence(ctx: object, node: Node, x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
    """From x ``[time, batch, input]``, the kernels ``[input, g*h]`` and ``[h, g*h]``, the bias ``[g*h]`` (``[2, g*h]``
    for a GRU that resets after its product) and the states: all outputs and the last states, in the type of x.
    """
    dtype = jnp.asarray(x).dtype
    lstm = node["cell"] == "lstm"
    entering, recurrent, bias, *others = [_wide(value) for value in rest]
    state = tuple(others[: 2 if lstm else 1])
    others = others[2 if lstm else 1 :]
    lengths = others.pop(0).astype(jnp.int32) if node["lengths"] else None
    attention = others.pop(0) if node["attention"] else None
    new, gate = _activation(node["activation"]), _activation(node["recurrent_activation"])
    cell = Cell(
        node["cell"],
        "ifno" if lstm else "zrn",
        (gate, new, new) if lstm else (gate, new),
        reset_after=node["reset_after"],
    )
    after = not lstm and node["reset_after"]
    biases = (bias[0],) if after else (bias.reshape(-1),)
    weights = CellWeights(entering.T, recurrent.T, biases, bias[1] if after else None)
    outputs, last = recurrence(cell, weights, Sequences(_wide(x), lengths, attention), state)
    return tuple(value.astype(dtype) for value in (outputs, *last))
