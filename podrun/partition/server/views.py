"""Views of partitions: what `vipu` lists, and how clients reach their IPUs.

Pure, from the POD's description, the allocator's `Partition` and the addresses of its machines. Values of
`podrun.partition.state.values`, and their JSON for those who watch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from podrun.core.cluster import Agent, Cluster, ipu_number
from podrun.core.errors import UsageError
from podrun.partition.machines.operations import AgentFacts
from podrun.partition.server.event_log import Told
from podrun.partition.state.accounts import Account
from podrun.partition.state.codec import from_message, value_to_json
from podrun.partition.state.events import StateChange
from podrun.partition.state.explanations import Explanation, PlannedExplanation
from podrun.partition.state.placement import routing_named, routing_of
from podrun.partition.state.records import MachineUse, Maintenance, Partition, Queued, owner_name
from podrun.partition.state.values import (
    AgentInfo,
    AgentState,
    AllocationInfo,
    ClusterInfo,
    IpuofConfig,
    IpuofDevice,
    PartitionInfo,
    PartitionState,
    PlannedInfo,
    QueueInfo,
    Requirements,
    ReservationInfo,
    UserInfo,
    agent_json,
)

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator


Source = TypeVar("Source")
Result = TypeVar("Result")
Named = TypeVar("Named", AllocationInfo, ClusterInfo, PartitionInfo, ReservationInfo, UserInfo)


class ViewCache(Generic[Source, Result]):
    """Results made from values, by name: made again only for a changed value. Lists of thousands of partitions and
    agents change little from one question to the next.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Source, Result]] = {}

    def all(self, entries: Iterable[tuple[str, Source, Callable[[], Result]]]) -> list[Result]:
        """The results for some entries (name, value, how to make its result), in their order; others are forgotten."""
        known, fresh, results = self._known, {}, []
        for name, source, make in entries:
            before = known.get(name)
            if before is None or (before[0] is not source and before[0] != source):
                before = (source, make())
            fresh[name] = before
            results.append(before[1])
        self._known = fresh
        return results


class AgentStatus(NamedTuple):
    """The changing facts about an agent. ``stale``: seconds since its machine answered; None if it answers, or has
    none. ``cluster``: its V-IPU cluster; ``attached``: the number of its IPUs that processes hold.
    """

    state: AgentState
    partitions: tuple[str, ...]
    endpoints: tuple[str, ...]
    maintenance: Maintenance | None
    stale: float | None
    cluster: str
    attached: int


def agent_statuses(pod: Cluster, facts: AgentFacts) -> Iterator[tuple[Agent, AgentStatus]]:
    """The status of each agent of a POD. Idle ones of a cluster share one."""
    busy = facts.lost.union(facts.maintenance, facts.holders, facts.running, facts.silent, facts.endpoints)
    idle = {cluster.name: _idle(cluster.name) for cluster in pod.clusters}
    nowhere = _idle("")
    for agent in pod.agents:
        name, cluster = agent.id, pod.clusters_by_agent.get(agent.id)
        if name not in busy:
            yield agent, nowhere if cluster is None else idle[cluster.name]
            continue
        yield (
            agent,
            AgentStatus(
                agent_state(name, facts.lost, facts.running),
                facts.holders.get(name, ()),
                facts.endpoints.get(name, ()),
                facts.maintenance.get(name),
                facts.silent.get(name),
                "" if cluster is None else cluster.name,
                facts.attached.get(name, 0),
            ),
        )


def _idle(cluster: str) -> AgentStatus:
    """The status of an agent without machine, partition or problem."""
    return AgentStatus(AgentState.STANDBY, (), (), None, None, cluster, 0)


def cluster_info(cluster: Cluster) -> ClusterInfo:
    """A V-IPU cluster as `vipu list clusters` describes it."""
    topology = cluster.topology
    return ClusterInfo(
        name=cluster.name,
        target=cluster.target,
        num_ipus=cluster.ipu_count,
        num_ilds=cluster.ipu_count // topology.ild_ipus,
        ipu_link_domain_size=topology.ild_ipus,
        ipu_link_topology=topology.ipu_links.value,
        gateway_topology=topology.gateway.value,
        agents=tuple(agent.id for agent in cluster.agents),
    )


def agent_info(agent: Agent, status: AgentStatus) -> AgentInfo:
    """An agent as `vipu-admin list agents` describes it."""
    wanted = status.maintenance
    return AgentInfo(
        agent_id=agent.id,
        host=agent.host,
        port=agent.port,
        serial=agent.serial,
        state=status.state,
        ild=agent.ild,
        partitions=status.partitions,
        endpoints=status.endpoints,
        health=agent_health(status.state is AgentState.LOST, wanted, status.stale),
        stale_seconds=status.stale,
        reason=wanted.reason if wanted else "",
        deadline=wanted.deadline if wanted else 0.0,
        cluster=status.cluster,
        attached_ipus=status.attached,
    )


