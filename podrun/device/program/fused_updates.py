"""Updates that are carried out as gradients are added up, in one pass over memory.

After a ReduceScatter a machine updates its slice of the weights with a piece. The sum is written to memory, XLA reads
it again, writes the result to memory of its own, and from there it is copied. Where the piece is plain arithmetic of
float32, element by element, the C module does all of it block by block (`podrun.device.xla.update_steps`).

Bits are the piece's: when a program is loaded, both compute the same random and special numbers, and the piece stays
where a bit differs. So machines with and without the C module, and those whose gradients travel over TCP, agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from podrun.core.executable import (
    AllGather,
    AllReduce,
    Array,
    Computation,
    Compute,
    Copy,
    Instruction,
    ReduceScatter,
    Reduction,
    Send,
    StoreStream,
)
from podrun.core.names import SLICE
from podrun.device.program.buffers import Buffers
from podrun.device.program.xla_memory import aligned_zeros, in_shape
from podrun.device.xla.clients import machine_settings
from podrun.device.xla.pieces import Piece
from podrun.device.xla.update_steps import UpdateSteps, has_updates, run_update, update_steps

LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 14, 1 << 24
"""Sizes of slices that are updated so. Of smaller ones calls cost most; comparing bits is a pass of the piece over as
much memory."""
_COMPARED = 1 << 14
"""Elements in which bits are compared."""
_SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.2e-38, 3e38, -3e38)


@dataclass(slots=True)
class FusedUpdate:
    """A ReduceScatter and the update of this machine's slice that follows it. ``done``: the update was carried out with
    the reduction, and its own instruction has nothing left to do."""

    arena: str
    reduction: Reduction
    computation: str
    buffers: Buffers
    run: Callable[[], None]
    done: bool = False

    def reduce(self) -> None:
        """The reduction, with the update unless replicas have copies of their own."""
        self.done = not self.buffers.own_copies
        if self.done:
            self.buffers.settle([self.arena])
            self.run()
        else:
            self.buffers.reduce_scatter(self.arena, self.reduction, settle=False)

    def take_done(self) -> bool:
        """Whether the update was carried out; the next one was not."""
        done, self.done = self.done, False
        return done


def make_fused_updates(
    instructions: Sequence[Instruction], pieces: Mapping[str, Piece], buffers: Buffers, unsettled: set[int]
) -> dict[int, FusedUpdate]:
    """Reductions of the only instruction list that the update behind them may join, by their place. ``unsettled``: the
    places of those after which no machine waits for slower readers."""
    updates = {}
    for place, (now, after) in enumerate(itertools.pairwise(instructions)):
        match now, after:
            case ReduceScatter(arena, Reduction.SUM | Reduction.MEAN as reduction), Compute(name):
                around = [*instructions[place + 2 :], *instructions[:place]]
                if place not in unsettled or _is_read(arena, around, pieces, buffers):
                    continue
                run = _prepared(pieces[name], arena, reduction, buffers)
                if run is not None:
                    updates[place] = FusedUpdate(arena, reduction, name, buffers, run)
    return updates


def _is_read(
    arena: str, around: Sequence[Instruction], pieces: Mapping[str, Piece], buffers: Buffers
) -> bool:
    """Whether an instruction reads a reduced arena before a piece writes all of it. ``around``: in order."""

    def inside(names: Sequence[str]) -> bool:
        return any(buffers.arena_behind(name) == arena for name in names)

    for instruction in around:
        match instruction:
            case Compute(name):
                computation = pieces[name].computation
                if inside(computation.inputs):
                    return True
                if buffers.covers(computation, buffers.arenas[arena].arena):
                    return False
            case Send(buffer) | Copy(buffer):
                if inside([buffer]):
                    return True
            case StoreStream(_, buffer):
                if inside([buffer]):
                    return True
            case AllGather(other) | AllReduce(other) | ReduceScatter(other):
                if other == arena:
                    return True
    return True


def _prepared(piece: Piece, arena: str, reduction: Reduction, buffers: Buffers) -> Callable[[], None] | None:
    """The reduction with a piece's arithmetic; None where the piece itself has to run."""
    computation, gradient = piece.computation, SLICE + arena
    operands = _operands(computation, gradient, buffers)
    if operands is None or piece.in_place or piece.is_shared or not has_updates():
        return None
    at = computation.inputs.index(gradient)
    stores = [computation.inputs.index(name) for name in computation.outputs]
    with machine_settings():
        fitting = (s for s in update_steps(computation, at) if agrees(s, piece, at, stores))
        steps = next(fitting, None)
    if steps is None:
        return None

    def sum_of(rows: Sequence[Array]) -> Callable[[], object]:
        mean = reduction is Reduction.MEAN
        return partial(run_update, steps.prepared(rows, mean=mean, operands=operands, stores=stores))

    return buffers.scatter_by(arena, reduction, sum_of)


