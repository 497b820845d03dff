"""The modelled time of the collectives inside of a model, from the link model: forward, and backward where their values
lead to the loss."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from podrun.collectives.timing import all_gather, reduce_scatter
from podrun.compiler.exchange import Kind, exchanges
from podrun.compiler.program import Program
from podrun.compiler.tracing.trace import Trace
from podrun.device.target import Chip
from podrun.device.tiles.links import all_reduce_seconds, fabric_of


def collective_seconds(
    program: Program, traced: Trace, chip: Chip
) -> tuple[tuple[JaxprEqn, float, float], ...]:
    """The collectives of a micro-batch, in order: the equation, and seconds forward and backward (0 for one whose
    value does not lead to the loss)."""
    found = exchanges(traced.jaxpr)
    differentiated = _leading_to(traced, program.loss) if found and program.loss is not None else set()
    return tuple(
        (equation, *_seconds(equation, program, chip, backward=id(equation) in differentiated))
        for equation in found
    )


def _seconds(equation: JaxprEqn, program: Program, chip: Chip, *, backward: bool) -> tuple[float, float]:
    """A collective and, with ``backward``, its transpose: of a sum the same, of a gathering a scattered sum."""
    kind, ranks = equation.params["kind"], len(equation.params["groups"][0])
    aval: Any = equation.invars[0].aval
    nbytes, ipus = aval.size * aval.dtype.itemsize, program.ipus_per_replica
    if kind is Kind.POSITION or ranks == 1:
        return 0.0, 0.0
    if kind is Kind.SUM:
        each = all_reduce_seconds(chip, ranks, nbytes, ipus_per_replica=ipus)
        return each, backward * each
    fabric = fabric_of(chip)
    return (
        all_gather(nbytes * ranks, ranks, fabric, ipus_per_rank=ipus).seconds,
        backward * reduce_scatter(nbytes * ranks, ranks, fabric, ipus_per_rank=ipus).seconds,
    )


def _leading_to(traced: Trace, loss: str) -> set[int]:
    """Identities of the floating-point exchanges from which a chain of equations leads to the loss."""
    wanted: set[Any] = {traced.variable(loss)}
    found = set()
    for equation in reversed(traced.jaxpr.jaxpr.eqns):
        if wanted.isdisjoint(equation.outvars):
            continue
        wanted |= {v for v in equation.invars if not isinstance(v, Literal)}
        if any(jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.floating) for v in equation.outvars):
            found.add(id(equation))
    return found
