"""The modelled time of the collectives inside of a model, from the link model: forward, and backward where their values
lead to the loss."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from podrun.collectives.timing import all_gather, reduce_scatter
from podrun.compiler.exchange import Kind, exchanges
from podrun.compiler.program import Program
from podrun.compiler.trace import Trace
from podrun.device.target import Chip
from podrun.device.tiles.links import all_reduce_seconds, fabric_of


def collective_seconds(program: Program, traced: Trace, chip: Chip) -> float:
    """Seconds that all collectives of a batch take, one after the other; 0 if the model has none."""
    found = exchanges(traced.jaxpr)
    if not found:
        return 0.0
    differentiated = _leading_to(traced, program.loss) if program.loss is not None else set()
    each = sum(
        _seconds(equation, program, chip, backward=id(equation) in differentiated) for equation in found
    )
    return program.accumulation_factor * each


def _seconds(equation: JaxprEqn, program: Program, chip: Chip, *, backward: bool) -> float:
    """A collective and, with ``backward``, its transpose: of a sum the same, of a gathering a scattered sum."""
    kind, ranks = equation.params["kind"], len(equation.params["groups"][0])
    aval: Any = equation.invars[0].aval
    nbytes = aval.size * aval.dtype.itemsize
    if kind is Kind.POSITION or ranks == 1:
        return 0.0
    if kind is Kind.SUM:
        return (1 + backward) * all_reduce_seconds(
            chip, ranks, nbytes, ipus_per_replica=program.ipus_per_replica
        )
    fabric, ipus = fabric_of(chip), program.ipus_per_replica
    seconds = all_gather(nbytes * ranks, ranks, fabric, ipus_per_rank=ipus).seconds
    if backward:
        seconds += reduce_scatter(nbytes * ranks, ranks, fabric, ipus_per_rank=ipus).seconds
    return seconds


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