def _operands(computation: Computation, gradient: str, buffers: Buffers) -> dict[int, Array] | None:
    """The memory of a piece's operands, by position: slices that only updates write, and variables that are one number.
    None if it has others, or results elsewhere."""
    arena = gradient.removeprefix(SLICE)
    inputs, outputs = computation.inputs, computation.outputs
    alone = [name for name in inputs if buffers.arena_behind(name) == arena] == [gradient]
    if not alone or not set(outputs) <= set(inputs) - {gradient} or len({*outputs}) != len(outputs):
        return None
    memory = {}
    for position, name in enumerate(inputs):
        array, behind = buffers.memory_behind(name), buffers.arena_behind(name)
        if array is None or array.dtype != np.float32:
            return None
        stays = name.startswith(SLICE) and behind not in buffers.changing
        number = behind is None and not array.shape and name not in outputs
        if name != gradient:
            if not (number or (stays and behind is not None and not buffers.holds_gradients(behind))):
                return None
            memory[position] = array
    size = buffers.arenas[arena].own[buffers.arenas[arena].mine].size
    slices = [array for array in memory.values() if array.shape]
    fits = all(array.size == size for array in slices) and LEAST_ELEMENTS <= size <= MOST_ELEMENTS
    return memory if fits and buffers.holds_gradients(arena) else None


def agrees(steps: UpdateSteps, piece: Piece, gradient: int, stores: Sequence[int]) -> bool:
    """Whether steps give a piece's bits, for two sets of random and special numbers. A NaN may be any NaN."""
    return all(_agrees(steps, piece, gradient, stores, seed) for seed in range(2))


def _agrees(steps: UpdateSteps, piece: Piece, gradient: int, stores: Sequence[int], seed: int) -> bool:
    generator = np.random.default_rng(seed)
    operands = {}
    for position, shape in enumerate(piece.shapes):
        array = operands[position] = aligned_zeros((piece.kinds[position][0],), np.dtype(np.float32))
        if shape:
            array[:_COMPARED] = _numbers(generator, min(array.size, _COMPARED))
        else:
            array[:] = generator.normal()
    expected = [
        np.array(result).reshape(-1)
        for result in piece.call(*[in_shape(operands[at], shape) for at, shape in enumerate(piece.shapes)])
    ]
    run_update(steps.prepared([operands[gradient]], mean=False, operands=operands, stores=stores))
    return all(_same(operands[at], result) for at, result in zip(stores, expected, strict=True))


def _numbers(generator: np.random.Generator, count: int) -> Array:
    """Numbers of one magnitude, of all magnitudes, and special ones, mixed."""
    normal = generator.normal(size=count).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        wide = np.ldexp(normal, generator.integers(-149, 128, count))
    special = generator.choice(np.array(_SPECIAL, np.float32), count)
    which = generator.integers(0, 4, count)
    return np.where(which < 2, normal, np.where(which == 2, wide, special))


def _same(ours: Array, theirs: Array) -> bool:
    bits = ours.view(np.uint32) == theirs.view(np.uint32)
    return bool(np.all(bits | (np.isnan(ours) & np.isnan(theirs))))
