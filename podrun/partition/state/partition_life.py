"""The allocator's part for the life of a partition: operations that start and end, resets, the server's start.

Functions over its draft.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.errors import ConflictError
from podrun.partition.state import events as ev
from podrun.partition.state.events import MachineOrder
from podrun.partition.state.records import Partition
from podrun.partition.state.values import PartitionState

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator


S = PartitionState


def operation_started(draft: Allocator, event: ev.OperationStarted) -> list[MachineOrder]:
    """Machines of a partition are being started."""
    partition = _current(draft, event.partition, event.operation)
    if partition is None or partition.state is not S.PENDING:
        return []
    return draft.put(partition.moved(S.PROVISIONING, "machines are being started"))


def operation_succeeded(draft: Allocator, event: ev.OperationSucceeded) -> list[MachineOrder]:
    """Machines are ready, or given back."""
    partition = _current(draft, event.partition, event.operation)
    if partition is None:
        return []
    if partition.state is S.REMOVING:
        return _forget(draft, partition)
    if partition.state in (S.PENDING, S.PROVISIONING, S.RESETTING):
        active = partition.moved(S.ACTIVE, "machines are ready")
        ends = draft.now + partition.limit_s if partition.limit_s and not partition.ends else partition.ends
        return draft.put(replace(active, generation=partition.generation + 1, ends=ends))
    return []


def operation_failed(draft: Allocator, event: ev.OperationFailed) -> list[MachineOrder]:
    """Machines could not be brought up: the partition is in ERROR."""
    partition = _current(draft, event.partition, event.operation)
    if partition is None:
        return []
    if partition.state is S.REMOVING:
        # A machine that could not be taken back ends with its process; the IPUs are free in any case.
        return _forget(draft, partition)
    if partition.state is S.ERROR:
        return []
    return draft.put(partition.moved(S.ERROR, "an operation failed", error=event.error))


def reset_partition_of(draft: Allocator, event: ev.ResetPartition) -> list[MachineOrder]:
    """Re-initialise a partition. Raises ConflictError if a machine of it is lost, or its state forbids it."""
    partition = draft.partition(event.partition)
    if partition.state is S.RESETTING or is_later(partition, event.generation):
        return []  # Another instance of the same program, say, has requested it.
    gone = sorted(agent for agent in draft.lost if partition.name in draft.partitions_on(agent))
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
    operation = draft.next_operation()
    moved = replace(partition.moved(S.RESETTING, "reset requested"), operation=operation)
    return draft.put(moved, ev.ResetMachines(moved.name, operation))


def begin_anew(draft: Allocator, event: ev.ServerStarted) -> list[MachineOrder]:
    """The server starts with stored partitions: bring up those whose machines are gone, go on with removals."""
    instructions: list[MachineOrder] = []
    for partition in list(draft.partitions.values()):
        if partition.state is S.REMOVING:
            operation = draft.next_operation()
            moved = replace(partition, operation=operation)
            instructions += draft.put(moved, ev.ReleaseMachines(moved.name, operation, moved.slices))
        elif partition.state is S.ACTIVE and partition.name in event.adopted:
            continue
        elif partition.state is not S.ERROR:
            operation = draft.next_operation()
            moved = replace(partition.moved(S.PENDING, "the server was restarted"), operation=operation)
            instructions += draft.put(moved, ev.ProvisionMachines(moved.name, operation))
    return instructions


def is_later(partition: Partition, generation: int) -> bool:
    """True iff a partition is usable in a generation after this one, or soon will be. Never so for generation 0."""
    if not generation or partition.state in (S.ERROR, S.REMOVING):
        return False
    return partition.generation > generation or partition.state is S.RESETTING


def _current(draft: Allocator, name: str, operation: int) -> Partition | None:
    """The partition, if ``operation`` is its current one."""
    partition = draft.partitions.get(name)
    return partition if partition is not None and partition.operation == operation else None


def _forget(draft: Allocator, partition: Partition) -> list[MachineOrder]:
    draft.note("partitions", partition.name, None)
    return []
