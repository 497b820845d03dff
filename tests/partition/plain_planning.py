"""Planning as it was first written: IPU by IPU, rebuilt for each event. What is fast must decide the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podrun.core.cluster import Cluster
from podrun.partition.state.backfill import PlannedStart, RequestToPlan
from podrun.partition.state.candidates import ChoicesByPlace
from podrun.partition.state.events import MachineOrder
from podrun.partition.state.placement import Flags, ipus_of, place_at
from podrun.partition.state.queueing import QUEUE_DEPTH, _ipus_of_agents, _to_plan

Times = NDArray[np.float64]
Draft = Any


def find_place(cluster: Cluster, size: int, ilds: int, usable: Flags) -> tuple[int, ...] | None:
    """IPUs of a V-IPU cluster for a partition of ``size`` IPUs over ``ilds`` IPU-Link domains, among those usable; None
    if there are none.

    Best fit: of all places the one in the smallest free block, so that larger blocks stay whole; of equals the first.
    """
    domain, share = cluster.topology.ild_ipus, size // ilds
    usable = usable[cluster.first_ipu : cluster.first_ipu + cluster.ipu_count]
    if share < 1 or share > domain or len(usable) < domain * ilds:
        return None
    blocks: Flags = np.all(
        usable.reshape(-1, share), axis=1
    )  # Aligned blocks of one domain, in the POD's order.
    groups = _in_groups(blocks, domain // share, ilds)
    fits = np.all(groups, axis=1)
    if not fits.any():
        return None
    enclosing = _in_groups(_free_block(blocks, share, domain), domain // share, ilds)[:, 0, :]
    group, offset = divmod(int(np.where(fits, enclosing, domain + 1).argmin()), domain // share)
    return place_at(cluster, size, ilds, group, offset)


def _in_groups(values: NDArray[np.generic], per_domain: int, ilds: int) -> NDArray[np.generic]:
    """Values of blocks as (group of domains, domain in the group, block); domains that make no whole group are left
    out."""
    by_domain = values.reshape(-1, per_domain)
    whole = len(by_domain) // ilds * ilds
    return by_domain[:whole].reshape(-1, ilds, per_domain)


def _free_block(blocks: Flags, share: int, domain: int) -> NDArray[np.int64]:
    """For each block, the IPUs of the largest aligned block of its domain that is free and holds it."""
    sizes = np.full(len(blocks), share, np.int64)
    free, size = blocks, share
    while size < domain:
        free = np.all(free.reshape(-1, 2), axis=1)
        size *= 2
        sizes[np.repeat(free, size // share)] = size
    return sizes


class Timeline:
    """For each IPU: until when it is held, from when it is booked for a waiting request, and when it is free after
    both.
    """

    def __init__(self, cluster: Cluster, now: float) -> None:
        self.now = now
        self._held_until: Times = np.full(cluster.ipu_count, now)
        self._booked_from: Times = np.full(cluster.ipu_count, math.inf)
        self._free_at: Times = np.full(cluster.ipu_count, now)

    def hold(self, ipus: Sequence[int] | NDArray[np.intp], until: float) -> None:
        """Note that IPUs are held from now until ``until``, or ``math.inf``."""
        self._held_until[ipus] = np.maximum(self._held_until[ipus], until)
        self._free_at[ipus] = np.maximum(self._free_at[ipus], until)

    def book(self, ipus: Sequence[int] | NDArray[np.intp], begin: float, end: float) -> None:
        """Book IPUs for a waiting request from ``begin`` to ``end``."""
        self._booked_from[ipus] = np.minimum(self._booked_from[ipus], begin)
        self._free_at[ipus] = np.maximum(self._free_at[ipus], end)

    def place_now(self, request: RequestToPlan) -> tuple[str, tuple[int, ...]] | None:
        """A place in which a request can start now without hindering a booking; None if there is none."""
        open_now = (self._held_until <= self.now) & (self._booked_from >= self.now + request.limit_s)
        for allocation, cluster, usable in request.choices:
            ipus = find_place(cluster, request.size, request.ilds, usable & open_now)
            if ipus is not None:
                return allocation, ipus
        return None

    def soonest(self, request: RequestToPlan) -> tuple[str, tuple[int, ...], float] | None:
        """The place that is free soonest, and when at the latest; of places whose time is unknown, the one with the
        fewest IPUs held. None if no place can hold the request.
        """
        best: tuple[float, int, str, tuple[int, ...]] | None = None
        for allocation, cluster, usable in request.choices:
            domain, share = cluster.topology.ild_ipus, request.size // request.ilds
            if share < 1 or share > domain:
                continue
            at = np.where(usable, self._free_at, np.inf)
            late, held = (
                _of_places(cluster, at, np.max, request),
                _of_places(cluster, np.isinf(at), np.sum, request),
            )
            possible = _of_places(cluster, usable, np.all, request).astype(bool)
            if not possible.any():
                continue
            order = np.lexsort((held.ravel(), np.where(possible, late, np.inf).ravel(), ~possible.ravel()))
            group, offset = divmod(int(order[0]), domain // share)
            found = (float(late[group, offset]), int(held[group, offset]), allocation)
            if best is None or found[:2] < best[:2]:
                best = (*found, place_at(cluster, request.size, request.ilds, group, offset))
        return None if best is None else (best[2], best[3], best[0])


def _of_places(
    cluster: Cluster, values: NDArray[np.generic], reduce: object, request: RequestToPlan
) -> NDArray[np.float64]:
    """A figure for each place of the request's size in a cluster, from one for each IPU of the POD: (group of domains,
    block)."""
    domain, share = cluster.topology.ild_ipus, request.size // request.ilds
    own = values[cluster.first_ipu : cluster.first_ipu + cluster.ipu_count]
    by_domain = own.reshape(-1, domain // share, share)
    whole = len(by_domain) // request.ilds * request.ilds
    grouped = by_domain[:whole].reshape(-1, request.ilds, domain // share, share)
    return np.asarray(reduce(grouped, axis=(1, 3)))  # type: ignore[operator]


def plan_with_backfill(timeline: Timeline, requests: Iterable[RequestToPlan]) -> list[PlannedStart]:
    """What happens to requests, given in their order: backfill behind the bookings of those before. The timeline holds
    the bookings afterwards.
    """
    result = []
    for request in requests:
        now = timeline.now
        place = timeline.place_now(request)
        if place is not None:
            allocation, ipus = place
            timeline.hold(list(ipus), now + request.limit_s)
            result.append(PlannedStart(request.name, allocation, ipus, now, starts=True))
            continue
        later = timeline.soonest(request)
        if later is None:
            result.append(PlannedStart(request.name, "", (), math.inf, starts=False))
            continue
        allocation, ipus, at = later
        timeline.book(list(ipus), now if math.isinf(at) else at, at + request.limit_s)
        result.append(PlannedStart(request.name, allocation, ipus, at, starts=False))
    return result


def serve_queue(draft: Draft) -> list[MachineOrder]:
    """Make partitions of the queued requests that can start now, but for those whose clients are absent: these keep
    their places. A start may change the place for which another request waits, and so let a third one start; this goes
    on until none can start.
    """
    instructions: list[MachineOrder] = []
    while starting := [p for p in planned_queue(draft) if p.starts and p.name not in draft.absent]:
        for planned in starting:
            needs = draft.queue[planned.name].needs
            draft.note("queue", planned.name, None)
            instructions += draft.make(needs, planned.allocation, planned.ipus)
    return instructions


def planned_queue(draft: Draft, more: Sequence[Any] = ()) -> list[PlannedStart]:
    """The plan_with_backfill for the queue in its order, and then for ``more``."""
    waiting = sorted([*draft.queue.values(), *more], key=lambda entry: entry.rank)
    if len(waiting) > QUEUE_DEPTH:
        waiting = waiting[:QUEUE_DEPTH]  # A request that is not planned does not start.
    inside = [entry for entry in waiting if entry.needs.reservation]
    outside = [entry for entry in waiting if not entry.needs.reservation]
    first = plan_with_backfill(
        _timeline_inside(draft), [_to_plan(ChoicesByPlace(draft), entry.needs) for entry in inside]
    )
    timeline = _timeline(draft)
    for reservation in draft.reservations.values():
        timeline.book(_ipus_of_agents(draft, reservation.agents), reservation.start, reservation.end)
    second = plan_with_backfill(timeline, [_to_plan(ChoicesByPlace(draft), entry.needs) for entry in outside])
    by_name = {planned.name: planned for planned in (*first, *second)}
    return [by_name[entry.needs.name] for entry in waiting]


def _timeline(draft: Draft) -> Timeline:
    """The timeline of the IPUs that partitions hold."""
    timeline = Timeline(draft.cluster, draft.now)
    for partition in draft.partitions.values():
        timeline.hold(list(ipus_of(draft.cluster, partition.slices)), partition.busy_until(draft.now))
    return timeline


def _timeline_inside(draft: Draft) -> Timeline:
    """The timeline for requests that name a reservation: its IPUs are theirs, but not before it begins."""
    timeline = _timeline(draft)
    for reservation in draft.reservations.values():
        if reservation.start > draft.now:
            timeline.hold(_ipus_of_agents(draft, reservation.agents), reservation.start)
    return timeline
