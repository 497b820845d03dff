"""Gradients as a running mean: the accumulator after *k* micro-batches is the mean of their gradients, over all
replicas (PopART's MeanReductionStrategy.Running).

With ``s`` the accumulator and ``g`` the gradient of micro-batch *k* (from 0), summed over the replicas R:
``s <- s * (k / (k + 1)) + (g / R) / (k + 1)``, computed in float32 and rounded once to the accumulator's type. So the
accumulator is never larger than a gradient, which matters to halves; the sum over machines then gives the mean.
"""

from __future__ import annotations

from typing import Any

from podrun.compiler.program import Program
from podrun.executable import Arena, ArenaMember, Reduction

COUNTS = "averaged"
"""Arena of the numbers of micro-batches that accumulators hold; its members are `count_buffer`s."""


def count_buffer(weight: str) -> str:
    """How many micro-batches the accumulator of a weight holds: float32 ``[1]``."""
    return f"averaged:{weight}"


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
