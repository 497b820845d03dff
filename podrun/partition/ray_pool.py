"""Machines as Ray actors, one for each IPU-M2000, or one for several where a host could not hold that many processes.

Actors of one start are created together. On one host they share a placement group by IPU-Link domain; over the nodes of
a Ray cluster `podrun.partition.spread` says where each goes, and machines listen on their node's address and want
podrun's token. Ray places and supervises; commands to machines go over gRPC.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from podrun.access import is_loopback
from podrun.cluster import IPUS_PER_MACHINE, Cluster
from podrun.errors import ServiceError
from podrun.partition.host_memory import available_bytes
from podrun.partition.machine_pool import BasePool, Control, OnLost, _Machine
from podrun.partition.ray_session import RaySession
from podrun.partition.ray_starts import Start, start_together
from podrun.partition.spread import VARIABLE, Host, host_of_agents, in_processes, machines_per_process

log = logging.getLogger("podrun.partition")

LOOPBACK = "127.0.0.1"
CPU_SHARE = 0.001
"""CPUs that an actor books. Machines of a POD are many and mostly wait; they share the CPUs there are."""
_SHORT = (
    "The host may be short of memory or processes; try a smaller POD or PODRUN_MACHINES_PER_PROCESS=4. "
    "vipu-server --verbose logs what happens."
)


class RayMachinePool(BasePool):
    """A pool of Ray actors. ``address``: somebody's Ray cluster to use; None: a private one on this host.

    ``on_session`` is told of Ray once it runs. ``start_timeout``: seconds that machines started together may
    take. ``options`` go to each machine. ``token``: what machines that listen on a network want to be shown.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        address: str | None = None,
        keep_spares: bool = False,
        on_session: Callable[[RaySession], None] = lambda session: None,
        start_timeout: float = 120.0,
        options: Mapping[str, Any] | None = None,
        token: str = "",
    ) -> None:
        super().__init__(cluster, keep_spares=keep_spares)
        self._token = token or secrets.token_hex(32)
        self._host_of: dict[str, Host] | None = None
        self._address = address
        self._start_timeout = start_timeout
        self._on_session = on_session
        self._options = dict(options or {})
        self._session: RaySession | None = None
        self._session_lock = threading.Lock()
        self._groups: dict[int, Any] = {}
        self._idle = threading.Condition()
        self._starts = 0

    def open(self, on_lost: OnLost) -> None:
        """See MachinePool. Ray itself starts with the first machine."""
        super().open(on_lost)

    @property
    def session(self) -> RaySession:
        """The Ray behind the pool, started if need be."""
        with self._session_lock:
            if self._session is not None and not self._session.alive:
                # Somebody ended Ray under us; its machines ended with it. A fresh one is for those that are restarted.
                self._session.close()
                self._session = None
                self._groups.clear()
            if self._session is None:
                self._session = RaySession(self._address, wanted=lambda: not self._closed)
                self._on_session(self._session)
            return self._session

    def close(self) -> None:
        """See MachinePool."""
        super().close()
        with self._idle:
            # Ray must not end under a start that is still going on: it notices soon that the pool is closed.
            self._idle.wait_for(lambda: not self._starts, self._start_timeout)
        with self._session_lock:
            session, self._session = self._session, None
        if session is not None:
            for group in self._groups.values() if self._address is not None else ():
                from ray.util.placement_group import remove_placement_group

                try:
                    remove_placement_group(group)
                except Exception as error:  # Ray forgets its groups when it ends, in the next line.
                    log.debug("a placement group was not removed: %s", error)
            self._groups.clear()
            session.close()

    def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        with self._idle:
            self._starts += 1
        try:
            return self._start_actors(agents)
        finally:
            with self._idle:
                self._starts -= 1
                self._idle.notify_all()

    def _start_actors(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        ray = self.session.ray
        self._check_open()
        groups = self._groups_of(agents)
        running = start_together(
            [(f"machine {', '.join(group)}", partial(self._begin, group)) for group in groups],
            ray,
            timeout=self._start_timeout,
            hint=_SHORT,
            check_wanted=self._check_open,
        )
        # In the order asked for; an agent may stand there more than once.
        started: dict[str, list[tuple[str, Any]]] = {}
        for group, (actor, endpoints) in zip(groups, running, strict=True):
            for agent, endpoint in zip(group, endpoints, strict=True):
                started.setdefault(agent, []).append((endpoint, _Resident(actor, agent, len(group) == 1)))
        return [started[agent].pop(0) for agent in agents]

    def _begin(self, group: list[str]) -> Start:
        """Have Ray start the machines of a group in an actor; not awaited."""
        from podrun.device.service.server import machine_actor

        actor = machine_actor().options(**self._place(group[0])).remote()
        listen = self._listen(group[0])
        return Start(actor, actor.start.remote(agent_ids=group, target=self.cluster.target, **listen))

    def _groups_of(self, agents: Sequence[str]) -> list[list[str]]:
        """The agents that share a process; says so if any do."""
        hosts = self._hosts_of_agents()
        share: dict[Host, int] = {}
        for host in set(hosts.values()):
            count = sum(hosts[agent] == host for agent in agents)
            share[host] = machines_per_process(count, host.cores, host.memory, os.environ.get(VARIABLE, ""))
        groups = in_processes(agents, hosts, share)
        shared = [group for group in groups if len(group) > 1]
        if shared:
            each = max(map(len, shared))
            where = "this host" if len(share) == 1 else "its host"
            log.warning(
                "%d machines share a process on %s: %d machines in %d processes (%s=1 gives each its own)",
                *(each, where, len(agents), len(groups), VARIABLE),
            )
        return groups

    # --- hosts ----------------------------------------------------------------------------------------------

    def hosts(self) -> list[Host]:
        """The nodes of the Ray cluster; Ray starts or is joined if need be."""
        session = self.session
        if self._address is None:
            return [Host("", LOOPBACK, os.cpu_count() or 1, available_bytes())]
        return [
            Host(
                node["NodeID"],
                node["NodeManagerAddress"],
                int(node["Resources"].get("CPU", 1)),
                int(node["Resources"].get("memory", 0)) or available_bytes(),
            )
            for node in session.ray.nodes()
            if node["Alive"]
        ]

    def own_address(self) -> str:
        """Where this process's host is reached by the others; 127.0.0.1 if there are none."""
        if len(self.hosts()) == 1:
            return LOOPBACK
        return str(self.session.ray.util.get_node_ip_address())

    def _hosts_of_agents(self) -> dict[str, Host]:
        if self._host_of is None or any(host.node for host in self._host_of.values()):
            hosts = self.hosts()
            known = {host.node: host for host in hosts}
            if self._host_of is None or any(h.node not in known for h in self._host_of.values()):
                self._host_of = host_of_agents(self.cluster, hosts)
                if len(hosts) > 1:
                    log.info("machines lie on %d hosts", len(hosts))
        return self._host_of

    def _listen(self, agent: str) -> dict[str, Any]:
        """Where and how the machines of an agent's process listen."""
        hosts = self._hosts_of_agents()
        if len(set(hosts.values())) == 1 and len(self.hosts()) == 1:
            return {**self._options, "host": LOOPBACK}
        return {**self._options, "host": hosts[agent].address, "token": self._token}

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError("the pool of machines was closed while they started")

    def _place(self, agent: str) -> dict[str, Any]:
        """Where Ray is to put the actor of an agent: with its IPU-Link domain, or on the host that was chosen."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if len(self.hosts()) > 1:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            there = NodeAffinitySchedulingStrategy(node_id=self._hosts_of_agents()[agent].node, soft=False)
            return {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": there}
        description = self.cluster.agents_by_id[agent]
        with self._session_lock:
            group = self._groups.get(description.ild)
            if group is None:
                members = self.cluster.ilds[description.ild].agents
                # A machine shared by partitions of one IPU has an actor for each, and one spare.
                bundle = {"CPU": CPU_SHARE * (IPUS_PER_MACHINE + 1)}
                group = placement_group([bundle] * len(members), strategy="PACK")
                self._groups[description.ild] = group
        return {
            "num_cpus": CPU_SHARE,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=description.position
            ),
        }

    def _kill(self, machine: _Machine) -> None:
        session = self._session
        if session is None or not session.alive or (self._closed and self._address is None):
            return  # Our own Ray ends with all that runs in it.
        resident = machine.handle
        try:
            if (
                resident.alone
                or session.ray.get(resident.actor.stop.remote(resident.agent), timeout=5.0) == 0
            ):
                session.ray.kill(resident.actor)
        except Exception as error:  # The actor may be gone already; Ray has no gentler question.
            log.debug("the machine of %s was not ended: %s", resident.agent, error)

    def _connect(self, endpoint: str) -> Control:
        from podrun.device.service.control import MachineControl

        token = "" if is_loopback(endpoint.rpartition(":")[0]) else self._token
        control: Control = MachineControl(endpoint, token=token)
        return control


@dataclass(frozen=True, slots=True)
class _Resident:
    """One agent's machine in an actor. ``alone``: the actor has no other."""

    actor: Any
    agent: str
    alone: bool
