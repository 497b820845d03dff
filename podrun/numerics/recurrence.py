"""Recurrent layers: RNN, GRU and LSTM as a scan over time, one layer in one direction.

Inputs are projected for all steps at once; each step then takes one matrix product of the state (a GRU that resets the
state before its product takes two). Front ends differ in the order of gates, in biases, activations and in where they
put directions and layers: the first three are values here, the rest is theirs.

Shapes: x ``[time, batch, input]``; with g gates (1, 3 or 4) of h elements the weights are ``[g*h, input]`` and
``[g*h, h]``, biases ``[g*h]``, states ``[batch, h]``. Computed in the type of the input: callers widen halves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from podrun.core.errors import InputMismatch
from podrun.core.quick_dataclass import dataclass
from podrun.numerics.shared_places import reversed_within

State = tuple[Array, ...]
"""What goes from step to step, the output first; an LSTM's second part is its memory."""
Activation = Callable[[Array], Array]
Step = Callable[[State, Any], State]
"""From the state and the projected input of a step to the new state."""

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
ACTIVATIONS = frozenset(_ACTIVATIONS)
"""Names that `cell_activations` knows."""
_TAKING_ALPHA = frozenset({"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"})
_TAKING_BETA = frozenset({"affine", "scaledtanh", "hardsigmoid"})


def cell_activations(
    names: tuple[str, ...], alphas: tuple[float, ...] = (), betas: tuple[float, ...] = ()
) -> tuple[Activation, ...]:
    """Activation functions by ONNX's names in any case. Each one that has a parameter takes the next of ``alphas`` and
    ``betas``, or its default. InputMismatch for an unknown name.
    """
    next_alpha, next_beta = iter(alphas), iter(betas)
    functions: list[Activation] = []
    for name in (n.lower() for n in names):
        if name not in _ACTIVATIONS:
            raise InputMismatch(f"activation '{name}' is not known")
        alpha = next(next_alpha, None) if name in _TAKING_ALPHA else None
        beta = next(next_beta, None) if name in _TAKING_BETA else None
        functions.append(functools.partial(_ACTIVATIONS[name], a=alpha, b=beta))
    return tuple(functions)


TANH, SIGMOID = cell_activations(("tanh", "sigmoid"))


def rows_product(a: Array, b: Array) -> Array:
    """``a @ b.T`` as `jnp.matmul` lowers it."""
    return a @ b.T


@dataclass(frozen=True, slots=True)
class CellWeights:
    """The weights of one layer in one direction, their rows in the order of the cell's gates.

    ``biases`` go to the projected input, one after the other, ``recurrent_bias`` to the product of the state in each
    step: it is the same but for rounding, except in a GRU that resets after the product.

    Of an LSTM alone: ``peepholes``, factors of the memory for input, output and forget gate, ``[h]`` each; ``leaving``,
    ``[p, h]``, by which outputs are multiplied: states and outputs then have p elements where the memory has h.

    ``part`` decides bits alone. With it ``recurrent`` is a larger array, ``[directions, g*h, h]`` or all weights of a
    cell, and each step reads ``recurrent[part]``; with an int a GRU's ``recurrent_bias`` ends in g*h elements for each
    direction, and is read likewise. The gradient of the whole array then adds up from step to step. Without ``part``
    the gradient of one part does, and is put into its place at the end. XLA fuses the two differently, and gradients
    can differ in the last bit.
    """

    entering: Array
    recurrent: Array
    biases: tuple[Array, ...] = ()
    recurrent_bias: Array | None = None
    peepholes: tuple[Array, ...] | None = None
    leaving: Array | None = None
    part: int | slice | None = None

    def bias(self, first: int, end: int) -> Array | None:
        """The recurrent bias of the rows ``first`` to ``end``; to be called within a step, see ``part``."""
        if self.recurrent_bias is None or self.part is None:
            return None if self.recurrent_bias is None else self.recurrent_bias[first:end]
        before = self.recurrent_bias.shape[-1] - self.recurrent.shape[-2]
        return self.recurrent_bias[self.part, before + first : before + end]

    def rows(self) -> Array:
        """The recurrent weights ``[g*h, h]``; to be called within a step, see ``part``."""
        return self.recurrent if self.part is None else self.recurrent[self.part]


@dataclass(frozen=True, slots=True)
class Sequences:
    """A batch of sequences ``[time, batch, input]``. ``lengths [batch]``: steps behind them change nothing and give 0.
    ``attention [time, batch]``: one minus it multiplies a GRU's update gate.
    """

    x: Array
    lengths: Array | None = None
    attention: Array | None = None

    def turned(self, values: Array) -> Array:
        """Values ``[time, batch, ...]`` with the steps of each sequence back to front."""
        return jnp.flip(values, 0) if self.lengths is None else reversed_within(values, self.lengths, 1, 0)


