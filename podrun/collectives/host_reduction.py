"""A reduction over several hosts: who reduces what, in which order, in pieces.

A vector is cut into *lanes*: lane *m* is rank *m*'s slice. On each host one rank handles a lane: its owner where the
owner is, elsewhere one of the ranks there, in turn. A lane's values are combined in rank order whatever the hosts, so a
running reduction visits the hosts in the order of their ranks: *runs* of consecutive ranks of one host (`HostLanes`).
It starts at the first run, each handler adds the values of its run, and at the last run the lane is finished. Lanes
travel in pieces, so that all handlers and both directions of every connection are busy at once: between two hosts each
moves the vector once each way, as a ring would, and no sum is taken in another order than on a single host.

The running reduction of a piece lies in the host's result row, or in a separate buffer where the row's dtype is too
narrow, and is sent from there. If this host needs it, it comes back finished to the same place, long after it was sent.
A run of one rank that comes first has nothing to reduce: its row is sent as it is.

Between two hosts of which the second has one rank, the sum can as well be finished at the first host, from that rank's
row as it is: so each host finishes its own ranks' lanes, and both add and send equally much.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from podrun.collectives.arithmetic import combining_ufunc, finish_mean, reduce_into, wide_dtype
from podrun.collectives.group import ByteArray, as_bytes
from podrun.collectives.mesh import Mesh
from podrun.collectives.tcp_link import FrameKind, LinkFrame, RankLink
from podrun.core.executable import Array, Reduction
from podrun.core.layout import slice_of
from podrun.core.quick_dataclass import dataclass


@dataclass(frozen=True)
class HostLanes:
    """Which rank is on which host. ``host_of[rank]``: number of its host, in order of the hosts' first ranks."""

    host_of: tuple[int, ...]

    @classmethod
    def from_names(cls, names: Sequence[str]) -> HostLanes:
        """The lanes of a group, from the name of each rank's host."""
        order = list(dict.fromkeys(names))
        return cls(tuple(order.index(name) for name in names))

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return max(self.host_of) + 1

    @cached_property
    def ranks_on(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host, in order."""
        return tuple(
            tuple(rank for rank, where in enumerate(self.host_of) if where == host)
            for host in range(self.hosts)
        )

    @cached_property
    def runs(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Host and ranks of every run, in rank order."""
        grouped = itertools.groupby(range(len(self.host_of)), key=lambda rank: self.host_of[rank])
        return tuple((host, tuple(ranks)) for host, ranks in grouped)

    def handler(self, host: int, lane: int) -> int:
        """The rank that handles a lane on a host."""
        if self.host_of[lane] == host:
            return lane
        here = self.ranks_on[host]
        return here[lane % len(here)]

    def lanes_of(self, rank: int) -> list[int]:
        """The lanes that a rank handles."""
        host = self.host_of[rank]
        return [lane for lane in range(len(self.host_of)) if self.handler(host, lane) == rank]

    def next_host(self, host: int, origin: int) -> int | None:
        """The host that a finished lane goes to from ``host``, round all hosts; None at the last one."""
        following = (host + 1) % self.hosts
        return None if following == origin else following

    def previous_host(self, host: int) -> int:
        """The host that a finished lane comes from, on any host but its origin."""
        return (host - 1) % self.hosts


PIECE_BYTES = 512 * 1024
"""Bytes of a piece: small enough to overlap adding and both directions, large enough for TCP."""
_PIECES = 32
"""Number of pieces of a longer vector: each piece costs switches between the interpreter and the sending thread."""
_MOST_PIECE_BYTES = 2 * 1024 * 1024
_MUCH = 32 * 1024 * 1024
"""Bytes from which a reduction is long enough for `RankLink.keep_in_caches` to pay."""


class HostReduction:
    """One rank's part of one reduction over hosts: the lanes that it handles, piece by piece."""

    def __init__(
        self,
        mesh: Mesh,
        lanes: HostLanes,
        what: bytes,
        rows: Sequence[Array],
        whole: Array,
        reduction: Reduction,
        everywhere: bool,
    ) -> None:
        self._rank, self._mesh, self._what = mesh.rank, mesh, what
        self._whole, self._reduction, self._everywhere = whole, reduction, everywhere
        self._lanes, self._host = lanes, lanes.host_of[mesh.rank]
        here = lanes.ranks_on[self._host]
        self._rows = dict(zip(here, rows, strict=False))
        self._size = len(lanes.host_of)
        self._wide = wide_dtype(whole.dtype)
        nbytes = whole.size * self._wide.itemsize
        piece = min(max(PIECE_BYTES, nbytes // _PIECES), _MOST_PIECE_BYTES)
        self._piece_elements = max(1, piece // self._wide.itemsize)
        if nbytes >= _MUCH:
            mesh.keep_in_caches()
        runs = lanes.runs
        self._shares = len(runs) == 2 and len(runs[1][1]) == 1
        self._received = np.empty(min(self._piece_elements, whole.size) if self._shares else 0, whole.dtype)
        self._cuts: dict[int, list[slice]] = {}
        self._scratch: dict[tuple[int, int], Array] = {}

    def run(self) -> None:
        """Start the lanes that start here, then handle what arrives; returns when nothing more is owed."""
        runs = self._lanes.runs
        lanes = self._lanes.lanes_of(self._rank)
        owed: dict[int, int] = {}
        for lane in lanes:
            for host in self._sources(lane):
                source = self._lanes.handler(host, lane)
                owed[source] = owed.get(source, 0) + len(self._bounds(lane))
        for lane in lanes:
            if self._finished_first(lane):
                if self._host != runs[0][0]:
                    self._post_row(runs[0][0], lane)
            elif self._host == runs[0][0]:
                for piece in range(len(self._bounds(lane))):
                    self._advance(lane, piece, 0)
        self._mesh.collect(self._what, owed, self._take)
        self._mesh.drain()

    def _finished_first(self, lane: int) -> bool:
        """Whether the host of the first run finishes the lane, rather than the host of the last run."""
        return self._shares and self._lanes.host_of[lane] == self._lanes.runs[0][0]

    def _origin(self, lane: int) -> int:
        """The host where a lane is finished."""
        return self._lanes.runs[0 if self._finished_first(lane) else -1][0]

    def _sources(self, lane: int) -> list[int]:
        """The hosts that send this one pieces of a lane, one entry for each time that they do."""
        runs = self._lanes.runs
        if self._finished_first(lane):
            sources = [runs[1][0]] if self._host == runs[0][0] else []
        else:
            sources = [runs[s - 1][0] for s in range(1, len(runs)) if runs[s][0] == self._host]
        result = self._result_source(lane)
        return sources if result is None else [*sources, result]

    def _result_source(self, lane: int) -> int | None:
        """The host that sends this one the finished lane, if any does."""
        origin = self._origin(lane)
        if self._host == origin:
            return None
        if self._everywhere:
            return self._lanes.previous_host(self._host)
        return origin if self._lanes.host_of[lane] == self._host else None

    def _post_row(self, host: int, lane: int) -> None:
        """Send this rank's own values of a lane to the host that finishes it."""
        row, peer = self._rows[self._rank], self._lanes.handler(host, lane)
        for piece, where in enumerate(self._bounds(lane)):
            self._mesh.post(peer, FrameKind.ROW, self._what, lane, piece, payload=as_bytes(row[where]))

    def _bounds(self, lane: int) -> list[slice]:
        bounds = self._cuts.get(lane)
        if bounds is None:
            own, step = slice_of(lane, self._size, self._whole.size), self._piece_elements
            starts = range(own.start, own.stop, step)
            bounds = self._cuts[lane] = [slice(at, min(at + step, own.stop)) for at in starts]
        return bounds

    def _total(self, lane: int, piece: int) -> Array:
        """The running reduction of a piece: the result itself, or a wider buffer if its dtype is too narrow."""
        where = self._bounds(lane)[piece]
        if self._wide == self._whole.dtype:
            return self._whole[where]
        key = (lane, piece)
        if key not in self._scratch:
            self._scratch[key] = np.empty(where.stop - where.start, self._wide)
        return self._scratch[key]

    def _take(self, link: RankLink, frame: LinkFrame, deadline: float) -> None:
        if frame.kind is FrameKind.PARTIAL:
            self._mesh.fill(link, frame, as_bytes(self._total(frame.a, frame.b)), deadline)
            self._advance(frame.a, frame.b, frame.tag)
        elif frame.kind is FrameKind.ROW:
            where = self._bounds(frame.a)[frame.b]
            raw = self._received[: where.stop - where.start]
            self._mesh.fill(link, frame, as_bytes(raw), deadline)
            first = [self._rows[rank][where] for rank in self._lanes.runs[0][1]]
            reduce_into(self._whole[where], [*first, raw], self._reduction)
            self._forward(frame.a, frame.b)
        else:
            where = self._bounds(frame.a)[frame.b]
            self._mesh.fill(link, frame, as_bytes(self._whole[where]), deadline)
            self._forward(frame.a, frame.b)

    def _advance(self, lane: int, piece: int, stage: int) -> None:
        """Add the values of this host's run to a piece, and send it to the next run or host."""
        runs = self._lanes.runs
        where = self._bounds(lane)[piece]
        parts = [self._rows[rank][where] for rank in runs[stage][1]]
        if stage == 0 and len(parts) == 1 and self._wide == self._whole.dtype:
            total = parts[0]
        else:
            total = self._total(lane, piece)
            self._add(total, parts, first=stage == 0)
        if stage + 1 < len(runs):
            peer = self._lanes.handler(runs[stage + 1][0], lane)
            self._mesh.post(peer, FrameKind.PARTIAL, self._what, lane, piece, stage + 1, as_bytes(total))
            return
        if self._reduction is Reduction.MEAN:
            finish_mean(total, self._size)
        if total.dtype != self._whole.dtype:
            self._whole[where] = total
        self._forward(lane, piece)

    def _add(self, total: Array, parts: Sequence[Array], *, first: bool) -> None:
        ufunc = combining_ufunc(self._reduction)
        if first and total.dtype == parts[0].dtype:
            without_mean = Reduction.SUM if self._reduction is Reduction.MEAN else self._reduction
            reduce_into(total, parts, without_mean)
            return
        if first:
            total[:] = parts[0]
            parts = parts[1:]
        for part in parts:
            ufunc(total, part.astype(total.dtype, copy=False), out=total)

    def _forward(self, lane: int, piece: int) -> None:
        """Send a finished piece to the next host that needs it."""
        owner_host, origin = self._lanes.host_of[lane], self._origin(lane)
        if self._everywhere:
            target = self._lanes.next_host(self._host, origin)
        else:
            target = owner_host if self._host == origin != owner_host else None
        if target is not None:
            peer = self._lanes.handler(target, lane)
            payload = as_bytes(self._whole[self._bounds(lane)[piece]])
            self._mesh.post(peer, FrameKind.RESULT, self._what, lane, piece, payload=payload)


def pieces_of(raw: ByteArray) -> list[ByteArray]:
    """A lane's bytes in pieces."""
    return [raw[at : at + PIECE_BYTES] for at in range(0, raw.size, PIECE_BYTES)]
