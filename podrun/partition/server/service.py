"""The V-IPU service: carries out what the allocator decides, and answers over gRPC.

Usable inside any process (the launcher runs it if no `vipu-server` runs). A request that changes something takes the
lock, lets the allocator decide, commits the change to the store, applies it, and hands the slow part to a worker
thread; the worker reports back with an event. Operations on one partition run one after the other; one that is no
longer current when its turn comes is skipped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from podrun import __version__
from podrun.core.access import make_token, quiet_grpc
from podrun.core.cluster import Cluster
from podrun.core.environment import environment, runtime_directory
from podrun.core.errors import PodrunError, ServiceError
from podrun.core.telemetry import MachineReport
from podrun.faults import FaultSpec
from podrun.partition.host.holders import SignsOfLife, check_end, this_holder
from podrun.partition.host.ipuof_files import IpuofFiles
from podrun.partition.machines import operations
from podrun.partition.machines.endpoint_watch import HEARTBEAT_S, ROUND_S, Rounds, steady_clock
from podrun.partition.machines.pool import MachinePool
from podrun.partition.server.event_log import CallMeter, EventLog, Told
from podrun.partition.server.request_faults import (
    ControlLog,
    RequestFaults,
    check_faults,
    of_service,
    planned_faults,
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
    queue_info,
    queued_info,
    reservation_infos,
)
from podrun.partition.state import events as ev
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.candidates import free_ipus, largest_possible
from podrun.partition.state.explanations import explain_queue
from podrun.partition.state.maintenance import anything_due
from podrun.partition.state.orphans import HolderWatch
from podrun.partition.state.records import ITSELF, Asker, MachineUse, Partition, Reservation
from podrun.partition.state.requirements import unknown_name
from podrun.partition.state.store import Store, Superseded
from podrun.partition.state.values import (
    AgentInfo,
    AllocationInfo,
    ClusterInfo,
    IpuofConfig,
    PartitionInfo,
    PartitionState,
    QueueInfo,
    Requirements,
    ReservationInfo,
    ServerVersion,
)

if TYPE_CHECKING:
    from podrun.partition.server.access import FrontDesk

log = logging.getLogger("podrun.partition")

WORKERS = 8
"""Operations on partitions that run at a time."""
REPORT_AGAIN_S = 1.0
"""Between two attempts to record what happened, while the state file cannot be written."""


class Service:
    """Partitions of one POD. ``clock`` gives seconds since 1970; ``heartbeats``: ask machines how they are every few
    seconds, so that what does not answer is known before somebody asks."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        machine_pool: MachinePool,
        *,
        clock: Callable[[], float] | None = None,
        heartbeats: bool = False,
    ) -> None:
        self.store, self.pool = store, machine_pool
        self._clock = clock or steady_clock()
        self._lock = threading.RLock()
        self._agents_lock, self._telling = threading.RLock(), threading.Lock()
        state = store.load(cluster)
        self._lease = store.lead()
        self.id = self._lease.pod or str(
            this_holder()
        )  # A service without a state file ends with its process.
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
        self.serving = False  # True once earlier machines are taken over.
        self._holders = HolderWatch(SignsOfLife())
        self._rounds = [Rounds("podrun-rounds", ROUND_S, self.look_around)]
        if heartbeats:
            self._rounds.append(Rounds("podrun-heartbeats", HEARTBEAT_S, self._ask_machines))
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="podrun-partition")
        self._partition_locks: dict[str, threading.Lock] = {}
        self.request_faults = RequestFaults()
        self.control_log = ControlLog()
        self._reporter = operations.Reporter(self.cluster, machine_pool)
        self.pool.arrange(self.cluster)
        self._server: Any = None
        self.events, self.meter = EventLog(self._all_there_is, self._clock), CallMeter()
        self._tell_of_groups()
        self._stopping = threading.Event()
        self.on_superseded: Callable[[], None] = lambda: None
        self._address = ("", 0)
        self.files = IpuofFiles(None, None, self.id)  # Those of the user's home are a server's that stays.

    @property
    def cluster(self) -> Cluster:
        """The POD with its agents and clusters as they are now."""
        return self._allocator.cluster

    # --- life -----------------------------------------------------------------------------------------------

    def start(
        self,
        host: str = "127.0.0.1",
        port: int = 8090,
        token: str | None = None,
        desk: FrontDesk | None = None,
    ) -> int:
        """Listen; returns the port (a free one if ``port`` is 0). ``token``: the secret that callers must prove to know
        (`podrun.core.access`), by default this user's; ``desk``: who else may call, and what for. Raises ConflictError
        if the port is taken."""
        quiet_grpc()
        from podrun.partition.server.grpc_listen import serve

        secret = token or make_token(environment(), runtime_directory())
        with self._lock:  # Requests wait until it is known which machines are up.
            self._server, bound = serve(self, host, port, secret, desk)
            self._address = (host, bound)
            self.pool.open(self._machine_lost, self._lease)
            instructions = self._take_over()
        for instruction in instructions:
            operations.work_on_agent(self.pool, instruction)
        for rounds in self._rounds:
            rounds.start()
        self.serving = True
        self.pool.settle()
        return bound

    def _take_over(self) -> list[ev.Instruction]:
        """Go on with the machines that an earlier server left, and bring up what is missing. Returns instructions on
        agents, which are to be carried out without the lock."""
        left = operations.take_over(self.pool, list(self._allocator.partitions.values()))
        self._reporter.note_silent(left.silent)
        instructions: list[ev.Instruction] = []
        for agent in left.lost:
            instructions += self._decide(ev.AgentLost(agent, "its process ended while no server ran"))
        self._end_orphans()
        self.files.sweep({p.epoch(self.id) for p in self._allocator.partitions.values()})
        self._decide(ev.ServerStarted(left.adopted))
        if left.adopted:
            log.info("machines of the last server go on: %s", ", ".join(sorted(left.adopted)))
        return instructions

    def stop(self, grace: float = 1.0, *, leave_machines: bool = False) -> None:
        """Stop listening, end all machines (or leave them for the next server), close the store. Partitions stay in the
        store. Idempotent."""
        self._stopping.set()
        self.events.close()
        for rounds in self._rounds:
            rounds.stop()
        if self._server is not None:
            self._server.stop(grace).wait(grace + 5)
            self._server.close()
            self._server = None
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.pool.close(leave=leave_machines)
        self._workers.shutdown(wait=True)
        if not leave_machines:
            self.files.stopped()  # Not before: a worker that brings a partition up writes its files.
        self.store.close()

    def version(self) -> ServerVersion:
        """Release, address and process."""
        host = self._address[0]
        shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
        return ServerVersion(__version__, shown, self._address[1], os.getpid())

    # --- requests of users -------------------------------------------------------------------------------------

    def create(
        self, needs: Requirements, *, wait: bool = False, priority: int = 0, asker: Asker = ITSELF
    ) -> None:
        """Reserve IPUs and bring them up in the background. ``wait``: in the queue, if there is no room."""
        check_end(needs)
        with self._lock:
            if needs.faults:
                possible = self._allocator.possible(needs, asker)
                cluster = self._allocator.find_cluster(possible.cluster)
                check_faults(possible.faults, cluster, possible.size, possible.num_ilds)
            if wait:
                self.handle(ev.Enqueue(needs, priority, self._clock()), asker)
            else:
                self.handle(ev.CreatePartition(needs, self._clock()), asker)
            self._holders.note(needs.name)
            # Not before: if the name is taken, they would strike requests of another.
            self.request_faults.plan(needs.name, [f for f in needs.faults if f.during != "CreatePartition"])

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

    def reset(self, name: str, generation: int = 0, *, asker: Asker = ITSELF) -> None:
        """Re-initialise IPUs and links in the background, unless the partition is past ``generation`` already."""
        self.handle(ev.ResetPartition(name, generation), asker)

    def remove(self, name: str, *, force: bool = False, asker: Asker = ITSELF) -> None:
        """Give the IPUs back in the background, or give up a queued request. Raises ConflictError if a process is
        attached, unless ``force``."""
        with self._lock:
            queued = self._allocator.queued(name, asker)
            partition = None if queued else self._allocator.partition(name, asker)
            lost = set(self._allocator.lost)
        if partition is not None and not force and partition.state is PartitionState.ACTIVE:
            operations.refuse_in_use(name, self._reporter.reports([partition], lost))
        self.handle(ev.RemovePartition(name), asker)

    def hold(self, name: str, holder: str, *, keep: bool = False, asker: Asker = ITSELF) -> None:
        """Note that the holder of a partition, or of a request, lives; ``keep``: end the bond. Raises NotFoundError."""
        if self.partition(name, asker=asker).holder == holder:
            self._holders.note(name)
            if keep:
                self.handle(ev.KeepPartition(name, holder), asker)

    def queue(self) -> list[QueueInfo]:
        """The requests that wait, in the order in which they are served."""
        with self._lock:
            self._allocator.now = self._clock()
            return [queue_info(entry) for entry in explain_queue(self._allocator)]

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

    def machine_reports(self, name: str = "", *, asker: Asker = ITSELF) -> list[MachineReport]:
        """Reports of machines: those of one partition, or one for each agent and partition of the POD."""
        with self._lock:
            lost = set(self._allocator.lost)
            if name:
                partitions = [self._allocator.partition(name, asker)]
            else:
                partitions = sorted(self._allocator.partitions.values(), key=lambda p: p.name)
        reports = self._reporter.reports(partitions, lost)
        reports = [with_request_faults(r, self.request_faults, self.control_log) for r in reports]
        return reports if name else self._reporter.whole_pod(reports, lost)

    def reset_ipus(self, name: str, ipus: Sequence[int], *, asker: Asker = ITSELF) -> None:
        """Reset IPUs by their index in the partition. Raises ConflictError unless the partition is active."""
        with self._lock:
            partition = self._allocator.active_partition(name, asker)
        operations.reset_ipus(self.pool, partition, ipus)

    # --- requests of administrators ----------------------------------------------------------------------------

    def inject_faults(self, name: str, faults: Sequence[FaultSpec], *, asker: Asker = ITSELF) -> None:
        """Plan faults on the machines of a partition; each machine takes those on itself."""
        with self._lock:
            partition = self._allocator.active_partition(name, asker)
            cluster = self._allocator.cluster_of_allocation(partition.allocation)
        check_faults(faults, cluster, partition.size, partition.num_ilds, created=name)
        self.request_faults.plan(name, faults)
        if len(faults) > len(of_service(faults)):
            operations.on_machines(self.pool, partition, lambda i, use: self.pool.control(use).inject(faults))

    def partitions_on(self, agent: str) -> tuple[str, ...]:
        """Names of the partitions that hold IPUs of an agent."""
        with self._lock:
            return self._allocator.partitions_on(agent)

    def cancel_faults(
        self, name: str, texts: Sequence[str] = (), *, asker: Asker = ITSELF
    ) -> tuple[str, ...]:
        """Take faults of a partition off the plan: those of these texts, or all. Those that were planned.

        Raises NotFoundError for a text that is not planned.
        """
        cancelled = planned_faults(name, self.machine_reports(name, asker=asker), texts)
        with self._lock:
            partition = self._allocator.partition(name, asker)
        self.request_faults.cancel(name, texts)
        operations.cancel_faults(self.pool, partition, texts)
        return cancelled

    def set_maintenance(self, agent: str, *, drain: bool, deadline_s: float = 0.0, reason: str = "") -> None:
        """Cordon or drain an agent."""
        self.handle(ev.SetMaintenance(agent, drain, self._clock(), deadline_s, reason))

    def end_maintenance(self, agent: str) -> None:
        """Return an agent to service."""
        self.handle(ev.EndMaintenance(agent, self._clock()))

    def create_reservation(
        self, name: str, agents: tuple[str, ...], *, begin_in_s: float, for_s: float, asker: Asker = ITSELF
    ) -> None:
        """Keep agents for some time."""
        now = self._clock()
        start = now + max(begin_in_s, 0.0)
        self.handle(ev.CreateReservation(Reservation(name, agents, start, start + for_s), now), asker)

    def remove_reservation(self, name: str, *, asker: Asker = ITSELF) -> None:
        """End a reservation."""
        self.handle(ev.RemoveReservation(name, self._clock()), asker)

    def look_around(self) -> None:
        """Do the work that is due as time passes; called once a second."""
        with self._lock:
            self._end_orphans()
            due = anything_due(self._allocator)
        if due:
            self.handle(ev.Tick(self._clock()))
        if self.events.watchers:
            self._tell_of_agents()

    def _end_orphans(self) -> None:
        """Remove what belongs to processes that are gone; called with the lock."""
        gone = self._holders.gone(self._allocator)
        if gone is not None:
            self._decide(gone)

    def _ask_machines(self) -> None:
        """A heartbeat: which machines answer."""
        with self._lock:
            partitions = list(self._allocator.partitions.values())
            lost = set(self._allocator.lost)
        self._reporter.reports(partitions, lost)
        self._reporter.forget(self.pool.endpoints())

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

    def handle(self, event: ev.Event, asker: Asker = ITSELF) -> None:
        """Let the allocator decide, store the change, apply it, and start what follows. ``asker``: who wants it.

        Raises what the allocator refuses, and ServiceError if the change cannot be stored: then nothing has changed.
        """
        if isinstance(event, ev.AgentLost | ev.RestartAgent | ev.PowerCycleAgent | ev.RemoveAgent):
            # Machines of agents end and start in the order in which that was decided, but not under the lock that every
            # request needs.
            with self._agents_lock:
                for instruction in self._decide(event, asker):
                    operations.work_on_agent(self.pool, instruction)
        else:
            self._decide(event, asker)

    def _decide(self, event: ev.Event, asker: Asker = ITSELF) -> tuple[ev.Instruction, ...]:
        """Decide, commit, then apply: nothing starts, and no IPU is held, that the store does not know."""
        with self._lock:
            self._allocator.now = self._clock()
            self._allocator.absent = self._holders.absent(self._allocator)
            decision = self._allocator.propose(event, asker)
            if decision.change:
                self._commit(decision.change)
            changed = [*decision.change.partitions, *decision.change.queue]
            before = {name: self.allocation_of(name) or "" for name in changed}
            self._allocator.apply(decision)
            if decision.change.layout is not None:
                self._arranged(decision.change.layout)
            for name, partition in decision.change.partitions.items():
                log.info("partition %s: %s", name, partition.story[-1] if partition else "removed")
            self._tell(decision.change, before)
            self.files.follow(decision.change, self.ipuof_config)
            for instruction in decision.instructions:
                self._carry_out(instruction)
            return decision.instructions

    def _arranged(self, pod: Cluster) -> None:
        """The POD has other agents or clusters."""
        self.pool.arrange(pod)
        self._reporter.cluster = pod
        self._partition_infos, self._agent_infos = ViewCache(), ViewCache()
        log.info("%s: %d agents in %d clusters", pod.name, len(pod.agents), len(pod.clusters))

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

    def _commit(self, change: ev.StateChange) -> None:
        try:
            self.store.commit(change)
        except Superseded:
            self.on_superseded()
            raise

    def _report(self, event: ev.Event) -> None:
        """Tell the allocator what happened; again every second while the state file cannot be written."""
        while True:
            try:
                return self.handle(event)
            except Superseded as error:
                log.warning("%s is not recorded: %s", type(event).__name__, error.message)
                return None
            except ServiceError as error:
                log.warning("%s is not recorded yet: %s", type(event).__name__, error.message)
                if self._stopping.wait(REPORT_AGAIN_S):
                    return None

    def wait_idle(self, timeout: float) -> bool:
        """Wait until every partition is in a terminal state, for tests and clean starts. False after ``timeout``."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            with self._lock:
                if all(p.state.is_terminal() for p in self._allocator.partitions.values()):
                    return True
            time.sleep(0.005)
        return False

    # --- instructions ---------------------------------------------------------------------------------------

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.ProvisionMachines() | ev.ResetMachines() | ev.ReleaseMachines():
                self._submit(self._run_operation, instruction)
            case ev.StopAgentMachines() | ev.ReplaceAgentMachines() | ev.PowerCycleMachines():
                pass  # See `handle`.

    def _submit(self, work: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # The service is stopping.
            self._workers.submit(self._logged, work, *args)

    def _logged(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception:
            log.exception("an operation failed: %s%s", work.__name__, args)

    def _run_operation(self, operation: ev.ProvisionMachines | ev.ResetMachines | ev.ReleaseMachines) -> None:
        """Run an operation on a partition after those before it; report how it ended."""
        name, number = operation.partition, operation.operation
        with self._lock:
            turn = self._partition_locks.setdefault(name, threading.Lock())
        with turn:
            with self._lock:
                partition = self._allocator.partitions.get(name)
            if partition is None or partition.operation != number:
                return
            with self._agents_lock:
                pass  # Instructions for its agents from before this operation are carried out first.
            self._report(ev.OperationStarted(name, number))
            try:
                if isinstance(operation, ev.ReleaseMachines):
                    self.pool.release([MachineUse(part.agent_id, name) for part in operation.slices])
                else:
                    operations.bring_up(self.pool, partition, self.id)
            except PodrunError as error:
                if self._stopping.is_set():
                    return  # The partition is in order: it is brought up when the service starts again.
                hint = f" {error.hint}" if error.hint else ""
                self._report(ev.OperationFailed(name, number, f"{error.message}.{hint}"))
            except Exception as error:
                log.exception("partition %s: an operation failed", name)
                self._report(ev.OperationFailed(name, number, f"{type(error).__name__}: {error}"))
            else:
                self._report(ev.OperationSucceeded(name, number))

    def _machine_lost(self, agent: str, reason: str) -> None:
        log.warning("machine %s is lost: %s", agent, reason)
        for partition in self.partitions_on(agent):
            self.control_log.note(partition, "machine lost", agent)
        self._report(ev.AgentLost(agent, reason))