@dataclass(frozen=True, slots=True)
class Cell:
    """A recurrent cell. ``gates``: the letters of the gates in the order of the weights' rows.

    ======== ====================================== ==========================================
    kind     letters                                activations
    ======== ====================================== ==========================================
    ``rnn``  ``n`` new state                        of the new state
    ``gru``  ``z`` update, ``r`` reset, ``n`` new   of the gates, of the new state
             state, always last
    ``lstm`` ``i`` input, ``f`` forget, ``o``       of the gates, of the new memory, of the
             output, ``n`` new memory               memory on its way out
    ======== ====================================== ==========================================

    ``clip``: bounds what activations get. ``reset_after``: a GRU's reset gate multiplies the product of the state
    (cuDNN, torch), not the state. ``coupled``: an LSTM forgets as much as it takes in. ``rounded``: what becomes of a
    state between two steps, such as a rounding to halves.

    Three values decide bits alone, and front ends keep those they always had. ``product``: ``a @ b.T``, which can be
    lowered in several ways. ``turns``: a backward layer turns sequences around and runs forward; otherwise it runs from
    the last step to the first, and gradients of weights add up steps in the other order. ``apart``: with
    ``reset_after`` the new state has a product of its own, which alone has a recurrent bias; the gradient of the state
    adds up two products.
    """

    kind: str
    gates: str
    activations: tuple[Activation, ...]
    clip: float | None = None
    reset_after: bool = True
    coupled: bool = False
    rounded: Activation | None = None
    product: Callable[[Array, Array], Array] = rows_product
    turns: bool = False
    apart: bool = False

    def bounded(self, x: Array) -> Array:
        """``x`` cut to the range from ``-clip`` to ``clip``; ``x`` itself without a clip."""
        return x if self.clip is None else jnp.clip(x, -self.clip, self.clip)

    def parts(self, values: Array) -> dict[str, Array]:
        """The gates ``[..., g*h]`` by letter."""
        return dict(zip(self.gates, jnp.split(values, len(self.gates), axis=-1), strict=True))


def _plain_step(cell: Cell, weights: CellWeights) -> Step:
    (activation,) = cell.activations

    def step(state: State, projected: Array) -> State:
        total = _with_bias(projected + cell.product(state[0], weights.rows()), weights.recurrent_bias)
        return (activation(cell.bounded(total)),)

    return step


def _with_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def _gru_step(cell: Cell, weights: CellWeights) -> Step:
    """Cho et al., Learning Phrase Representations using RNN Encoder-Decoder, 2014; with attention Zhou et al., Deep
    Interest Evolution Network, 2019.
    """
    gate, activation = cell.activations
    rows = weights.recurrent.shape[-2]
    together = cell.reset_after and not cell.apart
    count = rows // 3 * (3 if together else 2)

    def inner(values: Array, first: int, end: int) -> Array:
        """A part of the product of the state, its rows ``first`` to ``end``, with the bias."""
        product = cell.product(values, weights.rows()[first:end])
        return product if cell.apart and first == 0 else _with_bias(product, weights.bias(first, end))

    def step(state: State, inputs: tuple[Array, Array | None]) -> State:
        (hidden,), (projected, attention) = state, inputs
        entering = cell.parts(projected)
        first, second, *rest = jnp.split(inner(hidden, 0, count), count // hidden.shape[-1], axis=-1)
        total = {
            letter: entering[letter] + part for letter, part in zip(cell.gates, (first, second), strict=False)
        }
        update, reset = (gate(cell.bounded(total[letter])) for letter in "zr")
        if cell.reset_after:
            new = reset * (rest[0] if together else inner(hidden, count, rows))
        else:
            new = inner(reset * hidden, count, rows)
        if attention is not None:
            update = (1 - attention) * update
        return ((1 - update) * activation(cell.bounded(entering["n"] + new)) + update * hidden,)

    return step


def _lstm_step(cell: Cell, weights: CellWeights) -> Step:
    """Hochreiter and Schmidhuber, Long Short-Term Memory, 1997, with forget gate and peepholes."""
    gate, activation, leaving = cell.activations
    looks = None if weights.peepholes is None else dict(zip("iof", weights.peepholes, strict=True))

    def step(state: State, projected: Array) -> State:
        hidden, memory = state
        total = _with_bias(projected + cell.product(hidden, weights.rows()), weights.recurrent_bias)
        part = cell.parts(total)

        def opened(letter: str, memory: Array) -> Array:
            peeked = part[letter] if looks is None else part[letter] + looks[letter] * memory
            return gate(cell.bounded(peeked))

        enter = opened("i", memory)
        forget = 1 - enter if cell.coupled else opened("f", memory)
        memory = forget * memory + enter * activation(cell.bounded(part["n"]))
        hidden = opened("o", memory) * leaving(memory)
        return hidden if weights.leaving is None else cell.product(hidden, weights.leaving), memory

    return step


_STEPS: dict[str, Callable[[Cell, CellWeights], Step]] = {
    "rnn": _plain_step,
    "gru": _gru_step,
    "lstm": _lstm_step,
}


def recurrence(
    cell: Cell, weights: CellWeights, sequences: Sequences, state: State, *, backward: bool = False
) -> tuple[Array, State]:
    """All outputs ``[time, batch, h]``, in the order of time, and the last state. ``backward``: sequences are read from
    their last step to their first.
    """
    lengths, turns = sequences.lengths, backward and (cell.turns or sequences.lengths is not None)
    turn: Callable[[Array], Array] = sequences.turned if turns else _unchanged
    projected = functools.reduce(jnp.add, weights.biases, cell.product(turn(sequences.x), weights.entering))
    inputs: Any = projected
    if cell.kind == "gru":
        attention = sequences.attention
        inputs = (projected, None if attention is None else turn(attention[..., None]))
    advance = _STEPS[cell.kind](cell, weights)

    def body(before: State, scanned: Any) -> tuple[State, Array]:
        at, values = scanned
        after = advance(before, values)
        if cell.rounded is not None:
            after = tuple(cell.rounded(value) for value in after)
        if at is None:
            return after, after[0]
        alive = (at < lengths)[:, None]
        kept = tuple(jnp.where(alive, new, old) for new, old in zip(after, before, strict=True))
        return kept, jnp.where(alive, after[0], jnp.zeros((), after[0].dtype))

    times = None if lengths is None else jnp.arange(sequences.x.shape[0], dtype=jnp.int32)
    last, outputs = lax.scan(body, state, (times, inputs), reverse=backward and not turns)
    return turn(outputs), last


def _unchanged(values: Array) -> Array:
    return values
