"""The schedule: typed instructions for each IPU of a replica, for one batch.

Per chunk of micro-batches: load the streams, compute, hand over the anchors. After the last: reduce the
gradients over the machines, update, gather. Machines that share memory rely on this order: nobody writes a
weight before the reduction, which needs the gradients of all, and nobody reads one after it before the
gather.
"""

from __future__ import annotations

from collections.abc import Sequence

from podrun.compiler.numbers.chunk import ChunkBuilder, updated_piece
from podrun.compiler.numbers.fold import MicroBatchChunk
from podrun.compiler.numbers.update import JOINT_UPDATE
from podrun.compiler.program import RNG, joint
from podrun.compiler.state.arenas import WeightGroup
from podrun.compiler.state.gradient_scaling import STATISTICS
from podrun.compiler.state.gradient_scaling import UPDATE as SCALING
from podrun.compiler.state.randomness import ADVANCE
from podrun.core.buffer_names import anchor_buffer, input_buffer
from podrun.core.executable import (
    AllGather,
    AllReduce,
    Compute,
    Instruction,
    LoadStream,
    ReduceScatter,
    Retrieval,
    StoreStream,
    Sync,
    SyncScope,
)


def schedule(
    builder: ChunkBuilder,
    chunks: Sequence[MicroBatchChunk],
    pieces: Sequence[Sequence[Instruction]],
    *,
    clear: bool,
) -> tuple[tuple[Instruction, ...], ...]:
    """Instructions per IPU; ``pieces[i]`` is the work of ``chunks[i]``. ``clear``: accumulators start at zero.

    The numerical work of a replica is listed at its IPU 0; the others synchronise. (Sharding lists it per
    scope.)
    """
    work: list[Instruction] = [Sync(SyncScope.HOST)]
    if clear:
        work.append(Compute("clear"))
    for chunk, piece in zip(chunks, pieces, strict=True):
        work += [LoadStream(n, input_buffer(n), chunk.first, chunk.count) for n in builder.loaded]
        work += piece
        work += _stores(builder, chunk, last=chunk is chunks[-1])
    groups = builder.memory.groups
    if groups and joint(builder.program.update):
        work += [
            *(AllReduce(group.gradient_arena) for group in groups),
            Compute(JOINT_UPDATE),
            *norm_anchors(builder),
        ]
    else:
        for index, group in enumerate(groups):
            work += update_instructions(index, group)
    work += closing(builder)
    work += updated_anchors(builder, 0)
    idle: tuple[Instruction, ...] = (Sync(SyncScope.HOST),)
    return (tuple(work), *([idle] * (builder.layout.ipus_per_replica - 1)))


def _stores(builder: ChunkBuilder, chunk: MicroBatchChunk, *, last: bool) -> list[Instruction]:
    retrievals = {spec.name: spec.retrieval for spec in builder.program.anchors}
    return [
        StoreStream(anchor.name, anchor_buffer(anchor.name), chunk.first, chunk.count)
        for anchor in builder.stored
        if last or retrievals[anchor.name] is not Retrieval.FINAL
    ]


def update_instructions(index: int, group: WeightGroup) -> list[Instruction]:
    """Reduce a group's gradients over the machines, update, and let all see the new weights."""
    update = Compute(f"update.{index}")
    if group.elementwise:
        gathered = [AllGather(field.arena) for field in group.states if field.gathered and not field.scalar]
        reduce = AllReduce if group.whole_gradient else ReduceScatter
        return [reduce(group.gradient_arena), update, AllGather(group.weight_arena), *gathered]
    return [AllReduce(group.gradient_arena), update]


def closing(builder: ChunkBuilder) -> list[Instruction]:
    """What comes after all weights were updated: the loss scale's factor and the RNG state move on."""
    found: list[Instruction] = [AllReduce(STATISTICS), Compute(SCALING)] if builder.tracked else []
    return [*found, Compute(ADVANCE)] if RNG in builder.memory.variables else found


def norm_anchors(builder: ChunkBuilder) -> list[Instruction]:
    """Hand over the norms that a joint update has just clipped by, as the last micro-batch of the batch."""
    final = builder.program.accumulation_factor - 1
    return [StoreStream(anchor.name, anchor_buffer(anchor.name), final, 1) for anchor in builder.norms]


def updated_anchors(builder: ChunkBuilder, number: int, micro_batch: int | None = None) -> list[Instruction]:
    """Hand over weights after their update, those of IPU ``number``, as the last micro-batch of the batch. In flight:
    those of group ``number``, as ``micro_batch``."""
    final = builder.program.accumulation_factor - 1
    chosen = final if micro_batch is None else micro_batch
    retrievals = {spec.name: spec.retrieval for spec in builder.program.anchors}
    names = [
        anchor.name
        for anchor in builder.updated.get(updated_piece(number), ())
        if chosen == final or retrievals[anchor.name] is not Retrieval.FINAL
    ]
    stores = [StoreStream(name, anchor_buffer(name), chosen, 1) for name in names]
    return [Compute(updated_piece(number)), *stores] if stores else []
