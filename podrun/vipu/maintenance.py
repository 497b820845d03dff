"""The allocator's part for agents out of service and for time that passes: cordon, drain, return, relocation, limits.

A cordoned agent gets no new partitions; those on it stay. A draining one is cordoned too, and at its deadline the
partitions on it are removed, or moved if they are relocatable. Functions over the allocator's draft.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.errors import ConflictError, UsageError
from podrun.vipu import events as ev
from podrun.vipu.events import Instruction, Maintenance, Partition
from podrun.vipu.ipu_placement import find_place, slices_of
from podrun.vipu.queueing import end_reservation
from podrun.vipu.types import PartitionState

if TYPE_CHECKING:
    from podrun.vipu.allocator import Allocator

S = PartitionState


def begin(draft: Allocator, event: ev.SetMaintenance) -> list[Instruction]:
    """Cordon or drain an agent; a second request replaces the first."""
    draft.check_agent(event.agent)
    if event.deadline_s < 0:
        raise UsageError(
            f"a drain cannot end {-event.deadline_s:g} s ago", hint="Use --deadline SECONDS, from now."
        )
    deadline = event.now + event.deadline_s if event.deadline_s else 0.0
    entry = Maintenance(event.agent, event.draining, event.now, deadline, event.reason)
    draft.note("maintenance", event.agent, entry)
    return []


def end(draft: Allocator, event: ev.EndMaintenance) -> list[Instruction]:
    """Return an agent to service. Raises ConflictError if it is in service."""
    draft.check_agent(event.agent)
    if event.agent not in draft.maintenance:
        lost = event.agent in draft.lost
        raise ConflictError(
            f"agent {event.agent} is {'lost' if lost else 'in service already'}",
            hint=f"Replace it: vipu-admin restart agent {event.agent}" if lost else "vipu-admin list agents",
        )
    draft.note("maintenance", event.agent, None)
    return []


def tick(draft: Allocator, event: ev.Tick) -> list[Instruction]:
    """End what is over: partitions with a limit, drains with a deadline, reservations."""
    instructions: list[Instruction] = []
    for partition in list(draft.partitions.values()):
        if partition.ends and partition.ends <= event.now and partition.state is not S.REMOVING:
            instructions += draft.remove(partition.name, "its time limit is over")
    for entry in list(draft.maintenance.values()):
        if entry.deadline and entry.deadline <= event.now:
            for name in draft.partitions_on(entry.agent):
                partition = draft.partitions[name]
                if partition.state is not S.REMOVING:
                    why = f"agent {entry.agent} is drained"
                    moved = relocate(draft, partition, why)
                    instructions += draft.remove(name, why) if moved is None else moved
            draft.note("maintenance", entry.agent, replace(entry, deadline=0.0))
    for reservation in list(draft.reservations.values()):
        if reservation.end <= event.now:
            end_reservation(draft, reservation.name)
    return instructions


def relocate(
    draft: Allocator, partition: Partition, why: str = "a machine is lost"
) -> list[Instruction] | None:
    """Move a relocatable partition to other IPUs of its allocation. None if it is not, or there is no room: then
    nothing is changed."""
    if not partition.relocatable or partition.state is S.REMOVING:
        return None
    allocation = draft.allocations[partition.allocation]
    draft.table.mark(partition.slices, False)
    usable = draft.table.of_allocation(allocation, draft.unavailable()) & ~draft.table.taken
    draft.table.mark(partition.slices, True)
    ipus = find_place(draft.cluster, partition.size, partition.num_ilds, usable)
    if ipus is None:
        return None
    operation = draft.next_operation()
    moved = replace(
        partition.moved(S.PENDING, f"moved to other IPUs: {why}"),
        slices=slices_of(draft.cluster, ipus),
        operation=operation,
    )
    return draft.put(moved, ev.ProvisionMachines(moved.name, operation))
