"""The fused tail: the last reduction and update of a batch, done by one machine for all machines of its host.

Between machines that share memory, small gradients are reduced and weights updated in some tens of microseconds. Waking
a machine takes longer. So only the last machine waits: the others announce that their gradients are complete and are
done with the batch. The last machine reduces all gradients and updates every machine's slice of the weights, with the
piece that each machine would run and with the same bits.

It applies to programs whose batch ends with reductions, updates of slices and gathers alone (`fused_tail_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from podrun.collectives import Group
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core.executable import (
    AllGather,
    Array,
    Computation,
    Compute,
    Instruction,
    ReduceScatter,
    Reduction,
)
from podrun.core.names import SLICE
from podrun.core.quick_dataclass import dataclass
from podrun.device.program.buffers import Buffers
from podrun.device.program.machine_groups import CoreLock
from podrun.device.xla.pieces import Piece

MOST_MACHINES = 8
"""Machines up to which the last one updates all slices. With more, one core would work while the others are idle: a
slice takes one call of XLA, about 15 us."""


@dataclass(frozen=True, slots=True)
class FusedTail:
    """``first``: where the tail begins in the instruction list. ``reductions``: by arena. ``updates``: the Computations
    that update slices after them."""

    first: int
    reductions: Mapping[str, Reduction]
    updates: tuple[str, ...]


def fused_tail_of(instructions: Sequence[Instruction]) -> FusedTail | None:
    """The tail of a list that ends with ReduceScatters, each followed by its update and AllGathers; else None.

    At least one AllGather: there the other machines wait until the last one has read their gradients, before the next
    batch writes over them.
    """
    first = len(instructions)
    while first and isinstance(instructions[first - 1], ReduceScatter | Compute | AllGather):
        first -= 1
    while first < len(instructions) and not isinstance(instructions[first], ReduceScatter):
        first += 1
    reductions: dict[str, Reduction] = {}
    updates: list[str] = []
    for instruction in instructions[first:]:
        match instruction:
            case ReduceScatter(arena, reduction) if (
                len(updates) == len(reductions) and arena not in reductions
            ):
                reductions[arena] = reduction
            case Compute(name) if len(updates) == len(reductions) - 1:
                updates.append(name)
            case AllGather() if len(updates) == len(reductions):
                pass
            case _:
                return None
    if not reductions or len(updates) < len(reductions) or Reduction.LOCAL in reductions.values():
        return None
    if not any(isinstance(instruction, AllGather) for instruction in instructions[first:]):
        return None
    return FusedTail(first, reductions, tuple(updates))


def make_fused_tail(
    instructions: Sequence[Sequence[Instruction]],
    pieces: Mapping[str, Piece],
    buffers: Buffers,
    group: Group,
    core_lock: CoreLock,
) -> tuple[int, Callable[[], bool], Callable[[], None]] | None:
    """Where the fused tail begins in the only instruction list, and its two halves: one that reduces, and says whether
    this machine has to update, and one that updates the slices of all machines.

    None if each machine has to run its own tail: the machines do not all share memory, or there are more than
    `MOST_MACHINES`, or an update reads or writes more than slices, or the arenas are too large for one machine.
    """
    tail = fused_tail_of(instructions[0]) if len(instructions) == 1 else None
    if tail is None or not isinstance(group, SharedMemoryGroup) or group.size > MOST_MACHINES:
        return None
    if not buffers.is_reduced_by_one(tail.reductions):
        return None
    if not all(
        _uses_slices_only(pieces[name].computation, tail.reductions, buffers) for name in tail.updates
    ):
        return None
    reduce = group.at_last(tail.reductions)
    reduced: dict[str, Array] = {}
    updates: list[Callable[[], None]] = []

    def meet() -> bool:
        buffers.settle(tail.reductions)
        results = reduce()
        if results is not None and not reduced:
            reduced.update(zip(tail.reductions, results, strict=True))
        return results is not None

    def finish() -> None:
        with core_lock:
            if not updates:
                updates.extend(_update(pieces[name], reduced, buffers, group.size) for name in tail.updates)
            for update in updates:
                update()

    return tail.first, meet, finish


def _uses_slices_only(
    computation: Computation, reductions: Mapping[str, Reduction], buffers: Buffers
) -> bool:
    """Whether a Computation writes only slices, and reads only slices and values that all machines have alike."""

    def shared(name: str) -> bool:
        return name.startswith(SLICE) and buffers.is_one_copy(name[len(SLICE) :])

    def readable(name: str) -> bool:
        reduced = name.startswith(SLICE) and name[len(SLICE) :] in reductions
        return reduced or shared(name) or buffers.is_same_everywhere(name)

    return all(map(shared, computation.outputs)) and all(map(readable, computation.inputs))


def _update(
    piece: Piece, reduced: Mapping[str, Array], buffers: Buffers, machines: int
) -> Callable[[], None]:
    """Run a piece for all machines, one after the other. Operands and results are looked up beforehand."""
    inputs, outputs = piece.computation.inputs, piece.computation.outputs
    calls = [
        (
            [buffers.operand_at(n, machine, reduced, s) for n, s in zip(inputs, piece.shapes, strict=True)],
            [buffers.slice_at(name[len(SLICE) :], machine) for name in outputs],
        )
        for machine in range(machines)
    ]

    def run() -> None:
        for operands, targets in calls:
            for target, result in zip(targets, piece.call(*operands), strict=True):
                np.copyto(target, np.asarray(result).reshape(-1))

    return run
