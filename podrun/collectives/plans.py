"""How the ranks of one host go about an all-reduce: two ways, chosen by size, each one made ready once.

A small all-reduce takes as long as its Python and its meetings, so all that can be found out beforehand is: a
plan is a function without arguments, one call of the C module where there is one. The ways:

- `posted`, for few bytes: everyone copies its values out, meets, and reduces all of them by itself. One meeting.
- `in_slices`, for the rest: every rank reduces its slice for all. Two meetings.

Both take values in rank order, so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podrun.collectives.arithmetic import prepared, prepared_in_place
from podrun.collectives.board import Board
from podrun.collectives.group import Array, ByteArray, slice_of
from podrun.collectives.native import sums_natively
from podrun.executable import Reduction

POSTED_BYTES = 16 * 1024
"""Room for what a rank posts: the largest vector that goes by `posted`."""
ADDED_BYTES = 32 * 1024
"""Most bytes that each rank adds up by itself in `posted`: with more, a second meeting costs less."""

Run = Callable[[], Array]


@dataclass(frozen=True, slots=True)
class Job:
    """One all-reduce as this rank sees it: what to call it, all ranks' rows, its own, and the one all read."""

    begin: bytes
    end: bytes
    rows: Sequence[Array]
    mine: Array
    whole: Array
    reduction: Reduction
    in_place: bool
    timeout: float


Posts = tuple[Sequence[ByteArray], Sequence[ByteArray]]
"""Rows of `POSTED_BYTES`, one for each rank, that all plans of a group post in: two sets, used in turn.

Meetings of an even count use one set, the others the other. Whoever posts again in a set has since been to a meeting
to which all came after they had read it.
"""


def ready(job: Job, board: Board, posts: Callable[[], Posts]) -> Run:
    """The plan for a job: the same way on all ranks."""
    nbytes = job.mine.nbytes
    if nbytes <= POSTED_BYTES and nbytes * board.ranks <= ADDED_BYTES:
        return posted(job, board, posts())
    return in_slices(job, board)


def posted(job: Job, board: Board, posts: Posts) -> Run:
    """See the module docstring."""
    nbytes, dtype, meetings = job.mine.nbytes, job.mine.dtype, board.meetings
    result = job.mine if job.in_place else np.empty_like(job.mine)
    if (native := meetings.native) is not None:
        meeting, own = meetings.native_meeting(job.begin), tuple(rows[board.rank][:nbytes] for rows in posts)
        views = [[row[:nbytes].view(dtype) for row in rows] for rows in posts]
        sums = tuple(_sum(rows, [result], job.reduction) for rows in views)
        natively: Run = native.posted(meeting, job.timeout, result, job.mine, own, sums)
        return natively
    source = job.mine.view(np.uint8).data  # copies by memoryview cost a fraction of NumPy's call
    targets = [rows[board.rank][:nbytes].data for rows in posts]
    reduces = [prepared(result, [row[:nbytes].view(dtype) for row in rows], job.reduction) for rows in posts]
    turns = [
        (targets[phase & 1], *turn[:4], reduces[phase & 1])
        for phase, turn in enumerate(meetings.turns(job.begin))
    ]
    shared, begin, timeout = meetings.map, job.begin, job.timeout

    def run() -> Array:  # `Meetings.meet`, without a call
        count = meetings.count = meetings.count + 1
        target, own, word, window, everyone, reduce = turns[count & 3]
        target[:] = source
        own[0] = word
        if shared[window] != everyone:
            meetings.wait(begin, timeout)
        reduce()
        return result

    return run


def in_slices(job: Job, board: Board) -> Run:
    """See the module docstring."""
    own = slice_of(board.rank, board.ranks, job.whole.size)
    parts = [row[own] for row in job.rows]
    outs = parts if job.in_place else [job.whole[own]]
    result = job.mine if job.in_place else job.whole
    meetings = board.meetings
    if (native := meetings.native) is not None:
        begin, end = meetings.native_meeting(job.begin), meetings.native_meeting(job.end)
        natively: Run = native.sliced(begin, end, job.timeout, result, _sum(parts, outs, job.reduction))
        return natively
    reduce = _prepared(parts, outs, job.reduction)

    def run() -> Array:
        board.meet(job.begin, job.timeout)
        reduce()
        board.meet(job.end, job.timeout)
        return result

    return run


def scattered(
    board: Board,
    begin: bytes,
    end: bytes | None,
    timeout: float,
    out: Array,
    parts: Sequence[Array],
    reduction: Reduction,
) -> Run | None:
    """A rank's part of a reduce-scatter, with no second meeting where ``end`` is None; None: there is no C module."""
    meetings = board.meetings
    if meetings.native is None:
        return None
    last = None if end is None else meetings.native_meeting(end)
    total = _sum(parts, [out], reduction)
    natively: Run = meetings.native.sliced(meetings.native_meeting(begin), last, timeout, out, total)
    return natively


def _prepared(parts: Sequence[Array], outs: Sequence[Array], reduction: Reduction) -> Callable[[], None]:
    """A reduction into one array, or of all arrays in place."""
    return prepared(outs[0], parts, reduction) if len(outs) == 1 else prepared_in_place(outs, reduction)


def _sum(parts: Sequence[Array], outs: Sequence[Array], reduction: Reduction) -> Any:
    """A reduction as the C module wants it: what it is to sum, or a function that does it."""
    if sums_natively(outs[0].dtype, reduction):
        return list(parts), list(outs), reduction is Reduction.MEAN
    return _prepared(parts, outs, reduction)
