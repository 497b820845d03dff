"""Where a request may lie: the V-IPU clusters and allocations that can hold it, and the IPUs in service there.

Functions over the allocator's draft.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from podrun.core.cluster import Cluster
from podrun.core.errors import UsageError
from podrun.partition.state.backfill import Choice
from podrun.partition.state.placement import (
    Flags,
    find_place,
    largest_place,
    place_of_index,
)
from podrun.partition.state.requirements import complete_requirements, unknown_name
from podrun.partition.state.values import Requirements

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator


Place = tuple[str, tuple[int, ...]]
"""An allocation and IPUs of it."""


def free_place(draft: Allocator, needs: Requirements) -> Place | None:
    """A place whose IPUs nobody holds."""
    for allocation, cluster, usable in choices_of(draft, needs):
        ipus = find_place(cluster, needs.size, needs.num_ilds, usable & ~draft.table.taken)
        if ipus is not None:
            return allocation, ipus
    return None


def complete_in_cluster(draft: Allocator, asked: Requirements) -> Requirements:
    """A request with defaults for what it leaves open, and with the V-IPU cluster in which it is to lie: of those that
    can hold it the first with room, else the first. Raises UsageError if none can ever hold it."""
    names = {cluster.name for cluster in draft.cluster.clusters}
    if asked.cluster and asked.cluster not in names and asked.cluster in allocations_seen(draft):
        asked = replace(asked, cluster="", allocation=asked.allocation or asked.cluster)  # Its old name.
    clusters = _clusters(draft, asked)
    possible: list[Requirements] = []
    refusals: list[UsageError] = []
    for cluster in clusters:
        try:
            needs = complete_requirements(replace(asked, cluster=cluster.name), cluster)
            check_possible(draft, needs)
        except UsageError as error:
            refusals.append(error)
        else:
            possible.append(needs)
    if not possible:
        raise refusals[0] if refusals else _no_cluster(draft)
    if len(possible) == 1:
        return possible[0]
    return next((needs for needs in possible if free_place(draft, needs) is not None), possible[0])


def _clusters(draft: Allocator, asked: Requirements) -> list[Cluster]:
    """The V-IPU clusters in which a request may lie. Raises NotFoundError for an unknown allocation or cluster."""
    if asked.allocation:
        check_allocation_seen(draft, asked.allocation)
        agent = draft.allocations[asked.allocation].agents[0]
        of_agent = draft.cluster.clusters_by_agent[agent]
        if asked.cluster not in ("", of_agent.name):
            raise UsageError(
                f"allocation {asked.allocation} is in cluster {of_agent.name}, not in {asked.cluster}",
                hint="Leave out --cluster.",
            )
        return [of_agent]
    if asked.cluster:
        return [draft.find_cluster(asked.cluster)]
    return list(draft.cluster.clusters)


def _no_cluster(draft: Allocator) -> UsageError:
    return UsageError(
        f"{draft.cluster.name} has no cluster, so no IPU can be in a partition",
        hint="Make one: vipu-admin create cluster NAME --agents A,B,...",
    )


def choices_of(draft: Allocator, needs: Requirements) -> list[Choice]:
    """The allocations that a request may use, each with the IPUs of its agents that are in service."""
    unavailable = draft.unavailable()
    choices = []
    for name in _allocations(draft, needs):
        cluster = draft.cluster_of_allocation(name)
        mask = draft.table.of_allocation(draft.allocations[name], unavailable)
        if needs.index:
            there = np.zeros_like(mask)
            there[list(place_of_index(cluster, needs.size, needs.num_ilds, needs.index))] = True
            mask &= there
        if needs.reservation:
            mask &= draft.table.of_agents(draft.reservations[needs.reservation].agents)
        choices.append((name, cluster, mask))
    return choices


class ChoicesByPlace:
    """`choices_of` requests, worked out once for all requests that may lie in the same places. The state must not
    change meanwhile."""

    def __init__(self, draft: Allocator) -> None:
        self._draft = draft
        self._known: dict[tuple[object, ...], tuple[Choice, ...]] = {}

    def key(self, needs: Requirements) -> tuple[object, ...]:
        """Equal for requests that may lie in the same places."""
        index = (needs.index, needs.size, needs.num_ilds) if needs.index else ()
        return (needs.allocation, needs.cluster, needs.reservation, *index)

    def of(self, needs: Requirements) -> tuple[Choice, ...]:
        """Where a request may lie."""
        key = self.key(needs)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = tuple(choices_of(self._draft, needs))
        return known


def _allocations(draft: Allocator, needs: Requirements) -> list[str]:
    if needs.allocation:
        return [needs.allocation]
    return [
        name for name in draft.allocations if needs.cluster in ("", draft.cluster_of_allocation(name).name)
    ]


def check_allocation_seen(draft: Allocator, name: str) -> None:
    """Raise the error of an unknown allocation unless the caller may see one of that name."""
    known = allocations_seen(draft)
    if name not in known:
        raise unknown_name("allocation", name, known, "vipu-admin create allocation NAME")


def allocations_seen(draft: Allocator) -> list[str]:
    """The names of the allocations that the caller may see."""
    return [name for name in draft.allocations if draft.asker.sees(name)]


def reservations_seen(draft: Allocator) -> list[str]:
    """Reservations of agents that are in an allocation which the asker sees."""
    seen = {agent for name in allocations_seen(draft) for agent in draft.allocations[name].agents}
    return [
        entry.name
        for entry in draft.reservations.values()
        if draft.asker.allocations is None or seen & set(entry.agents)
    ]


def check_possible(draft: Allocator, needs: Requirements) -> None:
    """Raise UsageError if no allocation could ever hold the request, NotFoundError if it names what there is not."""
    if needs.allocation:
        check_allocation_seen(draft, needs.allocation)
    names = _allocations(draft, needs)
    if needs.reservation and needs.reservation not in reservations_seen(draft):
        raise unknown_name(
            "reservation", needs.reservation, reservations_seen(draft), "vipu-admin create reservation NAME"
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
