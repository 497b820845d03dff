"""Who gets IPUs next: requests in their order, and backfill behind the bookings of those that wait.

Requests are taken in order: higher priority first, then first come first served. One that fits starts now. One that
does not fit books the place that becomes free soonest, from the latest moment at which that place can become free.
Backfill: a later request may start earlier if it delays no booking, on other IPUs, or with a time limit that ends
before the booking begins. A partition without a time limit may end at any moment; a place that waits for one is booked
from now on, and its start time is unknown. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from podrun.core.cluster import Cluster
from podrun.partition.state.placement import (
    Flags,
    find_place,
    place_at,
    ranges_of,
)

if TYPE_CHECKING:
    from podrun.partition.state.records import Partition

Times = NDArray[np.float64]
"""A time for each IPU of the POD, seconds since 1970."""
Choice = tuple[str, Cluster, Flags]
"""An allocation, its V-IPU cluster, and its IPUs that may be used."""


@dataclass(frozen=True, slots=True)
class RequestToPlan:
    """A request as the plan needs it. ``choices``: the allocations in which it may lie, in order of preference;
    ``limit_s``: seconds after which its partition ends; infinite without a limit."""

    name: str
    size: int
    ilds: int
    choices: tuple[Choice, ...]
    limit_s: float = math.inf


@dataclass(frozen=True, slots=True)
class PlannedStart:
    """The plan for a request: the IPUs it gets, and when at the latest. ``at``: now if it starts; infinite if unknown.
    ``ipus`` is empty if no place can ever hold it as things are.
    """

    name: str
    allocation: str
    ipus: tuple[int, ...]
    at: float
    starts: bool


class HeldTimes:
    """Until when partitions hold each IPU, kept from event to event: a time, or a time from now for a partition that
    has not become active. `replace` follows a change of one partition."""

    def __init__(self, cluster: Cluster, partitions: Iterable[Partition] = ()) -> None:
        self._cluster = cluster
        self._until: Times = np.zeros(cluster.ipu_count)
        self._from_now: Times = np.zeros(cluster.ipu_count)
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        for partition in partitions:
            self.replace(partition.name, partition)

    def copy(self) -> HeldTimes:
        """Times that may be changed without changing these."""
        other = HeldTimes.__new__(HeldTimes)
        other._cluster, other._ranges = self._cluster, dict(self._ranges)
        other._until, other._from_now = self._until.copy(), self._from_now.copy()
        return other

    def replace(self, name: str, partition: Partition | None) -> None:
        """A partition has changed, come or gone (None)."""
        for begin, end in self._ranges.pop(name, ()):
            self._until[begin:end] = self._from_now[begin:end] = 0.0
        if partition is None:
            return
        self._ranges[name] = ranges_of(self._cluster, partition.slices)
        until, from_now = partition.held_times()
        for begin, end in self._ranges[name]:
            self._until[begin:end], self._from_now[begin:end] = until, from_now

    def at(self, now: float) -> Times:
        """Until when each IPU is held at the latest, and ``now`` for those that are free."""
        return np.maximum(np.maximum(self._until, now + self._from_now), now)


class Timeline:
    """For each IPU: until when it is held, from when it is booked for a waiting request, and when it is free after
    both.
    """

    def __init__(self, cluster: Cluster, now: float, held: Times | None = None) -> None:
        self.now = now
        self._held_until: Times = np.full(cluster.ipu_count, now) if held is None else held
        self._booked_from: Times = np.full(cluster.ipu_count, math.inf)
        self._free_at: Times = self._held_until.copy()

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
            possible = _of_places(cluster, usable, np.logical_and, request)
            if not possible.any():
                continue
            late = _of_places(cluster, at, np.maximum, request)
            held = _of_places(cluster, np.isinf(at).astype(np.int32), np.add, request)
            best_late = late[possible].min()
            soonest = possible & (late == best_late)
            fewest = soonest & (held == held[soonest].min())
            group, offset = divmod(int(np.argmax(fewest)), domain // share)
            candidate = (float(late[group, offset]), int(held[group, offset]), allocation)
            if best is None or candidate[:2] < best[:2]:
                best = (*candidate, place_at(cluster, request.size, request.ilds, group, offset))
        return None if best is None else (best[2], best[3], best[0])


def _of_places(
    cluster: Cluster, values: NDArray[Any], join: np.ufunc, request: RequestToPlan
) -> NDArray[Any]:
    """A figure for each place of the request's size in a cluster, from one for each IPU of the POD: (group of domains,
    block). ``join`` makes one figure of two; pairs are joined first, which is faster than along a short axis."""
    domain, share = cluster.topology.ild_ipus, request.size // request.ilds
    own = values[cluster.first_ipu : cluster.first_ipu + cluster.ipu_count]
    while share > 1:
        own, share = join(own[0::2], own[1::2]), share // 2
    per_domain = domain * request.ilds // request.size
    whole = len(own) // per_domain // request.ilds * request.ilds
    grouped = own[: whole * per_domain].reshape(-1, request.ilds, per_domain)
    return np.asarray(join.reduce(grouped, axis=1))


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
