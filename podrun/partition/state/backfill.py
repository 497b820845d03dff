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

import numpy as np
from numpy.typing import NDArray

from podrun.core.cluster import Cluster
from podrun.partition.state.placement import (
    Flags,
    find_place,
    place_at,
)

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
