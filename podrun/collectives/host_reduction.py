"""A reduction over several hosts: lanes in pieces, in rank order (see `podrun.collectives.lanes`).

The running reduction of a piece stands in the host's result row itself, or apart where that is too narrow for
it, and is sent from there. It comes back finished, if this host needs it, to the same place: by then it has
long been sent. A run of one rank that comes first has nothing to reduce: its row is sent as it is.

Between two hosts of which the second has one rank, the sum may as well be finished at the first, from that
rank's row as it is: so each host finishes its own ranks' lanes, and both add and send alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from podrun.collectives.arithmetic import combine, finish_mean, reduce_into, wide_dtype
from podrun.collectives.group import Array, ByteArray, as_bytes, slice_of
from podrun.collectives.lanes import Layout
from podrun.collectives.mesh import Mesh
from podrun.collectives.wire import Frame, FrameKind, Link
from podrun.executable import Reduction

PIECE_BYTES = 512 * 1024
"""Lanes travel in pieces of so many bytes: small enough to overlap adding and both ways, large enough for
TCP.
"""
_PIECES = 32
"""Longer vectors travel in so many pieces: each costs the interpreter some turns with the thread that sends."""
_MOST_PIECE_BYTES = 2 * 1024 * 1024
_MUCH = 32 * 1024 * 1024
"""Bytes from which a reduction has time to profit of `Link.keep_in_caches`."""


class HostReduction:
    """One reduction over hosts, as one rank sees it: the lanes that it handles, piece by piece."""

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        what: bytes,
        rows: Sequence[Array],
        whole: Array,
        reduction: Reduction,
        everywhere: bool,
    ) -> None:
        self._rank, self._mesh, self._what = mesh.rank, mesh, what
        self._whole, self._reduction, self._everywhere = whole, reduction, everywhere
        self._layout, self._host = layout, layout.host_of[mesh.rank]
        here = layout.ranks_on[self._host]
        self._rows = dict(zip(here, rows, strict=False))
        self._size = len(layout.host_of)
        self._wide = wide_dtype(whole.dtype)
        nbytes = whole.size * self._wide.itemsize
        piece = min(max(PIECE_BYTES, nbytes // _PIECES), _MOST_PIECE_BYTES)
        self._step = max(1, piece // self._wide.itemsize)
        if nbytes >= _MUCH:
            mesh.keep_in_caches()
        runs = layout.runs
        self._shares = len(runs) == 2 and len(runs[1][1]) == 1
        self._raw = np.empty(min(self._step, whole.size) if self._shares else 0, whole.dtype)
        self._cuts: dict[int, list[slice]] = {}
        self._scratch: dict[tuple[int, int], Array] = {}

    def run(self) -> None:
        """Start the lanes that start here, then work on what comes; returns when nothing more is owed."""
        runs = self._layout.runs
        lanes = self._layout.lanes_of(self._rank)
        owed: dict[int, int] = {}
        for lane in lanes:
            for host in self._sources(lane):
                source = self._layout.handler(host, lane)
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
        """Whether the host of the first run finishes the lane, rather than that of the last."""
        return self._shares and self._layout.host_of[lane] == self._layout.runs[0][0]

    def _origin(self, lane: int) -> int:
        """The host where a lane is finished."""
        return self._layout.runs[0 if self._finished_first(lane) else -1][0]

    def _sources(self, lane: int) -> list[int]:
        """The hosts that send this one pieces of a lane, once for each time they do."""
        runs = self._layout.runs
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
            return self._layout.previous_host(self._host)
        return origin if self._layout.host_of[lane] == self._host else None

    def _post_row(self, host: int, lane: int) -> None:
        """Send this rank's own values of a lane to the host that finishes it."""
        row, peer = self._rows[self._rank], self._layout.handler(host, lane)
        for piece, where in enumerate(self._bounds(lane)):
            self._mesh.post(peer, FrameKind.ROW, self._what, lane, piece, payload=as_bytes(row[where]))

    def _bounds(self, lane: int) -> list[slice]:
        bounds = self._cuts.get(lane)
        if bounds is None:
            own, step = slice_of(lane, self._size, self._whole.size), self._step
            starts = range(own.start, own.stop, step)
            bounds = self._cuts[lane] = [slice(at, min(at + step, own.stop)) for at in starts]
        return bounds

    def _total(self, lane: int, piece: int) -> Array:
        """Where the running reduction of a piece stands: in the result itself, unless that is too narrow."""
        where = self._bounds(lane)[piece]
        if self._wide == self._whole.dtype:
            return self._whole[where]
        key = (lane, piece)
        if key not in self._scratch:
            self._scratch[key] = np.empty(where.stop - where.start, self._wide)
        return self._scratch[key]

    def _take(self, link: Link, frame: Frame, deadline: float) -> None:
        if frame.kind is FrameKind.PARTIAL:
            self._mesh.fill(link, frame, as_bytes(self._total(frame.a, frame.b)), deadline)
            self._advance(frame.a, frame.b, frame.tag)
        elif frame.kind is FrameKind.ROW:
            where = self._bounds(frame.a)[frame.b]
            raw = self._raw[: where.stop - where.start]
            self._mesh.fill(link, frame, as_bytes(raw), deadline)
            first = [self._rows[rank][where] for rank in self._layout.runs[0][1]]
            reduce_into(self._whole[where], [*first, raw], self._reduction)
            self._hand_on(frame.a, frame.b)
        else:
            where = self._bounds(frame.a)[frame.b]
            self._mesh.fill(link, frame, as_bytes(self._whole[where]), deadline)
            self._hand_on(frame.a, frame.b)

    def _advance(self, lane: int, piece: int, stage: int) -> None:
        """Add the values of this host's run to a piece, and send it where it goes next."""
        runs = self._layout.runs
        where = self._bounds(lane)[piece]
        parts = [self._rows[rank][where] for rank in runs[stage][1]]
        if stage == 0 and len(parts) == 1 and self._wide == self._whole.dtype:
            total = parts[0]
        else:
            total = self._total(lane, piece)
            self._add(total, parts, first=stage == 0)
        if stage + 1 < len(runs):
            peer = self._layout.handler(runs[stage + 1][0], lane)
            self._mesh.post(peer, FrameKind.PARTIAL, self._what, lane, piece, stage + 1, as_bytes(total))
            return
        if self._reduction is Reduction.MEAN:
            finish_mean(total, self._size)
        if total.dtype != self._whole.dtype:
            self._whole[where] = total
        self._hand_on(lane, piece)

    def _add(self, total: Array, parts: Sequence[Array], *, first: bool) -> None:
        ufunc = combine(self._reduction)
        if first and total.dtype == parts[0].dtype:
            without_mean = Reduction.SUM if self._reduction is Reduction.MEAN else self._reduction
            reduce_into(total, parts, without_mean)
            return
        if first:
            total[:] = parts[0]
            parts = parts[1:]
        for part in parts:
            ufunc(total, part.astype(total.dtype, copy=False), out=total)

    def _hand_on(self, lane: int, piece: int) -> None:
        """Send a finished piece to the next host that needs it."""
        owner_host, origin = self._layout.host_of[lane], self._origin(lane)
        if self._everywhere:
            target = self._layout.next_host(self._host, origin)
        else:
            target = owner_host if self._host == origin != owner_host else None
        if target is not None:
            peer = self._layout.handler(target, lane)
            payload = as_bytes(self._whole[self._bounds(lane)[piece]])
            self._mesh.post(peer, FrameKind.RESULT, self._what, lane, piece, payload=payload)


def pieces_of(raw: ByteArray) -> list[ByteArray]:
    """A lane's bytes in pieces."""
    return [raw[at : at + PIECE_BYTES] for at in range(0, raw.size, PIECE_BYTES)]
