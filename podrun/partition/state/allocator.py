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
from dataclasses import replace
from typing import Any, TypedDict

from podrun.core.cluster import Allocation, Cluster
from podrun.core.errors import ConflictError, ExistsError, InternalError
from podrun.core.quick_dataclass import dataclass
from podrun.partition.state import allocations, machine_loss, maintenance, orphans, partition_life, queueing
from podrun.partition.state import events as ev
from podrun.partition.state.backfill import HeldTimes, Times
from podrun.partition.state.candidates import complete_in_cluster
from podrun.partition.state.events import Decision, Event, MachineOrder, StateChange
from podrun.partition.state.explanations import no_room
from podrun.partition.state.placement import IpuTable, slices_of
from podrun.partition.state.records import ITSELF, Asker, Maintenance, Partition, Queued, Reservation
from podrun.partition.state.requirements import (
    unknown_name,
    validate_plans,
    validate_state,
)
from podrun.partition.state.reservations import create_reservation, remove_reservation
from podrun.partition.state.values import PartitionState, Requirements, SyncType

S = PartitionState


@dataclass(frozen=True, slots=True)
class Plans:
    """The stored state besides partitions, allocations and lost agents."""

    maintenance: tuple[Maintenance, ...] = ()
    queue: tuple[Queued, ...] = ()
    reservations: tuple[Reservation, ...] = ()


NO_PLANS = Plans()


class _Changed(TypedDict):
    """What a draft has changed, by the fields of `StateChange`."""

    partitions: dict[str, Partition | None]
    maintenance: dict[str, Maintenance | None]
    queue: dict[str, Queued | None]
    reservations: dict[str, Reservation | None]


