"""The allocator's part for the queue: who enters and leaves it, and who is served now (`backfill` plans when).

Functions over the allocator's draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from podrun.partition.state import events as ev
from podrun.partition.state.backfill import PlannedStart, RequestToPlan, Timeline, plan_with_backfill
from podrun.partition.state.candidates import ChoicesByPlace, Place, check_possible, free_place
from podrun.partition.state.events import MachineOrder
from podrun.partition.state.placement import find_block
from podrun.partition.state.records import Queued
from podrun.partition.state.requirements import unknown_name
from podrun.partition.state.values import Requirements

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator


QUEUE_DEPTH = 64
"""Number of requests that are planned at a time; later ones start only after these."""


def enqueue(draft: Allocator, event: ev.Enqueue) -> list[MachineOrder]:
    """Put a request into the queue, from which it may be served at once (`serve_queue`)."""
    needs = draft.complete(event.requirements)
    check_possible(draft, needs)
    sequence = 1 + max((entry.sequence for entry in draft.queue.values()), default=0)
    draft.note("queue", needs.name, Queued(needs, event.priority, sequence, event.now))
    return []


def leave_queue(draft: Allocator, event: ev.LeaveQueue) -> list[MachineOrder]:
    """Remove a queued request. Raises NotFoundError, which lists the queue."""
    find_queued(draft, event.name)
    draft.note("queue", event.name, None)
    return []


def serve_queue(draft: Allocator) -> list[MachineOrder]:
    """Make partitions of the queued requests that can start now, but for those whose clients are absent: these keep
    their places. A start may change the place for which another request waits, and so let a third one start; this goes
    on until none can start.
    """
    instructions: list[MachineOrder] = []
    while starting := [p for p in _planned_to_start(draft) if p.starts and p.name not in draft.absent]:
        for planned in starting:
            needs = draft.queue[planned.name].needs
            draft.note("queue", planned.name, None)
            instructions += draft.make(needs, planned.allocation, planned.ipus)
    return instructions


def _planned_to_start(draft: Allocator) -> list[PlannedStart]:
    """The plan for the queue up to the last request that starts. Those behind the last one that has a place whose IPUs
    nobody holds, bookings aside, cannot start, and change nothing for those before them."""
    fits: dict[tuple[object, ...], bool] = {}
    free = ~draft.table.taken
    if not free.any():
        return []
    waiting = _planned_requests(draft)
    choices = ChoicesByPlace(draft)
    for count in range(len(waiting), 0, -1):
        needs = waiting[count - 1].needs
        shape = (needs.size, needs.num_ilds, *choices.key(needs))
        if shape not in fits:
            fits[shape] = any(
                find_block(cluster, needs.size, needs.num_ilds, usable & free) is not None
                for _, cluster, usable in choices.of(needs)
            )
        if fits[shape]:
            return _plan_of(draft, waiting[:count], choices, only_starts=True)
    return []


def _planned_requests(draft: Allocator, more: Sequence[Queued] = ()) -> list[Queued]:
    """The requests that are planned, in the order of the queue; those behind them do not start."""
    waiting = sorted([*draft.queue.values(), *more], key=lambda entry: entry.rank)
    return waiting[:QUEUE_DEPTH]


def place_without_delay(draft: Allocator, needs: Requirements) -> Place | None:
    """A place for a request now that hinders no queued request and no reservation; None if there is none."""
    check_possible(draft, needs)
    if not draft.queue and not draft.reservations:
        return free_place(draft, needs)
    last = Queued(needs, -(1 << 31), 1 << 62, draft.now)
    planned_last = {planned.name: planned for planned in planned_queue(draft, [last])}.get(needs.name)
    return (
        (planned_last.allocation, planned_last.ipus)
        if planned_last is not None and planned_last.starts
        else None
    )


def planned_queue(draft: Allocator, more: Sequence[Queued] = ()) -> list[PlannedStart]:
    """The plan_with_backfill for the queue in its order, and then for ``more``."""
    return _plan_of(draft, _planned_requests(draft, more), ChoicesByPlace(draft))


def _plan_of(
    draft: Allocator, waiting: Sequence[Queued], choices: ChoicesByPlace, *, only_starts: bool = False
) -> list[PlannedStart]:
    """The plan for requests in their order; ``only_starts``: without those behind the last one that starts."""
    inside = [_to_plan(choices, entry.needs) for entry in waiting if entry.needs.reservation]
    outside = [_to_plan(choices, entry.needs) for entry in waiting if not entry.needs.reservation]
    first: list[PlannedStart] = []
    if inside:
        first = plan_with_backfill(_timeline_inside(draft), inside, only_starts=only_starts)
    second: list[PlannedStart] = []
    if outside:
        timeline = _timeline(draft)
        for reservation in draft.reservations.values():
            timeline.book(_ipus_of_agents(draft, reservation.agents), reservation.start, reservation.end)
        second = plan_with_backfill(timeline, outside, only_starts=only_starts)
    by_name = {planned.name: planned for planned in (*first, *second)}
    return [by_name[entry.needs.name] for entry in waiting if entry.needs.name in by_name]


def _timeline(draft: Allocator) -> Timeline:
    """The timeline of the IPUs that partitions hold."""
    return Timeline(draft.cluster, draft.now, draft.held_times())


def _timeline_inside(draft: Allocator) -> Timeline:
    """The timeline for requests that name a reservation: its IPUs are theirs, but not before it begins."""
    timeline = _timeline(draft)
    for reservation in draft.reservations.values():
        if reservation.start > draft.now:
            timeline.hold(_ipus_of_agents(draft, reservation.agents), reservation.start)
    return timeline


def _ipus_of_agents(draft: Allocator, agents: Sequence[str]) -> NDArray[np.intp]:
    return np.flatnonzero(draft.table.of_agents(agents))


def _to_plan(choices: ChoicesByPlace, needs: Requirements) -> RequestToPlan:
    return RequestToPlan(needs.name, needs.size, needs.num_ilds, choices.of(needs), needs.limit_s or math.inf)


def find_queued(draft: Allocator, name: str) -> Queued:
    """A queued request by name. Raises NotFoundError, which lists the queue."""
    entry = draft.queue.get(name)
    if entry is None:
        raise unknown_name("queued request", name, draft.queue, "vipu create partition NAME --size N --wait")
    return entry
