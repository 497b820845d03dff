"""What follows from the order of a program's instructions: where machines need not wait, and where batches begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podrun.core.executable import (
    AllGather,
    AllReduce,
    Compute,
    Instruction,
    ReduceScatter,
    Sync,
    SyncScope,
)


def unsettled_reductions(
    instructions: Sequence[Sequence[Instruction]], writes: Mapping[str, frozenset[str]]
) -> frozenset[tuple[int, int]]:
    """Places ``(list, index)`` of ReduceScatters after which no machine needs to wait for slower readers.

    That holds if, from there on and around to the next batch, a barrier of all machines comes before anything writes
    the arena. ``writes``: arenas written by each Computation. In programs with several lists every reduction waits.
    """
    if len(instructions) != 1:
        return frozenset()
    lst = instructions[0]
    places = set()
    for index, instruction in enumerate(lst):
        if isinstance(instruction, ReduceScatter):
            for after in (*lst[index + 1 :], *lst[:index]):
                if isinstance(after, AllGather | AllReduce) or after == Sync(SyncScope.ALL):
                    places.add((0, index))
                    break
                if isinstance(after, Compute) and instruction.arena in writes[after.computation]:
                    break
    return frozenset(places)


def trailing_gathers(instructions: Sequence[Sequence[Instruction]]) -> frozenset[tuple[int, int]]:
    """Places ``(list, index)`` of AllGathers that only other AllGathers follow: the host or the next batch reads their
    arenas next. Empty for programs with several lists.
    """
    if len(instructions) != 1:
        return frozenset()
    places: set[tuple[int, int]] = set()
    for index in reversed(range(len(instructions[0]))):
        if not isinstance(instructions[0][index], AllGather):
            break
        places.add((0, index))
    return frozenset(places)


def batch_starts(instructions: Sequence[Instruction], batches: int) -> tuple[int, ...]:
    """Where each batch begins in a list that runs ``batches`` batches in a pipeline.

    A batch begins with the first Computation that the list runs once for every batch; the first batch begins with the
    list. Where a list computes nothing for each batch, they all begin with it.
    """
    if batches == 1:
        return (0,)
    places: dict[str, list[int]] = {}
    for place, instruction in enumerate(instructions):
        if isinstance(instruction, Compute):
            places.setdefault(instruction.computation, []).append(place)
    first_full = next((starts for starts in places.values() if len(starts) == batches), [0] * batches)
    return (0, *first_full[1:])