def partition_info(pod: Cluster, partition: Partition) -> PartitionInfo:
    """A partition as `vipu get partition` describes it."""
    cluster = pod.clusters_by_agent[partition.slices[0].agent_id]
    return PartitionInfo(
        name=partition.name,
        cluster=cluster.name,
        allocation=partition.allocation,
        size=partition.size,
        state=partition.state,
        reconfigurable=partition.reconfigurable,
        num_gcds=partition.num_gcds,
        sync_type=partition.sync_type,
        num_ilds=partition.num_ilds,
        ild_routing=routing_of(cluster, partition.size, partition.num_ilds, partition.routing).ild_routing,
        agents=tuple(part.agent_id for part in partition.slices),
        error=partition.error,
        generation=partition.generation,
        created=partition.created,
        ends=partition.ends or None,
        relocatable=partition.relocatable,
        owner=owner_name(partition.owner),
        holder=partition.holder,
    )


def queued_info(pod: Cluster, entry: Queued) -> PartitionInfo:
    """A request that waits, as `vipu get partition` describes it."""
    needs = entry.needs
    cluster = next((c for c in pod.clusters if c.name == needs.cluster), pod)
    return PartitionInfo(
        name=needs.name,
        cluster=cluster.name,
        allocation=needs.allocation,
        size=needs.size,
        state=PartitionState.QUEUED,
        reconfigurable=needs.reconfigurable,
        num_gcds=needs.num_gcds,
        num_ilds=needs.num_ilds,
        ild_routing=routing_of(cluster, needs.size, needs.num_ilds, needs.routing).ild_routing,
        created=entry.since,
        relocatable=needs.relocatable,
        owner=owner_name(needs.owner),
        holder=needs.holder,
    )


def reservation_infos(state: Allocator) -> list[ReservationInfo]:
    """Reservations, by their begin."""
    entries = sorted(state.reservations.values(), key=lambda entry: (entry.start, entry.name))
    return [ReservationInfo(entry.name, entry.agents, entry.start, entry.end) for entry in entries]


def allocation_infos(state: Allocator) -> list[AllocationInfo]:
    """Allocations, by name."""
    return [
        AllocationInfo(name, state.cluster_of_allocation(name).name, entry.agents)
        for name, entry in sorted(state.allocations.items())
    ]


def queue_info(told: Explanation) -> QueueInfo:
    """A queued request with what it waits for."""
    needs = told.entry.needs
    return QueueInfo(
        name=needs.name,
        size=needs.size,
        priority=told.entry.priority,
        since=told.entry.since,
        position=told.position,
        ahead=told.ahead,
        blockers=told.blockers,
        latest=told.latest,
        owner=owner_name(needs.owner),
    )


def planned_info(allocator: Allocator, told: PlannedExplanation) -> PlannedInfo:
    """Where and when a request would start."""
    agents = dict.fromkeys(allocator.cluster.agent_of(ipu).id for ipu in told.ipus)
    cluster = allocator.cluster_of_allocation(told.allocation).name if told.allocation else ""
    return PlannedInfo(
        queue_info(told.explanation), told.starts, cluster, told.allocation, tuple(agents), told.ipus
    )


