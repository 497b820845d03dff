"""Why there is no room, and what a request in the queue waits for. Functions over the allocator's draft."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from podrun.core.errors import ExhaustedError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.partition.state.backfill import PlannedStart
from podrun.partition.state.candidates import choices_of
from podrun.partition.state.placement import (
    ipus_of,
    largest_place,
)
from podrun.partition.state.queueing import planned_queue
from podrun.partition.state.records import Partition, Queued, owner_name
from podrun.partition.state.values import NO_USER, Requirements

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator


SHOWN_HOLDERS = 8
"""Partitions that a refusal names."""


def no_room(draft: Allocator, needs: Requirements) -> UsageError:
    """The refusal of a request that has no place now: what is free, what could be made, who holds the rest."""
    free = np.zeros(draft.cluster.ipu_count, bool)
    whole, largest = free.copy(), 0
    for allocation, cluster, usable in choices_of(draft, needs):
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


def explain_queue(draft: Allocator) -> list[Explanation]:
    """The queue in its order, with what each request waits for."""
    plans = {planned.name: planned for planned in planned_queue(draft)}
    ranked = sorted(draft.queue.values(), key=lambda entry: entry.rank)
    names = [entry.needs.name for entry in ranked]
    return [
        _explained(draft, entry, tuple(names[:place]), plans.get(entry.needs.name))
        for place, entry in enumerate(ranked)
    ]


@dataclass(frozen=True, slots=True)
class PlannedExplanation:
    """Where a request that nobody has made would lie: ``ipus`` of an allocation, empty if nobody can say."""

    explanation: Explanation
    starts: bool
    allocation: str
    ipus: tuple[int, ...]


def explain_request(draft: Allocator, needs: Requirements, priority: int = 0) -> PlannedExplanation:
    """Where and when a request would start, were it made now: behind those of its priority that wait. ``needs`` has no
    defaults open."""
    last = 1 + max((entry.sequence for entry in draft.queue.values()), default=0)
    entry = Queued(replace(needs, name=ASKED_FOR), priority, last, draft.now)
    planned = next((p for p in planned_queue(draft, [entry]) if p.name == ASKED_FOR), None)
    ahead = sorted((e for e in draft.queue.values() if e.rank < entry.rank), key=lambda e: e.rank)
    told = _explained(draft, entry, tuple(e.needs.name for e in ahead), planned)
    if planned is None:
        return PlannedExplanation(told, False, "", ())
    return PlannedExplanation(told, planned.starts, planned.allocation, planned.ipus)


ASKED_FOR = "(asked for)"
"""The name of a request that nobody has made; no request can have it."""


def _explained(
    draft: Allocator, entry: Queued, ahead: tuple[str, ...], planned: PlannedStart | None
) -> Explanation:
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
    return Explanation(entry, len(ahead) + 1, ahead, tuple(blockers), latest)
