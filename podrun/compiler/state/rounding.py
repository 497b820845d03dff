"""Stochastic rounding: a value between two halves becomes one of them, the nearer the likelier.

With ``q = x / ulp`` and u uniform in [0, 1), the result is ``floor(q + u) * ulp``: on average it is x itself, so that
steps much smaller than a weight's last place are not lost. Used for what an update stores in float16: weights and
optimizer state. The bits come from the RNG state, a variable that every update piece reads and that moves on once a
batch, and from the tensor's place; so all replicas, and runs over any number of instances, round alike.

Where weights change while micro-batches are in flight, each of these is a batch, and stages reach it at different
times. There every group of weights takes the state of its own turn: it begins with the state of the step, and moves on
with each of its updates. The state itself moves on by all of them when the step is over.

Source: IEEE 754 binary16 (11 significant bits, least exponent -14); Graphcore's "AI-Float" white paper on stochastic
rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from podrun.compiler.program import RNG, Program
from podrun.compiler.state import seeds
from podrun.executable import TensorSpec, Variable, VariableRole

if TYPE_CHECKING:
    from podrun.compiler.export.pieces import Piece

ADVANCE = "update.rng"
"""Name of the Computation that moves the RNG state on."""


def rounds_stochastically(program: Program) -> bool:
    """True iff the update rule asks for the RNG state."""
    rule = program.update
    weights = [name for name, parameter in program.parameters.items() if parameter.trainable]
    return rule is not None and any(RNG in rule.scalars(name) for name in weights)


def rounding_variables(program: Program) -> dict[str, Variable]:
    """The RNG state, uint32 ``[2]``, if the program uses one."""
    if not rounds_stochastically(program):
        return {}
    return {RNG: Variable(TensorSpec(RNG, "uint32", (2,)), VariableRole.SCALAR, 0.0)}


def place(state: Any, *numbers: Any) -> Any:
    """The RNG state of a place: uint32 ``[2]`` from the RNG state and numbers that tell the place."""
    import jax

    key = jax.random.wrap_key_data(state, impl="threefry2x32")
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return jax.random.key_data(key)


def stochastic_half(value: Any, state: Any) -> Any:
    """float32 to float16 by stochastic rounding, with the bits that ``state`` gives. NaN and infinities stay."""
    import jax
    import jax.numpy as jnp

    key = jax.random.wrap_key_data(state, impl="threefry2x32")
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    exponent = jnp.maximum(((bits >> 23) & 255).astype(jnp.int32), 127 - 14)
    ulp = jax.lax.bitcast_convert_type(((exponent - 10) << 23).astype(jnp.uint32), jnp.float32)
    rounded = jnp.floor(value / ulp + jax.random.uniform(key, value.shape)) * ulp
    return jnp.where(jnp.isfinite(value), rounded, value).astype(jnp.float16)


def advance_piece(batches: int = 1) -> Piece:
    """The piece that moves the RNG state on after some batches."""

    from podrun.compiler.abstract import buffer
    from podrun.compiler.export.pieces import Piece

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        return {RNG: seeds.advance(values[RNG], batches)}

    return Piece(ADVANCE, run, {RNG: buffer((2,), "uint32")}, (RNG,))


def turn_buffer(index: int) -> str:
    """The RNG state of a group's next update, where each group has its own turn."""
    return f"rngTurn:{index}"


def turns_piece(home: int, groups: Iterable[int]) -> Piece:
    """The piece with which an IPU begins the turns of its groups."""
    from podrun.compiler.abstract import buffer
    from podrun.compiler.export.pieces import Piece

    names = tuple(turn_buffer(index) for index in groups)
    return Piece(
        turns_name(home),
        lambda values: dict.fromkeys(names, values[RNG]),
        {RNG: buffer((2,), "uint32")},
        names,
    )


def turns_name(home: int) -> str:
    """The name of an IPU's `turns_piece`."""
    return f"turns.{home}"


def in_turn(update: Piece, index: int) -> Piece:
    """A group's update with the RNG state of its turn, which moves on; an update that does not round as it is."""
    if RNG not in update.inputs:
        return update
    turn = turn_buffer(index)

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        found = update.function({**values, RNG: values[turn]})
        return {**found, turn: seeds.advance(values[turn], 1)}

    inputs = {turn if name == RNG else name: spec for name, spec in update.inputs.items()}
    return replace(update, function=run, inputs=inputs, outputs=(*update.outputs, turn))
