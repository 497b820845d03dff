"""Calls about the POD: clusters, agents, allocations, agents out of service, reservations."""

from __future__ import annotations

from collections.abc import Iterable

from podrun.partition.client.connection import ServiceConnection
from podrun.partition.state.codec import from_message, unsigned
from podrun.partition.state.values import (
    AgentInfo,
    AllocationInfo,
    ClusterInfo,
    ReservationInfo,
)


class PodCalls(ServiceConnection):
    """What a client asks about the POD."""

    def list_reservations(self) -> list[ReservationInfo]:
        """Reservations, by their begin."""
        reply = self._ask("ListReservations")
        return [from_message(ReservationInfo, entry) for entry in reply.reservations]

    def cluster(self) -> ClusterInfo:
        """The POD behind the server; of one that was divided into several clusters the largest."""
        reply = self._ask("GetCluster")
        return ClusterInfo(
            reply.cluster_id,
            reply.target,
            reply.num_ipus,
            reply.num_ipus // reply.ipu_link_domain_size,
            reply.ipu_link_domain_size,
            reply.ipu_link_topology,
            reply.gateway_topology,
        )

    def list_clusters(self) -> list[ClusterInfo]:
        """The V-IPU clusters of the POD: agents that links join."""
        reply = self._ask("ListClusters")
        return [from_message(ClusterInfo, entry) for entry in reply.clusters]

    def create_cluster(
        self, name: str, agents: Iterable[str], *, ilds: int = 1, ipu_links: str = "mesh", gateway: str = ""
    ) -> None:
        """Join agents that are in no cluster by links, with an allocation of the same name. ``ilds``: IPU-Link domains;
        ``ipu_links``: ``mesh`` or ``torus``; ``gateway``: ``none`` or ``looped``, empty: as is usual for so many."""
        cluster = self._pb.Cluster(
            cluster_id=name,
            agent_ids=list(agents),
            num_ilds=unsigned(ilds, "num-ipulinkdomains"),
            ipu_link_topology=ipu_links,
            gateway_topology=gateway,
        )
        self._ask("CreateCluster", cluster=cluster)

    def remove_cluster(self, name: str) -> None:
        """Remove a cluster without partitions. Its agents stay, in no cluster."""
        self._ask("RemoveCluster", cluster_id=name)

    def create_agent(self, name: str, host: str, port: int = 8080) -> None:
        """Add an IPU-M2000, in no cluster. ``host`` and ``port``: its modelled address."""
        self._ask("CreateAgent", agent_id=name, host=host, port=unsigned(port, "port"))

    def remove_agent(self, name: str) -> None:
        """Remove an IPU-M2000 that is in no cluster."""
        self._ask("RemoveAgent", agent_id=name)

    def list_allocations(self) -> list[AllocationInfo]:
        """Allocations, by name."""
        reply = self._ask("ListAllocations")
        return [from_message(AllocationInfo, entry) for entry in reply.allocations]

    def create_allocation(self, name: str, agents: Iterable[str]) -> None:
        """Make an allocation of agents that are in no other one."""
        spec = self._pb.AllocationSpec(agent_ids=list(agents))
        self._ask("CreateAllocation", allocation=self._pb.Allocation(id=name, spec=spec))

    def remove_allocation(self, name: str) -> None:
        """Remove an allocation that has no partitions."""
        self._ask("RemoveAllocation", allocation_id=name)

    def list_agents(self) -> list[AgentInfo]:
        """Agents of the POD in its order, one for each IPU-M2000."""
        reply = self._ask("ListAgents")
        return [from_message(AgentInfo, agent) for agent in reply.agents]

    def set_maintenance(
        self, agent: str, *, drain: bool = False, deadline_s: float = 0.0, reason: str = ""
    ) -> None:
        """Make no new partitions on an agent; with ``drain`` remove the present ones after ``deadline_s`` seconds (0:
        they stay until their owners remove them).
        """
        self._ask("SetMaintenance", agent_id=agent, drain=drain, deadline_seconds=deadline_s, reason=reason)

    def end_maintenance(self, agent: str) -> None:
        """Return an agent to service."""
        self._ask("EndMaintenance", agent_id=agent)

    def create_reservation(
        self, name: str, agents: Iterable[str], *, begin_in_s: float, for_s: float
    ) -> None:
        """Keep agents, from ``begin_in_s`` seconds from now on, for partitions that name the reservation."""
        self._ask(
            "CreateReservation",
            reservation_id=name,
            agent_ids=list(agents),
            begin_in_seconds=begin_in_s,
            for_seconds=for_s,
        )

    def remove_reservation(self, name: str) -> None:
        """End a reservation of agents."""
        self._ask("RemoveReservation", reservation_id=name)

    def power_cycle_agent(self, agent: str, generation: int = 0) -> None:
        """Power-cycle an IPU-M2000 (FULL_RESET). Its partitions go to ERROR until they are reset.

        ``generation``: left alone if all its partitions are of later generations.
        """
        self._ask("PowerCycleAgent", agent_id=agent, generation=generation, again=generation > 0)

    def restart_agent(self, agent: str, generation: int = 0) -> None:
        """Replace a lost machine by a fresh one. Its partitions stay in ERROR until they are reset. ``generation``: as
        in `power_cycle_agent`.
        """
        self._ask("RestartAgent", agent_id=agent, generation=generation, again=generation > 0)
