"""The allocator's part that decides who gets IPUs next: at once, from the queue, or not now and why.

Functions over the allocator's draft. `podrun.vipu.queue_plan` plans over time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from podrun.core.errors import ConflictError, ExhaustedError, ExistsError, UsageError
from podrun.vipu import events as ev
from podrun.vipu.events import Instruction, Partition, Queued
from podrun.vipu.ipu_placement import Flags, find_place, ipus_of, largest_place, place_of_index
from podrun.vipu.queue_plan import Planned, Timeline, Wish, plan
from podrun.vipu.requirements import check_name, unknown_name
from podrun.vipu.types import Requirements

if TYPE_CHECKING:
    from podrun.vipu.allocator import Allocator

QUEUE_DEPTH = 64
"""Requests that are planned at a time; those behind them start only after these."""
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
    """Give a queued request up. Raises NotFoundError, which lists the queue."""
    find_queued(draft, event.name)
    draft.note("queue", event.name, None)
    return []


def create_reservation(draft: Allocator, event: ev.CreateReservation) -> list[Instruction]:
    """Keep agents for some time. Refused if a partition without a limit, or with a later end, holds them."""
    wanted = event.reservation
    check_name(wanted.name, "a reservation")
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
                raise ConflictError(
                    f"agent {agent} is in reservation {other.name} at that time", hint="Choose another time."
                )
        for name in draft.partitions_on(agent):
            if draft.partitions[name].busy_until(event.now) > wanted.start:
                raise ConflictError(
                    f"partition {name} may still hold {agent} then",
                    hint=f"Reserve a later time, or drain it first: vipu-admin drain agent {agent}",
                )
    draft.note("reservations", wanted.name, wanted)
    return []


def remove_reservation(draft: Allocator, event: ev.RemoveReservation) -> list[Instruction]:
    """End a reservation. Partitions in it stay."""
    if event.name not in draft.reservations:
        raise unknown_name(
            "reservation", event.name, draft.reservations, "vipu-admin create reservation NAME --agents A,B"
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
    """Make partitions of the queued requests that can start now. A start may change for which place another one waits,
    and so let a third one start: until nobody can."""
    instructions: list[Instruction] = []
    while starting := [planned for planned in planned_queue(draft) if planned.starts]:
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
        for allocation, usable in _usable(draft, needs):
            ipus = find_place(draft.cluster, needs.size, needs.num_ilds, usable & ~draft.table.taken)
            if ipus is not None:
                return allocation, ipus
        return None
    last = Queued(needs, -(1 << 31), 1 << 62, draft.now)
    found = {planned.name: planned for planned in planned_queue(draft, [last])}.get(needs.name)
    return (found.allocation, found.ipus) if found is not None and found.starts else None


def planned_queue(draft: Allocator, more: Sequence[Queued] = ()) -> list[Planned]:
    """The plan for the queue in its order, and then for ``more``."""
    waiting = sorted([*draft.queue.values(), *more], key=lambda entry: entry.rank)
    if len(waiting) > QUEUE_DEPTH:
        waiting = waiting[:QUEUE_DEPTH]  # Whoever is not planned does not start.
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
    """What partitions hold."""
    timeline = Timeline(draft.cluster, draft.now)
    for partition in draft.partitions.values():
        timeline.hold(list(ipus_of(draft.cluster, partition.slices)), partition.busy_until(draft.now))
    return timeline


def _timeline_inside(draft: Allocator) -> Timeline:
    """The same for requests that name a reservation: its IPUs are theirs, but not before it begins."""
    timeline = _timeline(draft)
    for reservation in draft.reservations.values():
        if reservation.start > draft.now:
            timeline.hold(_ipus_of_agents(draft, reservation.agents), reservation.start)
    return timeline


def _ipus_of_agents(draft: Allocator, agents: Sequence[str]) -> NDArray[np.intp]:
    return np.flatnonzero(draft.table.of_agents(agents))


def _wish(draft: Allocator, needs: Requirements) -> Wish:
    usable = tuple(_usable(draft, needs))
    return Wish(needs.name, needs.size, needs.num_ilds, usable, needs.limit_s or math.inf)


def _usable(draft: Allocator, needs: Requirements) -> list[tuple[str, Flags]]:
    """The allocations that a request may use, each with the IPUs of its agents that are in service."""
    unavailable = draft.unavailable()
    found = []
    for name in _allocations(draft, needs):
        mask = draft.table.of_allocation(draft.allocations[name], unavailable)
        if needs.index:
            there = np.zeros_like(mask)
            there[list(place_of_index(draft.cluster, needs.size, needs.num_ilds, needs.index))] = True
            mask &= there
        if needs.reservation:
            mask &= draft.table.of_agents(draft.reservations[needs.reservation].agents)
        found.append((name, mask))
    return found


def _allocations(draft: Allocator, needs: Requirements) -> list[str]:
    if needs.allocation and needs.allocation not in draft.allocations:
        raise unknown_name(
            "allocation", needs.allocation, draft.allocations, "vipu-admin create allocation NAME"
        )
    return [needs.allocation] if needs.allocation else list(draft.allocations)


def _possible_at_all(draft: Allocator, needs: Requirements) -> None:
    """Raise UsageError if no allocation could ever hold the request."""
    names = _allocations(draft, needs)
    if needs.reservation and needs.reservation not in draft.reservations:
        raise unknown_name(
            "reservation", needs.reservation, draft.reservations, "vipu-admin create reservation NAME"
        )
    for name in names:
        everything = draft.table.of_allocation(draft.allocations[name])
        if find_place(draft.cluster, needs.size, needs.num_ilds, everything) is not None:
            return
    where = f"allocation {names[0]}" if len(names) == 1 else "any allocation"
    raise UsageError(
        f"a partition of {needs.size} IPUs does not fit {where} of {draft.cluster.name}",
        hint="Partitions do not span allocations: vipu list allocations",
    )


def free_ipus(draft: Allocator) -> Flags:
    """The IPUs that no partition holds, on agents in service."""
    free = np.zeros(draft.cluster.ipu_count, bool)
    for allocation in draft.allocations.values():
        free |= draft.table.of_allocation(allocation, draft.unavailable())
    return free & ~draft.table.taken


# --- explanations -----------------------------------------------------------------------------------------------


def no_room(draft: Allocator, needs: Requirements) -> UsageError:
    """The refusal of a request that has no place now: what is free, what could be made, who holds the rest."""
    free = np.zeros(draft.cluster.ipu_count, bool)
    whole = free.copy()
    for allocation, usable in _usable(draft, needs):
        free |= usable & ~draft.table.taken
        whole |= draft.table.of_allocation(draft.allocations[allocation])
    agents = {draft.cluster.agent_of(int(ipu)).id for ipu in np.flatnonzero(whole & draft.table.taken)}
    names = {name for agent in agents for name in draft.partitions_on(agent)}
    holders = sorted((draft.partitions[name] for name in names), key=lambda p: (-p.size, p.created, p.name))
    shown = ", ".join(_holder(partition) for partition in holders[:SHOWN_HOLDERS]) or "none"
    more = f" and {len(holders) - SHOWN_HOLDERS} more" if len(holders) > SHOWN_HOLDERS else ""
    largest = largest_place(draft.cluster, free)
    message = f"no {needs.size} aligned IPUs are free: {int(free.sum())} IPUs are"
    if largest < needs.size:
        message += f", room for a partition of {largest}" if largest else ""
    elif draft.queue:
        message += f", and {len(draft.queue)} queued requests come first"
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


def _holder(partition: Partition) -> str:
    since = datetime.fromtimestamp(partition.created, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{partition.name} ({partition.size} IPUs since {since})"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request waits. ``position`` counts from 1; ``ahead``: the requests before it; ``blockers`` hold IPUs of the
    place that it waits for; ``latest``: when it starts at the latest, None if nobody can say."""

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
