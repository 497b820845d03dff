"""What the service knows of its POD, and tells: questions that change nothing, and the news for those who watch."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from podrun import __version__
from podrun.core.cluster import Cluster
from podrun.core.telemetry import MachineReport
from podrun.partition.host.holders import this_holder
from podrun.partition.host.leases import SignsOfLife
from podrun.partition.machines import operations
from podrun.partition.machines.pool import MachinePool
from podrun.partition.server.event_log import CallMeter, EventLog, Told
from podrun.partition.server.request_faults import (
    ControlLog,
    RequestFaults,
    with_request_faults,
)
from podrun.partition.server.views import (
    AgentStatus,
    ViewCache,
    agent_info,
    agent_statuses,
    agent_text,
    all_told,
    allocation_infos,
    changes_told,
    cluster_info,
    groups_json,
    ipuof_config,
    partition_info,
    planned_info,
    queue_info,
    queued_info,
    reservation_infos,
)
from podrun.partition.state import events as ev
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.candidates import free_ipus, largest_possible
from podrun.partition.state.capture import capture_json
from podrun.partition.state.explanations import explain_queue, explain_request
from podrun.partition.state.orphans import HolderWatch
from podrun.partition.state.records import ITSELF, Asker, Partition
from podrun.partition.state.requirements import unknown_name
from podrun.partition.state.store import Store
from podrun.partition.state.values import (
    AgentInfo,
    AllocationInfo,
    ClusterInfo,
    IpuofConfig,
    PartitionInfo,
    PartitionState,
    PlannedInfo,
    QueueInfo,
    Requirements,
    ReservationInfo,
    ServerVersion,
)

log = logging.getLogger("podrun.partition")


class ServiceReadings:
    """The service's state, store, machines and log of changes, and what it answers from them. ``clock`` gives seconds
    since 1970. Safe to use from several threads."""

    def __init__(
        self, cluster: Cluster, store: Store, machine_pool: MachinePool, clock: Callable[[], float]
    ) -> None:
        self.store, self.pool, self._clock = store, machine_pool, clock
        self._lock, self._telling = threading.RLock(), threading.Lock()
        state = store.load(cluster)
        self._lease = store.lead()
        # A service without a state file ends with its process.
        self.id = self._lease.pod or str(this_holder())
        self._allocator = Allocator(
            state.layout or cluster,
            allocations=state.allocations,
            partitions=state.partitions,
            lost=state.lost,
            plans=state.plans,
        )
        self._partition_infos: ViewCache[Partition, PartitionInfo] = ViewCache()
        self._agent_infos: ViewCache[AgentStatus, AgentInfo] = ViewCache()
        self._agent_texts: ViewCache[AgentInfo, str] = ViewCache()
        self._holders = HolderWatch(SignsOfLife())
        self.request_faults = RequestFaults()
        self.control_log = ControlLog()
        self._reporter = operations.Reporter(self.cluster, machine_pool)
        self.pool.arrange(self.cluster)
        self.events, self.meter = EventLog(self._all_there_is, self._clock), CallMeter()
        self._address = ("", 0)
        self._tell_of_groups()

    @property
    def cluster(self) -> Cluster:
        """The POD with its agents and clusters as they are now."""
        return self._allocator.cluster

    def version(self) -> ServerVersion:
        """The server's release, address and process."""
        host = self._address[0]
        shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        return ServerVersion(__version__, shown, self._address[1], os.getpid())

    def partition(self, name: str, *, asks_for_itself: bool = False, asker: Asker = ITSELF) -> PartitionInfo:
        """One partition, or queued request. ``asks_for_itself``: the question is a sign of life of who waits for it.
        Raises NotFoundError."""
        with self._lock:
            entry = self._allocator.queued(name, asker)
            if entry is not None:
                info = queued_info(self.cluster, entry)
            else:
                info = partition_info(self.cluster, self._allocator.partition(name, asker))
            if asks_for_itself and info.state is not PartitionState.ACTIVE:
                self._holders.note(name)
            return info

    def owners(self) -> dict[str, int]:
        """The user id of each partition's owner, by the partition's name."""
        with self._lock:
            waiting = {name: entry.needs.owner for name, entry in self._allocator.queue.items()}
            return waiting | {name: entry.owner for name, entry in self._allocator.partitions.items()}

    def partitions(self) -> list[PartitionInfo]:
        """All partitions, by name."""
        with self._lock:
            pod, entries = self.cluster, sorted(self._allocator.partitions.items())
        return self._partition_infos.all(
            (name, partition, partial(partition_info, pod, partition)) for name, partition in entries
        )

    def queue(self) -> list[QueueInfo]:
        """The requests that wait, in the order in which they are served."""
        with self._lock:
            self._allocator.now = self._clock()
            return [queue_info(entry) for entry in explain_queue(self._allocator)]

    def planned(self, needs: Requirements, *, priority: int = 0, asker: Asker = ITSELF) -> PlannedInfo:
        """Where and when a request would start, were it made now. Raises what `create` would refuse."""
        with self._lock:
            self._allocator.now = self._clock()
            told = explain_request(self._allocator, self._allocator.possible(needs, asker), priority)
            return planned_info(self._allocator, told)

    def captured(self) -> str:
        """Agents, partitions, queue and reservations, as JSON that a simulation can start from."""
        with self._lock:
            return capture_json(self._allocator, self._clock())

    def reservations(self) -> list[ReservationInfo]:
        """Reservations, by their begin."""
        with self._lock:
            return reservation_infos(self._allocator)

    def ipuof_config(self, name: str, gcd: int, *, asker: Asker = ITSELF) -> IpuofConfig:
        """How clients reach the IPUs of one GCD. Raises UsageError if the partition has no such GCD."""
        with self._lock:
            pod, partition = self.cluster, self._allocator.partition(name, asker)
        return ipuof_config(pod, partition, gcd, self.pool.endpoints(), self.id)

    def allocations(self) -> list[AllocationInfo]:
        """Allocations, by name."""
        with self._lock:
            return allocation_infos(self._allocator)

    def clusters(self) -> list[ClusterInfo]:
        """The POD's V-IPU clusters."""
        return [cluster_info(cluster) for cluster in self.cluster.clusters]

    def agents(self) -> list[AgentInfo]:
        """Agents of the POD in its order."""
        with self._lock:
            lost = set(self._allocator.lost)
            maintenance = dict(self._allocator.maintenance)
            holders, pod = self._allocator.table.all_holders(), self.cluster
        told = agent_statuses(pod, self._reporter.facts(lost, maintenance, holders))
        return self._agent_infos.all(
            (agent.id, status, partial(agent_info, agent, status)) for agent, status in told
        )

    def partitions_on(self, agent: str) -> tuple[str, ...]:
        """Names of the partitions that hold IPUs of an agent."""
        with self._lock:
            return self._allocator.partitions_on(agent)

    def room(self) -> tuple[int, int, int]:
        """Queued requests, free IPUs on agents in service, and IPUs of the largest partition possible now."""
        with self._lock:
            free = int(free_ipus(self._allocator).sum())
            return len(self._allocator.queue), free, largest_possible(self._allocator)

    def check_allocation(self, name: str) -> None:
        """Raise NotFoundError unless there is an allocation of that name."""
        with self._lock:
            if name not in self._allocator.allocations:
                known = self._allocator.allocations
                raise unknown_name("allocation", name, known, "vipu-admin create allocation NAME")

    def allocation_of(self, name: str) -> str | None:
        """The allocation of a partition, or the one that a queued request names; None if there is neither."""
        with self._lock:
            partition, entry = self._allocator.partitions.get(name), self._allocator.queue.get(name)
            return partition.allocation if partition else entry.needs.allocation if entry else None

    def wait_idle(self, timeout: float) -> bool:
        """Wait until every partition is in a terminal state, for tests and clean starts. False after ``timeout``."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            with self._lock:
                if all(p.state.is_terminal() for p in self._allocator.partitions.values()):
                    return True
            time.sleep(0.005)
        return False

    def _tell(self, change: ev.StateChange, before: dict[str, str]) -> None:
        """Tell those who watch. ``before``: allocations of what has changed, by name."""
        for told in changes_told(self.cluster, change, self._clock(), before):
            self.events.add(*told)
        if change.layout is not None or change.allocations is not None or change.reservations:
            self._tell_of_groups()

    def _tell_of_groups(self) -> dict[str, dict[str, str]]:
        """Tell those who watch which clusters, allocations and reservations have changed; the JSON of all."""
        there = groups_json(self.clusters(), self.allocations(), self.reservations())
        for kind, texts in there.items():
            self.events.tell(kind, texts)
        return there

    def _tell_of_agents(self) -> dict[str, str]:
        """Tell those who watch which agents have changed; the JSON of all."""
        with self._telling:  # What was looked at first is told first.
            infos = self.agents()
            texts = self._agent_texts.all((i.agent_id, i, partial(agent_text, i)) for i in infos)
            there = {info.agent_id: text for info, text in zip(infos, texts, strict=True)}
            self.events.tell("machine", there)
            return there

    def _all_there_is(self) -> list[Told]:
        """The present state, for those who begin to watch."""
        with self._lock:
            waiting = [queued_info(self.cluster, entry) for entry in self._allocator.queue.values()]
            there = self._tell_of_groups()
        there |= {"machine": self._tell_of_agents(), "user": self.events.there("user")}
        return all_told([*self.partitions(), *waiting], there)

    def _arranged(self, pod: Cluster) -> None:
        """The POD has other agents or clusters."""
        self.pool.arrange(pod)
        self._reporter.cluster = pod
        self._partition_infos, self._agent_infos = ViewCache(), ViewCache()
        log.info("%s: %d agents in %d clusters", pod.name, len(pod.agents), len(pod.clusters))

    def machine_reports(self, name: str = "", *, asker: Asker = ITSELF) -> list[MachineReport]:
        """Reports of machines: those of one partition, or one for each agent and partition of the POD."""
        with self._lock:
            lost = set(self._allocator.lost)
            if name:
                partitions = [self._allocator.partition(name, asker)]
            else:
                partitions = sorted(self._allocator.partitions.values(), key=lambda p: p.name)
        reports = self._reporter.reports(partitions, lost, silent_s=operations.SILENT_REPORT_SECONDS)
        reports = [with_request_faults(r, self.request_faults, self.control_log) for r in reports]
        return reports if name else self._reporter.whole_pod(reports, lost)
