"""Replicated tensor sharding in the model of time: what moves between replicas because each holds a part only.

A weight, its optimizer state or its accumulator may be cut over the replicas of a sharding domain
(`podrun.device.tiles.memory.Location.shards`). Numbers do not change; what does:

* weights cut: each replica gathers a weight before a segment uses it, once for each micro-batch; gradients are
  scattered to their shards and nothing is gathered after the update;
* accumulators cut: gradients are scattered for each micro-batch, not once for each batch;
* accumulators or state cut, weights whole: the new weights are gathered after the update, which with the scattering is
  what an all-reduce does;
* whatever is cut, each replica updates its shard only;
* a domain of fewer than all replicas: shards are all-reduced between domains.

Machines of the emulator keep one copy of weights and state on a host and update them by slices, cut or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podrun.collectives.timing import all_gather, reduce_scatter
from podrun.compiler.costs.holdings import Work
from podrun.compiler.program import Program
from podrun.compiler.state.arenas import Memory, WeightGroup, gradient_buffer
from podrun.compiler.state.grouped import replicas_reduced
from podrun.device.target import Chip
from podrun.device.tiles.links import all_reduce_seconds, fabric_of
from podrun.device.tiles.memory import Location
from podrun.executable import TensorSpec, numpy_dtype


@dataclass(frozen=True, slots=True)
class Shards:
    """Into how many parts a weight, its state and its accumulator are cut; 1: not at all."""

    weight: int
    state: int
    accumulator: int

    @property
    def update(self) -> int:
        """Into how many parts the update of the weight falls."""
        return max(self.weight, self.state, self.accumulator)


def shards_of(program: Program, weight: str) -> Shards:
    """The shards of a weight and what belongs to it, never more than the replicas that share the weight."""
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
    """What one replica updates of a weight: all of it, or its shard, which is flat."""
    spec, parts = program.parameters[weight].spec, shards_of(program, weight).update
    return spec if parts == 1 else TensorSpec(spec.name, spec.dtype, (-(-spec.size // parts),))


def reduction_seconds(program: Program, memory: Memory, chip: Chip) -> dict[int, float]:
    """Seconds to reduce the gradients of a batch and to gather what the update made, by IPU of a replica.

    IPUs do theirs side by side. What is cut alike travels together, padding of arenas included where nothing is cut.
    """
    found: dict[int, float] = {}
    for group in memory.groups:
        found.setdefault(group.home, 0.0)
    for home in found:
        groups = [group for group in memory.groups if group.home == home]
        found[home] = sum(
            _reduction(program, chip, replicas, shards, gradient, weight)
            for (replicas, shards), (gradient, weight) in _sizes(program, groups).items()
        )
    return dict(sorted(found.items()))


def gather_seconds(program: Program, work: Work, chip: Chip) -> float:
    """Seconds of a micro-batch in which the sharded weights that a segment reads are gathered for it."""
    fabric, ipus = fabric_of(chip), program.ipus_per_replica
    sizes: dict[int, float] = {}
    for name in sorted(work.reads & program.parameters.keys()):
        parts = shards_of(program, name).weight
        if parts > 1:
            sizes[parts] = sizes.get(parts, 0.0) + program.parameters[name].spec.nbytes
    return sum(all_gather(size, parts, fabric, ipus_per_rank=ipus).seconds for parts, size in sizes.items())


def _sizes(
    program: Program, groups: Sequence[WeightGroup]
) -> Mapping[tuple[int, Shards], tuple[float, float]]:
    """Bytes of gradients and of weights that are reduced over equally many replicas and cut alike."""
    found: dict[tuple[int, Shards], tuple[float, float]] = {}
    for group in groups:
        wide = numpy_dtype(group.gradient_dtype).itemsize
        stored = sum(weight.size for weight in group.weights)
        for weight in group.weights:
            replicas, spec = replicas_reduced(program, weight.name), program.parameters[weight.name].spec
            shards = shards_of(program, weight.name)
            shards = Shards(shards.weight, 1, shards.accumulator)  # State does not travel.
            gradient, moved = found.get((replicas, shards), (0.0, 0.0))
            padded = group.size / stored if shards.update == 1 else 1.0
            found[replicas, shards] = (gradient + spec.size * wide * padded, moved + spec.nbytes)
    return found


def _reduction(
    program: Program, chip: Chip, replicas: int, shards: Shards, gradient: float, weight: float
) -> float:
    ipus, fabric = program.ipus_per_replica, fabric_of(chip)
    parts = max(shards.weight, shards.accumulator)
    if parts == 1:
        return all_reduce_seconds(chip, replicas, gradient, ipus_per_replica=ipus)
    times = program.accumulation_factor if shards.accumulator > 1 else 1
    seconds = times * reduce_scatter(gradient, parts, fabric, ipus_per_rank=ipus).seconds
    if replicas > parts:
        seconds += all_reduce_seconds(chip, replicas // parts, gradient / parts, ipus_per_replica=ipus)
    if shards.weight == 1:
        seconds += all_gather(weight, parts, fabric, ipus_per_rank=ipus).seconds
    return seconds
