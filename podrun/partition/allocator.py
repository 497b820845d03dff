"""Who owns which IPUs: a pure state machine.

`Allocator.handle(event)` changes the state and returns the instructions that follow from the change, or
raises a UsageError (nothing changed). No I/O, no clock, no threads: `service` carries out instructions and
reports back with events. `validate_state` checks every cross-link; tests run it after each event.

States of a partition::

    PENDING -> PROVISIONING -> ACTIVE <-> RESETTING        any but REMOVING -> ERROR (a machine lost, a step
    failed)
    ERROR -> RESETTING (reset)                             any -> REMOVING -> gone
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from podrun.cluster import Allocation, Cluster
from podrun.errors import ConflictError, ExhaustedError, ExistsError, InternalError, NotFoundError, UsageError
from podrun.partition import events as ev
from podrun.partition.events import Event, Instruction, Partition
from podrun.partition.placement import find_place, ipus_of, is_power_of_two, slices_of
from podrun.partition.requirements import check_name, completed
from podrun.partition.types import PartitionState, Requirements, SyncType

S = PartitionState


class Allocator:
    """Partitions, allocations and lost agents of one POD. Attributes are for reading; only `handle` changes
    them."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        allocations: Iterable[Allocation] | None = None,
        partitions: Iterable[Partition] = (),
        lost: Iterable[str] = (),
    ) -> None:
        self.cluster = cluster
        given = cluster.allocations if allocations is None else allocations
        self.allocations: dict[str, Allocation] = {entry.name: entry for entry in given}
        self.partitions: dict[str, Partition] = {entry.name: entry for entry in partitions}
        self.lost: set[str] = set(lost)
        self._operations = max((p.operation for p in self.partitions.values()), default=0)
        self._handlers: dict[type, Callable[[Any], list[Instruction]]] = {
            ev.Create: self._create,
            ev.Started: self._started,
            ev.Succeeded: self._succeeded,
            ev.Failed: self._failed,
            ev.RequestReset: self._reset,
            ev.RequestRemove: self._remove,
            ev.MachineLost: self._machine_lost,
            ev.RequestRestart: self._restart,
            ev.RequestPowerCycle: self._power_cycle,
            ev.CreateAllocation: self._create_allocation,
            ev.RemoveAllocation: self._remove_allocation,
            ev.Recover: self._recover,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """Take in an event; returns what is to be done now. Raises UsageError and changes nothing if it
        cannot be."""
        return self._handlers[type(event)](event)

    # --- reading --------------------------------------------------------------------------------------------

    def partition(self, name: str) -> Partition:
        """A partition by name. Raises NotFoundError, which lists what there is."""
        found = self.partitions.get(name)
        if found is None:
            raise _unknown("partition", name, self.partitions, "vipu create partition NAME --size N")
        return found

    def taken(self) -> dict[int, str]:
        """IPUs of the POD in use, with the partition that holds each."""
        return {
            ipu: partition.name
            for partition in self.partitions.values()
            for ipu in ipus_of(self.cluster, partition.slices)
        }

    def partitions_on(self, agent: str) -> tuple[str, ...]:
        """Names of the partitions that hold IPUs of an agent."""
        return tuple(p.name for p in self.partitions.values() if any(s.agent_id == agent for s in p.slices))

    def validate_state(self) -> None:
        """Check every cross-link. Raises InternalError naming the first that does not hold."""
        held: dict[int, str] = {}
        for name, partition in self.partitions.items():
            _must(name == partition.name, f"partition {name} calls itself {partition.name}")
            _must(partition.state is not S.REMOVED, f"{name} is removed but still there")
            _must(partition.allocation in self.allocations, f"{name} is in no allocation")
            _must((partition.state is S.ERROR) == bool(partition.error), f"{name}: error and state disagree")
            _must(partition.operation <= self._operations, f"{name} has an operation from the future")
            ipus = ipus_of(self.cluster, partition.slices)
            _must(len(ipus) == partition.size, f"{name} holds {len(ipus)} IPUs, not {partition.size}")
            _must(is_power_of_two(partition.size), f"{name} has {partition.size} IPUs")
            allowed = self.allocations[partition.allocation].agents
            _must(all(s.agent_id in allowed for s in partition.slices), f"{name} spans allocations")
            share = partition.size // partition.num_ilds
            domain = self.cluster.topology.ild_ipus
            _must(ipus[0] % domain % share == 0, f"{name} is not aligned")
            ilds = {ipu // domain for ipu in ipus}
            _must(len(ilds) == partition.num_ilds, f"{name} spreads over other ILDs")
            for ipu in ipus:
                _must(ipu not in held, f"IPU {ipu} is held by {held.get(ipu)} and {name}")
                held[ipu] = name
            if any(s.agent_id in self.lost for s in partition.slices):
                _must(partition.state in (S.ERROR, S.REMOVING), f"{name} is not in ERROR without a machine")
        agents = [agent for allocation in self.allocations.values() for agent in allocation.agents]
        _must(len(agents) == len(set(agents)), "an agent is in two allocations")
        _must(self.lost <= set(self.cluster.agents_by_id), "an unknown agent is lost")

    # --- partitions -----------------------------------------------------------------------------------------

    def _create(self, event: ev.Create) -> list[Instruction]:
        if event.requirements.name in self.partitions:
            raise ExistsError(
                f"partition {event.requirements.name} exists already",
                hint=f"Use it, or remove it first: vipu remove partition {event.requirements.name}",
            )
        needs = completed(event.requirements, self.cluster)
        allocation, ipus = self._place(needs)
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
            created=event.now,
            faults=needs.faults,
            operation=self._next_operation(),
            story=("created",),
        )
        return self._put(partition, ev.Provision(partition.name, partition.operation))

    def _place(self, needs: Requirements) -> tuple[str, tuple[int, ...]]:
        """An allocation with room, and the IPUs there."""
        if needs.allocation and needs.allocation not in self.allocations:
            raise _unknown(
                "allocation", needs.allocation, self.allocations, "vipu-admin create allocation NAME"
            )
        names = [needs.allocation] if needs.allocation else list(self.allocations)
        taken = self.taken()
        for name in names:
            allowed = set(self.allocations[name].agents) - self.lost
            ipus = find_place(self.cluster, needs.size, needs.num_ilds, allowed, taken)
            if ipus is not None:
                return name, ipus
        raise self._no_room(needs, names, taken)

    def _no_room(self, needs: Requirements, names: list[str], taken: dict[int, str]) -> UsageError:
        for name in names:
            everything = set(self.allocations[name].agents)
            if find_place(self.cluster, needs.size, needs.num_ilds, everything, ()) is not None:
                break
        else:
            where = f"allocation {names[0]}" if len(names) == 1 else "any allocation"
            return UsageError(
                f"a partition of {needs.size} IPUs does not fit {where} of {self.cluster.name}",
                hint="Partitions do not span allocations: vipu list allocations",
            )
        usable = {agent for name in names for agent in self.allocations[name].agents} - self.lost
        free = sum(
            self.cluster.agent_of(ipu).id in usable and ipu not in taken
            for ipu in range(self.cluster.ipu_count)
        )
        holders = ", ".join(sorted(set(taken.values()))) or "none"
        lost = f"; lost agents: {', '.join(sorted(self.lost))}" if self.lost else ""
        return ExhaustedError(
            f"no {needs.size} aligned IPUs are free: {free} IPUs are, partitions in the way: {holders}{lost}",
            hint="Remove one (vipu remove partition NAME)"
            + (" or restart the lost agent (vipu-admin restart agent ID)." if self.lost else "."),
        )

    def _started(self, event: ev.Started) -> list[Instruction]:
        partition = self._current(event.partition, event.operation)
        if partition is None or partition.state is not S.PENDING:
            return []
        return self._put(partition.moved(S.PROVISIONING, "machines are being started"))

    def _succeeded(self, event: ev.Succeeded) -> list[Instruction]:
        partition = self._current(event.partition, event.operation)
        if partition is None:
            return []
        if partition.state is S.REMOVING:
            return self._forget(partition)
        if partition.state in (S.PENDING, S.PROVISIONING, S.RESETTING):
            active = partition.moved(S.ACTIVE, "machines are ready")
            return self._put(replace(active, generation=partition.generation + 1))
        return []

    def _failed(self, event: ev.Failed) -> list[Instruction]:
        partition = self._current(event.partition, event.operation)
        if partition is None:
            return []
        if partition.state is S.REMOVING:
            # What could not be taken back ends with its process; the IPUs are free either way.
            return self._forget(partition)
        if partition.state is S.ERROR:
            return []
        return self._put(partition.moved(S.ERROR, "a step failed", error=event.error))

    def _reset(self, event: ev.RequestReset) -> list[Instruction]:
        partition = self.partition(event.partition)
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
        operation = self._next_operation()
        moved = replace(partition.moved(S.RESETTING, "reset asked for"), operation=operation)
        return self._put(moved, ev.Reset(moved.name, operation))

    def _remove(self, event: ev.RequestRemove) -> list[Instruction]:
        partition = self.partition(event.partition)
        if partition.state is S.REMOVING:
            return []
        operation = self._next_operation()
        moved = replace(partition.moved(S.REMOVING, "removal asked for"), operation=operation)
        return self._put(moved, ev.Release(moved.name, operation, moved.slices))

    # --- machines -------------------------------------------------------------------------------------------

    def _machine_lost(self, event: ev.MachineLost) -> list[Instruction]:
        self._agent(event.agent)
        if event.agent in self.lost:
            return []
        self.lost.add(event.agent)
        restart = f"vipu-admin restart agent {event.agent}"
        error = f"machine {event.agent} is lost: {event.reason}. First {restart}, then reset it."
        return [
            ev.SaveLost(),
            ev.StopMachines(event.agent),
            *self._break(event.agent, "machine lost", error),
        ]

    def _restart(self, event: ev.RequestRestart) -> list[Instruction]:
        self._agent(event.agent)
        self.lost.discard(event.agent)
        error = f"machine {event.agent} was restarted. Reset the partition (vipu reset partition {{name}})."
        broken = self._break(event.agent, "agent restarted", error)
        return [ev.SaveLost(), *broken, ev.RestartMachines(event.agent, self.partitions_on(event.agent))]

    def _power_cycle(self, event: ev.RequestPowerCycle) -> list[Instruction]:
        self._agent(event.agent)
        if event.agent in self.lost:
            raise ConflictError(
                f"machine {event.agent} is lost: power-cycling does not reach it",
                hint=f"Replace it: vipu-admin restart agent {event.agent}",
            )
        error = (
            f"machine {event.agent} was power-cycled. Reset the partition (vipu reset partition {{name}})."
        )
        return [*self._break(event.agent, "agent power-cycled", error), ev.PowerCycle(event.agent)]

    def _break(self, agent: str, why: str, error: str) -> list[Instruction]:
        """Put the partitions on an agent into ERROR. Whatever operation they are in no longer counts."""
        instructions: list[Instruction] = []
        for name in self.partitions_on(agent):
            partition = self.partitions[name]
            if partition.state is not S.REMOVING:
                moved = partition.moved(S.ERROR, why, error=error.replace("{name}", name))
                instructions += self._put(replace(moved, operation=self._next_operation()))
        return instructions

    def _recover(self, event: ev.Recover) -> list[Instruction]:
        instructions: list[Instruction] = []
        for partition in list(self.partitions.values()):
            operation = self._next_operation()
            if partition.state is S.REMOVING:
                moved = replace(partition, operation=operation)
                instructions += self._put(moved, ev.Release(moved.name, operation, moved.slices))
            elif partition.state is not S.ERROR:
                moved = replace(partition.moved(S.PENDING, "the server was restarted"), operation=operation)
                instructions += self._put(moved, ev.Provision(moved.name, operation))
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
            self._agent(agent)
            for other in self.allocations.values():
                if agent in other.agents:
                    raise ConflictError(
                        f"agent {agent} is in allocation {other.name}",
                        hint=f"Remove that one first: vipu-admin remove allocation {other.name}",
                    )
        ordered = tuple(a.id for a in self.cluster.agents if a.id in set(event.agents))
        self.allocations[event.name] = Allocation(event.name, ordered)
        return [ev.SaveAllocations()]

    def _remove_allocation(self, event: ev.RemoveAllocation) -> list[Instruction]:
        if event.name not in self.allocations:
            raise _unknown("allocation", event.name, self.allocations, "vipu-admin create allocation NAME")
        users = sorted(p.name for p in self.partitions.values() if p.allocation == event.name)
        if users:
            raise ConflictError(
                f"allocation {event.name} has partitions: {', '.join(users)}",
                hint=f"Remove them first: vipu remove partition {users[0]}",
            )
        del self.allocations[event.name]
        return [ev.SaveAllocations()]

    # --- inside ---------------------------------------------------------------------------------------------

    def _agent(self, agent: str) -> None:
        if agent not in self.cluster.agents_by_id:
            raise _unknown("agent", agent, self.cluster.agents_by_id, "vipu-admin list agents")

    def _next_operation(self) -> int:
        self._operations += 1
        return self._operations

    def _current(self, name: str, operation: int) -> Partition | None:
        """The partition, if this operation is still what it is at."""
        partition = self.partitions.get(name)
        return partition if partition is not None and partition.operation == operation else None

    def _forget(self, partition: Partition) -> list[Instruction]:
        del self.partitions[partition.name]
        return [ev.ForgetPartition(partition.name)]

    def _put(self, partition: Partition, *then: Instruction) -> list[Instruction]:
        self.partitions[partition.name] = partition
        return [ev.SavePartition(partition.name), *then]


def _unknown(kind: str, name: str, known: Iterable[str], make: str) -> NotFoundError:
    names = sorted(
        known, key=lambda text: [part.zfill(9) for part in re.split(r"(\d+)", text)]
    )  # ipum2 before ipum10
    close = difflib.get_close_matches(name, names, n=1)
    did_you_mean = f"Did you mean {close[0]}? " if close else ""
    shown = ", ".join(names[:8]) + (" ..." if len(names) > 8 else ".")
    there = f"There are: {shown}" if names else f"There are none: {make}"
    return NotFoundError(f"there is no {kind} {name!r}", hint=did_you_mean + there)


def _must(condition: bool, message: str) -> None:
    if not condition:
        raise InternalError(f"the allocator's state does not hold together: {message}")
