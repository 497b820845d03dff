"""Who owns which IPUs: a pure state machine.

`Allocator.propose(event)` decides: it returns the change of state and the instructions that follow, or raises a
UsageError. It changes nothing. `service` stores the change, then calls `Allocator.apply`, then carries out the
instructions and reports back with events. No I/O, no clock, no threads. `podrun.partition.state.requirements` says
what always holds.

States of a partition::

    PENDING -> PROVISIONING -> ACTIVE <-> RESETTING
    any but REMOVING -> ERROR (a machine is lost, an operation failed); ERROR -> RESETTING (reset)
    any -> REMOVING -> gone
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from podrun.core.cluster import Allocation, Cluster
from podrun.core.errors import ConflictError, ExistsError, InternalError, UsageError
from podrun.partition.state import events as ev
from podrun.partition.state import maintenance, orphans, queueing
from podrun.partition.state.events import (
    Decision,
    Event,
    Instruction,
    Maintenance,
    Partition,
    Queued,
    Reservation,
    StateChange,
)
from podrun.partition.state.placement import IpuTable, slices_of
from podrun.partition.state.requirements import (
    check_name,
    unknown_name,
    validate_plans,
    validate_state,
)
from podrun.partition.state.rights import ITSELF, Asker
from podrun.partition.state.values import PartitionState, Requirements, SyncType

S = PartitionState


@dataclass(frozen=True, slots=True)
class Plans:
    """The stored state besides partitions, allocations and lost agents."""

    maintenance: tuple[Maintenance, ...] = ()
    queue: tuple[Queued, ...] = ()
    reservations: tuple[Reservation, ...] = ()


NO_PLANS = Plans()


class Allocator:
    """The state of one POD: its agents and V-IPU clusters (``cluster``), partitions, allocations, agents that are lost
    or in maintenance, queue, reservations.

    Attributes are for reading; only `apply` changes them. ``now``: the time of decisions, in seconds since 1970, for
    events that carry none; ``absent``: queued requests whose clients do not answer, which are not served. Whoever asks
    for decisions sets both.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        allocations: Iterable[Allocation] | None = None,
        partitions: Iterable[Partition] = (),
        lost: Iterable[str] = (),
        plans: Plans = NO_PLANS,
    ) -> None:
        self.cluster = cluster
        given = cluster.allocations if allocations is None else allocations
        self.allocations: dict[str, Allocation] = {entry.name: entry for entry in given}
        self.partitions: dict[str, Partition] = {entry.name: entry for entry in partitions}
        self.lost: set[str] = set(lost)
        self.maintenance = {entry.agent: entry for entry in plans.maintenance}
        self.queue = {entry.needs.name: entry for entry in plans.queue}
        self.reservations = {entry.name: entry for entry in plans.reservations}
        self.table = IpuTable(cluster, self.partitions.values())
        self.now = 0.0
        self.asker = ITSELF
        self.absent: frozenset[str] = frozenset()
        self._operations = max((p.operation for p in self.partitions.values()), default=0)
        self._changed = StateChange()

    def propose(self, event: Event, asker: Asker = ITSELF) -> Decision:
        """The consequences of an event; changes nothing. Raises UsageError if the request cannot be met, DeniedError if
        ``asker`` may not make it. Errors name only what it sees."""
        draft = self._draft()
        draft.asker, draft.absent = asker, self.absent
        draft.now = getattr(event, "now", self.now)
        handler: Callable[[Allocator, Any], list[Instruction]] = _HANDLERS[type(event)]
        instructions = handler(draft, event)
        if draft.queue:
            instructions += queueing.serve(draft)
        change = replace(
            draft._changed,
            allocations=None if draft.allocations == self.allocations else tuple(draft.allocations.values()),
            lost=None if draft.lost == self.lost else frozenset(draft.lost),
            layout=None if draft.cluster is self.cluster else draft.cluster,
        )
        return Decision(change, tuple(instructions), draft._operations)

    def _draft(self) -> Allocator:
        """A copy to decide on."""
        draft = Allocator.__new__(Allocator)
        draft.cluster, draft.table = self.cluster, self.table.copy()
        draft.allocations, draft.partitions = dict(self.allocations), dict(self.partitions)
        draft.lost, draft.maintenance = set(self.lost), dict(self.maintenance)
        draft.queue, draft.reservations = dict(self.queue), dict(self.reservations)
        draft._operations = self._operations
        draft._changed = StateChange()
        return draft

    def apply(self, decision: Decision) -> None:
        """Apply a decision's change. The decision must be based on exactly this state."""
        change = decision.change
        if change.layout is not None:
            self.arrange(change.layout)
        for name, partition in change.partitions.items():
            self._replace(name, partition)
        if change.allocations is not None:
            self.allocations = {entry.name: entry for entry in change.allocations}
        if change.lost is not None:
            self.lost = set(change.lost)
        _update(self.maintenance, change.maintenance)
        _update(self.queue, change.queue)
        _update(self.reservations, change.reservations)
        self._operations = decision.operations

    def handle(self, event: Event) -> list[Instruction]:
        """Decide and apply at once, for callers that store nothing."""
        decision = self.propose(event)
        self.apply(decision)
        return list(decision.instructions)

    # --- reading --------------------------------------------------------------------------------------------

    def partition(self, name: str, asker: Asker | None = None) -> Partition:
        """A partition by name. Raises NotFoundError, which lists the partitions that ``asker`` (by default the draft's)
        sees, and DeniedError if it may not use this one."""
        asker = asker or self.asker
        found = self.partitions.get(name)
        if found is None or not asker.sees(found.allocation):
            seen = [entry.name for entry in self.partitions.values() if asker.sees(entry.allocation)]
            raise unknown_name("partition", name, seen, "vipu create partition NAME --size N")
        asker.check(name, found.owner)
        return found

    def active_partition(self, name: str, asker: Asker | None = None) -> Partition:
        """A partition that is ACTIVE. Raises ConflictError for one in another state, and what `partition` raises."""
        partition = self.partition(name, asker)
        if partition.state is not S.ACTIVE:
            why = f": {partition.error}" if partition.error else ""
            raise ConflictError(
                f"partition {name} is {partition.state.name}, not ACTIVE{why}",
                hint=f"Look at it: vipu get partition {name}",
            )
        return partition

    def queued(self, name: str, asker: Asker | None = None) -> Queued | None:
        """A queued request by name; None if there is none that ``asker`` sees. Raises DeniedError if it may not use
        it."""
        asker = asker or self.asker
        entry = self.queue.get(name)
        if entry is None or not asker.sees(entry.needs.allocation):
            return None
        asker.check(name, entry.needs.owner)
        return entry

    def partitions_on(self, agent: str) -> tuple[str, ...]:
        """Names of the partitions that hold IPUs of an agent."""
        return self.table.holders(agent)

    def unavailable(self) -> set[str]:
        """Agents on which no partition may be made: lost, cordoned or draining."""
        return self.lost | set(self.maintenance)

    def validate_state(self) -> None:
        """Check every cross-link. Raises InternalError naming the first one that does not hold."""
        validate_state(self.cluster, self.partitions, self.allocations, self.lost)
        validate_plans(self)
        for partition in self.partitions.values():
            if partition.operation > self._operations:
                raise InternalError(f"partition {partition.name} has an operation that was never given out")

    # --- partitions -----------------------------------------------------------------------------------------

    def _create(self, event: ev.CreatePartition) -> list[Instruction]:
        needs = self.complete(event.requirements)
        place = queueing.place_now(self, needs)
        if place is None:
            raise queueing.no_room(self, needs)
        return self.make(needs, *place)

    def possible(self, asked: Requirements, asker: Asker) -> Requirements:
        """A request with defaults for what it leaves open, whether or not its name is taken. Raises UsageError if it
        can never be met."""
        draft = self._draft()
        draft.asker, draft.now = asker, self.now
        return queueing.settle(draft, asked)

    def complete(self, asked: Requirements) -> Requirements:
        """A request with defaults for what it leaves open. Raises UsageError if it can never be met, ExistsError if the
        name is taken."""
        holder = self.partitions.get(asked.name)
        entry = self.queue.get(asked.name)
        held_in = holder.allocation if holder else entry.needs.allocation if entry else None
        if held_in is not None and not self.asker.sees(held_in):
            raise ExistsError(f"the name {asked.name} is not available", hint="Choose another name.")
        if holder is not None:
            raise ExistsError(
                f"partition {asked.name} exists already",
                hint="Use it if it is yours, or choose another name: vipu list partitions shows which there are",
            )
        if entry is not None:
            raise ExistsError(
                f"a request for partition {asked.name} waits in the queue",
                hint=f"Look at it: vipu explain {asked.name}; give it up: vipu remove partition {asked.name}",
            )
        return queueing.settle(self, asked)

    def make(self, needs: Requirements, allocation: str, ipus: Sequence[int]) -> list[Instruction]:
        """Make a partition of free IPUs."""
        partition = Partition(
            name=needs.name,
            allocation=allocation,
            size=needs.size,
            reconfigurable=needs.reconfigurable,
            num_gcds=needs.num_gcds,
            num_ilds=needs.num_ilds,
            sync_type=needs.sync_type or SyncType.POD_NATIVE_DEFAULT,
            auto_reset=needs.auto_reset,
            slices=slices_of(self.cluster, ipus),
            created=self.now,
            faults=needs.faults,
            owner=needs.owner,
            limit_s=needs.limit_s,
            relocatable=needs.relocatable,
            routing=needs.routing,
            holder=needs.holder,
            operation=self.next_operation(),
            story=("created",),
        )
        return self.put(partition, ev.ProvisionMachines(partition.name, partition.operation))

    def _started(self, event: ev.OperationStarted) -> list[Instruction]:
        partition = self._current(event.partition, event.operation)
        if partition is None or partition.state is not S.PENDING:
            return []
        return self.put(partition.moved(S.PROVISIONING, "machines are being started"))

    def _succeeded(self, event: ev.OperationSucceeded) -> list[Instruction]:
        partition = self._current(event.partition, event.operation)
        if partition is None:
            return []
        if partition.state is S.REMOVING:
            return self._forget(partition)
        if partition.state in (S.PENDING, S.PROVISIONING, S.RESETTING):
            active = partition.moved(S.ACTIVE, "machines are ready")
            ends = (
                self.now + partition.limit_s if partition.limit_s and not partition.ends else partition.ends
            )
            return self.put(replace(active, generation=partition.generation + 1, ends=ends))
        return []

    def _failed(self, event: ev.OperationFailed) -> list[Instruction]:
        partition = self._current(event.partition, event.operation)
        if partition is None:
            return []
        if partition.state is S.REMOVING:
            # A machine that could not be taken back ends with its process; the IPUs are free in any case.
            return self._forget(partition)
        if partition.state is S.ERROR:
            return []
        return self.put(partition.moved(S.ERROR, "an operation failed", error=event.error))

    def _reset(self, event: ev.ResetPartition) -> list[Instruction]:
        partition = self.partition(event.partition)
        if partition.state is S.RESETTING or _is_later(partition, event.generation):
            return []  # Another instance of the same program, say, has requested it.
        gone = sorted({s.agent_id for s in partition.slices} & self.lost)
        if gone:
            raise ConflictError(
                f"partition {partition.name} cannot be reset: machine {gone[0]} is lost",
                hint=f"Replace it first: vipu-admin restart agent {gone[0]}",
            )
        if partition.state not in (S.ACTIVE, S.ERROR):
            raise ConflictError(
                f"partition {partition.name} is {partition.state.name}; only ACTIVE or ERROR can be reset",
                hint=f"Wait for it: vipu get partition {partition.name}",
            )
        operation = self.next_operation()
        moved = replace(partition.moved(S.RESETTING, "reset requested"), operation=operation)
        return self.put(moved, ev.ResetMachines(moved.name, operation))

    def _remove(self, event: ev.RemovePartition) -> list[Instruction]:
        if self.queued(event.partition) is not None:
            return queueing.leave(self, ev.LeaveQueue(event.partition))
        return self.remove(self.partition(event.partition).name, "removal requested")

    def remove(self, name: str, why: str) -> list[Instruction]:
        """Give the IPUs of a partition back."""
        partition = self.partitions[name]
        if partition.state is S.REMOVING:
            return []
        operation = self.next_operation()
        moved = replace(partition.moved(S.REMOVING, why), operation=operation)
        return self.put(moved, ev.ReleaseMachines(moved.name, operation, moved.slices))

    # --- machines -------------------------------------------------------------------------------------------

    def _agent_lost(self, event: ev.AgentLost) -> list[Instruction]:
        self.check_agent(event.agent)
        if event.agent in self.lost:
            return []
        self.lost.add(event.agent)
        restart = f"vipu-admin restart agent {event.agent}"
        error = f"machine {event.agent} is lost: {event.reason}. First {restart}, then reset it."
        return [ev.StopAgentMachines(event.agent), *self._break(event.agent, "machine lost", error)]

    def _restart(self, event: ev.RestartAgent) -> list[Instruction]:
        self.check_agent(event.agent)
        if self._have_begun_anew(event.agent, event.generation):
            return []
        self.lost.discard(event.agent)
        error = f"machine {event.agent} was restarted. Reset the partition (vipu reset partition {{name}})."
        broken = self._break(event.agent, "agent restarted", error)
        return [*broken, ev.ReplaceAgentMachines(event.agent, self.partitions_on(event.agent))]

    def _power_cycle(self, event: ev.PowerCycleAgent) -> list[Instruction]:
        self.check_agent(event.agent)
        if self._have_begun_anew(event.agent, event.generation):
            return []
        if event.agent in self.lost:
            raise ConflictError(
                f"machine {event.agent} is lost; a power cycle cannot reach it",
                hint=f"Replace it: vipu-admin restart agent {event.agent}",
            )
        error = (
            f"machine {event.agent} was power-cycled. Reset the partition (vipu reset partition {{name}})."
        )
        return [*self._break(event.agent, "agent power-cycled", error), ev.PowerCycleMachines(event.agent)]

    def _have_begun_anew(self, agent: str, generation: int) -> bool:
        """True iff an agent's partitions are all past a generation, so that the requested work was done."""
        names = self.partitions_on(agent)
        return bool(names) and all(_is_later(self.partitions[name], generation) for name in names)

    def _break(self, agent: str, why: str, error: str) -> list[Instruction]:
        """Put the partitions on an agent into ERROR; their current operations become stale."""
        instructions: list[Instruction] = []
        for name in self.partitions_on(agent):
            partition = self.partitions[name]
            moved_away = maintenance.relocate(self, partition) if agent in self.lost else None
            if moved_away is not None:
                instructions += moved_away
            elif partition.state is not S.REMOVING:
                moved = partition.moved(S.ERROR, why, error=error.replace("{name}", name))
                instructions += self.put(replace(moved, operation=self.next_operation()))
        return instructions

    def _server_started(self, event: ev.ServerStarted) -> list[Instruction]:
        instructions: list[Instruction] = []
        for partition in list(self.partitions.values()):
            if partition.state is S.REMOVING:
                operation = self.next_operation()
                moved = replace(partition, operation=operation)
                instructions += self.put(moved, ev.ReleaseMachines(moved.name, operation, moved.slices))
            elif partition.state is S.ACTIVE and partition.name in event.adopted:
                continue
            elif partition.state is not S.ERROR:
                operation = self.next_operation()
                moved = replace(partition.moved(S.PENDING, "the server was restarted"), operation=operation)
                instructions += self.put(moved, ev.ProvisionMachines(moved.name, operation))
        return instructions

    # --- allocations ----------------------------------------------------------------------------------------

    def _create_allocation(self, event: ev.CreateAllocation) -> list[Instruction]:
        check_name(event.name, "an allocation")
        if event.name in self.allocations:
            raise ExistsError(
                f"allocation {event.name} exists already",
                hint=f"Remove it first: vipu-admin remove allocation {event.name}",
            )
        if not event.agents:
            raise UsageError("an allocation needs at least one agent", hint="--agents ipum1,ipum2")
        for agent in event.agents:
            self.check_agent(agent)
            for other in self.allocations.values():
                if agent in other.agents:
                    raise ConflictError(
                        f"agent {agent} is in allocation {other.name}",
                        hint=f"Remove that one first: vipu-admin remove allocation {other.name}",
                    )
        self._check_one_cluster(event.agents)
        ordered = tuple(a.id for a in self.cluster.agents if a.id in set(event.agents))
        self.allocations[event.name] = Allocation(event.name, ordered)
        return []

    def _check_one_cluster(self, agents: Sequence[str]) -> None:
        """Raise ConflictError unless agents are in one V-IPU cluster."""
        clusters = self.cluster.clusters_by_agent
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

    def _remove_allocation(self, event: ev.RemoveAllocation) -> list[Instruction]:
        if event.name not in self.allocations:
            raise unknown_name(
                "allocation", event.name, self.allocations, "vipu-admin create allocation NAME"
            )
        users = sorted(p.name for p in self.partitions.values() if p.allocation == event.name)
        if users:
            raise ConflictError(
                f"allocation {event.name} has partitions: {', '.join(users)}",
                hint=f"Remove them first: vipu remove partition {users[0]}",
            )
        waiting = sorted(name for name, entry in self.queue.items() if entry.needs.allocation == event.name)
        if waiting:
            raise ConflictError(
                f"requests wait for allocation {event.name}: {', '.join(waiting)}",
                hint=f"Give them up first: vipu remove partition {waiting[0]}",
            )
        del self.allocations[event.name]
        return []

    # --- inside ---------------------------------------------------------------------------------------------

    def find_cluster(self, name: str) -> Cluster:
        """A V-IPU cluster by name. Raises NotFoundError, which lists them."""
        found = {cluster.name: cluster for cluster in self.cluster.clusters}
        if name not in found:
            raise unknown_name("cluster", name, found, "vipu-admin create cluster NAME --agents A,B")
        return found[name]

    def cluster_of_allocation(self, name: str) -> Cluster:
        """The V-IPU cluster in which an allocation lies."""
        return self.cluster.clusters_by_agent[self.allocations[name].agents[0]]

    def arrange(self, layout: Cluster) -> None:
        """Change the POD's agents and V-IPU clusters; what lies on them must be in both."""
        self.cluster, self.table = layout, IpuTable(layout, self.partitions.values())

    def check_agent(self, agent: str) -> None:
        """Raise NotFoundError for an agent that the POD does not have."""
        if agent not in self.cluster.agents_by_id:
            raise unknown_name("agent", agent, self.cluster.agents_by_id, "vipu-admin list agents")

    def next_operation(self) -> int:
        self._operations += 1
        return self._operations

    def _current(self, name: str, operation: int) -> Partition | None:
        """The partition, if ``operation`` is its current one."""
        partition = self.partitions.get(name)
        return partition if partition is not None and partition.operation == operation else None

    def _forget(self, partition: Partition) -> list[Instruction]:
        self.note("partitions", partition.name, None)
        return []

    def put(self, partition: Partition, *then: Instruction) -> list[Instruction]:
        """Change a partition's record; returns the instructions that follow."""
        self.note("partitions", partition.name, partition)
        return list(then)

    def put_stored(self, partition: Partition) -> None:
        """Add a partition in its stored state."""
        self._operations = max(self._operations, partition.operation)
        self.put(partition)

    def put_back(self, name: str) -> None:
        """Remove a partition's record, whatever else holds its IPUs."""
        self.partitions.pop(name, None)
        self.table = IpuTable(self.cluster, self.partitions.values())

    def note(self, what: str, name: str, value: object) -> None:
        """Change one entry of ``partitions``, ``maintenance``, ``queue`` or ``reservations``; None removes it."""
        if what == "partitions":
            assert value is None or isinstance(value, Partition)
            self._replace(name, value)
        else:
            _update(getattr(self, what), {name: value})
        changed: dict[str, Any] = {what: {**getattr(self._changed, what), name: value}}
        self._changed = replace(self._changed, **changed)

    def _replace(self, name: str, partition: Partition | None) -> None:
        old = self.partitions.get(name)
        if old is not None and (partition is None or partition.slices != old.slices):
            self.table.drop(old)
        if partition is not None and (old is None or partition.slices != old.slices):
            self.table.add(partition)
        _update(self.partitions, {name: partition})


