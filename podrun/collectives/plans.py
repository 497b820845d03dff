"""How the ranks of one host go about an all-reduce: three ways, chosen by size, each one made ready once.

A small all-reduce takes as long as its Python and its meetings, so all that can be found out beforehand is: a
plan is a function without arguments. The ways:

- `posted`, for few bytes on a core of one's own: everyone copies its values out, meets, and reduces all of them
  by itself. One meeting.
- `by_the_last`, for few bytes when ranks share cores: one rank, the last to come, reduces for all. One meeting
  too, and the work is done once, not once a rank.
- `in_slices`, for the rest: every rank reduces its slice for all. Two meetings.

All take values in rank order, so all give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from podrun.collectives.arithmetic import prepared, prepared_in_place
from podrun.collectives.board import Board
from podrun.collectives.group import Array, ByteArray, slice_of
from podrun.executable import Reduction

POSTED_BYTES = 16 * 1024
"""Largest vector that goes by `posted`; meetings cost more than adding so much twice."""
LAST_BYTES = 64 * 1024
"""Largest vector, for each rank of a core, that goes by `by_the_last`: larger ones are worth all cores and a
second meeting, which costs the more the more ranks share a core."""

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
    if board.ranks <= board.cores:
        return posted(job, board, posts()) if nbytes <= POSTED_BYTES else in_slices(job, board)
    return (
        by_the_last(job, board)
        if nbytes <= LAST_BYTES * board.ranks // board.cores
        else in_slices(job, board)
    )


def posted(job: Job, board: Board, posts: Posts) -> Run:
    """See the module docstring."""
    nbytes, dtype, meetings = job.mine.nbytes, job.mine.dtype, board.meetings
    result = job.mine if job.in_place else np.empty_like(job.mine)
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


def by_the_last(job: Job, board: Board) -> Run:
    """See the module docstring. Nothing is posted: nobody goes on before all rows are read."""
    reduce = prepared(job.whole, job.rows, job.reduction)
    mine, whole, begin, timeout = job.mine, job.whole, job.begin, job.timeout
    meet_and_close = board.meet_and_close

    def run() -> Array:
        meet_and_close(begin, timeout, reduce)
        return whole

    def run_in_place() -> Array:
        meet_and_close(begin, timeout, reduce)
        mine[:] = whole
        return mine

    return run_in_place if job.in_place else run


def in_slices(job: Job, board: Board) -> Run:
    """See the module docstring."""
    own = slice_of(board.rank, board.ranks, job.whole.size)
    parts = [row[own] for row in job.rows]
    reduction = job.reduction
    reduce = (
        prepared_in_place(parts, reduction) if job.in_place else prepared(job.whole[own], parts, reduction)
    )
    result = job.mine if job.in_place else job.whole

    def run() -> Array:
        board.meet(job.begin, job.timeout)
        reduce()
        board.meet(job.end, job.timeout)
        return result

    return run
