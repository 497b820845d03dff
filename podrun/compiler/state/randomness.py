"""Random keys of replicas and micro-batches, and the random bits of stochastic rounding.

**Keys.** The base seed is a 64-bit number, held as uint32 ``[2]`` (high word, low word). Micro-batch *i* after a seed
*s* has the seed ``s + i * STRIDE``; replica *r* (counted over the whole program) uses that plus *r*, as PopART's
replicas do; the result is a threefry key. After a batch the base seed has moved on by ``accumulation_factor * STRIDE``,
so that reading it and writing it back continues the sequence. All arithmetic is modulo 2**64. Keys do not depend on
how replicas and micro-batches are folded.

**Stochastic rounding.** A value between two float16 numbers becomes one of them, the nearer the likelier. With
``q = x / ulp`` and u uniform in [0, 1), the result is ``floor(q + u) * ulp``: on average it is x itself, so that
updates much smaller than a weight's last place are not lost. It is used for what an update stores in float16: weights
and optimizer state. The bits follow from the RNG state, a variable that every update piece reads and that moves on once
a batch, and from the tensor's place; so all replicas, and runs over any number of instances, round alike.

Where weights change while micro-batches are in flight, each micro-batch is a batch, and stages reach it at different
times. There every group of weights has an RNG state of its own: it starts as the RNG state of the run's batch and moves
on with each update of the group. The RNG state itself moves on by all of them afterwards.

Source: IEEE 754 binary16 (11 significant bits, least exponent -14); Graphcore's "AI-Float" white paper on stochastic
rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from podrun.compiler.program import RNG, Program
from podrun.core.executable import TensorSpec, Variable, VariableRole

if TYPE_CHECKING:
    import jax

SEED_VARIABLE = "randomSeed___fromHost"
"""Name of the variable that holds the base seed, in every Executable that draws random numbers."""

STRIDE = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: seeds of neighbouring micro-batches lie far from those of
replicas."""


def seed_words(seed: int) -> tuple[int, int]:
    """(high, low) uint32 words of ``seed`` modulo 2**64: what the host writes to `SEED_VARIABLE`."""
    seed &= (1 << 64) - 1
    return seed >> 32, seed & 0xFFFFFFFF


def advance(seed: jax.Array, micro_batches: int) -> jax.Array:
    """The base seed after that many micro-batches, inside a trace: uint32 ``[2]`` to uint32 ``[2]``."""
    import jax.numpy as jnp

    high, low = seed_words(micro_batches * STRIDE)
    return _add(seed, jnp.array([high, low], jnp.uint32))


def folded_keys(seed: jax.Array, replica_offset: jax.Array, micro_batches: int, replicas: int) -> jax.Array:
    """Key data uint32 ``[micro_batches * replicas, 2]``, micro-batch major, for replicas from
    ``replica_offset``."""
    import jax.numpy as jnp
    import numpy as np

    steps = np.array([seed_words(i * STRIDE) for i in range(micro_batches)], np.uint32)
    base = _add(seed, jnp.asarray(steps))
    replica = jnp.arange(replicas, dtype=jnp.uint32) + replica_offset.astype(jnp.uint32)
    shift = jnp.stack([jnp.zeros_like(replica), replica], axis=-1)
    return _add(base[:, None, :], shift[None, :, :]).reshape(micro_batches * replicas, 2)


def _add(a: jax.Array, b: Any) -> jax.Array:
    """64-bit addition on words in the last axis, with broadcasting (JAX runs without 64-bit types here)."""
    import jax.numpy as jnp

    low = a[..., 1] + b[..., 1]
    carry = (low < b[..., 1]).astype(jnp.uint32)
    return jnp.stack([a[..., 0] + b[..., 0] + carry, low], axis=-1)


if TYPE_CHECKING:
    from podrun.compiler.export.pieces import PieceFunction

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


def advance_piece(batches: int = 1) -> PieceFunction:
    """The piece that moves the RNG state on after some batches."""

    from podrun.compiler.abstract import buffer
    from podrun.compiler.export.pieces import PieceFunction

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        return {RNG: advance(values[RNG], batches)}

    return PieceFunction(ADVANCE, run, {RNG: buffer((2,), "uint32")}, (RNG,))


def turn_buffer(index: int) -> str:
    """The RNG state of a group's next update, where each group has its own turn."""
    return f"rngTurn:{index}"


def turns_piece(home: int, groups: Iterable[int]) -> PieceFunction:
    """The piece with which an IPU begins the turns of its groups."""
    from podrun.compiler.abstract import buffer
    from podrun.compiler.export.pieces import PieceFunction

    names = tuple(turn_buffer(index) for index in groups)
    return PieceFunction(
        turns_name(home),
        lambda values: dict.fromkeys(names, values[RNG]),
        {RNG: buffer((2,), "uint32")},
        names,
    )


def turns_name(home: int) -> str:
    """The name of an IPU's `turns_piece`."""
    return f"turns.{home}"


def in_turn(update: PieceFunction, index: int) -> PieceFunction:
    """A group's update with the RNG state of its turn, which moves on; an update that does not round as it is."""
    if RNG not in update.inputs:
        return update
    turn = turn_buffer(index)

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        found = update.function({**values, RNG: values[turn]})
        return {**found, turn: advance(values[turn], 1)}

    inputs = {turn if name == RNG else name: spec for name, spec in update.inputs.items()}
    return replace(update, function=run, inputs=inputs, outputs=(*update.outputs, turn))
