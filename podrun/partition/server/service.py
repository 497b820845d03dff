"""The V-IPU service: carries out what the allocator decides, and answers over gRPC.

Usable inside any process (the launcher runs it if no `vipu-server` runs). A request that changes something takes the
lock, lets the allocator decide, commits the change to the store, applies it, and hands the slow part to a worker
thread (`operation_workers`); the worker reports back with an event. Operations on one partition run one after the
other; one that is no longer current when its turn comes is skipped. What changes nothing is in `readings`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from podrun.core.access import make_token, quiet_grpc
from podrun.core.cluster import Cluster
from podrun.core.environment import environment, runtime_directory
from podrun.core.errors import ServiceError
from podrun.faults import FaultSpec
from podrun.partition.host.holders import HEARTBEAT_S, ROUND_S, Rounds, steady_clock
from podrun.partition.machines import operations
from podrun.partition.machines.pool import MachinePool
from podrun.partition.server.config_folder import IpuofFiles
from podrun.partition.server.operation_workers import OperationWorkers
from podrun.partition.server.readings import ServiceReadings
from podrun.partition.server.request_faults import (
    check_faults,
    of_service,
    planned_faults,
)
from podrun.partition.state import events as ev
from podrun.partition.state.maintenance import anything_due
from podrun.partition.state.records import ITSELF, Asker, Partition, Reservation
from podrun.partition.state.requirements import check_end
from podrun.partition.state.store import Store, Superseded
from podrun.partition.state.values import (
    PartitionState,
    Requirements,
)

if TYPE_CHECKING:
    from podrun.partition.server.access import FrontDesk
    from podrun.partition.server.grpc_listen import Listening

log = logging.getLogger("podrun.partition")

REPORT_AGAIN_S = 1.0
"""Between two attempts to record what happened, while the state file cannot be written."""


class Service(ServiceReadings):
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
        super().__init__(cluster, store, machine_pool, clock or steady_clock())
        self._agents_lock, self._stopping = threading.RLock(), threading.Event()
        self.serving = False  # True once earlier machines are taken over.
        self._rounds = [Rounds("podrun-rounds", ROUND_S, self.look_around)]
        if heartbeats:
            self._rounds.append(Rounds("podrun-heartbeats", HEARTBEAT_S, self._ask_machines))
        self._workers = OperationWorkers(
            *(machine_pool, self.id, self._record_of, self._report, self._agents_lock, self._stopping)
        )
        self._server: Listening | None = None
        self.on_superseded: Callable[[], None] = lambda: None
        self.more_servicers: Sequence[Callable[[Any], None]] = ()
        self.files = IpuofFiles(None, None, self.id)  # Those of the user's home are a server's that stays.

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
        from podrun.partition.server.grpc_listen import serve_partitions

        secret = token or make_token(environment(), runtime_directory())
        with self._lock:  # Requests wait until it is known which machines are up.
            self._server, bound = serve_partitions(self, host, port, secret, desk)
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

    def _take_over(self) -> list[ev.MachineOrder]:
        """Go on with the machines that an earlier server left, and bring up what is missing. Returns instructions on
        agents, which are to be carried out without the lock."""
        left = operations.take_over(self.pool, list(self._allocator.partitions.values()))
        self._reporter.note_silent(left.silent)
        instructions: list[ev.MachineOrder] = []
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
        self._workers.refuse_new()
        self.pool.close(leave=leave_machines)
        self._workers.wait()
        if not leave_machines:
            self.files.stopped()  # Not before: a worker that brings a partition up writes its files.
        self.store.close()

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

    def reset_ipus(self, name: str, ipus: Sequence[int], *, asker: Asker = ITSELF) -> None:
        """Reset IPUs by their index in the partition. Raises ConflictError unless the partition is active."""
        with self._lock:
            partition = self._allocator.active_partition(name, asker)
        operations.reset_ipus(self.pool, partition, ipus)

    def inject_faults(self, name: str, faults: Sequence[FaultSpec], *, asker: Asker = ITSELF) -> None:
        """Plan faults on the machines of a partition; each machine takes those on itself."""
        with self._lock:
            partition = self._allocator.active_partition(name, asker)
            cluster = self._allocator.cluster_of_allocation(partition.allocation)
        check_faults(faults, cluster, partition.size, partition.num_ilds, created=name)
        self.request_faults.plan(name, faults)
        if len(faults) > len(of_service(faults)):
            operations.on_machines(self.pool, partition, lambda i, use: self.pool.control(use).inject(faults))

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
        """End a reservation of agents."""
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

    def _decide(self, event: ev.Event, asker: Asker = ITSELF) -> tuple[ev.MachineOrder, ...]:
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
                if isinstance(instruction, ev.ProvisionMachines | ev.ResetMachines | ev.ReleaseMachines):
                    self._workers.submit(instruction)  # Those about agents: see `handle`.
            return decision.instructions

    def _record_of(self, name: str) -> Partition | None:
        """A partition's record as it is now."""
        with self._lock:
            return self._allocator.partitions.get(name)

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

    def _machine_lost(self, agent: str, reason: str) -> None:
        log.warning("machine %s is lost: %s", agent, reason)
        for partition in self.partitions_on(agent):
            self.control_log.note(partition, "machine lost", agent, why=reason)
        self._report(ev.AgentLost(agent, reason))
