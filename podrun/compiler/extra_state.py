"""Variables that the compiler adds to a program: random keys, RNG state, the gradients' running mean, loss scale.

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

**Running mean** (PopART's MeanReductionStrategy.Running): the accumulator after *k* micro-batches is the mean of their
gradients over all replicas. With ``s`` the accumulator and ``g`` the gradient of micro-batch *k* (from 0), summed over
the R replicas: ``s <- s * (k / (k + 1)) + (g / R) / (k + 1)``, computed in float32 and rounded once to the
accumulator's type. The accumulator is never larger than a gradient, which matters in float16; the sum over machines
then gives the mean.

**Automatic loss scaling**: a factor on the loss scaling follows the sizes of gradients. Every micro-batch counts, over
all elements of the tracked gradients of every replica, how many have a magnitude below an edge and how many do not
(infinite and NaN ones among these). After the micro-batches of a batch the counts are summed over the machines; if more
than a given part of the elements lies above, the factor is halved, else doubled. The new factor holds from the next
batch on. With a period of *p* this happens in batch 0, p, 2p ... Counts are float32: exact up to 2**24 elements for
each tensor and micro-batch. Source: the class documentation of PopART's AutomaticLossScale transform.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from podrun.compiler.program import FACTOR, PHASE, RNG, AutomaticScaling, Program
from podrun.core.errors import present
from podrun.core.executable import Arena, ArenaMember, Reduction, TensorSpec, Variable, VariableRole
from podrun.core.names import count_buffer, statistics_buffer

if TYPE_CHECKING:
    import jax

    from podrun.compiler.export import PieceFunction

SEED_VARIABLE = "randomSeed___fromHost"
"""Name of the variable that holds the base seed, in every Executable that draws random numbers."""

STRIDE = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd: seeds of neighbouring micro-batches lie far from those of replicas."""


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
    """Key data uint32 ``[micro_batches * replicas, 2]``, micro-batch major, for replicas from ``replica_offset``."""
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


ADVANCE = "update.rng"
"""Name of the Computation that advances the RNG state."""


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


def place_state(state: jax.Array, *numbers: Any) -> Any:
    """The RNG state of a place: uint32 ``[2]`` from the RNG state and the numbers that identify the place."""
    import jax

    key = jax.random.wrap_key_data(state, impl="threefry2x32")
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return jax.random.key_data(key)


def stochastic_half(value: jax.Array, state: jax.Array) -> Any:
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
    """The piece that advances the RNG state after some batches."""

    from podrun.compiler.export import PieceFunction
    from podrun.compiler.jaxprs import buffer

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        return {RNG: advance(values[RNG], batches)}

    return PieceFunction(ADVANCE, run, {RNG: buffer((2,), "uint32")}, (RNG,))


def turn_buffer(index: int) -> str:
    """The RNG state of a group's next update, where each group has its own turn."""
    return f"rngTurn:{index}"


def turns_piece(home: int, groups: Iterable[int]) -> PieceFunction:
    """The piece with which an IPU begins the turns of its groups."""
    from podrun.compiler.export import PieceFunction
    from podrun.compiler.jaxprs import buffer

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
    """A group's update with the RNG state of its turn, which advances; an update that does not round is returned
    unchanged.
    """
    if RNG not in update.inputs:
        return update
    turn = turn_buffer(index)

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        results = update.function({**values, RNG: values[turn]})
        return {**results, turn: advance(values[turn], 1)}

    inputs = {turn if name == RNG else name: spec for name, spec in update.inputs.items()}
    return replace(update, function=run, inputs=inputs, outputs=(*update.outputs, turn))


COUNTS = "averaged"
"""Arena of the numbers of micro-batches that accumulators hold; its members are `count_buffer`s."""


def averages(program: Program) -> bool:
    """True iff the program's gradients are running means."""
    return program.reduction is Reduction.MEAN


def counts_micro_batches(program: Program) -> bool:
    """True iff accumulators have to know how many micro-batches they hold."""
    return averages(program) and program.accumulates


