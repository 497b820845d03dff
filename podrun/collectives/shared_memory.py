"""The group of ranks on one host, over shared memory: processes, threads of one process, or both mixed.

Nothing is copied: every rank's gradients lie in one region, one row for each rank and one for the result. Rank *m*
reduces slice *m* of all rows, in rank order, into the result row, which all ranks read in place. A reduction costs each
rank one pass over its slice and two barriers (`podrun.collectives.plans` has shorter ways for small ones); an
all-gather of a shared arena is one barrier and no copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from podrun.collectives import plans
from podrun.collectives.arithmetic import fastest, prepared
from podrun.collectives.barrier import ArrivalCounter, arrival_counter_bytes
from podrun.collectives.board import GroupBoard, label
from podrun.collectives.group import (
    EXCHANGE_BYTES,
    ByteArray,
    GroupPlace,
    Movement,
    as_bytes,
    check_peer,
    message_mismatch,
    unknown_arena,
)
from podrun.collectives.host_memory import HostMemory, MappedArena, MessageChannel, channel_bytes, reducible
from podrun.core.executable import Array, Reduction
from podrun.core.layout import slice_of
from podrun.core.quick_dataclass import dataclass

_BARRIER = label("barrier")
_NO_TURN = nullcontext()
_LastPlan = tuple[str, Reduction, int | None, bool, plans.Plan]


def _never() -> Array:
    raise unknown_arena("", [])


def _no_sum() -> None:
    """The sum of a reduction that adds nothing."""


_NO_PLAN: _LastPlan = ("", Reduction.LOCAL, None, False, _never)
"""The arguments of the last all_reduce and its plan: most calls repeat the one before."""


@dataclass(frozen=True, slots=True)
class _Scatter:
    """One reduce-scatter over an arena: the labels of its two barriers, its views of the arena, and the sum alone."""

    begin: bytes
    end: bytes
    mine: Array
    slice: Array
    reduce: Callable[[], object]
    whole: tuple[plans.Plan, ...]
    """The plans of the whole collective, without and with the second barrier."""


class SharedMemoryGroup:
    """The group of ranks on one host, over shared memory. See `podrun.collectives.group.Group` for what each call
    promises.
    """

    def __init__(self, board: GroupBoard, timeout: float) -> None:
        self._board = board
        self._timeout = timeout
        self._rank = board.rank
        self.turn: AbstractContextManager[object] = _NO_TURN
        """Held while this rank reduces a slice, never while it waits, so that threads that share a core can take turns.
        """
        self.patient = False
        """Whether this rank sleeps at once where it waits for a message, because the other computes for long."""
        self._size = board.ranks
        self._memory = HostMemory(board)
        self._scatters: dict[tuple[str, int, int | None], _Scatter] = {}
        self._plans: dict[tuple[str, int, int | None, bool], plans.Plan] = {}
        self._last_plan: _LastPlan = _NO_PLAN
        self._labels: dict[tuple[str, str], bytes] = {}
        self._pattern_labels: dict[Movement, bytes] = {}
        self._posts: list[list[ByteArray]] = []
        self._plan_rows: dict[str, plans.Rows] = {}
        self._arrival_counter: ArrivalCounter | None = None
        self._turn = 0
        self._channels: dict[tuple[int, int], MessageChannel] = {}
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

    # --- For groups over several hosts ----------------------------------------------------------------------

    def arena(self, name: str) -> MappedArena:
        """An arena with the rows of this host's ranks. Raises UsageError if this rank has not requested it."""
        return self._memory.find(name)

    def arrive_and_wait(self, what: bytes) -> None:
        """Wait until all ranks of this host have arrived with the same label."""
        self._board.arrive_and_wait(what, self._timeout)

    def posting_rows(self, ranks: int) -> list[list[ByteArray]]:
        """Two sets of posting buffers, one buffer for each of ``ranks`` ranks, of this host or of more."""
        if not self._posts:
            name = f"posts of {ranks} ranks"
            self._posts = self._memory.row_sets(name, "exchange", EXCHANGE_BYTES, sets=2, ranks=ranks)
        return self._posts

    def _rows_for_plans(self, name: str, nbytes: int, sets: int) -> plans.Rows:
        """``sets`` sets of rows that plans copy values to, made on first use."""
        rows = self._plan_rows.get(name)
        if rows is None:
            full = f"{name} of reductions"
            rows = self._memory.row_sets(full, name, nbytes, sets=sets, ranks=self._size)
            self._plan_rows[name] = rows
        return rows

    def _rows_for_posting(self) -> plans.Rows:
        return self._rows_for_plans("posts", plans.POSTED_BYTES, plans.POST_SETS)

    def _rows_for_handover(self) -> plans.Rows:
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
        self._board.arrive_and_wait(plan.begin, self._timeout)
        with self.turn:
            plan.reduce()
        if settle:
            self._board.arrive_and_wait(plan.end, self._timeout)
        return plan.slice

    def scatter_by(
        self, arena: str, reduction: Reduction, make: Callable[[Sequence[Array]], Callable[[], object]]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """A prepared `reduce_scatter` without the second barrier, in two halves: one that waits for all ranks, and the
        sum, which is the caller's. ``make`` gives it for this rank's slice of every rank's row. It meets ranks that
        call `reduce_scatter`."""
        plan, mapped = self._plan_scatter(arena, reduction, None), self._memory.find(arena)
        own = slice_of(self._rank, self._size, mapped.whole.size)
        reduce = make([row[own] for row in mapped.rows])

        def meet() -> None:
            self._board.arrive_and_wait(plan.begin, self._timeout)

        def finish() -> None:
            with self.turn:
                reduce()

        return meet, finish

    def all_reduce(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        count: int | None = None,
        in_place: bool = False,
    ) -> Array:
        same, of, elements, inside, plan = self._last_plan
        if same is arena and of is reduction and elements == count and inside is in_place:
            return plan()
        key = (arena, id(reduction), count, in_place)
        kept = self._plans.get(key)
        if kept is None:
            _make_room(self._plans)
            kept = self._plans[key] = self._plan_all_reduce(arena, reduction, count, in_place)
        self._last_plan = arena, reduction, count, in_place, kept
        return kept()

    def _plan_scatter(self, arena: str, reduction: Reduction, count: int | None) -> _Scatter:
        mapped = self._memory.find(arena)
        used, text = reducible("reduce_scatter", arena, mapped, reduction, count)
        own = slice_of(self._rank, self._size, used)
        begin, end = label(text), label(f"end of {text}")
        total, parts = mapped.whole[own], [row[own] for row in mapped.rows]
        mine = mapped.rows[self._rank][own]
        if reduction is Reduction.LOCAL:
            return _Scatter(begin, end, mine, total, _no_sum, ())
        whole = tuple(
            plans.scatter_plan(
                self._board, plans.BarrierLabels(begin, last, self._timeout), total, parts, reduction
            )
            for last in (None, end)
        )
        return _Scatter(begin, end, mine, total, fastest(total, parts, reduction), whole)

    def _plan_all_reduce(
        self, arena: str, reduction: Reduction, count: int | None, in_place: bool
    ) -> plans.Plan:
        operation = "all_reduce in place" if in_place else "all_reduce"
        mapped = self._memory.find(arena)
        used, text = reducible(operation, arena, mapped, reduction, count)
        rows = [row[:used] for row in mapped.rows]
        mine = rows[self._rank]
        if reduction is Reduction.LOCAL:
            return lambda: mine
        labels = plans.BarrierLabels(label(text), label(f"end of {text}"), self._timeout)
        call = plans.AllReduceCall(labels, rows, mine, mapped.whole[:used], reduction, in_place)
        return plans.plan_for(call, self._board, self._rows_for_posting, self._rows_for_handover)

    def at_last(self, reductions: Mapping[str, Reduction]) -> Callable[[], Sequence[Array] | None]:
        """A prepared reduction of several arenas by the last rank alone.

        Called on the last rank, it waits until all ranks have called theirs and gives the whole results. On the other
        ranks it gives None at once; they must not change their values until they know by other means that the last rank
        has read them.
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

        return finish if self._rank == self._size - 1 else arrivals.arrive

    def _arrivals(self) -> ArrivalCounter:
        """This rank's only counter of arrivals, shared by all reductions."""
        if self._arrival_counter is None:
            region = self._memory.region("arrivals", "arrivals", arrival_counter_bytes(self._size), rows=1)
            self._arrival_counter = ArrivalCounter(region, self._board)
        return self._arrival_counter

    def all_gather(self, arena: str) -> Array:
        mapped = self._memory.find(arena)
        self._barrier("all_gather", arena, mapped)
        if mapped.rows:
            own = slice_of(self._rank, self._size, mapped.whole.size)
            mapped.whole[own] = mapped.rows[self._rank][own]
            self._barrier("end of all_gather", arena, mapped)
        return mapped.whole

    # --- Moving data ----------------------------------------------------------------------------------------

    def exchange(self, posted: ByteArray, pattern: Movement) -> list[ByteArray]:
        rows = self._post(posted)
        self._board.arrive_and_wait(self._pattern_label(pattern), self._timeout)
        received = []
        for source, row in enumerate(rows):
            offset, nbytes = pattern.part(source, self._rank)
            received.append(row[offset : offset + nbytes])
        return received

    def _post(self, posted: ByteArray) -> list[ByteArray]:
        """Copy into this rank's posting buffer; returns the buffers of all ranks, to be read after the next barrier.

        Two sets of buffers are used in turn. The barrier between two uses of a set separates its readers from its next
        writers: a rank that posts in it again has passed a barrier that all ranks reached after reading the set.
        """
        self._turn ^= 1
        rows = self.posting_rows(self._size)[self._turn]
        rows[self._rank][: posted.size] = posted
        return rows

    def _pattern_label(self, pattern: Movement) -> bytes:
        text = self._pattern_labels.get(pattern)
        if text is None:
            if len(self._pattern_labels) > 1000:
                self._pattern_labels.clear()
            text = self._pattern_labels[pattern] = label(pattern.text)
        return text

    def send(self, array: Array, dest: int, tag: int = 0, *, preface: bytes = b"") -> None:
        """``preface``: bytes before the array, in one message with it, for `receive_preface`."""
        check_peer(self._rank, self._size, dest, "send to")
        self.message_channel(self._rank, dest).send(
            tag, array.dtype.name, as_bytes(array), self._timeout, preface=preface
        )

    def receive_preface(self, source: int, size: int) -> tuple[bytes, int]:
        """The preface of the next message, of ``size`` bytes, and the size of its array in bytes; call `receive_rest`
        next, unless that is 0. Not together with `receive` from the same rank.
        """
        reason, channel = _rest_label(source), self.message_channel(source, self._rank)
        return channel.receive_preface(size, reason, self._timeout)

    def receive_rest(self, out: Array, source: int) -> None:
        """Receive the array of the message whose preface was received, into memory of its size."""
        channel = self.message_channel(source, self._rank)
        channel.receive_into(as_bytes(out), _rest_label(source), self._timeout)

    def receive(self, out: Array, source: int, tag: int = 0) -> None:
        check_peer(self._rank, self._size, source, "receive from")
        reason = label(f"receive({out.dtype.name}[{out.size}], from rank {source}, tag {tag})")
        channel, early = self.message_channel(source, self._rank), self._early.setdefault(source, [])
        message = next((m for m in early if m[0] == tag), None)
        if message is not None:
            early.remove(message)
            self._check_message(source, tag, out, message[1], message[2].size)
            as_bytes(out)[:] = message[2]
            return
        while True:
            arrived_tag, nbytes, kind = channel.receive_header(reason, self._timeout)
            if arrived_tag == tag:
                self._check_message(source, tag, out, kind, nbytes)
                channel.receive_into(as_bytes(out), reason, self._timeout)
                return
            payload = np.empty(nbytes, np.uint8)
            channel.receive_into(payload, reason, self._timeout)
            early.append((arrived_tag, kind, payload))

    def _check_message(self, source: int, tag: int, out: Array, kind: str, nbytes: int) -> None:
        if kind != out.dtype.name[:32] or nbytes != out.nbytes:
            self._board.fail_with(message_mismatch(self._rank, source, tag, out, kind, nbytes))

    def message_channel(self, source: int, dest: int) -> MessageChannel:
        """This rank's end of the pipe from one rank to another."""
        key = (source, dest)
        if key not in self._channels:
            name = f"channel from rank {source} to rank {dest}"
            region = self._memory.region(name, "channel", channel_bytes(), rows=1)
            self._channels[key] = MessageChannel(region, self._board, source, dest)
            self._channels[key].patient = self.patient
        return self._channels[key]

    def place_for(self, ranks: Sequence[int]) -> GroupPlace:
        return GroupPlace(self._timeout)

    # --- The group itself -----------------------------------------------------------------------------------

    def barrier(self) -> None:
        self._board.arrive_and_wait(_BARRIER, self._timeout)

    def abort(self, error: Mapping[str, Any]) -> None:
        self._board.fail(error)

    def close(self) -> None:
        self._board.close()
        self._plans.clear()
        self._last_plan = _NO_PLAN
        self._scatters.clear()
        self._plan_rows.clear()
        self._posts = []
        self._memory.close()

    def _barrier(self, operation: str, arena: str, mapped: MappedArena) -> None:
        text = self._labels.get((operation, arena))
        if text is None:
            text = self._labels[operation, arena] = label(f"{operation}({arena!r}: {mapped.text})")
        self._board.arrive_and_wait(text, self._timeout)


@functools.lru_cache(1024)
def _rest_label(source: int) -> bytes:
    return label(f"receive(a message, from rank {source})")


def _make_room(cache: dict[Any, Any]) -> None:
    """Forget all plans if there are too many; they are made again when needed."""
    if len(cache) > 1000:
        cache.clear()
