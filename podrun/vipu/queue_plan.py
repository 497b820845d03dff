"""When queued requests for partitions can start: a pure plan over time.

Requests are planned in their order: higher priority first, then first come first served. One that fits starts now. One
that does not gets the place that is free soonest, booked from the moment at which it is free at the latest. A later
request may start before an earlier one only where it is no hindrance to any booking: on other IPUs, or for a limited
time that ends before the booking begins. Partitions without a time limit may end at any moment, so a place that waits
for one is booked from now on, and its time is not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from podrun.core.cluster import Cluster
from podrun.vipu.ipu_placement import Flags, find_place, place_at

Times = NDArray[np.float64]
"""A time for each IPU of the POD, seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A request as the plan needs it. ``usable``: the allocations in which it may lie, in order of preference;
    ``limit_s``: seconds after which its partition ends; infinite without a limit."""

    name: str
    size: int
    ilds: int
    usable: tuple[tuple[str, Flags], ...]
    limit_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Planned:
    """What the plan says about a wish: the IPUs it gets, and when at the latest. ``at``: now if it starts; infinite if
    that is not known. ``ipus`` is empty if no place can ever hold it as things are."""

    name: str
    allocation: str
    ipus: tuple[int, ...]
    at: float
    starts: bool


class Timeline:
    """Until when each IPU is held, from when it is booked for somebody who waits, and when it is free after both."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self.cluster, self.now = cluster, now
        self._held_until: Times = np.full(cluster.ipu_count, now)
        self._booked_from: Times = np.full(cluster.ipu_count, math.inf)
        self._free_at: Times = np.full(cluster.ipu_count, now)

    def hold(self, ipus: Sequence[int] | NDArray[np.intp], until: float) -> None:
        """IPUs are held from now until then, or ``math.inf``."""
        self._held_until[ipus] = np.maximum(self._held_until[ipus], until)
        self._free_at[ipus] = np.maximum(self._free_at[ipus], until)

    def book(self, ipus: Sequence[int] | NDArray[np.intp], begin: float, end: float) -> None:
        """IPUs are kept for somebody from ``begin`` to ``end``."""
        self._booked_from[ipus] = np.minimum(self._booked_from[ipus], begin)
        self._free_at[ipus] = np.maximum(self._free_at[ipus], end)

    def place_now(self, wish: Wish) -> tuple[str, tuple[int, ...]] | None:
        """A place in which a wish can start now without hindering a booking; None if there is none."""
        open_now = (self._held_until <= self.now) & (self._booked_from >= self.now + wish.limit_s)
        for allocation, usable in wish.usable:
            ipus = find_place(self.cluster, wish.size, wish.ilds, usable & open_now)
            if ipus is not None:
                return allocation, ipus
        return None

    def soonest(self, wish: Wish) -> tuple[str, tuple[int, ...], float] | None:
        """The place that is free soonest, and when at the latest; of those whose time is not known the one with the
        fewest IPUs held. None if no place can hold the wish."""
        best: tuple[float, int, str, tuple[int, ...]] | None = None
        domain, share = self.cluster.topology.ild_ipus, wish.size // wish.ilds
        if share < 1 or share > domain:
            return None
        for allocation, usable in wish.usable:
            at = np.where(usable, self._free_at, np.inf)
            late, held = self._of_places(at, np.max, wish), self._of_places(np.isinf(at), np.sum, wish)
            possible = self._of_places(usable, np.all, wish).astype(bool)
            if not possible.any():
                continue
            order = np.lexsort((held.ravel(), np.where(possible, late, np.inf).ravel(), ~possible.ravel()))
            group, offset = divmod(int(order[0]), domain // share)
            found = (float(late[group, offset]), int(held[group, offset]), allocation)
            if best is None or found[:2] < best[:2]:
                best = (*found, place_at(self.cluster, wish.size, wish.ilds, group, offset))
        return None if best is None else (best[2], best[3], best[0])

    def _of_places(self, values: NDArray[np.generic], reduce: object, wish: Wish) -> NDArray[np.float64]:
        """A figure for each place of the wish's size, from one for each IPU: (group of domains, block)."""
        domain, share = self.cluster.topology.ild_ipus, wish.size // wish.ilds
        by_domain = values.reshape(-1, domain // share, share)
        whole = len(by_domain) // wish.ilds * wish.ilds
        grouped = by_domain[:whole].reshape(-1, wish.ilds, domain // share, share)
        return np.asarray(reduce(grouped, axis=(1, 3)))  # type: ignore[operator]


def plan(timeline: Timeline, wishes: Iterable[Wish]) -> list[Planned]:
    """What happens to wishes, given in their order; the timeline holds the bookings afterwards."""
    result = []
    for wish in wishes:
        now = timeline.now
        place = timeline.place_now(wish)
        if place is not None:
            allocation, ipus = place
            timeline.hold(list(ipus), now + wish.limit_s)
            result.append(Planned(wish.name, allocation, ipus, now, starts=True))
            continue
        later = timeline.soonest(wish)
        if later is None:
            result.append(Planned(wish.name, "", (), math.inf, starts=False))
            continue
        allocation, ipus, at = later
        timeline.book(list(ipus), now if math.isinf(at) else at, at + wish.limit_s)
        result.append(Planned(wish.name, allocation, ipus, at, starts=False))
    return result
