"""Who gets IPUs next: requests in their order, and backfill behind the bookings of those that wait.

Requests are taken in order: higher priority first, then first come first served. One that fits starts now. One that
does not fit books the place that becomes free soonest, from the latest moment at which that place can become free.
Backfill: a later request may start earlier if it delays no booking, on other IPUs, or with a time limit that ends
before the booking begins. A partition without a time limit may end at any moment; a place that waits for one is booked
from now on, and its start time is unknown. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from podrun.core.cluster import Cluster
from podrun.core.quick_dataclass import dataclass
from podrun.partition.state.placement import (
    Flags,
    IpuIndex,
    MachineSlice,
    find_block,
    index_at,
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


_NOWHERE: tuple[tuple[MachineSlice, ...], list[tuple[int, int]]] = ((), [])


class HeldTimes:
    """Until when partitions hold each IPU, kept from event to event: a time, or a time from now for a partition that
    has not become active. `replace` follows a change of one partition."""

    def __init__(self, cluster: Cluster, partitions: Iterable[Partition] = ()) -> None:
        self._cluster = cluster
        self._until: Times = np.zeros(cluster.ipu_count)
        self._from_now: Times = np.zeros(cluster.ipu_count)
        self._ranges: dict[str, tuple[tuple[MachineSlice, ...], list[tuple[int, int]]]] = {}
        for partition in partitions:
            self.replace(partition.name, partition)

    def replace(self, name: str, partition: Partition | None) -> None:
        """A partition has changed, come or gone (None)."""
        if partition is None:
            for begin, end in self._ranges.pop(name, _NOWHERE)[1]:
                self._until[begin:end] = self._from_now[begin:end] = 0.0
            return
        ranges = self._ranges_of(partition)
        known = self._ranges.get(name, _NOWHERE)
        if known[1] is not ranges:
            for begin, end in known[1]:
                self._until[begin:end] = self._from_now[begin:end] = 0.0
        self._ranges[name] = (partition.slices, ranges)
        until, from_now = partition.held_times()
        for begin, end in ranges:
            self._until[begin:end], self._from_now[begin:end] = until, from_now

    def _ranges_of(self, partition: Partition) -> list[tuple[int, int]]:
        """The IPUs of a partition; most changes leave them where they are."""
        slices, ranges = self._ranges.get(partition.name, _NOWHERE)
        return ranges if slices is partition.slices else ranges_of(self._cluster, partition.slices)

    def at(self, now: float, changed: Mapping[str, Partition | None] | None = None) -> Times:
        """Until when each IPU is held at the latest, and ``now`` for those that are free. ``changed``: partitions that
        differ from those followed, or are gone (None)."""
        times = self._from_now + now
        np.maximum(times, self._until, out=times)
        if not changed:
            return times
        for name in changed:
            for begin, end in self._ranges.get(name, _NOWHERE)[1]:
                times[begin:end] = now
        for partition in changed.values():
            if partition is not None:
                for begin, end in self._ranges_of(partition):
                    times[begin:end] = partition.busy_until(now)
        return times


class Timeline:
    """For each IPU: whether it is held, from when it is booked for a waiting request, and when it is free after both.

    ``held``: until when partitions hold it; `now` for those that are free. The array becomes the timeline's own."""

    def __init__(self, cluster: Cluster, now: float, held: Times | None = None) -> None:
        self.now = now
        self._free_at: Times = np.full(cluster.ipu_count, now) if held is None else held
        self.open: Flags = self._free_at <= now
        self._booked_from: Times = np.full(cluster.ipu_count, math.inf)
        self._first_booking = math.inf
        self._changes: list[tuple[IpuIndex, float]] = []
        """IPUs and until when they are not free at least, in the order in which that was noted."""
        self._latest: dict[tuple[int, int, int, int], tuple[Times, int]] = {}
        """By `choices`, number of the choice, size and domains of a request: when each of its places is free, and how
        many of the changes that takes in."""
        self._refused: dict[tuple[int, int, int], float] = {}
        """By `choices`, size and domains: the shortest limit of a request that had no place now. Notes take places away
        and give none, so that a longer one has none later."""

    def hold(self, ipus: IpuIndex, until: float) -> None:
        """Note that IPUs are held from now until ``until``, or ``math.inf``."""
        if until > self.now:
            self.open[ipus] = False
        self._not_free(ipus, until)

    def book(self, ipus: IpuIndex, begin: float, end: float) -> None:
        """Book IPUs for a waiting request from ``begin`` to ``end``."""
        self._booked_from[ipus] = np.minimum(self._booked_from[ipus], begin)
        self._first_booking = min(self._first_booking, begin)
        self._not_free(ipus, end)

    def _not_free(self, ipus: IpuIndex, until: float) -> None:
        self._free_at[ipus] = np.maximum(self._free_at[ipus], until)
        self._changes.append((ipus, until))

    def place_now(self, request: RequestToPlan) -> PlannedPlace | None:
        """A place in which a request can start now without hindering a booking; None if there is none."""
        shape = (id(request.choices), request.size, request.ilds)
        if shape in self._refused and request.limit_s >= self._refused[shape]:
            return None
        end, open_now = self.now + request.limit_s, self.open
        if self._first_booking < end:
            open_now = open_now & (self._booked_from >= end)
        for allocation, cluster, usable in request.choices:
            block = find_block(cluster, request.size, request.ilds, usable & open_now)
            if block is not None:
                return PlannedPlace(allocation, cluster, *block)
        self._refused[shape] = request.limit_s
        return None

    def soonest(self, request: RequestToPlan) -> tuple[PlannedPlace, float] | None:
        """The place that is free soonest, and when at the latest; of places whose time is unknown, the one with the
        fewest IPUs held. None if no place can hold the request.
        """
        best: tuple[float, int, PlannedPlace] | None = None
        for number, (allocation, cluster, usable) in enumerate(request.choices):
            domain, share = cluster.topology.ild_ipus, request.size // request.ilds
            if share < 1 or share > domain:
                continue
            late = self._latest_of(request, number)
            if not late.size:
                continue
            flat, held = int(late.argmin()), 0
            if math.isinf(
                late.item(flat)
            ):  # All are: those that will never be free, and those whose time is unknown.
                possible = _of_places(cluster, usable, np.logical_and, request)
                if not possible.any():
                    continue
                unknown = ~usable | np.isinf(self._free_at)
                counts = _of_places(cluster, unknown.astype(np.int32), np.add, request)
                held = int(counts[possible].min())
                flat = int(np.argmax(possible & (counts == held)))
            candidate = (late.item(flat), held)
            if best is None or candidate < best[:2]:
                best = (*candidate, PlannedPlace(allocation, cluster, *divmod(flat, domain // share)))
        return None if best is None else (best[2], best[0])

    def _latest_of(self, request: RequestToPlan, number: int) -> Times:
        """When each place of a request's shape is free in one of its choices."""
        _, cluster, usable = request.choices[number]
        key = (id(request.choices), number, request.size, request.ilds)
        if key not in self._latest:
            late = _of_places(cluster, np.where(usable, self._free_at, np.inf), np.maximum, request)
        else:
            late, taken_in = self._latest[key]
            for ipus, until in self._changes[taken_in:]:
                places = _places_on(cluster, ipus, request, late.size)
                late.reshape(-1)[places] = np.maximum(late.reshape(-1)[places], until)
        self._latest[key] = (late, len(self._changes))
        return late


class PlannedPlace(NamedTuple):
    """A place for a request of known shape: an allocation, its V-IPU cluster, a group of domains, a block in each."""

    allocation: str
    cluster: Cluster
    group: int
    offset: int

    def selector(self, request: RequestToPlan) -> IpuIndex:
        """What selects its IPUs in an array over the POD."""
        return index_at(self.cluster, request.size, request.ilds, self.group, self.offset)

    def planned(self, request: RequestToPlan, at: float, *, starts: bool) -> PlannedStart:
        """The plan for a request to lie here."""
        ipus = place_at(self.cluster, request.size, request.ilds, self.group, self.offset)
        return PlannedStart(request.name, self.allocation, ipus, at, starts)


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


def _places_on(cluster: Cluster, ipus: IpuIndex, request: RequestToPlan, count: int) -> NDArray[np.intp]:
    """The places of a request's shape, numbered as by `_of_places`, that have some of these IPUs."""
    domain, share = cluster.topology.ild_ipus, request.size // request.ilds
    own = np.arange(ipus.start, ipus.stop) if isinstance(ipus, slice) else ipus
    number, inside = np.divmod(own - cluster.first_ipu, domain)
    places: NDArray[np.intp] = number // request.ilds * (domain // share) + inside // share
    return np.asarray(places[(number >= 0) & (places < count)])


def plan_with_backfill(
    timeline: Timeline, requests: Sequence[RequestToPlan], *, only_starts: bool = False
) -> list[PlannedStart]:
    """What happens to requests, given in their order: backfill behind the bookings of those before. The timeline holds
    the bookings afterwards. ``only_starts``: leave out requests behind the last one that can start.
    """
    result = []
    last = _last_to_start(timeline, requests, len(requests) - 1) if only_starts else len(requests) - 1
    for number, request in enumerate(requests):
        if number > last:
            break
        now, shrinks = timeline.now, True
        place = timeline.place_now(request)
        if place is not None:
            timeline.hold(place.selector(request), now + request.limit_s)
            result.append(place.planned(request, now, starts=True))
        elif (later := timeline.soonest(request)) is not None:
            block, at = later
            ipus = block.selector(request)
            shrinks = bool(timeline.open[ipus].any())
            timeline.book(ipus, now if math.isinf(at) else at, at + request.limit_s)
            result.append(block.planned(request, at, starts=False))
        else:
            shrinks = False
            result.append(PlannedStart(request.name, "", (), math.inf, starts=False))
        if only_starts and shrinks and number < last:
            last = _last_to_start(timeline, requests, last)
    return result


def _last_to_start(timeline: Timeline, requests: Sequence[RequestToPlan], last: int) -> int:
    """The last request up to number ``last`` that has a place now, -1 if none. What is planned takes places away and
    gives none, so that none behind it starts."""
    while last >= 0 and timeline.place_now(requests[last]) is None:
        last -= 1
    return last
