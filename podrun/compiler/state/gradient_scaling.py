"""Gradients as a running mean, and automatic loss scaling.

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

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podrun.compiler.program import FACTOR, PHASE, AutomaticScaling, Program
from podrun.core.buffer_names import count_buffer, statistics_buffer
from podrun.core.executable import Arena, ArenaMember, Reduction, TensorSpec, Variable, VariableRole

COUNTS = "averaged"
"""Arena of the numbers of micro-batches that accumulators hold; its members are `count_buffer`s."""


def averages(program: Program) -> bool:
    """True iff the program's gradients are running means."""
    return program.reduction is Reduction.MEAN


def counted(program: Program) -> bool:
    """True iff accumulators need to know how many micro-batches they hold."""
    return averages(program) and program.accumulates


def averaging_arenas(program: Program, weights: tuple[str, ...], alignment: int) -> dict[str, Arena]:
    """The arena of counts, if there is something to count."""
    if not counted(program) or not weights:
        return {}
    members = tuple(
        ArenaMember(count_buffer(name), i * alignment, (1,)) for i, name in enumerate(sorted(weights))
    )
    return {COUNTS: Arena(COUNTS, "float32", len(members) * alignment, members, False)}


def averaged(old: Any, count: Any, gradient: Any, replicas: int) -> Any:
    """The accumulator with one more micro-batch; ``gradient`` is its sum over the replicas of a machine."""
    import jax.numpy as jnp

    mean = gradient.astype(jnp.float32) / replicas
    if old is None:
        return mean
    count = count[0]
    return old.astype(jnp.float32) * (count / (count + 1)) + mean / (count + 1)


if TYPE_CHECKING:
    from podrun.compiler.export.pieces import PieceFunction

STATISTICS = "lossScaleStatistics"
"""Arena of the counts; its members are `statistics_buffer`s."""
UPDATE = "update.loss_scale"
"""Name of the Computation that changes the factor."""


def scaling_arenas(program: Program, alignment: int) -> dict[str, Arena]:
    """The arena of counts, if the program scales its loss by itself."""
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


def counts(gradient: Any, scaling: AutomaticScaling) -> Any:
    """How many elements of ``gradient`` (any shape) lie below the edge and how many do not: float32 ``[2]``."""
    import jax.numpy as jnp

    below = (jnp.abs(gradient.astype(jnp.float32)) < jnp.float32(scaling.edge)).sum(dtype=jnp.int32)
    return jnp.stack([below, jnp.int32(gradient.size) - below]).astype(jnp.float32)


def scaling_piece(program: Program) -> PieceFunction:
    """The piece that halves or doubles the factor, after the counts were summed over the machines."""
    import jax.numpy as jnp

    from podrun.compiler.abstract import buffer
    from podrun.compiler.export.pieces import PieceFunction

    scaling, loss_scaling = program.automatic_scaling, program.loss_scaling
    assert scaling is not None
    assert isinstance(loss_scaling, str)
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
