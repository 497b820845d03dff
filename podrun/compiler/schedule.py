"""The schedule: typed instructions for each IPU of a replica, for one batch.

**Replicas on one IPU.** Per chunk of micro-batches: load the streams, compute, hand over the anchors. After the last:
reduce the gradients over the machines, update, gather. Machines that share memory rely on this order: nobody writes a
weight before the reduction, which needs the gradients of all, and nobody reads one after it before the gather.

**Sharding and pipelining.** Both run the same segments, micro-batch by micro-batch, so they give the same bits. Without
pipelining all segments of a micro-batch run before the next one starts. With it, segment *c* of the chain runs
micro-batch *m* in cycle ``c + period * m``: the pipeline fills, runs full and flushes. What a segment made and a later
one of the same IPU reads is stashed meanwhile, in a ring as long as the distance between the two.

Without accumulation each micro-batch of a pipeline is a batch of its own: a stage's weights are updated as soon as
their gradient is there, in the cycle of that stage's backward work, after the forward work of the same cycle. Weights
are not stashed: backward work sees those of its own time (as in PopART).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from podrun.compiler.arenas import Memory, WeightGroup
from podrun.compiler.chain import (
    ChainUnit,
    clearing_homes,
    far_counts,
    far_groups,
    first_ipus,
    read_names,
    taking_name,
    turns_at,
    written_names,
)
from podrun.compiler.chunk import ChunkBuilder, updated_piece
from podrun.compiler.collective_cuts import gathered_arena
from podrun.compiler.extra_state import ADVANCE, STATISTICS, turns_name
from podrun.compiler.extra_state import UPDATE as SCALING
from podrun.compiler.fold import MicroBatchChunk
from podrun.compiler.program import RNG, joint
from podrun.compiler.update import JOINT_UPDATE
from podrun.core.executable import (
    AllGather,
    AllReduce,
    Compute,
    Copy,
    Instruction,
    LoadStream,
    Receive,
    ReduceScatter,
    Retrieval,
    Send,
    StoreStream,
    Sync,
    SyncScope,
)
from podrun.core.names import ANCHOR, INPUT, RETURNED, WHOLE, anchor_buffer, gradient_buffer, input_buffer
from podrun.costmodel.target import IPUS_PER_MACHINE


def schedule(
    builder: ChunkBuilder,
    chunks: Sequence[MicroBatchChunk],
    pieces: Sequence[Sequence[Instruction]],
    closing: Sequence[Instruction] = (),
    *,
    clear: bool,
) -> tuple[tuple[Instruction, ...], ...]:
    """Instructions per IPU; ``pieces[i]`` is the work of ``chunks[i]``, ``closing`` what comes after them. ``clear``:
    accumulators start at zero.

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
    work += closing
    work += end_of_batch(builder)
    work += hand_over_updated(builder, 0)
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


def end_of_batch(builder: ChunkBuilder) -> list[Instruction]:
    """The end of a batch, after all weights were updated: advance the loss scale's factor and the RNG state."""
    instructions: list[Instruction] = [AllReduce(STATISTICS), Compute(SCALING)] if builder.tracked else []
    return [*instructions, Compute(ADVANCE)] if RNG in builder.memory.variables else instructions


def norm_anchors(builder: ChunkBuilder) -> list[Instruction]:
    """Hand over the norms that a joint update has just clipped by, as the last micro-batch of the batch."""
    final = builder.program.accumulation_factor - 1
    return [StoreStream(anchor.name, anchor_buffer(anchor.name), final, 1) for anchor in builder.norms]


def hand_over_updated(
    builder: ChunkBuilder, number: int, micro_batch: int | None = None
) -> list[Instruction]:
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


