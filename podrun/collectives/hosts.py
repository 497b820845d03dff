"""The group of ranks on several hosts: shared memory on each host, TCP between them.

Same promises and same bits as a group on one host. Each host's ranks form a `SharedMemoryGroup`; the vector's
lanes (`podrun.collectives.lanes`) are carried between hosts by one rank each, all at once. Every rank has a
connection (`Link`) to every rank of the other hosts. A rank reads only from links that owe it something in
the current collective, so one that runs ahead is left waiting and frames never mix.

Unlike on one host, the first call waits until all ranks have joined: only then is it known who shares a host.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from podrun.collectives.arenas import reducible
from podrun.collectives.board import Board, label
from podrun.collectives.errors import ClosedError, describe, for_rank, restore, within_limits
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
)
from podrun.collectives.host_reduction import HostReduction, pieces_of
from podrun.collectives.lanes import Layout
from podrun.collectives.mesh import Mesh
from podrun.collectives.patterns import Pattern
from podrun.collectives.process import host_identity
from podrun.collectives.registrar import Registrar
from podrun.collectives.roster import Member
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.collectives.wire import Frame, FrameKind, Link
from podrun.errors import PodrunError
from podrun.executable import Reduction


class HostsGroup:
    """See the module docstring, and `podrun.collectives.group.Group` for what each call promises."""

    def __init__(
        self, token: Token, rank: int, timeout: float, registrar: Registrar | None, host: str | None = None
    ) -> None:
        self._rank, self._size = rank, int(token["size"])
        self._timeout = timeout
        self._token = dict(token)
        self._registrar = registrar
        self._failure: dict[str, Any] | None = None
        self._failed = threading.Event()
        self._closed = False
        self._local: SharedMemoryGroup | None = None
        self._turn = 0
        self._calls = 0
        self._last_calls: deque[bytes] = deque(maxlen=8)
        with for_rank(rank), within_limits("connection or thread for a group"):
            self._mesh = Mesh(rank, self._size, timeout, self._check_lost, self._tell_waiting)
            self._member = Member(
                {**token, "timeout": timeout}, rank, host or host_identity(), os.getpid(), self._on_abort
            )

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def host_ranks(self) -> tuple[int, ...]:
        self._ready()
        return self._layout.ranks_on[self._host]

    # --- Coming together ------------------------------------------------------------------------------------

    def _ready(self) -> SharedMemoryGroup:
        """The ranks of this host, once all ranks have joined; raises what ended the group."""
        self._check()
        if self._local is None:
            with (
                self._spreading_errors(),
                for_rank(self._rank),
                within_limits("connections or threads for a group"),
            ):
                deadline = time.monotonic() + self._timeout
                roster = self._member.roster(deadline)
                self._layout = Layout.from_names([str(entry["host"]) for entry in roster])
                self._host = self._layout.host_of[self._rank]
                self._local = self._join_host(deadline)
                remote = [r for r in range(self._size) if self._layout.host_of[r] != self._host]
                key = str(self._token["key"]).encode()
                self._mesh.connect(remote, roster, key, self._member.listener, deadline)
                self._member.connected()
            self._check()
        return self._local

    def _join_host(self, deadline: float) -> SharedMemoryGroup:
        here = self._layout.ranks_on[self._host]
        if here[0] == self._rank:
            board = Board.create(len(here))
            try:
                board.join(0)
                self._member.hand_in({"pid": os.getpid(), "fd": board.segment.fd})
                self._member.boards(deadline)
            except BaseException:
                board.close()
                raise
        else:
            token = self._member.boards(deadline)[self._member.host]
            board = Board.open(int(token["pid"]), int(token["fd"]), len(here))
            try:
                board.join(here.index(self._rank))
            except BaseException:
                board.close()
                raise
        board.names, board.total = here, self._size
        return SharedMemoryGroup(board, self._timeout)

    # --- Arenas ---------------------------------------------------------------------------------------------

    def allocate(self, arena: str, dtype: str, size: int) -> Array:
        return self._ready().allocate(arena, dtype, size)

    def shared(self, arena: str, dtype: str, size: int) -> Array:
        return self._ready().shared(arena, dtype, size)

    # --- Reductions -----------------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        settle: bool = True,
        count: int | None = None,
    ) -> Array:
        whole, used = self._reduce("reduce_scatter", arena, reduction, count, settle=settle, everywhere=False)
        return whole[slice_of(self._rank, self._size, used)]

    def all_reduce(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        count: int | None = None,
        in_place: bool = False,
    ) -> Array:
        operation = "all_reduce in place" if in_place else "all_reduce"
        whole, used = self._reduce(operation, arena, reduction, count, settle=True, everywhere=True)
        if not in_place:
            return whole[:used]
        local = self._ready()
        mine = local.arena(arena).rows[local.rank][:used]
        mine[:] = whole[:used]
        return mine

    def _reduce(
        self,
        operation: str,
        arena: str,
        reduction: Reduction,
        count: int | None,
        *,
        settle: bool,
        everywhere: bool,
    ) -> tuple[Array, int]:
        local = self._ready()
        found = local.arena(arena)
        used, text = reducible(operation, arena, found, reduction, count)
        rows, whole = found.rows, found.whole
        if reduction is Reduction.LOCAL:
            return rows[local.rank], used
        what = label(text)
        with self._spreading_errors():
            self._come_to(what)
            local.meet(what)
            HostReduction(self._mesh, self._layout, what, rows, whole[:used], reduction, everywhere).run()
            if settle:
                local.meet(what)
        return whole, used

    def all_gather(self, arena: str) -> Array:
        local = self._ready()
        found = local.arena(arena)
        rows, whole = found.rows, found.whole
        what = label(f"all_gather({arena!r}: {found.text})")
        with self._spreading_errors():
            self._come_to(what)
            local.meet(what)
            if rows:
                own = slice_of(self._rank, self._size, whole.size)
                whole[own] = rows[local.rank][own]
            self._gather_lanes(what, whole)
            local.meet(what)
        return whole

    def _gather_lanes(self, what: bytes, whole: Array) -> None:
        """Send my own lane round the hosts, and take in those that I handle for my host."""
        layout, lanes = self._layout, self._layout.lanes_of(self._rank)
        raw = as_bytes(whole)
        owed: dict[int, int] = {}
        for lane in lanes:
            if lane == self._rank:
                following = layout.next_host(self._host, self._host)
                if following is not None:
                    for at, piece in enumerate(pieces_of(self._lane_bytes(raw, whole, lane))):
                        self._mesh.post(
                            layout.handler(following, lane), FrameKind.RESULT, what, lane, at, payload=piece
                        )
            else:
                source = layout.handler(layout.previous_host(self._host), lane)
                owed[source] = owed.get(source, 0) + len(pieces_of(self._lane_bytes(raw, whole, lane)))

        def take(link: Link, frame: Frame, deadline: float) -> None:
            piece = pieces_of(self._lane_bytes(raw, whole, frame.a))[frame.b]
            self._mesh.fill(link, frame, piece, deadline)
            following = layout.next_host(self._host, layout.host_of[frame.a])
            if following is not None:
                peer = layout.handler(following, frame.a)
                self._mesh.post(peer, FrameKind.RESULT, what, frame.a, frame.b, payload=piece)

        self._mesh.collect(what, owed, take)

    def _lane_bytes(self, raw: ByteArray, whole: Array, lane: int) -> ByteArray:
        own = slice_of(lane, self._size, whole.size)
        return raw[own.start * whole.itemsize : own.stop * whole.itemsize]

    def barrier(self) -> None:
        local = self._ready()
        what = label("barrier")
        with self._spreading_errors():
            self._come_to(what)
            local.meet(what)
            leaders = [ranks[0] for ranks in self._layout.ranks_on]
            if self._rank == leaders[0]:
                self._mesh.collect(what, dict.fromkeys(leaders[1:], 1), lambda *_: None)
                for peer in leaders[1:]:
                    self._mesh.post(peer, FrameKind.TOKEN, what)
            elif self._rank in leaders:
                self._mesh.post(leaders[0], FrameKind.TOKEN, what)
                self._mesh.collect(what, {leaders[0]: 1}, lambda *_: None)
            local.meet(what)

    # --- Moving data ----------------------------------------------------------------------------------------

    def exchange(self, posted: ByteArray, pattern: Pattern) -> list[ByteArray]:
        local = self._ready()
        what = label(pattern.text)
        with self._spreading_errors():
            self._come_to(what)
            self._mesh.drain()  # the last exchange but one may still be on its way
            self._turn ^= 1
            rows = local.posting_rows(self._size)[self._turn]
            rows[self._rank][: posted.size] = posted
            for host in range(self._layout.hosts):
                wanted = self._range(pattern, self._rank, host)
                if host != self._host and wanted is not None:
                    peer = self._layout.handler(host, self._rank)
                    payload = rows[self._rank][wanted]
                    self._mesh.post(peer, FrameKind.BLOCK, what, self._rank, 0, wanted.start, payload)
            owed: dict[int, int] = {}
            for source in self._layout.lanes_of(self._rank):
                if source != self._rank and self._range(pattern, source, self._host) is not None:
                    owed[source] = 1

            def take(link: Link, frame: Frame, deadline: float) -> None:
                wanted = self._range(pattern, frame.a, self._host)
                self._mesh.fill(link, frame, rows[frame.a][wanted or slice(0, 0)], deadline)

            self._mesh.collect(what, owed, take)
            local.meet(what)
        received = []
        for source, row in enumerate(rows):
            offset, nbytes = pattern.part(source, self._rank)
            received.append(row[offset : offset + nbytes])
        return received

    def _range(self, pattern: Pattern, source: int, host: int) -> slice | None:
        """The bytes of what ``source`` posts that ranks of a host need; first to last."""
        parts = [pattern.part(source, dest) for dest in self._layout.ranks_on[host]]
        needed = [(start, start + size) for start, size in parts if size]
        if not needed:
            return None
        return slice(min(start for start, _ in needed), min(max(stop for _, stop in needed), EXCHANGE_BYTES))

    def send(self, array: Array, dest: int, tag: int = 0) -> None:
        local = self._ready()
        check_peer(self._rank, self._size, dest, "send to")
        with self._spreading_errors():
            if self._layout.host_of[dest] == self._host:
                local.send(array, self.host_ranks.index(dest), tag)
                return
            what = label(array.dtype.name)
            self._mesh.post(dest, FrameKind.MESSAGE, what, tag=tag, payload=as_bytes(array).copy())

    def receive(self, out: Array, source: int, tag: int = 0) -> None:
        local = self._ready()
        check_peer(self._rank, self._size, source, "receive from")
        with self._spreading_errors():
            if self._layout.host_of[source] == self._host:
                local.receive(out, self.host_ranks.index(source), tag)
                return
            what = label(f"receive({out.dtype.name}[{out.size}], from rank {source}, tag {tag})")
            while (message := self._mesh.message(source, tag)) is None:
                self._mesh.collect(what, {source: 1}, None)
            kind, payload = message
            if kind != out.dtype.name or payload.size != out.nbytes:
                raise message_mismatch(self._rank, source, tag, out, kind, payload.size)
            as_bytes(out)[:] = payload

    # --- Failing --------------------------------------------------------------------------------------------

    def _come_to(self, what: bytes) -> None:
        """Note the collective that begins here, for `_tell_waiting`."""
        self._calls += 1
        self._last_calls.append(what)

    def _tell_waiting(self) -> None:
        """Have the last collectives of this rank, which waits long in the last of them, compared with others'."""
        self._member.waits(self._calls, [what.hex() for what in self._last_calls])

    @contextlib.contextmanager
    def _spreading_errors(self) -> Iterator[None]:
        """What ends the group here ends it on all hosts."""
        try:
            yield
        except ClosedError:
            raise
        except PodrunError as error:
            self._fail(error)

    def _fail(self, error: PodrunError) -> NoReturn:
        self.abort(describe(error))
        self._check()
        raise error

    def abort(self, error: Mapping[str, Any]) -> None:
        self._on_abort(dict(error))
        self._member.abort(error)

    def _on_abort(self, error: dict[str, Any]) -> None:
        """The group has ended. Called from any thread; the first error stands."""
        if self._failure is None:
            self._failure = error
            self._failed.set()
        if self._local is not None:
            self._local.abort(self._failure)
        self._mesh.wake()

    def _check_lost(self, seconds: float) -> None:
        """A peer is gone: raises the reason, if rank 0 passes one on within ``seconds``."""
        if seconds:
            self._failed.wait(seconds)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise restore(self._failure)
        if self._closed:
            raise ClosedError(f"rank {self._rank} has closed this group", hint="Make a new group.")

    def establish(self, ranks: Sequence[int]) -> tuple[Group, Token]:
        from podrun.collectives.rendezvous import create  # which imports this module

        self._ready()
        if len({self._layout.host_of[rank] for rank in ranks}) == 1:
            return create(len(ranks), timeout=self._timeout)
        return create(len(ranks), address=self._member.address, timeout=self._timeout, host=self._member.host)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._mesh.close()
        if self._local is not None:
            self._local.close()
        self._member.close()
        if self._registrar is not None:
            self._registrar.close()
