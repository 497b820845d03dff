"""Where the machines of a pool lie: on which host of a Ray cluster, in which process, at which address.

On one host, the actors of an IPU-Link domain share a placement group; over the nodes of a Ray cluster
`podrun.partition.machines.ray_starts` chooses the node, and machines listen on their node's address.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from podrun.core.access import tls_asked_for
from podrun.core.cluster import IPUS_PER_MACHINE, Cluster
from podrun.core.environment import PODRUN_MACHINES_PER_PROCESS, TLS_VARIABLES, environment
from podrun.core.quick_dataclass import dataclass
from podrun.partition.machines.ray_session import RaySession
from podrun.partition.machines.ray_starts import (
    Host,
    available_bytes,
    host_of_agents,
    in_processes,
    machines_per_process,
    own_machines_per_process,
)
from podrun.partition.machines.ray_template import LOOPBACK

if TYPE_CHECKING:
    from ray.actor import ActorHandle

log = logging.getLogger("podrun.partition")

CPU_SHARE = 0.001
"""CPUs that an actor reserves: little, since machines mostly wait and share the CPUs of the host."""


class RayPlaces:
    """Where the machines of a pool lie: host of a Ray cluster, process, address. ``address``: of an existing Ray
    cluster; None: Ray is private, on this host. ``session``: gives the pool's Ray, which it starts if need be.
    ``options`` go to each machine.
    """

    def __init__(
        self,
        cluster: Cluster,
        address: str | None,
        session: Callable[[], RaySession],
        options: Mapping[str, Any],
    ) -> None:
        self._cluster, self._address, self._session = cluster, address, session
        self._options = dict(options)
        self._host_of: dict[str, Host] | None = None
        self._groups: dict[tuple[str, ...], Any] = {}
        self._lock = threading.Lock()

    def hosts(self) -> list[Host]:
        """The nodes of the Ray cluster; starts or joins Ray first if needed."""
        session = self._session()
        if self._address is None:
            return [Host("", LOOPBACK, os.cpu_count() or 1, available_bytes())]
        return [
            Host(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(node["Resources"].get("CPU", 1)),
                int(node["Resources"].get("memory", 0)) or available_bytes(),
            )
            for node in session.head.call(session.ray.nodes)
            if node["Alive"]
        ]

    def own_address(self) -> str:
        """The address at which other hosts reach this one; 127.0.0.1 if there are none."""
        if len(self.hosts()) == 1:
            return LOOPBACK
        return str(self._session().ray.util.get_node_ip_address())

    def _hosts_of_agents(self) -> dict[str, Host]:
        placed = self._host_of or {}
        complete = placed.keys() == self._cluster.agents_by_id.keys()
        if not complete or any(host.node for host in placed.values()):
            hosts = self.hosts()
            known = {host.node for host in hosts}
            if not complete or any(host.node not in known for host in placed.values()):
                placed = self._host_of = host_of_agents(self._cluster, hosts)
                if len(hosts) > 1:
                    log.info("machines lie on %d hosts", len(hosts))
        return placed

    def listening(self, agent: str) -> dict[str, Any]:
        """Address, token and options of the machines in an agent's process."""
        listen = self._listening(agent)
        if self._address is not None:
            listen["joined"] = listen["host"] != self.own_address()
        return listen

    def _listening(self, agent: str) -> dict[str, Any]:
        hosts = self._hosts_of_agents()
        if len(set(hosts.values())) == 1 and len(self.hosts()) == 1:
            return {**self._options, "host": LOOPBACK}
        tls = {"tls": [environment()[name] for name in TLS_VARIABLES]} if tls_asked_for() else {}
        return {**self._options, **tls, "host": hosts[agent].address}

    def processes_for(self, agents: Sequence[str]) -> list[list[str]]:
        """Agents by process; logs a warning if any share one."""
        hosts = self._hosts_of_agents()
        share: dict[Host, int] = {}
        for host in set(hosts.values()):
            count = sum(hosts[agent] == host for agent in agents)
            share[host] = machines_per_process(
                count, host.cores, host.memory, own_machines_per_process(environment())
            )
        groups = in_processes(agents, hosts, share)
        shared = [group for group in groups if len(group) > 1]
        if shared:
            most_shared = max(map(len, shared))
            where = "this host" if len(share) == 1 else "its host"
            log.warning(
                "%d machines share a process on %s: %d machines in %d processes (%s=1 gives each its own)",
                *(most_shared, where, len(agents), len(groups), PODRUN_MACHINES_PER_PROCESS),
            )
        return groups

    def of_actor(self, agent: str, *, lasting: bool) -> dict[str, Any]:
        """Options that place an agent's actor: with its IPU-Link domain, or on the host chosen for it. ``lasting``: the
        actor outlives this process."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if len(self.hosts()) > 1:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            there = NodeAffinitySchedulingStrategy(node_id=self._hosts_of_agents()[agent].node, soft=False)
            return {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": there}
        if lasting:  # A group would end with the driver that made it.
            return {"num_cpus": 0, "max_restarts": 0}
        description = self._cluster.agents_by_id[agent]
        members = self._cluster.clusters_by_agent[agent].ilds[description.ild].agents
        with self._lock:
            key = tuple(member.id for member in members)
            group = self._groups.get(key)
            if group is None:
                # A machine shared by partitions of one IPU has an actor for each, and one spare.
                bundle = {"CPU": CPU_SHARE * (IPUS_PER_MACHINE + 1)}
                group = placement_group([bundle] * len(members), strategy="PACK")
                self._groups[key] = group
        return {
            "num_cpus": CPU_SHARE,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=description.position
            ),
        }

    def remove_groups(self, session: RaySession) -> None:
        """Remove the placement groups from a Ray that goes on without the pool; a private one ends with them."""
        for group in self._groups.values() if self._address is not None and session.alive else ():
            from ray.util.placement_group import remove_placement_group

            try:
                session.head.call(partial(remove_placement_group, group))
            except Exception as error:  # Ray forgets its groups when it ends.
                log.debug("a placement group was not removed: %s", error)
        self._groups.clear()

    def forget_groups(self) -> None:
        """Ray ended, and its placement groups with it."""
        self._groups.clear()


@dataclass(frozen=True, slots=True)
class ActorMachine:
    """One agent's machine in an actor. ``name``: the actor's, in its namespace; ``alone``: it runs no other machine;
    ``actor``: Ray's handle, None if Ray has not been asked for it."""

    name: str
    namespace: str
    agent: str
    alone: bool
    actor: ActorHandle | None = None

    def find(self, ray: ModuleType) -> ActorHandle:
        """Ray's handle of the actor."""
        return self.actor if self.actor is not None else ray.get_actor(self.name, self.namespace)

    def end(self, ray: ModuleType) -> None:
        """End the machine, and its actor with the last one."""
        actor = self.find(ray)
        if self.alone or ray.get(actor.stop.remote(self.agent), timeout=5.0) == 0:
            ray.kill(actor)
