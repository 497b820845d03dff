"""The group of ranks on several hosts: shared memory on each host, TCP between them.

It makes the same promises and gives the same bits as a group on one host. Each host's ranks form a `SharedMemoryGroup`;
one rank for each lane carries it between hosts, all lanes at once (`podrun.collectives.host_reduction`). Every rank has
a `RankLink` to every rank of the other hosts. A rank reads only from links that owe it something in the current
collective, so a rank that runs ahead has to wait and frames of different collectives never mix.

Unlike on one host, the first call waits until all ranks have joined: only then is it known which ranks share a host.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from podrun.collectives.board import GroupBoard, label
from podrun.collectives.group import (
    EXCHANGE_BYTES,
    ByteArray,
    ClosedError,
    GroupError,
    GroupPlace,
    Movement,
    Token,
    as_bytes,
    check_peer,
    for_rank,
    message_mismatch,
    within_limits,
)
from podrun.collectives.host_memory import reducible
from podrun.collectives.host_reduction import HostLanes, HostReduction, pieces_of
from podrun.collectives.linux import host_identity
from podrun.collectives.mesh import Mesh
from podrun.collectives.registrar import Registrar
from podrun.collectives.registrar_client import RegistrarClient
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.collectives.tcp_link import FrameKind, LinkFrame, RankLink
from podrun.core.error_codec import error_from_dict, error_to_dict
from podrun.core.errors import PodrunError
from podrun.core.executable import Array, Reduction
from podrun.core.layout import slice_of


class HostsGroup:
    """The group of ranks on several hosts: shared memory on each host, TCP between them. See
    `podrun.collectives.group.Group` for what each call promises.
    """

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
            self._mesh = Mesh(rank, self._size, timeout, self._check_lost, self._report_waiting)
            self._client = RegistrarClient(
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
        return self._lanes.ranks_on[self._host]

    # --- Joining ----- ------------------------------------------------------------------------------------

    def _ready(self) -> SharedMemoryGroup:
        """The group of this host's ranks, after all ranks have joined. Raises the error that ended the group."""
        self._check()
        if self._local is None:
            with (
                self._spreading_errors(),
                for_rank(self._rank),
                within_limits("connections or threads for a group"),
            ):
                deadline = time.monotonic() + self._timeout
                roster = self._client.roster(deadline)
                self._lanes = HostLanes.from_names([str(entry["host"]) for entry in roster])
                self._host = self._lanes.host_of[self._rank]
                self._local = self._join_host(deadline)
                remote = [r for r in range(self._size) if self._lanes.host_of[r] != self._host]
                key = str(self._token["key"]).encode()
                self._mesh.connect(remote, roster, key, self._client.listener, deadline)
                self._client.connected()
            self._check()
        return self._local

    def _join_host(self, deadline: float) -> SharedMemoryGroup:
        here = self._lanes.ranks_on[self._host]
        if here[0] == self._rank:
            board = GroupBoard.create(len(here))
            try:
                board.join(0, self._timeout)
                self._client.send_board({"pid": os.getpid(), "fd": board.region.fd, "secret": board.secret})
                self._client.boards(deadline)
            except BaseException:
                board.close()
                raise
        else:
            token = self._client.boards(deadline)[self._client.host]
            board = GroupBoard.open(int(token["pid"]), int(token["fd"]), len(here), str(token["secret"]))
            try:
                board.join(here.index(self._rank), self._timeout)
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
        mapped = local.arena(arena)
        used, text = reducible(operation, arena, mapped, reduction, count)
        rows, whole = mapped.rows, mapped.whole
        if reduction is Reduction.LOCAL:
            return rows[local.rank], used
        what = label(text)
        with self._spreading_errors():
            self._note_call(what)
            local.arrive_and_wait(what)
            HostReduction(self._mesh, self._lanes, what, rows, whole[:used], reduction, everywhere).run()
            if settle:
                local.arrive_and_wait(what)
        return whole, used

    def all_gather(self, arena: str) -> Array:
        local = self._ready()
        mapped = local.arena(arena)
        rows, whole = mapped.rows, mapped.whole
        what = label(f"all_gather({arena!r}: {mapped.text})")
        with self._spreading_errors():
            self._note_call(what)
            local.arrive_and_wait(what)
            if rows:
                own = slice_of(self._rank, self._size, whole.size)
                whole[own] = rows[local.rank][own]
            self._gather_lanes(what, whole)
            local.arrive_and_wait(what)
        return whole

    def _gather_lanes(self, what: bytes, whole: Array) -> None:
        """Send this rank's lane round the hosts, and receive the lanes that it handles for its host."""
        lanes = self._lanes
        raw = as_bytes(whole)
        owed: dict[int, int] = {}
        for lane in lanes.lanes_of(self._rank):
            if lane == self._rank:
                following = lanes.next_host(self._host, self._host)
                if following is not None:
                    for at, piece in enumerate(pieces_of(self._lane_bytes(raw, whole, lane))):
                        self._mesh.post(
                            lanes.handler(following, lane), FrameKind.RESULT, what, lane, at, payload=piece
                        )
            else:
                source = lanes.handler(lanes.previous_host(self._host), lane)
                owed[source] = owed.get(source, 0) + len(pieces_of(self._lane_bytes(raw, whole, lane)))

        def take(link: RankLink, frame: LinkFrame, deadline: float) -> None:
            piece = pieces_of(self._lane_bytes(raw, whole, frame.a))[frame.b]
            self._mesh.fill(link, frame, piece, deadline)
            following = lanes.next_host(self._host, lanes.host_of[frame.a])
            if following is not None:
                peer = lanes.handler(following, frame.a)
                self._mesh.post(peer, FrameKind.RESULT, what, frame.a, frame.b, payload=piece)

        self._mesh.collect(what, owed, take)

    def _lane_bytes(self, raw: ByteArray, whole: Array, lane: int) -> ByteArray:
        own = slice_of(lane, self._size, whole.size)
        return raw[own.start * whole.itemsize : own.stop * whole.itemsize]

    def barrier(self) -> None:
        local = self._ready()
        what = label("barrier")
        with self._spreading_errors():
            self._note_call(what)
            local.arrive_and_wait(what)
            leaders = [ranks[0] for ranks in self._lanes.ranks_on]
            if self._rank == leaders[0]:
                self._mesh.collect(what, dict.fromkeys(leaders[1:], 1), lambda *_: None)
                for peer in leaders[1:]:
                    self._mesh.post(peer, FrameKind.TOKEN, what)
            elif self._rank in leaders:
                self._mesh.post(leaders[0], FrameKind.TOKEN, what)
                self._mesh.collect(what, {leaders[0]: 1}, lambda *_: None)
            local.arrive_and_wait(what)

    # --- Moving data ----------------------------------------------------------------------------------------

    def exchange(self, posted: ByteArray, pattern: Movement) -> list[ByteArray]:
        local = self._ready()
        what = label(pattern.text)
        with self._spreading_errors():
            self._note_call(what)
            self._mesh.drain()  # the exchange before the last may still be in transit
            self._turn ^= 1
            rows = local.posting_rows(self._size)[self._turn]
            rows[self._rank][: posted.size] = posted
            for host in range(self._lanes.hosts):
                wanted = self._range(pattern, self._rank, host)
                if host != self._host and wanted is not None:
                    peer = self._lanes.handler(host, self._rank)
                    payload = rows[self._rank][wanted]
                    self._mesh.post(peer, FrameKind.BLOCK, what, self._rank, 0, wanted.start, payload)
            owed: dict[int, int] = {}
            for source in self._lanes.lanes_of(self._rank):
                if source != self._rank and self._range(pattern, source, self._host) is not None:
                    owed[source] = 1

            def take(link: RankLink, frame: LinkFrame, deadline: float) -> None:
                wanted = self._range(pattern, frame.a, self._host)
                self._mesh.fill(link, frame, rows[frame.a][wanted or slice(0, 0)], deadline)

            self._mesh.collect(what, owed, take)
            local.arrive_and_wait(what)
        received = []
        for source, row in enumerate(rows):
            offset, nbytes = pattern.part(source, self._rank)
            received.append(row[offset : offset + nbytes])
        return received

    def _range(self, pattern: Movement, source: int, host: int) -> slice | None:
        """The bytes, first to last, of what ``source`` posts that any rank of a host needs."""
        parts = [pattern.part(source, dest) for dest in self._lanes.ranks_on[host]]
        needed = [(start, start + size) for start, size in parts if size]
        if not needed:
            return None
        return slice(min(start for start, _ in needed), min(max(stop for _, stop in needed), EXCHANGE_BYTES))

    def send(self, array: Array, dest: int, tag: int = 0) -> None:
        local = self._ready()
        check_peer(self._rank, self._size, dest, "send to")
        with self._spreading_errors():
            if self._lanes.host_of[dest] == self._host:
                local.send(array, self.host_ranks.index(dest), tag)
                return
            what = label(array.dtype.name)
            self._mesh.post(dest, FrameKind.MESSAGE, what, tag=tag, payload=as_bytes(array).copy())

    def receive(self, out: Array, source: int, tag: int = 0) -> None:
        local = self._ready()
        check_peer(self._rank, self._size, source, "receive from")
        with self._spreading_errors():
            if self._lanes.host_of[source] == self._host:
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

    def _note_call(self, what: bytes) -> None:
        """Record the collective that begins here, for `_report_waiting`."""
        self._calls += 1
        self._last_calls.append(what)

    def _report_waiting(self) -> None:
        """Report this rank's last collectives, because it waits long, so that they are compared with other ranks'."""
        self._client.report_waiting(self._calls, [what.hex() for what in self._last_calls])

    @contextlib.contextmanager
    def _spreading_errors(self) -> Iterator[None]:
        """Let errors that end the group here end it on all hosts."""
        try:
            yield
        except ClosedError:
            raise
        except PodrunError as error:
            self._fail(error)

    def _fail(self, error: PodrunError) -> NoReturn:
        self.abort(error_to_dict(error))
        self._check()
        raise error

    def abort(self, error: Mapping[str, Any]) -> None:
        self._on_abort(dict(error))
        self._client.abort(error)

    def _on_abort(self, error: dict[str, Any]) -> None:
        """End the group. May be called from any thread; the first error counts."""
        if self._failure is None:
            self._failure = error
            self._failed.set()
        if self._local is not None:
            self._local.abort(self._failure)
        self._mesh.wake()

    def _check_lost(self, seconds: float) -> None:
        """Raise the error that ended the group, if rank 0 reports one within ``seconds``."""
        if seconds:
            self._failed.wait(seconds)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise error_from_dict(self._failure, unknown=GroupError)
        if self._closed:
            raise ClosedError(f"rank {self._rank} has closed this group", hint="Make a new group.")

    def place_for(self, ranks: Sequence[int]) -> GroupPlace:
        self._ready()
        if len({self._lanes.host_of[rank] for rank in ranks}) == 1:
            return GroupPlace(self._timeout)
        return GroupPlace(self._timeout, self._client.address, self._client.host)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._mesh.close()
        if self._local is not None:
            self._local.close()
        self._client.close()
        if self._registrar is not None:
            self._registrar.close()
