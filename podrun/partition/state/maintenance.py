"""The allocator's part for agents and clusters: cordon, drain, return, relocation, and which there are; and for time
that passes.

A cordoned agent gets no new partitions; those on it stay. A draining one is cordoned too, and at its deadline the
partitions on it are removed, or moved if they are relocatable. An agent is made outside of all clusters; a cluster
joins such agents by links, with an allocation of all of them that has its name. Functions over the allocator's draft.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.cluster import (
    IPUS_PER_MACHINE,
    MAX_ILD_IPUS,
    Agent,
    Allocation,
    Cluster,
    GatewayTopology,
    Topology,
    arrange_pod,
)
from podrun.core.errors import ConflictError, ExistsError, UsageError
from podrun.core.layout import is_power_of_two
from podrun.partition.state import events as ev
from podrun.partition.state.events import MachineOrder
from podrun.partition.state.placement import find_place, slices_of
from podrun.partition.state.records import Maintenance, Partition
from podrun.partition.state.reservations import end_reservation
from podrun.partition.state.values import PartitionState, check_name

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator

S = PartitionState
LONGEST_REASON = 500
"""Characters of a reason, which is shown in one line."""


def begin(draft: Allocator, event: ev.SetMaintenance) -> list[MachineOrder]:
    """Cordon or drain an agent; a second request replaces the first."""
    draft.check_agent(event.agent)
    if event.deadline_s < 0:
        raise UsageError(
            f"a drain cannot end {-event.deadline_s:g} s ago", hint="Use --deadline SECONDS, from now."
        )
    if len(event.reason) > LONGEST_REASON:
        raise UsageError(
            f"a reason of {len(event.reason)} characters is too long", hint=f"{LONGEST_REASON} at the most."
        )
    deadline = event.now + event.deadline_s if event.deadline_s else 0.0
    entry = Maintenance(event.agent, event.draining, event.now, deadline, event.reason)
    draft.note("maintenance", event.agent, entry)
    return []


def end(draft: Allocator, event: ev.EndMaintenance) -> list[MachineOrder]:
    """Return an agent to service. Raises ConflictError if it is in service."""
    draft.check_agent(event.agent)
    if event.agent not in draft.maintenance:
        lost = event.agent in draft.lost
        raise ConflictError(
            f"agent {event.agent} is {'lost' if lost else 'in service already'}",
            hint=f"Replace it: vipu-admin restart agent {event.agent}" if lost else "vipu-admin list agents",
        )
    draft.note("maintenance", event.agent, None)
    return []


def tick(draft: Allocator, event: ev.Tick) -> list[MachineOrder]:
    """End partitions over their limit, drains over their deadline, and reservations that are over."""
    instructions: list[MachineOrder] = []
    for partition in list(draft.partitions.values()):
        if partition.ends and partition.ends <= event.now and partition.state is not S.REMOVING:
            instructions += draft.remove(partition.name, "its time limit is over")
    for entry in list(draft.maintenance.values()):
        if entry.deadline and entry.deadline <= event.now:
            for name in draft.partitions_on(entry.agent):
                partition = draft.partitions[name]
                if partition.state is not S.REMOVING:
                    why = f"agent {entry.agent} is drained"
                    moved = relocate(draft, partition, why)
                    instructions += draft.remove(name, why) if moved is None else moved
            draft.note("maintenance", entry.agent, replace(entry, deadline=0.0))
    for reservation in list(draft.reservations.values()):
        if reservation.end <= event.now:
            end_reservation(draft, reservation.name)
    return instructions


def anything_due(state: Allocator) -> bool:
    """Whether time that passes may change anything: requests wait, or something has an end."""
    timed = bool(state.reservations) or any(p.ends for p in state.partitions.values())
    return bool(state.queue) or timed or any(entry.deadline for entry in state.maintenance.values())


def relocate(
    draft: Allocator, partition: Partition, why: str = "a machine is lost"
) -> list[MachineOrder] | None:
    """Move a relocatable partition to other IPUs of its allocation. None, and no change, if it is not relocatable or
    there is no room.
    """
    if not partition.relocatable or partition.state is S.REMOVING:
        return None
    allocation = draft.allocations[partition.allocation]
    draft.table.mark(partition.slices, False)
    usable = draft.table.of_allocation(allocation, draft.unavailable()) & ~draft.table.taken
    draft.table.mark(partition.slices, True)
    cluster = draft.cluster_of_allocation(allocation.name)
    ipus = find_place(cluster, partition.size, partition.num_ilds, usable)
    if ipus is None:
        return None
    operation = draft.next_operation()
    moved = replace(
        partition.moved(S.PENDING, f"moved to other IPUs: {why}"),
        slices=slices_of(draft.cluster, ipus),
        operation=operation,
    )
    return draft.put(moved, ev.ProvisionMachines(moved.name, operation))


# --- agents and clusters made and removed -----------------------------------------------------------------------

HOST_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]{0,252}")


def create_agent(draft: Allocator, event: ev.CreateAgent) -> list[MachineOrder]:
    """Add an agent, in no cluster. Raises ExistsError, ConflictError if another one is at its address, UsageError."""
    check_name(event.name, "an agent")
    if not HOST_PATTERN.fullmatch(event.host) or not 1 <= event.port <= 65535:
        raise UsageError(
            f"{event.host!r} and port {event.port} are no address of an agent",
            hint="--host 10.1.1.5 --port 8080",
        )
    pod = draft.cluster
    if event.name in pod.agents_by_id:
        raise ExistsError(
            f"agent {event.name} exists already", hint=f"Look at it: vipu-admin get agent {event.name}"
        )
    for other in pod.agents:
        if (other.host, other.port) == (event.host, event.port):
            raise ConflictError(
                f"agent {other.id} is at {event.host}:{event.port} already",
                hint="Give another --host or --port.",
            )
    taken = {agent.serial_pattern for agent in pod.agents}
    agent = Agent(event.name, 0, event.host, event.port, _serial(event.name, taken), 0, 0)
    draft.arrange(arrange_pod(pod, _described(pod), [*pod.agents, agent]))
    return []


def _serial(agent: str, taken: Collection[str]) -> str:
    """A serial number for an agent, as descriptions of PODs have it: the same for the same name, unless it is taken."""
    attempt = 0
    while True:
        number = int.from_bytes(hashlib.sha256(f"{agent}/{attempt}".encode()).digest()[:4]) % 10_000_000
        serial = f"0024.{{board}}.{number:07d}"
        if serial not in taken:
            return serial
        attempt += 1


def remove_agent(draft: Allocator, event: ev.RemoveAgent) -> list[MachineOrder]:
    """Remove an agent. Raises ConflictError if a cluster or a reservation has it."""
    draft.check_agent(event.name)
    cluster = draft.cluster.clusters_by_agent.get(event.name)
    if cluster is not None:
        raise ConflictError(
            f"agent {event.name} is in cluster {cluster.name}",
            hint=f"Remove that first: vipu-admin remove cluster {cluster.name}",
        )
    for reservation in draft.reservations.values():
        if event.name in reservation.agents:
            raise ConflictError(
                f"agent {event.name} is in reservation {reservation.name}",
                hint=f"Remove that first: vipu-admin remove reservation {reservation.name}",
            )
    pod = draft.cluster
    draft.arrange(arrange_pod(pod, _described(pod), [a for a in pod.agents if a.id != event.name]))
    draft.lost.discard(event.name)
    if event.name in draft.maintenance:
        draft.note("maintenance", event.name, None)
    return [ev.StopAgentMachines(event.name)]


def create_cluster(draft: Allocator, event: ev.CreateCluster) -> list[MachineOrder]:
    """Join agents by links, and make an allocation of them. Raises ExistsError, ConflictError if one of them is in
    another cluster, UsageError for links that there cannot be."""
    check_name(event.name, "a cluster")
    pod = draft.cluster
    if event.name in {cluster.name for cluster in pod.clusters}:
        raise ExistsError(
            f"cluster {event.name} exists already",
            hint=f"Remove it first: vipu-admin remove cluster {event.name}",
        )
    if event.name in draft.allocations:
        raise ExistsError(
            f"an allocation {event.name} exists already, and a cluster begins with one of its name",
            hint=f"Choose another name, or remove that one: vipu-admin remove allocation {event.name}",
        )
    if not event.agents:
        raise UsageError("a cluster needs at least one agent", hint="--agents ipum1,ipum2")
    for agent in event.agents:
        draft.check_agent(agent)
        other = pod.clusters_by_agent.get(agent)
        if other is not None:
            raise ConflictError(
                f"agent {agent} is in cluster {other.name}",
                hint=f"Remove that one first: vipu-admin remove cluster {other.name}",
            )
    if len(set(event.agents)) != len(event.agents):
        twice = next(agent for agent in event.agents if event.agents.count(agent) > 1)
        raise UsageError(f"agent {twice} is named twice", hint="Name each agent of a cluster once.")
    description = (event.name, _links_of(event), event.agents)
    draft.arrange(arrange_pod(pod, [*_described(pod), description], pod.agents))
    draft.allocations[event.name] = Allocation(event.name, event.agents)
    return []


def _links_of(event: ev.CreateCluster) -> Topology:
    """The links of a new cluster. Raises UsageError if its agents cannot be joined so."""
    machines = len(event.agents)
    per_domain = machines // event.ilds if event.ilds > 0 else 0
    if per_domain < 1 or per_domain * event.ilds != machines or not is_power_of_two(per_domain):
        raise UsageError(
            f"{machines} agents do not make {event.ilds} equal IPU-Link domains of 1, 2, 4, 8 or 16 agents",
            hint="Use --num-ipulinkdomains N, and N times 1, 2, 4, 8 or 16 agents.",
        )
    if per_domain * IPUS_PER_MACHINE > MAX_ILD_IPUS:
        raise UsageError(
            f"IPU-Links join at most {MAX_ILD_IPUS} IPUs, "
            f"not the {per_domain * IPUS_PER_MACHINE} of {per_domain} agents",
            hint=f"Use --num-ipulinkdomains {machines * IPUS_PER_MACHINE // MAX_ILD_IPUS}.",
        )
    if event.gateway is GatewayTopology.NONE and event.ilds > 1:
        raise UsageError(
            f"{event.ilds} IPU-Link domains have to be joined by GW-Links",
            hint="Use --cluster-topology looped.",
        )
    gateway = GatewayTopology.LOOPED if event.ilds > 1 else GatewayTopology.NONE
    return Topology(event.ipu_links, per_domain * IPUS_PER_MACHINE, gateway)


def remove_cluster(draft: Allocator, event: ev.RemoveCluster) -> list[MachineOrder]:
    """Remove a cluster and the allocation of its name. Raises ConflictError if partitions, requests or other
    allocations are in it."""
    cluster = draft.find_cluster(event.name)
    agents = {agent.id for agent in cluster.agents}
    names = [name for name, entry in draft.allocations.items() if agents & set(entry.agents)]
    partitions = sorted(p.name for p in draft.partitions.values() if p.allocation in names)
    if partitions:
        raise ConflictError(
            f"cluster {event.name} has partitions: {', '.join(partitions)}",
            hint=f"Remove them first: vipu remove partition {partitions[0]}",
        )
    others = sorted(set(names) - {event.name})
    if others:
        raise ConflictError(
            f"cluster {event.name} has allocations: {', '.join(others)}",
            hint=f"Remove them first: vipu-admin remove allocation {others[0]}",
        )
    waiting = sorted(
        name
        for name, entry in draft.queue.items()
        if event.name in (entry.needs.cluster, entry.needs.allocation)
    )
    if waiting:
        raise ConflictError(
            f"requests wait for cluster {event.name}: {', '.join(waiting)}",
            hint=f"Give them up first: vipu remove partition {waiting[0]}",
        )
    draft.allocations.pop(event.name, None)
    pod = draft.cluster
    left = [entry for entry in _described(pod) if entry[0] != event.name]
    draft.arrange(arrange_pod(pod, left, pod.agents))
    return []


def _described(pod: Cluster) -> list[tuple[str, Topology, tuple[str, ...]]]:
    """The clusters of a POD as `arrange_pod` takes them."""
    return [(c.name, c.topology, tuple(agent.id for agent in c.agents)) for c in pod.clusters]
