"""How the ranks of one host carry out an all-reduce: three ways, chosen by size, each prepared once.

The time of a small all-reduce is its Python code and its barriers, so everything that can be computed beforehand is: a
plan is a function without arguments, one call of the C module where there is one. The ways:

- `posting_plan`, for few bytes: every rank copies its values out, waits, and reduces all of them itself. One barrier.
- `slice_plan`, for many bytes: every rank reduces its slice for all. Two barriers.
- `handover_plan`, between few ranks, for some sizes: as `slice_plan`, but each rank first copies the other ranks'
  slices of its values to where those ranks read them.

All take values in rank order, so all give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from podrun.collectives.arithmetic import in_c, kernel, prepared, prepared_in_place
from podrun.collectives.board import GroupBoard
from podrun.collectives.group import ByteArray, as_bytes
from podrun.core.executable import Array, Reduction
from podrun.core.layout import slice_of
from podrun.core.quick_dataclass import dataclass

POSTED_BYTES = 16 * 1024
"""Bytes of a rank's posting row: the largest vector for `posting_plan`."""
ADDED_BYTES = 32 * 1024
"""Largest total in bytes of all ranks' vectors for `posting_plan`: above it a second barrier costs less."""
ADDED_BY_TWO = 8 * 1024
"""The same for two ranks, which have a core each."""
HANDED_BYTES = 176 * 1024
"""Largest vector in bytes for `handover_plan` between two ranks. More ranks, up to `HANDED_RANKS`, have as much in
total.
"""
HANDED_RANKS = 4
POST_SETS, HANDED_SETS = 2, 8
_HANDED_ROOM = 512 * 1024
"""Most bytes of the sets of rows of one `handover_plan`: a quarter of a usual L2 cache."""

Plan = Callable[[], Array]
"""Carries out one prepared collective and returns its result."""


@dataclass(frozen=True, slots=True)
class BarrierLabels:
    """The labels of the barriers before and after a reduction, and the seconds that each barrier may take.

    ``end`` is None where there is no second barrier.
    """

    begin: bytes
    end: bytes | None
    timeout: float


@dataclass(frozen=True, slots=True)
class AllReduceCall:
    """One all-reduce as this rank sees it: barriers, the rows of all ranks, its own row, and the row that all read."""

    labels: BarrierLabels
    rows: Sequence[Array]
    mine: Array
    whole: Array
    reduction: Reduction
    in_place: bool


Rows = Sequence[Sequence[ByteArray]]
"""Sets of rows that plans copy values to, one row for each rank; all plans of a group use the sets in turn."""

_Set = tuple[Sequence[tuple[Array, Array]], Sequence[Array], Sequence[Array]]
"""The copies (source, target) before the first barrier, and the operands and results of the reduction after it."""


def plan_for(
    call: AllReduceCall, board: GroupBoard, posts: Callable[[], Rows], handovers: Callable[[], Rows]
) -> Plan:
    """The plan for a call, of the same kind on all ranks.

    ``posts`` and ``handovers`` make the sets of rows, of `POSTED_BYTES` and of `HANDED_BYTES`.
    """
    nbytes = call.mine.nbytes
    if nbytes <= POSTED_BYTES and nbytes * board.ranks <= (ADDED_BY_TWO if board.ranks == 2 else ADDED_BYTES):
        return posting_plan(call, board, posts())
    if board.ranks <= HANDED_RANKS and nbytes * board.ranks <= 2 * HANDED_BYTES and not call.in_place:
        return handover_plan(call, board, handovers())
    return slice_plan(call, board)


def posting_plan(call: AllReduceCall, board: GroupBoard, posts: Rows) -> Plan:
    """An all-reduce for few bytes: every rank copies its values out, waits, and reduces all of them itself.

    Barriers with an even count use one set of rows, the others the other set: a rank that posts in a set again has
    passed a barrier that all ranks reached after reading the set.
    """
    result = call.mine if call.in_place else np.empty_like(call.mine)
    sets: list[_Set] = []
    for rows in posts:
        views = _as(rows, call.mine)
        sets.append(([(call.mine, views[board.rank])], views, [result]))
    return _make_plan(board, replace(call.labels, end=None), result, 0, sets, call.reduction)


