"""The end of a batch, done by one machine for all of its host.

Between machines that share memory, small gradients are reduced and weights updated in some tens of microseconds, less
than it takes to wake a machine once. So only the last machine waits: the others say that their gradients are there and
have nothing left to do, and the last one adds up all gradients and updates every machine's slice of the weights, by the
same piece and with the same bits as each would by itself.

That is for programs whose batch ends with nothing but reductions, updates of slices, and gathers (`closing_of` tells).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podrun.collectives import Group
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.device.program.arenas import SLICE
from podrun.device.program.buffers import Buffers
from podrun.device.program.cores import Turn
from podrun.device.program.operands import Array
from podrun.device.xla.pieces import Piece
from podrun.executable import AllGather, Computation, Compute, Instruction, ReduceScatter, Reduction

MOST_MACHINES = 8
"""Machines up to which the last one updates all slices: with more, one core would be at it while others have nothing to
do. A slice takes a call of XLA's, about 15 us."""


@dataclass(frozen=True, slots=True)
class Closing:
    """Where it begins in the list of instructions; what is reduced, and the Computations that update slices then."""

    first: int
    reductions: Mapping[str, Reduction]
    updates: tuple[str, ...]


def closing_of(instructions: Sequence[Instruction]) -> Closing | None:
    """The end of a list, if it is ReduceScatters, each with its update and AllGathers, and nothing else."""
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
    return Closing(first, reductions, tuple(updates))


def closing_here(
    instructions: Sequence[Sequence[Instruction]],
    pieces: Mapping[str, Piece],
    buffers: Buffers,
    group: Group,
    turn: Turn,
) -> tuple[int, Callable[[], None]] | None:
    """Where the end of a batch begins in the only list there is, and what does all of it for this host's machines.

    None if each machine has to do its own: they do not all share memory, or an update is not of slices alone, or all
    together is too much for one.
    """
    found = closing_of(instructions[0]) if len(instructions) == 1 else None
    if found is None or not isinstance(group, SharedMemoryGroup) or group.size > MOST_MACHINES:
        return None
    if not buffers.is_reduced_by_one(found.reductions):
        return None
    if not all(_of_slices(pieces[name].computation, found.reductions, buffers) for name in found.updates):
        return None
    reduce = group.at_last(found.reductions)
    updates: list[Callable[[], None]] = []

    def close() -> None:
        buffers.settle(found.reductions)
        results = reduce()
        if results is None:
            return
        with turn:
            if not updates:
                reduced = dict(zip(found.reductions, results, strict=True))
                updates.extend(_update(pieces[name], reduced, buffers, group.size) for name in found.updates)
            for update in updates:
                update()

    return found.first, close


def _of_slices(computation: Computation, reductions: Mapping[str, Reduction], buffers: Buffers) -> bool:
    """Whether a Computation does nothing but read and write slices, and read what is the same on all machines."""

    def shared(name: str) -> bool:
        return name.startswith(SLICE) and buffers.is_one_copy(name[len(SLICE) :])

    def readable(name: str) -> bool:
        reduced = name.startswith(SLICE) and name[len(SLICE) :] in reductions
        return reduced or shared(name) or buffers.is_same_everywhere(name)

    return all(map(shared, computation.outputs)) and all(map(readable, computation.inputs))


def _update(
    piece: Piece, reduced: Mapping[str, Array], buffers: Buffers, machines: int
) -> Callable[[], None]:
    """A piece for all machines, one after the other, with everything that stays the same looked up."""
    inputs, outputs = piece.computation.inputs, piece.computation.outputs
    each = [
        (
            [buffers.operand_at(n, machine, reduced, s) for n, s in zip(inputs, piece.shapes, strict=True)],
            [buffers.slice_at(name[len(SLICE) :], machine) for name in outputs],
        )
        for machine in range(machines)
    ]

    def run() -> None:
        for operands, targets in each:
            for target, result in zip(targets, piece.call(*operands), strict=True):
                np.copyto(target, np.asarray(result).reshape(-1))

    return run
