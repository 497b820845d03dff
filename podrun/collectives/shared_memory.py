"""The group of ranks on one host, over shared memory: processes, threads of one process, or both mixed.

Zero-copy. Every rank's gradients lie in one segment, one row per rank and one for the result; rank *m*
reduces slice *m* of all rows, in rank order, into the result row, which all ranks read where it lies. A
reduction costs each rank one pass over its slice and two meetings on the `Board` (`podrun.collectives.plans` has
shorter ways for small ones); an all-gather of a shared arena is one meeting and no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from podrun.collectives import plans
from podrun.collectives.arenas import Arena, HostMemory, reducible
from podrun.collectives.arithmetic import prepared, reduce_into
from podrun.collectives.arrivals import Arrivals, arrivals_bytes
from podrun.collectives.board import Board, label
from podrun.collectives.channel import Channel, segment_bytes
from podrun.collectives.group import (
    EXCHANGE_BYTES,
    Array,
    ByteArray,
    Group,
    Token,
    as_bytes,
    check_peer,
    message_mismatch,
    slice_of,
    unknown_arena,
)
from podrun.collectives.patterns import Pattern
from podrun.executable import Reduction

_BARRIER = label("barrier")
_NO_TURN = nullcontext()
_LastRun = tuple[str, Reduction, int | None, bool, plans.Run]


def _never() -> Array:
    raise unknown_arena("", [])


_NO_RUN: _LastRun = ("", Reduction.LOCAL, None, False, _never)
"""What all_reduce was called with last, and how to do it: most calls are as the one before."""


@dataclass(frozen=True, slots=True)
class _Scatter:
    """One reduce-scatter over an arena: labels of its two meetings, and the views that it works on."""

    begin: bytes
    end: bytes
    mine: Array
    slice: Array
    parts: list[Array]
    whole: tuple[plans.Run, ...]
    """All of it in one call, without and with the second meeting."""


class SharedMemoryGroup:
    """See the module docstring, and `podrun.collectives.group.Group` for what each call promises."""

    def __init__(self, board: Board, timeout: float) -> None:
        self._board = board
        board.patience = min(board.patience, timeout)
        self._timeout = timeout
        self._rank = board.rank
        self.turn: AbstractContextManager[object] = _NO_TURN
        """Held while this rank reduces a slice, never while it waits: threads that share a core may take turns."""
        self._size = board.ranks
        self._memory = HostMemory(board)
        self._scatters: dict[tuple[str, int, int | None], _Scatter] = {}
        self._runs: dict[tuple[str, int, int | None, bool], plans.Run] = {}
        self._last_run: _LastRun = _NO_RUN
        self._labels: dict[tuple[str, str], bytes] = {}
        self._pattern_labels: dict[Pattern, bytes] = {}
        self._posts: list[list[ByteArray]] = []
        self._rows_of_plans: dict[str, plans.Rows] = {}
        self._came: Arrivals | None = None
        self._turn = 0
        self._channels: dict[tuple[int, int], Channel] = {}
        self._early: dict[int, list[tuple[int, str, ByteArray]]] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def host_ranks(self) -> tuple[int, ...]:
        return tuple(range(self._size))

    # --- Arenas ---------------------------------------------------------------------------------------------

    def allocate(self, arena: str, dtype: str, size: int) -> Array:
        return self._memory.arena(arena, dtype, size, kind="allocated").rows[self._rank]

    def shared(self, arena: str, dtype: str, size: int) -> Array:
        return self._memory.arena(arena, dtype, size, kind="shared").whole

    # --- For groups over several hosts ---

    def arena(self, name: str) -> Arena:
        """An arena with the rows of this host's ranks. Raises UsageError if this rank has not asked for it."""
        return self._memory.find(name)

    def meet(self, what: bytes) -> None:
        """A barrier of this host's ranks."""
        self._board.meet(what, self._timeout)

    def posting_rows(self, ranks: int) -> list[list[ByteArray]]:
        """Two sets of posting buffers, one for each of ``ranks``, which may be more than this host's."""
        if not self._posts:
            name = f"posts of {ranks} ranks"
            self._posts = self._memory.row_sets(name, "exchange", EXCHANGE_BYTES, sets=2, ranks=ranks)
        return self._posts

    def _rows_for_plans(self, name: str, nbytes: int, sets: int) -> plans.Rows:
        """What reductions copy out to: so many sets of rows, made on first use."""
        found = self._rows_of_plans.get(name)
        if found is None:
            full = f"{name} of reductions"
            found = self._memory.row_sets(full, name, nbytes, sets=sets, ranks=self._size)
            self._rows_of_plans[name] = found
        return found

    def _posts_of_plans(self) -> plans.Rows:
        return self._rows_for_plans("posts", plans.POSTED_BYTES, plans.POST_SETS)

    def _handed_of_plans(self) -> plans.Rows:
        return self._rows_for_plans("handed", plans.HANDED_BYTES, plans.HANDED_SETS)

    # --- Collectives ----------------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        settle: bool = True,
        count: int | None = None,
    ) -> Array:
        key = (arena, id(reduction), count)
        plan = self._scatters.get(key)
        if plan is None:
            _make_room(self._scatters)
            plan = self._scatters[key] = self._plan_scatter(arena, reduction, count)
        if reduction is Reduction.LOCAL:
            return plan.mine
        if self.turn is _NO_TURN:
            return plan.whole[settle]()
        self._board.meet(plan.begin, self._timeout)
        with self.turn:
            reduce_into(plan.slice, plan.parts, reduction)
        if settle:
            self._board.meet(plan.end, self._timeout)
        return plan.slice

    def all_reduce(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        count: int | None = None,
        in_place: bool = False,
    ) -> Array:
        same, of, elements, inside, run = self._last_run
        if same is arena and of is reduction and elements == count and inside is in_place:
            return run()
        key = (arena, id(reduction), count, in_place)
        found = self._runs.get(key)
        if found is None:
            _make_room(self._runs)
            found = self._runs[key] = self._plan_all_reduce(arena, reduction, count, in_place)
        self._last_run = arena, reduction, count, in_place, found
        return found()

    def _plan_scatter(self, arena: str, reduction: Reduction, count: int | None) -> _Scatter:
        found = self._memory.find(arena)
        used, text = reducible("reduce_scatter", arena, found, reduction, count)
        own = slice_of(self._rank, self._size, used)
        begin, end = label(text), label(f"end of {text}")
        total, parts = found.whole[own], [row[own] for row in found.rows]
        mine = found.rows[self._rank][own]
        if reduction is Reduction.LOCAL:
            return _Scatter(begin, end, mine, total, parts, ())
        whole = tuple(
            plans.scattered(self._board, plans.Around(begin, last, self._timeout), total, parts, reduction)
            for last in (None, end)
        )
        return _Scatter(begin, end, mine, total, parts, whole)

    def _plan_all_reduce(
        self, arena: str, reduction: Reduction, count: int | None, in_place: bool
    ) -> plans.Run:
        operation = "all_reduce in place" if in_place else "all_reduce"
        found = self._memory.find(arena)
        used, text = reducible(operation, arena, found, reduction, count)
        rows = [row[:used] for row in found.rows]
        mine = rows[self._rank]
        if reduction is Reduction.LOCAL:
            return lambda: mine
        around = plans.Around(label(text), label(f"end of {text}"), self._timeout)
        job = plans.Job(around, rows, mine, found.whole[:used], reduction, in_place)
        return plans.ready(job, self._board, self._posts_of_plans, self._handed_of_plans)

    def at_last(self, reductions: Mapping[str, Reduction]) -> Callable[[], Sequence[Array] | None]:
        """A reduction of several arenas by the last rank alone, made ready: there the whole results, once all have
        come; elsewhere None, at once.

        Whoever calls knows by other means when the last rank has read a rank's values, which until then stay as they
        are.
        """
        arenas = [self._memory.find(name) for name in reductions]
        texts, steps = [], []
        for arena, (name, reduction) in zip(arenas, reductions.items(), strict=True):
            texts.append(reducible("reduce", name, arena, reduction, None)[1])
            steps.append(prepared(arena.whole, arena.rows, reduction))
        what, arrivals = label(f"at the last rank: {', '.join(texts)}"), self._arrivals()
        results = [arena.whole for arena in arenas]

        def finish() -> Sequence[Array]:
            arrivals.wait(what, self._timeout)
            for step in steps:
                step()
            return results

        return finish if self._rank == self._size - 1 else arrivals.come

    def _arrivals(self) -> Arrivals:
        """The one count of this rank's arrivals, whatever they are for."""
        if self._came is None:
            segment = self._memory.segment("arrivals", "arrivals", arrivals_bytes(self._size), rows=1)
            self._came = Arrivals(segment, self._board)
        return self._came

    def all_gather(self, arena: str) -> Array:
        found = self._memory.find(arena)
        self._meet("all_gather", arena, found)
        if found.rows:
            own = slice_of(self._rank, self._size, found.whole.size)
            found.whole[own] = found.rows[self._rank][own]
            self._meet("end of all_gather", arena, found)
        return found.whole

    # --- Moving data ----------------------------------------------------------------------------------------

    def exchange(self, posted: ByteArray, pattern: Pattern) -> list[ByteArray]:
        rows = self._post(posted)
        self._board.meet(self._pattern_label(pattern), self._timeout)
        received = []
        for source, row in enumerate(rows):
            offset, nbytes = pattern.part(source, self._rank)
            received.append(row[offset : offset + nbytes])
        return received

    def _post(self, posted: ByteArray) -> list[ByteArray]:
        """Copy into this rank's posting buffer; returns everyone's, to be read after the next meeting.

        There are two sets, used in turn. The one meeting between two uses of a set keeps its readers and its
        next writers apart: whoever posts again in it has seen all ranks come to the meeting after they read
        it.
        """
        self._turn ^= 1
        rows = self.posting_rows(self._size)[self._turn]
        rows[self._rank][: posted.size] = posted
        return rows

    def _pattern_label(self, pattern: Pattern) -> bytes:
        text = self._pattern_labels.get(pattern)
        if text is None:
            if len(self._pattern_labels) > 1000:
                self._pattern_labels.clear()
            text = self._pattern_labels[pattern] = label(pattern.text)
        return text

    def send(self, array: Array, dest: int, tag: int = 0) -> None:
        check_peer(self._rank, self._size, dest, "send to")
        self._channel(self._rank, dest).send(tag, array.dtype.name, as_bytes(array), self._timeout)

    def receive(self, out: Array, source: int, tag: int = 0) -> None:
        check_peer(self._rank, self._size, source, "receive from")
        reason = label(f"receive({out.dtype.name}[{out.size}], from rank {source}, tag {tag})")
        channel, early = self._channel(source, self._rank), self._early.setdefault(source, [])
        message = next((m for m in early if m[0] == tag), None)
        if message is not None:
            early.remove(message)
            self._check_message(source, tag, out, message[1], message[2].size)
            as_bytes(out)[:] = message[2]
            return
        while True:
            found, nbytes, kind = channel.receive_header(reason, self._timeout)
            if found == tag:
                self._check_message(source, tag, out, kind, nbytes)
                channel.receive_into(as_bytes(out), reason, self._timeout)
                return
            payload = np.empty(nbytes, np.uint8)
            channel.receive_into(payload, reason, self._timeout)
            early.append((found, kind, payload))

    def _check_message(self, source: int, tag: int, out: Array, kind: str, nbytes: int) -> None:
        if kind != out.dtype.name[:32] or nbytes != out.nbytes:
            self._board.fail_with(message_mismatch(self._rank, source, tag, out, kind, nbytes))

    def _channel(self, source: int, dest: int) -> Channel:
        key = (source, dest)
        if key not in self._channels:
            name = f"channel from rank {source} to rank {dest}"
            segment = self._memory.segment(name, "channel", segment_bytes(), rows=1)
            self._channels[key] = Channel(segment, self._board, source, dest)
        return self._channels[key]

    def establish(self, ranks: Sequence[int]) -> tuple[Group, Token]:
        from podrun.collectives.rendezvous import create  # which imports this module

        return create(len(ranks), timeout=self._timeout)

    # --- The group itself -----------------------------------------------------------------------------------

    def barrier(self) -> None:
        self._board.meet(_BARRIER, self._timeout)

    def abort(self, error: Mapping[str, Any]) -> None:
        self._board.fail(error)

    def close(self) -> None:
        self._board.close()
        self._runs.clear()
        self._last_run = _NO_RUN
        self._scatters.clear()
        self._rows_of_plans.clear()
        self._posts = []
        self._memory.close()

    def _meet(self, operation: str, arena: str, found: Arena) -> None:
        text = self._labels.get((operation, arena))
        if text is None:
            text = self._labels[operation, arena] = label(f"{operation}({arena!r}: {found.text})")
        self._board.meet(text, self._timeout)


def _make_room(made: dict[Any, Any]) -> None:
    """Forget the plans made so far if there are too many: they are made again when needed."""
    if len(made) > 1000:
        made.clear()
