"""What one machine of a replica does with what others hold: one update of all weights, counts of all gradients.

The update is one piece on IPU 0 (`podrun.compiler.numbers.update.joint_piece`). What it reads and another machine of
the replica holds is sent there, once a batch and after all gradients are reduced; what it writes is sent back, and a
piece on the IPU that holds it puts it into its arenas. Every replica computes the same, so replicas stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from podrun.compiler.abstract import buffer
from podrun.compiler.export.pieces import PieceFunction
from podrun.compiler.numbers.chunk import ChunkBuilder
from podrun.compiler.order.chain import ChainUnit
from podrun.compiler.state.arenas import Memory, WeightGroup
from podrun.core.buffer_names import RETURNED, statistics_buffer
from podrun.core.layout import Layout
from podrun.costmodel.target import IPUS_PER_MACHINE


def far_groups(memory: Memory, layout: Layout) -> tuple[WeightGroup, ...]:
    """The groups of weights that another machine than that of IPU 0 holds; none if replicas lie on one machine."""
    return tuple(group for group in memory.groups if layout.position_of(group.home) not in (None, 0))


def read_names(memory: Memory, group: WeightGroup) -> tuple[str, ...]:
    """What a joint update reads of a group: weights, gradients, optimizer state."""
    return _members(memory, (group.weight_arena, group.gradient_arena, *_states(group)))


def written_names(memory: Memory, group: WeightGroup) -> tuple[str, ...]:
    """What a joint update writes of a group."""
    return _members(memory, (group.weight_arena, *_states(group)))


def taking_pieces(memory: Memory, layout: Layout) -> list[PieceFunction]:
    """For each IPU that holds far groups, the piece that puts back what was updated elsewhere."""
    groups = far_groups(memory, layout)
    return [
        _taking(memory, home, [group for group in groups if group.home == home])
        for home in sorted({group.home for group in groups})
    ]


def taking_name(home: int, what: str = "") -> str:
    """The name of the piece with which an IPU takes in what came from other machines."""
    return f"take.{what}.{home}" if what else f"take.{home}"


def taking_piece(name: str, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> PieceFunction:
    """A piece that puts what came from another machine into the buffers of its names; ``specs``: dtype and shape."""

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
    """The IPUs that clear accumulators: those with weights, and one of each machine that only counts."""
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
    """The pieces that put counts that came from other machines of a replica into the arena of counts."""
    specs = {statistics_buffer(name): ("float32", (2,)) for name in builder.tracked}
    return [
        taking_piece(taking_name(first, "counts"), {name: specs[name] for name in far})
        for first, far in far_counts(builder, chain).items()
        if far
    ]