class Timetable:
    """Instruction lists for all IPUs of a replica, from units."""

    def __init__(self, builder: ChunkBuilder, chain: Sequence[ChainUnit], *, pipelined: bool) -> None:
        self.builder = builder
        self.chain = chain
        self.pipelined = pipelined
        self.period = builder.program.pipeline_schedule.period if pipelined else 1
        self.updates_early = builder.program.updates_each_micro_batch
        self.lists: list[list[Instruction]] = [[] for _ in range(builder.layout.ipus_per_replica)]
        self.maker = {name: unit for unit in chain for name in unit.piece.outputs}
        self.readers: dict[tuple[str, int], list[ChainUnit]] = {}
        for unit in chain:
            for name in unit.reads:
                self.readers.setdefault((name, unit.ipu), []).append(unit)
        self.reading_ipus: dict[str, list[int]] = {}
        for name, ipu in self.readers:
            self.reading_ipus.setdefault(name, []).append(ipu)
        self.slots: dict[tuple[str, int], tuple[str, ...]] = {}
        self.retrievals = {spec.name: spec.retrieval for spec in builder.program.anchors}
        self.tags: dict[tuple[str, int, int], int] = {}
        self.last_collective: dict[int, tuple[int, int, str]] = {}

    def instructions(self, *, clear: bool) -> tuple[tuple[Instruction, ...], ...]:
        """The lists of one batch. ``clear``: gradient accumulators start at zero."""
        groups = self.builder.memory.groups
        homes = sorted({group.home for group in groups})
        self._everywhere(Sync(SyncScope.HOST))
        if clear:
            for home in clearing_homes(self.builder):
                self.lists[home].append(Compute(f"clear.{home}"))
            self._everywhere(Sync(SyncScope.MACHINE))
        for home in turns_at(self.builder):
            self.lists[home].append(Compute(turns_name(home)))
        self._send_variables()
        for unit, micro_batch in self._order():
            self._emit(unit, micro_batch)
        if groups:
            self._everywhere(Sync(SyncScope.MACHINE))
        if groups and joint(self.builder.program.update):
            self._update_jointly()
        elif not self.updates_early:
            for index, group in enumerate(groups):
                self.lists[group.home] += update_instructions(index, group)
        self._close()
        for home in () if self.updates_early else homes:
            self.lists[home] += hand_over_updated(self.builder, home)
        return tuple(tuple(work) for work in self.lists)

    def _update_jointly(self) -> None:
        """Update all weights in one piece, on IPU 0, between the reduction of all gradients and the rest. Inputs from
        other machines of the replica come there, and results go back.
        """
        memory = self.builder.memory
        far = far_groups(memory, self.builder.layout)
        for group in memory.groups:
            self.lists[group.home].append(AllReduce(group.gradient_arena))
        self._everywhere(Sync(SyncScope.MACHINE))
        for group in far:
            for name in read_names(memory, group):
                self._send_once(name, group.home, 0, name)
        self.lists[0] += [Compute(JOINT_UPDATE), *norm_anchors(self.builder)]
        for group in far:
            for name in written_names(memory, group):
                self._send_once(name, 0, group.home, RETURNED + name)
        for home in sorted({group.home for group in far}):
            self.lists[home].append(Compute(taking_name(home)))
        self._everywhere(Sync(SyncScope.MACHINE))

    def _send_once(self, name: str, source: int, dest: int, buffer: str) -> None:
        """Send a buffer to another IPU for the update, where its name is ``buffer``."""
        tag = self._tag(f"update:{name}", dest, 0)
        self.lists[source].append(Send(name, dest, tag))
        self.lists[dest].append(Receive(buffer, source, tag))

    def _close(self) -> None:
        """Append the work that waits for the update of all weights: on IPU 0, or on the first IPU of every machine of a
        replica, which all do the same.
        """
        work = end_of_batch(self.builder)
        if not work:
            return
        self._everywhere(Sync(SyncScope.MACHINE))
        for first, far in far_counts(self.builder, self.chain).items():
            for name in far:
                self._send_once(name, self.maker[name].ipu, first, RETURNED + name)
            if far:
                self.lists[first].append(Compute(taking_name(first, "counts")))
        for first in first_ipus(self.builder):
            self.lists[first] += work
        self._everywhere(Sync(SyncScope.MACHINE))

    def _send_variables(self) -> None:
        """Where a replica spans machines: send variables on one of them to units on others, once a batch."""
        memory, layout = self.builder.memory, self.builder.layout
        sent: set[tuple[str, int]] = set()
        for unit in self.chain:
            for name in unit.piece.inputs:
                home = self.home_of(name, memory)
                if home is None or layout.position_of(home) == layout.position_of(unit.ipu):
                    continue
                if (name, unit.ipu) not in sent:
                    sent.add((name, unit.ipu))
                    tag = self._tag(name, unit.ipu, 0)
                    self.lists[home].append(Send(name, unit.ipu, tag))
                    self.lists[unit.ipu].append(Receive(name, home, tag))

    def home_of(self, name: str, memory: Memory) -> int | None:
        """The IPU that holds a variable; None for a variable on every machine, and for names that are no variables."""
        variable = memory.variables.get(name)
        if variable is None:
            return None
        position = memory.arenas[variable.arena].position if variable.arena else variable.position
        return None if position is None else position * IPUS_PER_MACHINE

    def _everywhere(self, instruction: Instruction) -> None:
        for work in self.lists:
            work.append(instruction)

    def _order(self) -> Iterable[tuple[ChainUnit, int]]:
        total = self.builder.program.accumulation_factor
        if not self.pipelined:
            return [(unit, micro_batch) for micro_batch in range(total) for unit in self.chain]
        # Within a cycle older micro-batches go first: somebody upstream may wait for their gradients. But where each
        # changes the weights, PopART's order counts: forward work before backward work.
        sign = 1 if self.updates_early else -1
        turns = [
            (unit.cycle + self.period * micro_batch, sign * unit.cycle, place, micro_batch)
            for place, unit in enumerate(self.chain)
            for micro_batch in range(total)
        ]
        return [(self.chain[place], micro_batch) for _, _, place, micro_batch in sorted(turns)]

    def _emit(self, unit: ChainUnit, micro_batch: int) -> None:
        work = self.lists[unit.ipu]
        for name in unit.reads:
            work += self._arrival(name, unit, micro_batch)
        work.append(Compute(unit.piece.name))
        gathers = [AllGather(arena) for arena in map(gathered_arena, unit.piece.outputs) if arena is not None]
        if gathers:
            self._collective(unit.ipu, gathers, gathers[-1].arena)
        for name in unit.piece.outputs:
            if name.startswith(ANCHOR):
                work += self._store(name.removeprefix(ANCHOR), micro_batch)
            else:
                work += self._departure(name, unit, micro_batch)
        if self.updates_early:
            self._update_now(unit, micro_batch)

    def _update_now(self, unit: ChainUnit, micro_batch: int) -> None:
        """Update the weights whose gradients a unit has just made, and hand over those that are anchored."""
        for index, group in enumerate(self.builder.memory.groups):
            if gradient_buffer(group.weights[0].name) in unit.piece.outputs:
                self._collective(unit.ipu, update_instructions(index, group), group.weight_arena)
                self.lists[unit.ipu] += hand_over_updated(self.builder, index, micro_batch)

    def _collective(self, ipu: int, instructions: Iterable[Instruction], arena: str) -> None:
        """Add instructions of a collective between machines. ``arena``: an arena that exists when they are done.

        Where a replica spans machines, messages of others decide which of a machine's lists goes on first. But all
        machines must run their collectives in one order. A message from the list with the previous collective, sent
        right after it, keeps that order.
        """
        position = self.builder.layout.position_of(ipu)
        if position is not None:
            before, place, left = self.last_collective.get(position, (ipu, 0, ""))
            if before != ipu:
                tag = len(self.tags)
                self.tags[f"order:{tag}", ipu, 0] = tag
                self.lists[before].insert(place, Send(WHOLE + left, ipu, tag))
                self.lists[ipu].append(Receive("order", before, tag))
        self.lists[ipu] += instructions
        if position is not None:
            self.last_collective[position] = (ipu, len(self.lists[ipu]), arena)

    def _arrival(self, name: str, unit: ChainUnit, micro_batch: int) -> list[Instruction]:
        """Instructions that bring a temporary to the unit that reads it."""
        maker = self.maker.get(name)
        made_here = maker is not None and maker.ipu == unit.ipu
        if made_here or self.readers[name, unit.ipu][0] is not unit:
            return [Copy(self._slot(name, unit.ipu, micro_batch), name)] if self.pipelined else []
        instructions: list[Instruction] = []
        if maker is None:
            instructions.append(LoadStream(name.removeprefix(INPUT), name, micro_batch, 1))
        else:
            instructions.append(Receive(name, maker.ipu, self._tag(name, unit.ipu, micro_batch)))
        if self.pipelined and len(self.readers[name, unit.ipu]) > 1:
            instructions.append(Copy(name, self._slot(name, unit.ipu, micro_batch)))
        return instructions

    def _departure(self, name: str, unit: ChainUnit, micro_batch: int) -> list[Instruction]:
        """Instructions that follow the making of a temporary."""
        ipus = self.reading_ipus.get(name, [])
        instructions: list[Instruction] = [
            Send(name, ipu, self._tag(name, ipu, micro_batch)) for ipu in sorted(ipus) if ipu != unit.ipu
        ]
        if self.pipelined and unit.ipu in ipus:
            instructions.append(Copy(name, self._slot(name, unit.ipu, micro_batch)))
        return instructions

    def _slot(self, name: str, ipu: int, micro_batch: int) -> str:
        """The place of a stashed temporary in its ring."""
        ring = self.slots.get((name, ipu))
        if ring is None:
            readers, maker = self.readers[name, ipu], self.maker.get(name)
            begin = maker.cycle if maker is not None and maker.ipu == ipu else readers[0].cycle
            places = (readers[-1].cycle - begin) // self.period + 1
            ring = self.slots[name, ipu] = tuple(f"{name}#{place}" for place in range(places))
        return ring[micro_batch % len(ring)]

    def _tag(self, name: str, ipu: int, micro_batch: int) -> int:
        return self.tags.setdefault((name, ipu, micro_batch), len(self.tags))

    def _store(self, anchor: str, micro_batch: int) -> list[Instruction]:
        last = micro_batch == self.builder.program.accumulation_factor - 1
        if self.retrievals[anchor] is Retrieval.FINAL and not last:
            return []
        return [StoreStream(anchor, anchor_buffer(anchor), micro_batch, 1)]