def ipuof_config(
    cluster: Cluster, partition: Partition, gcd: int, endpoints: Mapping[MachineUse, str], service: str = ""
) -> IpuofConfig:
    """How clients reach the IPUs of one GCD of a partition of ``service``. Raises UsageError if the partition has no
    such GCD.
    """
    if gcd >= partition.num_gcds:
        raise UsageError(
            f"partition {partition.name} has no GCD {gcd}",
            hint=f"Its GCDs are 0 to {partition.num_gcds - 1}.",
        )
    share = partition.size // partition.num_gcds
    devices = tuple(d for d in _devices(partition, endpoints) if d.partition_ipu // share == gcd)
    who = {"Partition": partition.name, "Service": service, "Epoch": partition.epoch(service)}
    attributes = _attributes(cluster, partition, gcd) | who
    return IpuofConfig(partition.name, partition.state, devices, attributes)


def agent_state(agent: str, lost: set[str], running: set[str]) -> AgentState:
    """State of an agent, from the agents that are lost and those whose machine runs."""
    if agent in lost:
        return AgentState.LOST
    return AgentState.UP if agent in running else AgentState.STANDBY


SUSPECT_SECONDS = 15.0
"""Seconds for which a machine that does not answer is suspect; then it is unreachable."""


def agent_health(lost: bool, maintenance: Maintenance | None, stale: float | None) -> str:
    """Health of an agent. ``stale``: seconds since its machine answered, None if it answers or has none. A problem
    comes before an administrator's request.
    """
    if lost:
        return "failed"
    if stale is not None:
        return "suspect" if stale < SUSPECT_SECONDS else "unreachable"
    if maintenance is not None:
        return "draining" if maintenance.draining else "cordoned"
    return "up"


def _devices(partition: Partition, endpoints: Mapping[MachineUse, str]) -> Iterator[IpuofDevice]:
    for machine, (first, part) in enumerate(partition.machines()):
        host, _, port = endpoints.get(MachineUse(part.agent_id, partition.name), ":0").rpartition(":")
        for ipu in range(part.count):
            yield IpuofDevice(
                ip=host,
                server_port=int(port),
                partition_ipu=first + ipu,
                machine=machine,
                ipu=ipu,
                agent_id=part.agent_id,
                ipu_number=ipu_number(part.first_slot + ipu),
            )


def _attributes(cluster: Cluster, partition: Partition, gcd: int) -> dict[str, str]:
    own = cluster.clusters_by_agent[partition.slices[0].agent_id]
    routing = routing_of(own, partition.size, partition.num_ilds, partition.routing)
    return {
        "GCD Id": str(gcd),
        "Num GCDs": str(partition.num_gcds),
        "Partition Size": str(partition.size),
        "Reconfigurable": str(partition.reconfigurable).lower(),
        "Generation": str(partition.generation),
        "IPU-Link Domain Size": str(partition.size // partition.num_ilds),
        "IPU-Link Topology": routing.link_topology.value,
        "IPU-Link Configuration": routing.link_configuration,
        "Gateway Mode": "true",
        "Target": cluster.target,
        "Auto Reset": str(partition.auto_reset).lower(),
        "Error": partition.error,
    }


def groups_json(
    clusters: Iterable[ClusterInfo],
    allocations: Iterable[AllocationInfo],
    reservations: Iterable[ReservationInfo],
) -> dict[str, dict[str, str]]:
    """The groups of agents as those who watch are told, by kind and name."""
    return {
        "cluster": json_by_name(clusters),
        "allocation": json_by_name(allocations),
        "reservation": json_by_name(reservations),
    }


def all_told(partitions: Iterable[PartitionInfo], others: Mapping[str, Mapping[str, str]]) -> list[Told]:
    """The present state as those who begin to watch are told. ``others``: JSON by kind and name."""
    told: list[Told] = [
        ("partition", info.name, json.dumps(value_to_json(info)), info.allocation) for info in partitions
    ]
    return told + [(kind, name, text, "") for kind, texts in others.items() for name, text in texts.items()]


def changes_told(
    pod: Cluster, change: StateChange, now: float, allocations: Mapping[str, str]
) -> Iterator[Told]:
    """A change of state as those who watch are told. ``allocations``: of what there was before, by name."""
    for name, partition in change.partitions.items():
        text, allocation = "", allocations.get(name, "")
        if partition is not None:
            allocation = partition.allocation
            text = json.dumps(value_to_json(partition_info(pod, partition)))
            if partition.state is PartitionState.ERROR:
                told = {"partition": name, "allocation": allocation, "error": partition.error}
                yield "incident", name, json.dumps({**told, "time_s": now}), allocation
        yield "partition", name, text, allocation
    for name, entry in change.queue.items():
        if entry is not None:
            text = json.dumps(value_to_json(queued_info(pod, entry)))
            yield "partition", name, text, entry.needs.allocation
        elif name not in change.partitions:
            yield "partition", name, "", allocations.get(name, "")


def agent_text(info: AgentInfo) -> str:
    """The JSON of an agent, for those who watch."""
    return json.dumps(agent_json(info))


def json_by_name(entries: Iterable[Named]) -> dict[str, str]:
    """The JSON of values, by name, for those who watch."""
    return {entry.name: json.dumps(value_to_json(entry)) for entry in entries}


def requirements_of(request: object, owner: int) -> Requirements:
    """The request of a CreatePartitionRequest by user ``owner``. Raises UsageError for values that there are not."""
    needs = from_message(Requirements, request)
    routing = routing_named(needs.routing) if needs.routing else ""
    return replace(needs, owner=owner, routing=routing, num_gcds=needs.num_gcds or 1)


def user_info(account: Account) -> UserInfo:
    """A user as `vipu-admin list users` shows it."""
    return UserInfo(
        account.name, account.role.value, account.allocations, account.may_inject, account.created
    )
