"""How the ranks of one host go about an all-reduce: three ways, chosen by size, each one made ready once.

A small all-reduce takes as long as its Python and its meetings, so all that can be found out beforehand is: a
plan is a function without arguments, one call of the C module where there is one. The ways:

- `posted`, for few bytes: everyone copies its values out, meets, and reduces all of them by itself. One meeting.
- `in_slices`, for the rest: every rank reduces its slice for all. Two meetings.
- `handed_over`, between few ranks, for some sizes: as `in_slices`, but each copies the others' slices out for them.

All take values in rank order, so all give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podrun.collectives.arithmetic import in_c, kernel, prepared, prepared_in_place
from podrun.collectives.board import Board
from podrun.collectives.group import Array, ByteArray, as_bytes, slice_of
from podrun.executable import Reduction

POSTED_BYTES = 16 * 1024
"""Room for what a rank posts: the largest vector that goes by `posted`."""
ADDED_BYTES = 32 * 1024
"""Most bytes that each rank adds up by itself in `posted`: with more, a second meeting costs less;"""
ADDED_BY_TWO = 8 * 1024
"""of two ranks, which have a core each, sooner."""
HANDED_BYTES = 176 * 1024
"""The largest vector that goes by `handed_over` between two ranks; between more, up to `HANDED_RANKS`, as much of all
of them together.
"""
HANDED_RANKS = 4
POST_SETS, HANDED_SETS = 2, 8
_HANDED_ROOM = 512 * 1024
"""What the sets of rows that one plan hands over by may take: a quarter of a usual L2."""

Run = Callable[[], Array]


@dataclass(frozen=True, slots=True)
class Around:
    """The meetings around a reduction by their labels, no second one where ``end`` is None, and the seconds that each
    may take.
    """

    begin: bytes
    end: bytes | None
    timeout: float


@dataclass(frozen=True, slots=True)
class Job:
    """One all-reduce as this rank sees it: its meetings, all ranks' rows, its own, and the one all read."""

    around: Around
    rows: Sequence[Array]
    mine: Array
    whole: Array
    reduction: Reduction
    in_place: bool


Rows = Sequence[Sequence[ByteArray]]
"""Sets of rows to copy values out to, one row for each rank, used in turn by all plans of a group."""

_Set = tuple[Sequence[tuple[Array, Array]], Sequence[Array], Sequence[Array]]
"""What is copied before the first meeting (from, to), and what is reduced after it into what."""


def ready(job: Job, board: Board, posts: Callable[[], Rows], handed: Callable[[], Rows]) -> Run:
    """The plan for a job: the same way on all ranks. ``posts`` and ``handed`` make the sets of rows, of
    `POSTED_BYTES` and of `HANDED_BYTES`.
    """
    nbytes = job.mine.nbytes
    if nbytes <= POSTED_BYTES and nbytes * board.ranks <= (ADDED_BY_TWO if board.ranks == 2 else ADDED_BYTES):
        return posted(job, board, posts())
    if board.ranks <= HANDED_RANKS and nbytes * board.ranks <= 2 * HANDED_BYTES and not job.in_place:
        return handed_over(job, board, handed())
    return in_slices(job, board)


def posted(job: Job, board: Board, posts: Rows) -> Run:
    """See the module docstring.

    Meetings of an even count use one set of rows, the others the other: whoever posts again in a set has since been
    to a meeting to which all came after they had read it.
    """
    result = job.mine if job.in_place else np.empty_like(job.mine)
    sets: list[_Set] = []
    for rows in posts:
        views = _as(rows, job.mine)
        sets.append(([(job.mine, views[board.rank])], views, [result]))
    return _run(board, replace(job.around, end=None), result, 0, sets, job.reduction)


def in_slices(job: Job, board: Board) -> Run:
    """See the module docstring."""
    own = slice_of(board.rank, board.ranks, job.whole.size)
    parts = [row[own] for row in job.rows]
    outs = parts if job.in_place else [job.whole[own]]
    result = job.mine if job.in_place else job.whole
    return _run(board, job.around, result, 0, [([], parts, outs)], job.reduction)


def handed_over(job: Job, board: Board, handed: Rows) -> Run:
    """See the module docstring. For callers who rewrite their values before every reduction, as gradients are: a line
    that another core has read is slow to write anew, and here none of the caller's is.

    Sets are used in turn because lines are handed over faster if it was long ago that they last were.
    """
    few = 2
    while 2 * few * job.mine.nbytes <= _HANDED_ROOM and 2 * few <= len(handed):
        few *= 2
    own = slice_of(board.rank, board.ranks, job.whole.size)
    others = [cut for cut in (slice(0, own.start), slice(own.stop, job.whole.size)) if cut.start < cut.stop]
    sets: list[_Set] = []
    for rows in handed[:few]:
        views = _as(rows, job.mine)
        parts = [job.mine[own] if rank == board.rank else view[own] for rank, view in enumerate(views)]
        copies = [(job.mine[cut], views[board.rank][cut]) for cut in others]
        sets.append((copies, parts, [job.whole[own]]))
    return _run(board, job.around, job.whole, 1, sets, job.reduction)


def scattered(board: Board, around: Around, out: Array, parts: Sequence[Array], reduction: Reduction) -> Run:
    """A rank's part of a reduce-scatter."""
    return _run(board, around, out, 0, [([], parts, [out])], reduction)


def _as(rows: Sequence[ByteArray], like: Array) -> list[Array]:
    """The beginnings of rows as arrays of another's dtype and size."""
    return [row[: like.nbytes].view(like.dtype) for row in rows]


def _run(
    board: Board, around: Around, result: Array, shift: int, sets: Sequence[_Set], reduction: Reduction
) -> Run:
    """Copy out, meet, reduce, meet again if there is an ``end``: one call of the C module where there is one.

    Which set: of the meeting's count, shifted right, modulo their number, on all ranks alike.
    """
    meetings, mask = board.meetings, len(sets) - 1
    begin, end, timeout = around.begin, around.end, around.timeout
    if (native := meetings.native) is not None:
        made = tuple(
            (
                [(as_bytes(source), as_bytes(target)) for source, target in copies],
                _natively(parts, outs, reduction),
            )
            for copies, parts, outs in sets
        )
        last = None if end is None else meetings.native_meeting(end)
        run: Run = native.run(meetings.native_meeting(begin), last, timeout, result, shift, made)
        return run
    steps = [  # copies by memoryview cost a fraction of NumPy's call
        (
            [(as_bytes(target).data, as_bytes(source).data) for source, target in copies],
            _prepared(parts, outs, reduction),
        )
        for copies, parts, outs in sets
    ]

    def step_by_step() -> Array:
        copies, reduce = steps[(meetings.count + 1) >> shift & mask]
        for target, source in copies:
            target[:] = source
        board.meet(begin, timeout)
        reduce()
        if end is not None:
            board.meet(end, timeout)
        return result

    return step_by_step


def _prepared(parts: Sequence[Array], outs: Sequence[Array], reduction: Reduction) -> Callable[[], None]:
    """A reduction into one array, or of all arrays in place."""
    return prepared(outs[0], parts, reduction) if len(outs) == 1 else prepared_in_place(outs, reduction)


def _natively(parts: Sequence[Array], outs: Sequence[Array], reduction: Reduction) -> Any:
    """A reduction as the C module wants it: what it is to combine, or a function that does it."""
    found = kernel(outs[0].dtype, reduction)
    return in_c(found, parts, outs) if found is not None else _prepared(parts, outs, reduction)
