"""What goes to and from streaming memory: bytes that each segment of a micro-batch and each update move, and seconds.

Variables whose location is off chip come for every use: weights for each segment that reads them, accumulators there
and back for each gradient, optimizer state there and back for the update. Activations that wait on their IPU go there
when they are made and come back for each segment that reads them; between neighbouring execution phases they stay on
chip. A variable cut over replicas moves its shard only.

The rate is that of a machine, shared by what streams at the same time: the replicas of the machine, and in a pipeline
their stages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from podrun.compiler.costs.holdings import Work
from podrun.compiler.layout import layout_of
from podrun.compiler.program import Program
from podrun.compiler.state.arenas import WeightGroup, gradient_buffer
from podrun.device.target import IPUS_PER_MACHINE
from podrun.device.tiles.batch import STREAMING_BYTES_PER_SECOND
from podrun.device.tiles.memory import Location
from podrun.executable import TensorSpec, numpy_dtype


def segment_bytes(
    program: Program, works: Sequence[Work], gradients: Sequence[Collection[str]]
) -> tuple[int, ...]:
    """Bytes that each segment moves for a micro-batch; ``gradients[i]``: weights whose gradients ``works[i]`` makes."""
    found = [_variables(program, work, made) for work, made in zip(works, gradients, strict=True)]
    activations = program.locations.activations
    for maker, work in enumerate(works):
        for name, size in work.crossing:
            if not activations.streamed(size):
                continue
            readers = [
                i for i, other in enumerate(works) if name in other.reads and _waits(program, work, other)
            ]
            found[maker] += size * bool(readers)
            for reader in readers:
                found[reader] += size
    return tuple(found)


def update_bytes(program: Program, groups: Sequence[WeightGroup]) -> int:
    """Bytes that the update of the groups of one IPU moves."""
    where, rule = program.locations, program.update
    total = 0
    for group in groups:
        assert rule is not None
        for weight in (program.parameters[weight.name].spec for weight in group.weights):
            total += 2 * _moved(weight, where.of(weight.name, where.weights))
            for spec, _ in rule.state(weight).values():
                total += 2 * _moved(spec, where.of(spec.name, where.optimizer_state))
            if program.accumulates:
                name = gradient_buffer(weight.name)
                accumulator = TensorSpec(name, group.gradient_dtype, weight.shape)
                total += _moved(accumulator, where.of(name, where.accumulators))
    return total


def seconds(program: Program, nbytes: int, streams: int = 1) -> float:
    """Seconds for ``nbytes`` on each of ``streams`` IPUs of a replica at once (at most those of a machine)."""
    sharing = layout_of(program).replicas_per_machine * min(streams, IPUS_PER_MACHINE)
    return nbytes * sharing / STREAMING_BYTES_PER_SECOND


def _variables(program: Program, work: Work, made: Collection[str]) -> int:
    where = program.locations
    total = 0
    for name, parameter in program.parameters.items():
        if name in work.reads:
            total += _moved(parameter.spec, where.of(name, where.weights))
        if name in made and program.accumulates:
            total += 2 * _moved(parameter.spec, where.of(gradient_buffer(name), where.accumulators))
    return total


def _waits(program: Program, maker: Work, reader: Work) -> bool:
    """True iff what ``maker`` makes goes off chip until ``reader`` wants it."""
    if maker.ipu != reader.ipu or maker is reader:
        return False
    return program.phases is None or reader.cycle - maker.cycle > 1


def _moved(spec: TensorSpec, place: Location) -> int:
    return place.elements(spec.size) * numpy_dtype(spec.dtype).itemsize if place.streamed(spec.size) else 0
