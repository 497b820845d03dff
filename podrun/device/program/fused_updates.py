"""Updates of weights that are computed in the same pass over memory as the sum of gradients.

After a ReduceScatter a machine updates its slice of the weights with a piece. The sum is written to memory, XLA reads
it again, writes the result to memory of its own, and from there it is copied. Where the piece is plain arithmetic of
float32, element by element, the C module does all of it block by block (`podrun.device.xla.update_steps`).

Bits are the piece's: when a program is loaded, both compute the same random and special numbers, and the piece stays
where a bit differs. So machines with and without the C module, and those whose gradients travel over TCP, agree.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from podrun.core.aligned_memory import aligned_zeros
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
from podrun.core.quick_dataclass import dataclass
from podrun.device.program.buffers import Buffers
from podrun.device.program.xla_memory import in_shape
from podrun.device.xla.clients import machine_settings
from podrun.device.xla.pieces import Piece
from podrun.device.xla.update_steps import UpdateSteps, has_updates, run_update, update_steps

LEAST_ELEMENTS = 1 << 14
"""Slices of fewer numbers are updated by pieces: calls cost most of their time."""
MOST_ARRAYS = 512
"""Arrays that `native/updates.c` has room for."""
_COMPARED = 1 << 14
"""Elements in which bits are compared: half of them at an operand's beginning, half at its end."""
_SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.2e-38, 3e38, -3e38)
_reading = threading.Lock()
"""Held while a piece is read and compared, so that one of the machines of a process does it for all."""


@dataclass(frozen=True, slots=True)
class FusedUpdate:
    """A ReduceScatter and the update of this machine's slice that follows it. ``meet``: waits until the gradients of
    all machines are complete, in place of the reduction. ``finish``: adds them up and updates the slice, in place of
    the ``computation``. What strikes between the two finds the memory that it would find without the C module.
    """

    arena: str
    computation: str
    buffers: Buffers
    meet: Callable[[], None]
    finish: Callable[[], None]

    def reduce(self) -> None:
        """What the reduction has to do before the update."""
        self.buffers.settle([self.arena])
        self.meet()


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
                halves = _prepared(pieces[name], arena, reduction, buffers)
                if halves is not None:
                    updates[place] = FusedUpdate(arena, name, buffers, *halves)
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


def _prepared(
    piece: Piece, arena: str, reduction: Reduction, buffers: Buffers
) -> tuple[Callable[[], None], Callable[[], None]] | None:
    """Two functions: the first meets the other machines, the second sums a slice and updates its weights by ``piece``.

    None where the piece has to run by itself, after the reduction.
    """
    computation, gradient = piece.computation, SLICE + arena
    operands = _operands(computation, gradient, buffers)
    if operands is None or piece.in_place or piece.is_shared or not has_updates():
        return None
    at = computation.inputs.index(gradient)
    stores = tuple(computation.inputs.index(name) for name in computation.outputs)
    steps = fitting_steps(piece, at, stores)
    if steps is None or buffers.group_size + steps.arrays > MOST_ARRAYS:
        return None

    def sum_of(rows: Sequence[Array]) -> Callable[[], object]:
        mean = reduction is Reduction.MEAN
        return partial(run_update, steps.prepared(rows, mean=mean, operands=operands, stores=stores))

    return buffers.scatter_by(arena, reduction, sum_of)


def fitting_steps(piece: Piece, gradient: int, stores: tuple[int, ...]) -> UpdateSteps | None:
    """The steps that give a piece's bits; None if there are none. They are kept with the piece's code, for all
    machines of this process and for programs that are loaded later."""
    key = gradient, stores
    with _reading:
        if key not in piece.fitting_steps:
            with machine_settings():
                readings = update_steps(piece.computation, gradient)
                piece.fitting_steps[key] = next(
                    (steps for steps in readings if agrees(steps, piece, gradient, stores)), None
                )
        return piece.fitting_steps[key]


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
        stays = stays and not (behind and buffers.own_copies.may_hold(behind))
        number = behind is None and not array.shape and name not in outputs
        if name != gradient:
            if not (number or (stays and behind is not None and not buffers.holds_gradients(behind))):
                return None
            memory[position] = array
    size = buffers.arenas[arena].own[buffers.arenas[arena].mine].size
    slices = [array for array in memory.values() if array.shape]
    fits = all(array.size == size for array in slices) and size >= LEAST_ELEMENTS
    return memory if fits and buffers.holds_gradients(arena) else None


def agrees(steps: UpdateSteps, piece: Piece, gradient: int, stores: Sequence[int]) -> bool:
    """Whether steps give a piece's bits, for random and special numbers. A NaN may be any NaN; so where numbers of the
    usual magnitudes give hardly anything else than NaN, infinities and zeros, nothing was compared, and it is False.
    """
    generator = np.random.default_rng(0)
    at_numbers = [at for at, shape in enumerate(piece.shapes) if not shape]
    memory = [aligned_zeros((elements,), np.dtype(np.float32)) for elements, _ in piece.kinds]
    size = piece.kinds[gradient][0]
    count = min(size, _COMPARED)
    where = np.r_[: count // 2, size - (count - count // 2) : size]
    signed = {at: _numbers(generator, count) for at in range(len(piece.shapes)) if at not in at_numbers}
    positive = {at: np.abs(array) for at, array in signed.items()}
    for turn, scalars in enumerate(_scalar_sets(generator, len(at_numbers))):
        slices = signed if turn % 2 else positive
        operands = {at: array.copy() for at, array in slices.items()}
        operands |= {at: np.array(number) for at, number in zip(at_numbers, scalars, strict=True)}
        for at, array in operands.items():
            memory[at][where if array.shape else ...] = array
        results = piece.call(*[in_shape(memory[at], shape) for at, shape in enumerate(piece.shapes)])
        expected = [np.asarray(result).reshape(-1)[where] for result in results]
        run_update(steps.prepared([operands[gradient]], mean=False, operands=operands, stores=stores))
        if not all(_same(operands[at], result) for at, result in zip(stores, expected, strict=True)):
            return False
        if turn < _USUAL and slices is positive and not all(map(_tells, expected)):
            return False
    return True


_USUAL = 16
"""Sets of scalars between 0 and 1, as rates, decays and what is left of them."""


def _scalar_sets(generator: np.random.Generator, count: int) -> list[Array]:
    """Values of a piece's scalars: the usual ones first, then of all magnitudes, negative ones, 0 and 1."""
    usual = generator.uniform(0.001, 0.999, (_USUAL, count))
    wide = 10 ** generator.uniform(-8, 4, (8, count))
    signed = generator.normal(size=(4, count))
    special = generator.choice([0.0, 1.0], (4, count))
    return list(np.concatenate([usual, wide, signed, special]).astype(np.float32))


def _tells(result: Array) -> bool:
    """Whether comparing a result's bits is meaningful: at least half of its values are finite and not zero."""
    return bool(2 * np.count_nonzero(np.isfinite(result) & (result != 0)) >= result.size)


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