def _nothing_changed() -> _Changed:
    return {"partitions": {}, "maintenance": {}, "queue": {}, "reservations": {}}


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
        entries = cluster.allocations if allocations is None else allocations
        self.allocations: dict[str, Allocation] = {entry.name: entry for entry in entries}
        self.partitions: dict[str, Partition] = {entry.name: entry for entry in partitions}
        self.lost: set[str] = set(lost)
        self.maintenance = {entry.agent: entry for entry in plans.maintenance}
        self.queue = {entry.needs.name: entry for entry in plans.queue}
        self.reservations = {entry.name: entry for entry in plans.reservations}
        self.table = IpuTable(cluster, self.partitions.values())
        self._held = HeldTimes(cluster, self.partitions.values())
        self.now = 0.0
        self.asker = ITSELF
        self.absent: frozenset[str] = frozenset()
        self._operations = max((p.operation for p in self.partitions.values()), default=0)
        self._changed: _Changed = _nothing_changed()

    def propose(self, event: Event, asker: Asker = ITSELF) -> Decision:
        """The consequences of an event; changes nothing. Raises UsageError if the request cannot be met, DeniedError if
        ``asker`` may not make it. Errors name only what it sees."""
        draft = self._draft()
        draft.asker, draft.absent = asker, self.absent
        draft.now = getattr(event, "now", self.now)
        handler: Callable[[Allocator, Any], list[MachineOrder]] = _HANDLERS[type(event)]
        instructions = handler(draft, event)
        if draft.queue:
            instructions += queueing.serve_queue(draft)
        change = StateChange(
            **draft._changed,
            allocations=None if draft.allocations == self.allocations else tuple(draft.allocations.values()),
            lost=None if draft.lost == self.lost else frozenset(draft.lost),
            layout=None if draft.cluster is self.cluster else draft.cluster,
        )
        return Decision(change, tuple(instructions), draft._operations)

    def _draft(self) -> Allocator:
        """A copy to decide on."""
        draft = Allocator.__new__(Allocator)
        draft.cluster, draft.table, draft._held = self.cluster, self.table.copy(), self._held
        draft.allocations, draft.partitions = dict(self.allocations), dict(self.partitions)
        draft.lost, draft.maintenance = set(self.lost), dict(self.maintenance)
        draft.queue, draft.reservations = dict(self.queue), dict(self.reservations)
        draft._operations = self._operations
        draft._changed = _nothing_changed()
        return draft

    def apply(self, decision: Decision) -> None:
        """Apply a decision's change. The decision must be based on exactly this state."""
        change = decision.change
        if change.layout is not None:
            self.arrange(change.layout)
        for name, partition in change.partitions.items():
            self._replace(name, partition)
            self._held.replace(name, partition)
        if change.allocations is not None:
            self.allocations = {entry.name: entry for entry in change.allocations}
        if change.lost is not None:
            self.lost = set(change.lost)
        _update(self.maintenance, change.maintenance)
        _update(self.queue, change.queue)
        _update(self.reservations, change.reservations)
        self._operations = decision.operations

    def handle(self, event: Event) -> list[MachineOrder]:
        """Decide and apply at once, for callers that store nothing."""
        decision = self.propose(event)
        self.apply(decision)
        return list(decision.instructions)

    # --- reading --------------------------------------------------------------------------------------------

    def partition(self, name: str, asker: Asker | None = None) -> Partition:
        """A partition by name. Raises NotFoundError, which lists the partitions that ``asker`` (by default the draft's)
        sees, and DeniedError if it may not use this one."""
        asker = asker or self.asker
        held = self.partitions.get(name)
        if held is None or not asker.sees(held.allocation):
            seen = [entry.name for entry in self.partitions.values() if asker.sees(entry.allocation)]
            raise unknown_name("partition", name, seen, "vipu create partition NAME --size N")
        asker.check(name, held.owner)
        return held

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

    def _create(self, event: ev.CreatePartition) -> list[MachineOrder]:
        needs = self.complete(event.requirements)
        place = queueing.place_without_delay(self, needs)
        if place is None:
            raise no_room(self, needs)
        return self.make(needs, *place)

    def possible(self, asked: Requirements, asker: Asker) -> Requirements:
        """A request with defaults for what it leaves open, whether or not its name is taken. Raises UsageError if it
        can never be met."""
        draft = self._draft()
        draft.asker, draft.now = asker, self.now
        return complete_in_cluster(draft, asked)

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
        return complete_in_cluster(self, asked)

    def make(self, needs: Requirements, allocation: str, ipus: Sequence[int]) -> list[MachineOrder]:
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

    def _remove(self, event: ev.RemovePartition) -> list[MachineOrder]:
        if self.queued(event.partition) is not None:
            return queueing.leave_queue(self, ev.LeaveQueue(event.partition))
        return self.remove(self.partition(event.partition).name, "removal requested")

    def remove(self, name: str, why: str) -> list[MachineOrder]:
        """Give the IPUs of a partition back."""
        partition = self.partitions[name]
        if partition.state is S.REMOVING:
            return []
        operation = self.next_operation()
        moved = replace(partition.moved(S.REMOVING, why), operation=operation)
        return self.put(moved, ev.ReleaseMachines(moved.name, operation, moved.slices))

    # --- inside ---------------------------------------------------------------------------------------------

    def find_cluster(self, name: str) -> Cluster:
        """A V-IPU cluster by name. Raises NotFoundError, which lists them."""
        by_name = {cluster.name: cluster for cluster in self.cluster.clusters}
        if name not in by_name:
            raise unknown_name("cluster", name, by_name, "vipu-admin create cluster NAME --agents A,B")
        return by_name[name]

    def cluster_of_allocation(self, name: str) -> Cluster:
        """The V-IPU cluster in which an allocation lies."""
        return self.cluster.clusters_by_agent[self.allocations[name].agents[0]]

    def arrange(self, layout: Cluster) -> None:
        """Change the POD's agents and V-IPU clusters; what lies on them must be in both."""
        self.cluster, self.table = layout, IpuTable(layout, self.partitions.values())
        self._held = HeldTimes(layout, self.partitions.values())

    def check_agent(self, agent: str) -> None:
        """Raise NotFoundError for an agent that the POD does not have."""
        if agent not in self.cluster.agents_by_id:
            raise unknown_name("agent", agent, self.cluster.agents_by_id, "vipu-admin list agents")

    def next_operation(self) -> int:
        self._operations += 1
        return self._operations

    def put(self, partition: Partition, *then: MachineOrder) -> list[MachineOrder]:
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
        self._held = HeldTimes(self.cluster, self.partitions.values())

    def held_times(self) -> Times:
        """Until when partitions hold each IPU, and ``now`` for those that are free."""
        return self._held.at(self.now, self._changed["partitions"])

    def note(self, what: str, name: str, value: object) -> None:
        """Change one entry of ``partitions``, ``maintenance``, ``queue`` or ``reservations``; None removes it."""
        if what == "partitions":
            if value is not None and not isinstance(value, Partition):
                raise InternalError(f"an entry of partitions is a {type(value).__name__}")
            self._replace(name, value)
        else:
            _update(getattr(self, what), {name: value})
        self._changed[what][name] = value  # type: ignore[literal-required]

    def _replace(self, name: str, partition: Partition | None) -> None:
        old = self.partitions.get(name)
        stays = old is not None and partition is not None
        if stays and (partition.slices is old.slices or partition.slices == old.slices):  # type: ignore[union-attr]
            _update(self.partitions, {name: partition})
            return
        if old is not None:
            self.table.drop(old)
        if partition is not None:
            self.table.add(partition)
        _update(self.partitions, {name: partition})


def _update(known: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if value is None:
            known.pop(name, None)  # The entry may have appeared and disappeared in one decision.
        else:
            known[name] = value


_HANDLERS: dict[type, Callable[[Allocator, Any], list[MachineOrder]]] = {
    ev.CreatePartition: Allocator._create,
    ev.OperationStarted: partition_life.operation_started,
    ev.OperationSucceeded: partition_life.operation_succeeded,
    ev.OperationFailed: partition_life.operation_failed,
    ev.ResetPartition: partition_life.reset_partition_of,
    ev.RemovePartition: Allocator._remove,
    ev.AgentLost: machine_loss.lose_agent,
    ev.RestartAgent: machine_loss.restart_agent_of,
    ev.PowerCycleAgent: machine_loss.power_cycle_machines,
    ev.CreateAllocation: allocations.add_allocation,
    ev.RemoveAllocation: allocations.drop_allocation,
    ev.ServerStarted: partition_life.begin_anew,
    ev.Enqueue: queueing.enqueue,
    ev.LeaveQueue: queueing.leave_queue,
    ev.HoldersGone: orphans.end_with_holders,
    ev.KeepPartition: orphans.keep,
    ev.CreateReservation: create_reservation,
    ev.RemoveReservation: remove_reservation,
    ev.Tick: maintenance.tick,
    ev.SetMaintenance: maintenance.begin,
    ev.EndMaintenance: maintenance.end,
    ev.CreateAgent: maintenance.create_agent,
    ev.RemoveAgent: maintenance.remove_agent,
    ev.CreateCluster: maintenance.create_cluster,
    ev.RemoveCluster: maintenance.remove_cluster,
}