def slice_plan(call: AllReduceCall, board: GroupBoard) -> Plan:
    """An all-reduce for many bytes: every rank reduces its slice for all."""
    own = slice_of(board.rank, board.ranks, call.whole.size)
    parts = [row[own] for row in call.rows]
    outs = parts if call.in_place else [call.whole[own]]
    result = call.mine if call.in_place else call.whole
    return _make_plan(board, call.labels, result, 0, [([], parts, outs)], call.reduction)


def handover_plan(call: AllReduceCall, board: GroupBoard, handovers: Rows) -> Plan:
    """As `slice_plan`, but each rank first copies the others' slices of its values to where they read them.

    It suits callers who rewrite their values before every reduction, such as gradients: a cache line that another core
    has read is slow to write again, and here no other core reads the caller's lines. Sets are used in turn because a
    line that was last copied long ago is copied faster.
    """
    few = 2
    while 2 * few * call.mine.nbytes <= _HANDED_ROOM and 2 * few <= len(handovers):
        few *= 2
    own = slice_of(board.rank, board.ranks, call.whole.size)
    others = [cut for cut in (slice(0, own.start), slice(own.stop, call.whole.size)) if cut.start < cut.stop]
    sets: list[_Set] = []
    for rows in handovers[:few]:
        views = _as(rows, call.mine)
        parts = [call.mine[own] if rank == board.rank else view[own] for rank, view in enumerate(views)]
        copies = [(call.mine[cut], views[board.rank][cut]) for cut in others]
        sets.append((copies, parts, [call.whole[own]]))
    return _make_plan(board, call.labels, call.whole, 1, sets, call.reduction)


def scatter_plan(
    board: GroupBoard, labels: BarrierLabels, out: Array, parts: Sequence[Array], reduction: Reduction
) -> Plan:
    """A rank's part of a reduce-scatter."""
    return _make_plan(board, labels, out, 0, [([], parts, [out])], reduction)


def _as(rows: Sequence[ByteArray], like: Array) -> list[Array]:
    """The beginnings of rows as arrays of the dtype and size of ``like``."""
    return [row[: like.nbytes].view(like.dtype) for row in rows]


def _make_plan(
    board: GroupBoard,
    labels: BarrierLabels,
    result: Array,
    shift: int,
    sets: Sequence[_Set],
    reduction: Reduction,
) -> Plan:
    """Copy out, wait, reduce, and wait again if there is an ``end``: one call of the C module where there is one.

    All ranks use the same set: its number is the barrier's count, shifted right, modulo the number of sets.
    """
    barriers, mask = board.barriers, len(sets) - 1
    begin, end, timeout = labels.begin, labels.end, labels.timeout
    if (native := barriers.native) is not None:
        reductions = tuple(
            (
                [(as_bytes(source), as_bytes(target)) for source, target in copies],
                _native_reduction(parts, outs, reduction),
            )
            for copies, parts, outs in sets
        )
        last = None if end is None else barriers.native_barrier(end)
        plan: Plan = native.plan(barriers.native_barrier(begin), last, timeout, result, shift, reductions)
        return plan
    steps = [  # copies by memoryview cost a fraction of NumPy's call
        (
            [(as_bytes(target).data, as_bytes(source).data) for source, target in copies],
            _prepared(parts, outs, reduction),
        )
        for copies, parts, outs in sets
    ]

    def step_by_step() -> Array:
        copies, reduce = steps[(barriers.count + 1) >> shift & mask]
        for target, source in copies:
            target[:] = source
        board.arrive_and_wait(begin, timeout)
        reduce()
        if end is not None:
            board.arrive_and_wait(end, timeout)
        return result

    return step_by_step


def _prepared(parts: Sequence[Array], outs: Sequence[Array], reduction: Reduction) -> Callable[[], None]:
    """A reduction into one array, or of all arrays in place."""
    return prepared(outs[0], parts, reduction) if len(outs) == 1 else prepared_in_place(outs, reduction)


def _native_reduction(parts: Sequence[Array], outs: Sequence[Array], reduction: Reduction) -> Any:
    """A reduction as the C module takes it: what it combines, or a Python function that does it."""
    names = kernel(outs[0].dtype, reduction)
    return in_c(names, parts, outs) if names is not None else _prepared(parts, outs, reduction)