def _is_later(partition: Partition, generation: int) -> bool:
    """True iff a partition is usable in a generation after this one, or soon will be. Never so for generation 0."""
    if not generation or partition.state in (S.ERROR, S.REMOVING):
        return False
    return partition.generation > generation or partition.state is S.RESETTING


def _update(known: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if value is None:
            known.pop(name, None)  # The entry may have appeared and disappeared in one decision.
        else:
            known[name] = value


_HANDLERS: dict[type, Callable[[Allocator, Any], list[Instruction]]] = {
    ev.CreatePartition: Allocator._create,
    ev.OperationStarted: Allocator._started,
    ev.OperationSucceeded: Allocator._succeeded,
    ev.OperationFailed: Allocator._failed,
    ev.ResetPartition: Allocator._reset,
    ev.RemovePartition: Allocator._remove,
    ev.AgentLost: Allocator._agent_lost,
    ev.RestartAgent: Allocator._restart,
    ev.PowerCycleAgent: Allocator._power_cycle,
    ev.CreateAllocation: Allocator._create_allocation,
    ev.RemoveAllocation: Allocator._remove_allocation,
    ev.ServerStarted: Allocator._server_started,
    ev.Enqueue: queueing.enqueue,
    ev.LeaveQueue: queueing.leave,
    ev.HoldersGone: orphans.end_with_holders,
    ev.KeepPartition: orphans.keep,
    ev.CreateReservation: queueing.create_reservation,
    ev.RemoveReservation: queueing.remove_reservation,
    ev.Tick: maintenance.tick,
    ev.SetMaintenance: maintenance.begin,
    ev.EndMaintenance: maintenance.end,
    ev.CreateAgent: maintenance.create_agent,
    ev.RemoveAgent: maintenance.remove_agent,
    ev.CreateCluster: maintenance.create_cluster,
    ev.RemoveCluster: maintenance.remove_cluster,
}