def averaging_arenas(program: Program, weights: tuple[str, ...], alignment: int) -> dict[str, Arena]:
    """The arena of counts, if there is something to count."""
    if not counts_micro_batches(program) or not weights:
        return {}
    members = tuple(
        ArenaMember(count_buffer(name), i * alignment, (1,)) for i, name in enumerate(sorted(weights))
    )
    return {COUNTS: Arena(COUNTS, "float32", len(members) * alignment, members, False)}


def averaged(old: jax.Array | None, count: jax.Array | None, gradient: jax.Array, replicas: int) -> Any:
    """The accumulator with one more micro-batch; ``gradient`` is its sum over the replicas of a machine."""
    import jax.numpy as jnp

    mean = gradient.astype(jnp.float32) / replicas
    if old is None or count is None:
        return mean
    count = count[0]
    return old.astype(jnp.float32) * (count / (count + 1)) + mean / (count + 1)


STATISTICS = "lossScaleStatistics"
"""Arena of the counts; its members are `statistics_buffer`s."""
UPDATE = "update.loss_scale"
"""Name of the Computation that changes the factor."""


def scaling_arenas(program: Program, alignment: int) -> dict[str, Arena]:
    """The arena of counts, if the program has automatic loss scaling."""
    scaling = program.automatic_scaling
    if scaling is None:
        return {}
    members = tuple(
        ArenaMember(statistics_buffer(name), i * alignment, (2,)) for i, name in enumerate(scaling.tracked)
    )
    return {STATISTICS: Arena(STATISTICS, "float32", len(members) * alignment, members, False)}


def scaling_variables(program: Program) -> dict[str, Variable]:
    """The factor and the phase: they last from batch to batch and from run to run."""
    if program.automatic_scaling is None:
        return {}
    starts = {FACTOR: 1.0, PHASE: 0.0}
    role = VariableRole.OPTIMIZER_STATE
    return {n: Variable(TensorSpec(n, "float32", ()), role, value) for n, value in starts.items()}


def counts(gradient: jax.Array, scaling: AutomaticScaling) -> Any:
    """How many elements of ``gradient`` (any shape) lie below the edge and how many do not: float32 ``[2]``."""
    import jax.numpy as jnp

    below = (jnp.abs(gradient.astype(jnp.float32)) < jnp.float32(scaling.edge)).sum(dtype=jnp.int32)
    return jnp.stack([below, jnp.int32(gradient.size) - below]).astype(jnp.float32)


def scaling_piece(program: Program) -> PieceFunction:
    """The piece that halves or doubles the factor, after the counts were summed over the machines."""
    import jax.numpy as jnp

    from podrun.compiler.export import PieceFunction
    from podrun.compiler.jaxprs import buffer

    scaling = present(program.automatic_scaling, "only a program with automatic loss scaling scales")
    loss_scaling = str(program.loss_scaling)  # Automatic scaling has a variable.
    buffers = [statistics_buffer(name) for name in scaling.tracked]
    inputs = {name: buffer((2,), "float32") for name in buffers}
    inputs |= {name: buffer((), "float32") for name in (FACTOR, PHASE, loss_scaling)}
    threshold = scaling.threshold

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        below, above = sum(values[name] for name in buffers[1:]) + values[buffers[0]]
        # upper / (upper + lower) > t, without a division; with t = 1 nothing is greater.
        down = above > below * jnp.float32(threshold / (1 - threshold)) if threshold < 1 else jnp.bool_(False)
        factor = values[FACTOR] * jnp.where(down, jnp.float32(0.5), jnp.float32(2.0))
        if scaling.most is not None:
            factor = jnp.minimum(factor, jnp.float32(scaling.most) / values[loss_scaling])
        phase = values[PHASE]
        following = jnp.where(phase + 1 < scaling.period, phase + 1, jnp.float32(0.0))
        return {FACTOR: jnp.where(phase == 0, factor, values[FACTOR]), PHASE: following}

    return PieceFunction(UPDATE, run, inputs, (FACTOR, PHASE))
