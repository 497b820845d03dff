"""The chain: a micro-batch of a replica over several IPUs as segments, each on its IPU and in its pipeline cycle.

Segments are cut where the place changes, and where machines exchange data for a collective of the model. In a pipeline
segment *c* of the chain runs micro-batch *m* in cycle ``c + period * m`` (`podrun.compiler.schedule`).

**Joint updates.** An update that needs all weights of a replica is one piece on IPU 0
(`podrun.compiler.update.joint_piece`). Its inputs on other machines of the replica are sent there, once a
batch and after all gradients are reduced; its results are sent back, and a piece on the IPU that holds them puts them
into their arenas. Statistics of all gradients go the same way. Every replica computes the same, so replicas stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from podrun.compiler.arenas import Memory, WeightGroup
from podrun.compiler.chunk import ChunkBuilder
from podrun.compiler.collective_cuts import LevelledPiece, opened
from podrun.compiler.export import PieceFunction, TracedPiece, trace_piece
from podrun.compiler.jaxprs import buffer
from podrun.compiler.program import RNG
from podrun.compiler.segments import PieceSegment, Placement, split_at_places
from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.layout import Layout
from podrun.core.names import CROSSING, INPUT, KEYS, RETURNED, gradient_buffer, statistics_buffer
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.splitting import Spot
from podrun.costmodel.target import IPUS_PER_MACHINE


@dataclass(frozen=True, slots=True)
class ChainUnit:
    """A segment at its place in the chain: on which IPU, and in which cycle after its micro-batch entered."""

    piece: TracedPiece
    ipu: int
    cycle: int

    @property
    def reads(self) -> tuple[str, ...]:
        """The temporaries it needs: streamed inputs, keys, and what other units made."""
        return tuple(n for n in self.piece.inputs if n.startswith((INPUT, CROSSING)) or n == KEYS)


def units(builder: ChunkBuilder, placement: Placement, *, pipelined: bool) -> tuple[ChainUnit, ...]:
    """The segments of one micro-batch in order, the random keys first.

    Raises UsageError for stages that cannot be a pipeline.
    """
    accumulate = builder.program.accumulates and bool(builder.weights)
    whole = opened(
        trace_piece(builder.piece("segment", 1, accumulate=accumulate, split=True)), builder.layout
    )
    cutting = placement.cutting()
    segments = _segments(whole, cutting)
    cycles = _cycles(segments, placement, whole.depth) if pipelined else range(len(segments))
    chain = [
        ChainUnit(segment.piece, cutting.ipu(segment.place // whole.depth), cycle)
        for segment, cycle in zip(segments, cycles, strict=True)
    ]
    if builder.traced.uses_random:
        chain.insert(0, ChainUnit(trace_piece(builder.keys_piece()), 0, 0))
    chain = _with_states(sorted(builder.program.state_updates), chain, pipelined=pipelined)
    if builder.program.updates_each_micro_batch:
        _check_updates(builder, chain)
    return tuple(chain)


def _segments(whole: LevelledPiece, placement: Placement) -> tuple[PieceSegment, ...]:
    """The segments, also cut where machines exchange data: places and ranks are multiplied by the number of levels, and
    the level added.
    """

    def spot(equation: JaxprEqn) -> Spot | None:
        home, level = placement.spot(equation), whole.level(equation)
        if home is None:
            return None
        rank = None if home.rank is None else home.rank * whole.depth + level
        return Spot(home.place * whole.depth + level, rank, home.late)

    return split_at_places(whole.piece, spot)


def _check_updates(builder: ChunkBuilder, chain: Sequence[ChainUnit]) -> None:
    """Raise UsageError unless weights that change while micro-batches are in flight are read only on the IPU that holds
    them.
    """
    for name in builder.weights:
        ipus = {
            unit.ipu
            for unit in chain
            if {name, gradient_buffer(name)} & {*unit.piece.inputs, *unit.piece.outputs}
        }
        if len(ipus) > 1:
            raise UnsupportedError(
                f"{name!r} is read on IPUs {', '.join(map(str, sorted(ipus)))}; without gradient accumulation a "
                "pipeline's weight can be on one IPU only",
                hint="Place everything that reads it on one IPU, or use gradient accumulation.",
            )


def turns_of(builder: ChunkBuilder, chain: Sequence[ChainUnit]) -> dict[str, int]:
    """Weight -> the number, in the chain, of the unit after which it is updated: the one that makes its gradient.

    Empty for programs that update after a whole batch: only where each micro-batch updates do weights change while
    others are in flight.
    """
    if not builder.program.updates_each_micro_batch:
        return {}
    producer = {name: number for number, unit in enumerate(chain) for name in unit.piece.outputs}
    return {name: producer[gradient_buffer(name)] for name in builder.weights}


def turns_at(builder: ChunkBuilder) -> dict[int, list[int]]:
    """The groups of weights, by IPU, whose updates in flight round stochastically, each group in turns of its own."""
    by_ipu: dict[int, list[int]] = {}
    for index, group in enumerate(builder.memory.groups):
        if builder.program.updates_each_micro_batch and RNG in group.scalars:
            by_ipu.setdefault(group.home, []).append(index)
    return by_ipu


def homes_of(builder: ChunkBuilder, chain: Sequence[ChainUnit]) -> dict[str, int]:
    """The IPU that holds each parameter: the one that makes its gradient or replaces it, else the first that
    reads it."""
    homes: dict[str, int] = {}
    for unit in chain:
        for name in unit.piece.inputs:
            if name in builder.program.parameters:
                homes.setdefault(name, unit.ipu)
    ipu_of = {name: unit.ipu for unit in chain for name in unit.piece.outputs}
    for name in builder.program.parameters:
        for output in (gradient_buffer(name), name):
            if output in ipu_of:
                homes[name] = ipu_of[output]
    return homes


def _with_states(states: Sequence[str], chain: Sequence[ChainUnit], *, pipelined: bool) -> list[ChainUnit]:
    """The chain in which units that replace parameters first hand over the old values to the units that read them.

    The handing units come in front, on the IPUs that replace the parameters. UnsupportedError where micro-batches
    overlap: a reader would get a later or an earlier micro-batch's value.
    """
    states_by_ipu: dict[int, dict[str, ShapedArray]] = {}
    for name in states:
        writer = next(unit for unit in chain if name in unit.piece.outputs)
        for unit in chain:
            if unit is writer or name not in unit.piece.inputs:
                continue
            if pipelined:
                raise UnsupportedError(
                    f"{name!r} is replaced in one stage of a pipeline (on IPU {writer.ipu}) and read in another one "
                    f"(on IPU {unit.ipu}), where other micro-batches are meanwhile",
                    hint="Put what reads and what replaces it in one pipeline stage, or do not pipeline.",
                )
            aval = unit.piece.jaxpr.in_avals[unit.piece.inputs.index(name)]
            states_by_ipu.setdefault(writer.ipu, {})[name] = aval
    units = [ChainUnit(_giving(ipu, avals), ipu, 0) for ipu, avals in sorted(states_by_ipu.items())]
    for unit in chain:
        others = {name for avals in states_by_ipu.values() for name in avals} - {*unit.piece.outputs}
        inputs = tuple(CROSSING + name if name in others else name for name in unit.piece.inputs)
        units.append(replace(unit, piece=replace(unit.piece, inputs=inputs)))
    return units


def _giving(ipu: int, avals: Mapping[str, ShapedArray]) -> TracedPiece:
    """A piece that passes on parameters of an IPU."""
    names = tuple(avals)
    jaxpr = jax.make_jaxpr(lambda *values: values)(*avals.values())
    return TracedPiece(f"states.{ipu}", jaxpr, names, tuple(CROSSING + name for name in names))


def _cycles(segments: Sequence[PieceSegment], placement: Placement, depth: int) -> list[int]:
    """The cycle of each segment: its rank without the level, which must go up along the chain."""
    missing = sorted(set(range(max(placement.stages) + 1)) - set(placement.stages))
    if missing:
        raise UsageError(
            f"the pipeline has no work in stage {', '.join(map(str, missing))}",
            hint="Number the stages from 0 on, without gaps.",
        )
    ranks = [segment.rank for segment in segments]
    if ranks != sorted(set(ranks)):
        order = ", ".join(str(segment.place // depth) for segment in segments)
        raise UsageError(
            f"the pipeline's stages run in the order {order}: an operator reads the result of a later stage",
            hint="Give every operator a stage that is not before those of the operators it reads.",
        )
    return [rank // depth for rank in ranks]


def far_groups(memory: Memory, layout: Layout) -> tuple[WeightGroup, ...]:
    """The groups of weights on another machine than that of IPU 0; empty if replicas lie on one machine."""
    return tuple(group for group in memory.groups if layout.position_of(group.home) not in (None, 0))


def read_names(memory: Memory, group: WeightGroup) -> tuple[str, ...]:
    """The buffers of a group that a joint update reads: weights, gradients, optimizer state."""
    return _members(memory, (group.weight_arena, group.gradient_arena, *_states(group)))


def written_names(memory: Memory, group: WeightGroup) -> tuple[str, ...]:
    """The buffers of a group that a joint update writes."""
    return _members(memory, (group.weight_arena, *_states(group)))


def taking_pieces(memory: Memory, layout: Layout) -> list[PieceFunction]:
    """For each IPU that holds far groups, the piece that writes back the results that another IPU computed."""
    groups = far_groups(memory, layout)
    return [
        _taking(memory, home, [group for group in groups if group.home == home])
        for home in sorted({group.home for group in groups})
    ]


def taking_name(home: int, what: str = "") -> str:
    """The name of the piece with which an IPU writes values from other machines into its buffers."""
    return f"take.{what}.{home}" if what else f"take.{home}"


def taking_piece(name: str, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> PieceFunction:
    """A piece that writes values from another machine into the buffers of their names; ``specs``: dtype and shape."""

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values[RETURNED + name] for name in specs}

    inputs = {RETURNED + name: buffer(shape, dtype) for name, (dtype, shape) in specs.items()}
    return PieceFunction(name, run, inputs, tuple(specs))


def _taking(memory: Memory, home: int, groups: Sequence[WeightGroup]) -> PieceFunction:
    specs = [memory.variables[name].spec for group in groups for name in written_names(memory, group)]
    return taking_piece(taking_name(home), {spec.name: (spec.dtype, spec.shape) for spec in specs})


def _states(group: WeightGroup) -> tuple[str, ...]:
    return tuple(field.arena for field in group.states)


def _members(memory: Memory, arenas: Iterable[str]) -> tuple[str, ...]:
    return tuple(member.name for arena in arenas for member in memory.arenas[arena].members)


def first_ipus(builder: ChunkBuilder) -> range:
    """The first IPU of each machine of a replica."""
    spanned = builder.layout.machines_per_replica
    return range(0, spanned * IPUS_PER_MACHINE if spanned > 1 else 1, IPUS_PER_MACHINE)


def clearing_homes(builder: ChunkBuilder) -> list[int]:
    """The IPUs that clear accumulators: those with weights, and one of each machine that has only counts."""
    homes = sorted({group.home for group in builder.memory.groups})
    cleared = {builder.layout.position_of(home) for home in homes}
    counting = [f for f in first_ipus(builder) if builder.layout.position_of(f) not in cleared]
    return sorted([*homes, *(counting if builder.tracked and homes else ())])


def far_counts(builder: ChunkBuilder, chain: Sequence[ChainUnit]) -> dict[int, tuple[str, ...]]:
    """For the first IPU of each machine of a replica, the counts of tracked gradients that other machines make."""
    layout = builder.layout
    makers = {name: unit.ipu for unit in chain for name in unit.piece.outputs}
    names = [statistics_buffer(name) for name in builder.tracked]
    return {
        first: tuple(n for n in names if layout.position_of(makers[n]) != layout.position_of(first))
        for first in first_ipus(builder)
    }


def counted_pieces(builder: ChunkBuilder, chain: Sequence[ChainUnit]) -> list[PieceFunction]:
    """The pieces that put the counts from other machines of a replica into the arena of counts."""
    specs = {statistics_buffer(name): ("float32", (2,)) for name in builder.tracked}
    return [
        taking_piece(taking_name(first, "counts"), {name: specs[name] for name in far})
        for first, far in far_counts(builder, chain).items()
        if far
    ]
