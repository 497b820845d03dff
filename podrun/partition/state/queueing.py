"""The allocator's part that decides who gets IPUs next: at once, from the queue, or not now and why.

`plan` says over time when queued requests can start. It takes requests in order: higher priority first, then first come
first served. A request that fits starts now. One that does not fit books the place that becomes free soonest, from the
latest moment at which that place can become free. A later request may start earlier only if it delays no booking: on
other IPUs, or with a time limit that ends before the booking begins. A partition without a time limit may end at any
moment; a place that waits for one is booked from now on, and its start time is unknown.

`plan` is pure; the other functions work on the allocator's draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from podrun.core.cluster import Cluster
from podrun.core.errors import ConflictError, ExhaustedError, ExistsError, UsageError
from podrun.partition.state import events as ev
from podrun.partition.state.events import Instruction, Partition, Queued
from podrun.partition.state.placement import (
    Flags,
    find_place,
    ipus_of,
    largest_place,
    place_at,
    place_of_index,
)
from podrun.partition.state.requirements import check_name, complete_requirements, unknown_name
from podrun.partition.state.rights import owner_name
from podrun.partition.state.values import NO_USER, Requirements

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator


Times = NDArray[np.float64]
"""A time for each IPU of the POD, seconds since 1970."""
Choice = tuple[str, Cluster, Flags]
"""An allocation, its V-IPU cluster, and its IPUs that may be used."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A request as the plan needs it. ``choices``: the allocations in which it may lie, in order of preference;
    ``limit_s``: seconds after which its partition ends; infinite without a limit."""

    name: str
    size: int
    ilds: int
    choices: tuple[Choice, ...]
    limit_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for a wish: the IPUs it gets, and when at the latest. ``at``: now if it starts; infinite if unknown.
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

    def place_now(self, wish: Wish) -> tuple[str, tuple[int, ...]] | None:
        """A place in which a wish can start now without hindering a booking; None if there is none."""
        open_now = (self._held_until <= self.now) & (self._booked_from >= self.now + wish.limit_s)
        for allocation, cluster, usable in wish.choices:
            ipus = find_place(cluster, wish.size, wish.ilds, usable & open_now)
            if ipus is not None:
                return allocation, ipus
        return None

    def soonest(self, wish: Wish) -> tuple[str, tuple[int, ...], float] | None:
        """The place that is free soonest, and when at the latest; of places whose time is unknown, the one with the
        fewest IPUs held. None if no place can hold the wish.
        """
        best: tuple[float, int, str, tuple[int, ...]] | None = None
        for allocation, cluster, usable in wish.choices:
            domain, share = cluster.topology.ild_ipus, wish.size // wish.ilds
            if share < 1 or share > domain:
                continue
            at = np.where(usable, self._free_at, np.inf)
            late, held = (
                _of_places(cluster, at, np.max, wish),
                _of_places(cluster, np.isinf(at), np.sum, wish),
            )
            possible = _of_places(cluster, usable, np.all, wish).astype(bool)
            if not possible.any():
                continue
            order = np.lexsort((held.ravel(), np.where(possible, late, np.inf).ravel(), ~possible.ravel()))
            group, offset = divmod(int(order[0]), domain // share)
            found = (float(late[group, offset]), int(held[group, offset]), allocation)
            if best is None or found[:2] < best[:2]:
                best = (*found, place_at(cluster, wish.size, wish.ilds, group, offset))
        return None if best is None else (best[2], best[3], best[0])


def _of_places(
    cluster: Cluster, values: NDArray[np.generic], reduce: object, wish: Wish
) -> NDArray[np.float64]:
    """A figure for each place of the wish's size in a cluster, from one for each IPU of the POD: (group of domains,
    block)."""
    domain, share = cluster.topology.ild_ipus, wish.size // wish.ilds
    own = values[cluster.first_ipu : cluster.first_ipu + cluster.ipu_count]
    by_domain = own.reshape(-1, domain // share, share)
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


QUEUE_DEPTH = 64
"""Number of requests that are planned at a time; later ones start only after these."""
SHOWN_HOLDERS = 8
"""Partitions that a refusal names."""
Place = tuple[str, tuple[int, ...]]
"""An allocation and IPUs of it."""


# --- events -----------------------------------------------------------------------------------------------------


def enqueue(draft: Allocator, event: ev.Enqueue) -> list[Instruction]:
    """Put a request into the queue, from which it may be served at once (`serve`)."""
    needs = draft.complete(event.requirements)
    _possible_at_all(draft, needs)
    sequence = 1 + max((entry.sequence for entry in draft.queue.values()), default=0)
    draft.note("queue", needs.name, Queued(needs, event.priority, sequence, event.now))
    return []


def leave(draft: Allocator, event: ev.LeaveQueue) -> list[Instruction]:
    """Remove a queued request. Raises NotFoundError, which lists the queue."""
    find_queued(draft, event.name)
    draft.note("queue", event.name, None)
    return []


def create_reservation(draft: Allocator, event: ev.CreateReservation) -> list[Instruction]:
    """Keep agents for some time. Refused if a partition without a limit, or with a later end, holds them."""
    wanted = event.reservation
    check_name(wanted.name, "a reservation")
    if wanted.name in draft.reservations and wanted.name not in _seen_reservations(draft):
        raise ExistsError(f"the name {wanted.name} is not available", hint="Choose another name.")
    if wanted.name in draft.reservations:
        raise ExistsError(
            f"reservation {wanted.name} exists already",
            hint=f"Remove it first: vipu-admin remove reservation {wanted.name}",
        )
    if not wanted.agents or not wanted.start < wanted.end or wanted.end <= event.now:
        raise UsageError(
            "a reservation needs agents, and an end after its start and after now",
            hint="--agents ipum1,ipum2 --begin-in 600 --for 3600",
        )
    for agent in wanted.agents:
        draft.check_agent(agent)
        for other in draft.reservations.values():
            if agent in other.agents and other.start < wanted.end and wanted.start < other.end:
                which = f"reservation {other.name}"
                if other.name not in _seen_reservations(draft):
                    which = "another reservation"
                raise ConflictError(f"agent {agent} is in {which} at that time", hint="Choose another time.")
        for name in draft.partitions_on(agent):
            holder = draft.partitions[name]
            if holder.busy_until(event.now) > wanted.start:
                which = f"partition {name}" if draft.asker.sees(holder.allocation) else "a partition"
                raise ConflictError(
                    f"{which} may still hold {agent} then",
                    hint=f"Reserve a later time, or drain it first: vipu-admin drain agent {agent}",
                )
    draft.note("reservations", wanted.name, wanted)
    return []


def remove_reservation(draft: Allocator, event: ev.RemoveReservation) -> list[Instruction]:
    """End a reservation. Partitions in it stay."""
    known = _seen_reservations(draft)
    if event.name not in known:
        raise unknown_name(
            "reservation", event.name, known, "vipu-admin create reservation NAME --agents A,B"
        )
    end_reservation(draft, event.name)
    return []


def end_reservation(draft: Allocator, name: str) -> None:
    """Forget a reservation; requests that wait for it become ordinary ones."""
    draft.note("reservations", name, None)
    for entry in list(draft.queue.values()):
        if entry.needs.reservation == name:
            ordinary = replace(entry, needs=replace(entry.needs, reservation=""))
            draft.note("queue", entry.needs.name, ordinary)


def serve(draft: Allocator) -> list[Instruction]:
    """Make partitions of the queued requests that can start now, but for those whose clients are absent: these keep
    their places. A start may change the place for which another request waits, and so let a third one start; this goes
    on until none can start.
    """
    instructions: list[Instruction] = []
    while starting := [p for p in planned_queue(draft) if p.starts and p.name not in draft.absent]:
        for planned in starting:
            needs = draft.queue[planned.name].needs
            draft.note("queue", planned.name, None)
            instructions += draft.make(needs, planned.allocation, planned.ipus)
    return instructions


# --- decisions --------------------------------------------------------------------------------------------------


def place_now(draft: Allocator, needs: Requirements) -> Place | None:
    """A place for a request now that hinders no queued request and no reservation; None if there is none."""
    _possible_at_all(draft, needs)
    if not draft.queue and not draft.reservations:
        return _free_place(draft, needs)
    last = Queued(needs, -(1 << 31), 1 << 62, draft.now)
    found = {planned.name: planned for planned in planned_queue(draft, [last])}.get(needs.name)
    return (found.allocation, found.ipus) if found is not None and found.starts else None


def _free_place(draft: Allocator, needs: Requirements) -> Place | None:
    """A place whose IPUs nobody holds."""
    for allocation, cluster, usable in _choices(draft, needs):
        ipus = find_place(cluster, needs.size, needs.num_ilds, usable & ~draft.table.taken)
        if ipus is not None:
            return allocation, ipus
    return None


def settle(draft: Allocator, asked: Requirements) -> Requirements:
    """A request with defaults for what it leaves open, and with the V-IPU cluster in which it is to lie: of those that
    can hold it the first with room, else the first. Raises UsageError if none can ever hold it."""
    names = {cluster.name for cluster in draft.cluster.clusters}
    if asked.cluster and asked.cluster not in names and asked.cluster in _seen_allocations(draft):
        asked = replace(asked, cluster="", allocation=asked.allocation or asked.cluster)  # Its old name.
    clusters = _clusters(draft, asked)
    possible: list[Requirements] = []
    refusals: list[UsageError] = []
    for cluster in clusters:
        try:
            needs = complete_requirements(replace(asked, cluster=cluster.name), cluster)
            _possible_at_all(draft, needs)
        except UsageError as error:
            refusals.append(error)
        else:
            possible.append(needs)
    if not possible:
        raise refusals[0] if refusals else _no_cluster(draft)
    if len(possible) == 1:
        return possible[0]
    return next((needs for needs in possible if _free_place(draft, needs) is not None), possible[0])


def _clusters(draft: Allocator, asked: Requirements) -> list[Cluster]:
    """The V-IPU clusters in which a request may lie. Raises NotFoundError for an unknown allocation or cluster."""
    if asked.allocation:
        _check_allocation(draft, asked.allocation)
        agent = draft.allocations[asked.allocation].agents[0]
        found = draft.cluster.clusters_by_agent[agent]
        if asked.cluster not in ("", found.name):
            raise UsageError(
                f"allocation {asked.allocation} is in cluster {found.name}, not in {asked.cluster}",
                hint="Leave out --cluster.",
            )
        return [found]
    if asked.cluster:
        return [draft.find_cluster(asked.cluster)]
    return list(draft.cluster.clusters)


def _no_cluster(draft: Allocator) -> UsageError:
    return UsageError(
        f"{draft.cluster.name} has no cluster, so no IPU can be in a partition",
        hint="Make one: vipu-admin create cluster NAME --agents A,B,...",
    )


def planned_queue(draft: Allocator, more: Sequence[Queued] = ()) -> list[Planned]:
    """The plan for the queue in its order, and then for ``more``."""
    waiting = sorted([*draft.queue.values(), *more], key=lambda entry: entry.rank)
    if len(waiting) > QUEUE_DEPTH:
        waiting = waiting[:QUEUE_DEPTH]  # A request that is not planned does not start.
    inside = [entry for entry in waiting if entry.needs.reservation]
    outside = [entry for entry in waiting if not entry.needs.reservation]
    first = plan(_timeline_inside(draft), [_wish(draft, entry.needs) for entry in inside])
    timeline = _timeline(draft)
    for reservation in draft.reservations.values():
        timeline.book(_ipus_of_agents(draft, reservation.agents), reservation.start, reservation.end)
    second = plan(timeline, [_wish(draft, entry.needs) for entry in outside])
    by_name = {planned.name: planned for planned in (*first, *second)}
    return [by_name[entry.needs.name] for entry in waiting]


def _timeline(draft: Allocator) -> Timeline:
    """The timeline of the IPUs that partitions hold."""
    timeline = Timeline(draft.cluster, draft.now)
    for partition in draft.partitions.values():
        timeline.hold(list(ipus_of(draft.cluster, partition.slices)), partition.busy_until(draft.now))
    return timeline


def _timeline_inside(draft: Allocator) -> Timeline:
    """The timeline for requests that name a reservation: its IPUs are theirs, but not before it begins."""
    timeline = _timeline(draft)
    for reservation in draft.reservations.values():
        if reservation.start > draft.now:
            timeline.hold(_ipus_of_agents(draft, reservation.agents), reservation.start)
    return timeline


def _ipus_of_agents(draft: Allocator, agents: Sequence[str]) -> NDArray[np.intp]:
    return np.flatnonzero(draft.table.of_agents(agents))


def _wish(draft: Allocator, needs: Requirements) -> Wish:
    choices = tuple(_choices(draft, needs))
    return Wish(needs.name, needs.size, needs.num_ilds, choices, needs.limit_s or math.inf)


def _choices(draft: Allocator, needs: Requirements) -> list[Choice]:
    """The allocations that a request may use, each with the IPUs of its agents that are in service."""
    unavailable = draft.unavailable()
    found = []
    for name in _allocations(draft, needs):
        cluster = draft.cluster_of_allocation(name)
        mask = draft.table.of_allocation(draft.allocations[name], unavailable)
        if needs.index:
            there = np.zeros_like(mask)
            there[list(place_of_index(cluster, needs.size, needs.num_ilds, needs.index))] = True
            mask &= there
        if needs.reservation:
            mask &= draft.table.of_agents(draft.reservations[needs.reservation].agents)
        found.append((name, cluster, mask))
    return found


def _allocations(draft: Allocator, needs: Requirements) -> list[str]:
    if needs.allocation:
        return [needs.allocation]
    return [
        name for name in draft.allocations if needs.cluster in ("", draft.cluster_of_allocation(name).name)
    ]


def _check_allocation(draft: Allocator, name: str) -> None:
    known = _seen_allocations(draft)
    if name not in known:
        raise unknown_name("allocation", name, known, "vipu-admin create allocation NAME")


def _seen_allocations(draft: Allocator) -> list[str]:
    return [name for name in draft.allocations if draft.asker.sees(name)]


def _seen_reservations(draft: Allocator) -> list[str]:
    """Reservations of agents that are in an allocation which the asker sees."""
    seen = {agent for name in _seen_allocations(draft) for agent in draft.allocations[name].agents}
    return [
        entry.name
        for entry in draft.reservations.values()
        if draft.asker.allocations is None or seen & set(entry.agents)
    ]


def _possible_at_all(draft: Allocator, needs: Requirements) -> None:
    """Raise UsageError if no allocation could ever hold the request, NotFoundError if it names what there is not."""
    if needs.allocation:
        _check_allocation(draft, needs.allocation)
    names = _allocations(draft, needs)
    if needs.reservation and needs.reservation not in _seen_reservations(draft):
        raise unknown_name(
            "reservation", needs.reservation, _seen_reservations(draft), "vipu-admin create reservation NAME"
        )
    for name in names:
        everything = draft.table.of_allocation(draft.allocations[name])
        cluster = draft.cluster_of_allocation(name)
        if find_place(cluster, needs.size, needs.num_ilds, everything) is not None:
            return
    where = f"allocation {names[0]}" if len(names) == 1 else "any allocation"
    raise UsageError(
        f"a partition of {needs.size} IPUs does not fit {where} of {needs.cluster or draft.cluster.name}",
        hint="Partitions do not span allocations: vipu list allocations",
    )


def free_ipus(draft: Allocator) -> Flags:
    """The IPUs that no partition holds, on agents in service."""
    free = np.zeros(draft.cluster.ipu_count, bool)
    for allocation in draft.allocations.values():
        free |= draft.table.of_allocation(allocation, draft.unavailable())
    return free & ~draft.table.taken


def largest_possible(draft: Allocator) -> int:
    """IPUs of the largest partition that could be made now; a partition does not span allocations."""
    unavailable = draft.unavailable()
    return max(
        (
            largest_place(
                draft.cluster_of_allocation(name),
                draft.table.of_allocation(allocation, unavailable) & ~draft.table.taken,
            )
            for name, allocation in draft.allocations.items()
        ),
        default=0,
    )


# --- explanations -----------------------------------------------------------------------------------------------


def no_room(draft: Allocator, needs: Requirements) -> UsageError:
    """The refusal of a request that has no place now: what is free, what could be made, who holds the rest."""
    free = np.zeros(draft.cluster.ipu_count, bool)
    whole, largest = free.copy(), 0
    for allocation, cluster, usable in _choices(draft, needs):
        free |= usable & ~draft.table.taken
        largest = max(largest, largest_place(cluster, usable & ~draft.table.taken))
        whole |= draft.table.of_allocation(draft.allocations[allocation])
    agents = {draft.cluster.agent_of(int(ipu)).id for ipu in np.flatnonzero(whole & draft.table.taken)}
    names = {name for agent in agents for name in draft.partitions_on(agent)}
    holders = [draft.partitions[name] for name in names]
    holders = [partition for partition in holders if draft.asker.sees(partition.allocation)]
    holders.sort(key=lambda p: (-p.size, p.created, p.name))
    shown = ", ".join(_holder(partition, needs.owner) for partition in holders[:SHOWN_HOLDERS]) or "none"
    more = f" and {len(holders) - SHOWN_HOLDERS} more" if len(holders) > SHOWN_HOLDERS else ""
    message = f"no {needs.size} aligned IPUs are free: {int(free.sum())} IPUs are"
    if largest < needs.size:
        message += f", room for a partition of {largest}" if largest else ""
    elif draft.queue:
        seen = sum(draft.asker.sees(entry.needs.allocation) for entry in draft.queue.values())
        message += f", and {seen or 'other'} queued requests come first"
    else:
        message += ", which a reservation keeps"
    message += f"; partitions in the way: {shown}{more}"
    if draft.lost:
        message += f"; lost agents: {', '.join(sorted(draft.lost))}"
    if draft.maintenance:
        message += f"; agents out of service: {', '.join(sorted(draft.maintenance))}"
    hint = (
        "Wait for it (vipu create partition --wait), or remove one of your own (vipu remove partition NAME)"
    )
    hint += " or restart the lost agent (vipu-admin restart agent ID)." if draft.lost else "."
    return ExhaustedError(message, hint=hint)


def _holder(partition: Partition, asks: int) -> str:
    """A partition that is in the way of user ``asks``, and whose it is if it is another user's."""
    since = datetime.fromtimestamp(partition.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    whose = "" if partition.owner in (asks, NO_USER) else f" of {owner_name(partition.owner)}"
    return (
        f"{partition.name} ({partition.size} {'IPU' if partition.size == 1 else 'IPUs'}{whose} since {since})"
    )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request waits. ``position`` counts from 1; ``ahead``: the requests before it; ``blockers`` hold IPUs of the
    place that it waits for; ``latest``: when it starts at the latest, None if unknown.
    """

    entry: Queued
    position: int
    ahead: tuple[str, ...]
    blockers: tuple[str, ...]
    latest: float | None


def explain(draft: Allocator) -> list[Explanation]:
    """The queue in its order, with what each request waits for."""
    plans = {planned.name: planned for planned in planned_queue(draft)}
    ranked = sorted(draft.queue.values(), key=lambda entry: entry.rank)
    names = [entry.needs.name for entry in ranked]
    result = []
    for position, entry in enumerate(ranked):
        planned = plans.get(entry.needs.name)
        ipus = planned.ipus if planned is not None else ()
        agents = dict.fromkeys(draft.cluster.agent_of(ipu).id for ipu in ipus)
        wanted = set(ipus)
        blockers = dict.fromkeys(
            name
            for agent in agents
            for name in draft.partitions_on(agent)
            if wanted & set(ipus_of(draft.cluster, draft.partitions[name].slices))
        )
        latest = None if planned is None or math.isinf(planned.at) else planned.at
        result.append(Explanation(entry, position + 1, tuple(names[:position]), tuple(blockers), latest))
    return result


def find_queued(draft: Allocator, name: str) -> Queued:
    """A queued request by name. Raises NotFoundError, which lists the queue."""
    entry = draft.queue.get(name)
    if entry is None:
        raise unknown_name("queued request", name, draft.queue, "vipu create partition NAME --size N --wait")
    return entry
