"""Seconds of the collectives of a step.

Those in the model, the reductions of gradients and the gathers of split weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal

from podrun.collectives.timing import all_gather_time, reduce_scatter_time
from podrun.compiler.arenas import Memory, WeightGroup
from podrun.compiler.forward_trace import Trace
from podrun.compiler.ipu_memory import SegmentWork
from podrun.compiler.model_collectives import ExchangeKind, exchanges
from podrun.compiler.program import Program
from podrun.compiler.replica_groups import replicas_reduced
from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.core.names import gradient_buffer
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.exchange import all_reduce_seconds, fabric_of
from podrun.costmodel.settings import Location
from podrun.costmodel.target import Chip


def collective_seconds(
    program: Program, traced: Trace, chip: Chip
) -> tuple[tuple[JaxprEqn, float, float], ...]:
    """The collectives of a micro-batch, in order: the equation, and seconds forward and backward (0 for one whose
    value does not lead to the loss)."""
    equations = exchanges(traced.jaxpr)
    differentiated = _leading_to(traced, program.loss) if equations and program.loss is not None else set()
    return tuple(
        (equation, *_exchange_seconds(equation, program, chip, backward=id(equation) in differentiated))
        for equation in equations
    )


def _exchange_seconds(
    equation: JaxprEqn, program: Program, chip: Chip, *, backward: bool
) -> tuple[float, float]:
    """A collective and, with ``backward``, its transpose: of a sum the same, of a gathering a scattered sum."""
    kind, ranks = equation.params["kind"], len(equation.params["groups"][0])
    aval = cast(ShapedArray, equation.invars[0].aval)
    nbytes, ipus = aval.size * aval.dtype.itemsize, program.ipus_per_replica
    if kind is ExchangeKind.POSITION or ranks == 1:
        return 0.0, 0.0
    if kind is ExchangeKind.SUM:
        seconds = all_reduce_seconds(chip, ranks, nbytes, ipus_per_replica=ipus)
        return seconds, backward * seconds
    fabric = fabric_of(chip)
    return (
        all_gather_time(nbytes * ranks, ranks, fabric, ipus_per_rank=ipus).seconds,
        backward * reduce_scatter_time(nbytes * ranks, ranks, fabric, ipus_per_rank=ipus).seconds,
    )


def _leading_to(traced: Trace, loss: str) -> set[int]:
    """Identities of the floating-point exchanges from which a chain of equations leads to the loss."""
    wanted: set[Any] = {traced.variable(loss)}
    ancestors = set()
    for equation in reversed(traced.jaxpr.jaxpr.eqns):
        if wanted.isdisjoint(equation.outvars):
            continue
        wanted |= {v for v in equation.invars if not isinstance(v, Literal)}
        if any(jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.floating) for v in equation.outvars):
            ancestors.add(id(equation))
    return ancestors


@dataclass(frozen=True, slots=True)
class Shards:
    """The number of parts into which a weight, its state and its accumulator are cut; 1: not cut."""

    weight: int
    state: int
    accumulator: int

    @property
    def update(self) -> int:
        """The number of parts into which the update of the weight is cut."""
        return max(self.weight, self.state, self.accumulator)


def shards_of(program: Program, weight: str) -> Shards:
    """The shards of a weight and of its state and accumulator, never more than the replicas that share the weight."""
    where, rule, spec = program.locations, program.update, program.parameters[weight].spec
    most = replicas_reduced(program, weight)

    def parts(place: Location, elements: int) -> int:
        return min(place.shards, most) if place.elements(elements) < elements else 1

    states = [] if rule is None else [state for state, _ in rule.state(spec).values()]
    return Shards(
        parts(where.of(weight, where.weights), spec.size),
        max((parts(where.of(s.name, where.optimizer_state), s.size) for s in states), default=1),
        parts(where.of(gradient_buffer(weight), where.accumulators), spec.size) if program.accumulates else 1,
    )


def update_spec(program: Program, weight: str) -> TensorSpec:
    """The part of a weight that one replica updates: all of it, or its shard, which is flat."""
    spec, parts = program.parameters[weight].spec, shards_of(program, weight).update
    return spec if parts == 1 else TensorSpec(spec.name, spec.dtype, (-(-spec.size // parts),))


def reduction_seconds(program: Program, memory: Memory, chip: Chip) -> dict[int, float]:
    """Seconds to reduce the gradients of a batch and to gather what the update made, by IPU of a replica.

    IPUs do theirs side by side. What is cut alike travels together, padding of arenas included where nothing is cut.
    """
    by_ipu: dict[int, float] = {}
    for group in memory.groups:
        by_ipu.setdefault(group.home, 0.0)
    for home in by_ipu:
        groups = [group for group in memory.groups if group.home == home]
        by_ipu[home] = sum(
            _reduction(program, chip, replicas, shards, gradient, weight)
            for (replicas, shards), (gradient, weight) in _sizes(program, groups).items()
        )
    return dict(sorted(by_ipu.items()))


def gather_seconds(program: Program, work: SegmentWork, chip: Chip) -> float:
    """Seconds of a micro-batch in which the sharded weights that a segment reads are gathered for it."""
    fabric, ipus = fabric_of(chip), program.ipus_per_replica
    sizes: dict[int, float] = {}
    for name in sorted(work.reads & program.parameters.keys()):
        parts = shards_of(program, name).weight
        if parts > 1:
            sizes[parts] = sizes.get(parts, 0.0) + program.parameters[name].spec.nbytes
    return sum(
        all_gather_time(size, parts, fabric, ipus_per_rank=ipus).seconds for parts, size in sizes.items()
    )


def _sizes(
    program: Program, groups: Sequence[WeightGroup]
) -> Mapping[tuple[int, Shards], tuple[float, float]]:
    """Bytes of gradients and of weights that are reduced over equally many replicas and cut alike."""
    sizes: dict[tuple[int, Shards], tuple[float, float]] = {}
    for group in groups:
        wide = numpy_dtype(group.gradient_dtype).itemsize
        stored = max(1, sum(weight.size for weight in group.weights))
        for weight in group.weights:
            replicas, spec = replicas_reduced(program, weight.name), program.parameters[weight.name].spec
            shards = shards_of(program, weight.name)
            shards = Shards(shards.weight, 1, shards.accumulator)  # State does not travel.
            gradient, moved = sizes.get((replicas, shards), (0.0, 0.0))
            padded = group.size / stored if shards.update == 1 else 1.0
            sizes[replicas, shards] = (gradient + spec.size * wide * padded, moved + spec.nbytes)
    return sizes


def _reduction(
    program: Program, chip: Chip, replicas: int, shards: Shards, gradient: float, weight: float
) -> float:
    ipus, fabric = program.ipus_per_replica, fabric_of(chip)
    parts = max(shards.weight, shards.accumulator)
    if parts == 1:
        return all_reduce_seconds(chip, replicas, gradient, ipus_per_replica=ipus)
    times = program.accumulation_factor if shards.accumulator > 1 else 1
    seconds = times * reduce_scatter_time(gradient, parts, fabric, ipus_per_rank=ipus).seconds
    if replicas > parts:
        seconds += all_reduce_seconds(chip, replicas // parts, gradient / parts, ipus_per_replica=ipus)
    if shards.weight == 1:
        seconds += all_gather_time(weight, parts, fabric, ipus_per_rank=ipus).seconds
    return seconds
