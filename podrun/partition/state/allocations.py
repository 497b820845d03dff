"""The allocator's part for allocations: agents that users have access to. Functions over its draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from podrun.core.cluster import Allocation
from podrun.core.errors import ConflictError, ExistsError, UsageError
from podrun.partition.state import events as ev
from podrun.partition.state.events import MachineOrder
from podrun.partition.state.requirements import unknown_name
from podrun.partition.state.values import check_name

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator


def add_allocation(draft: Allocator, event: ev.CreateAllocation) -> list[MachineOrder]:
    """Make an allocation of agents of one V-IPU cluster that are in no other one."""
    check_name(event.name, "an allocation")
    if event.name in draft.allocations:
        raise ExistsError(
            f"allocation {event.name} exists already",
            hint=f"Remove it first: vipu-admin remove allocation {event.name}",
        )
    if not event.agents:
        raise UsageError("an allocation needs at least one agent", hint="--agents ipum1,ipum2")
    for agent in event.agents:
        draft.check_agent(agent)
        for other in draft.allocations.values():
            if agent in other.agents:
                raise ConflictError(
                    f"agent {agent} is in allocation {other.name}",
                    hint=f"Remove that one first: vipu-admin remove allocation {other.name}",
                )
    _check_one_cluster(draft, event.agents)
    ordered = tuple(a.id for a in draft.cluster.agents if a.id in set(event.agents))
    draft.allocations[event.name] = Allocation(event.name, ordered)
    return []


def _check_one_cluster(draft: Allocator, agents: Sequence[str]) -> None:
    """Raise ConflictError unless agents are in one V-IPU cluster."""
    clusters = draft.cluster.clusters_by_agent
    first = clusters.get(agents[0])
    for agent in agents:
        if agent not in clusters:
            raise ConflictError(
                f"agent {agent} is in no cluster",
                hint="Put it into one first: vipu-admin create cluster NAME --agents A,B,...",
            )
        if clusters[agent] is not first:
            raise ConflictError(
                f"agents {agents[0]} and {agent} are in different clusters",
                hint="An allocation lies in one cluster: vipu list clusters",
            )


def drop_allocation(draft: Allocator, event: ev.RemoveAllocation) -> list[MachineOrder]:
    """Remove an allocation without partitions and requests."""
    if event.name not in draft.allocations:
        raise unknown_name("allocation", event.name, draft.allocations, "vipu-admin create allocation NAME")
    users = sorted(p.name for p in draft.partitions.values() if p.allocation == event.name)
    if users:
        raise ConflictError(
            f"allocation {event.name} has partitions: {', '.join(users)}",
            hint=f"Remove them first: vipu remove partition {users[0]}",
        )
    waiting = sorted(name for name, entry in draft.queue.items() if entry.needs.allocation == event.name)
    if waiting:
        raise ConflictError(
            f"requests wait for allocation {event.name}: {', '.join(waiting)}",
            hint=f"Give them up first: vipu remove partition {waiting[0]}",
        )
    del draft.allocations[event.name]
    return []
