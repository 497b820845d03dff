"""What the service does with machines: bring partitions up, act on agents, take over what an earlier server left.

Functions over the pool, without the service's state: they may take long, and hold no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from podrun.core.errors import PodrunError, ServiceError, UsageError
from podrun.vipu import events as ev
from podrun.vipu.events import Partition
from podrun.vipu.machine_pool import SILENT, MachinePool, MachineUse
from podrun.vipu.types import PartitionState


def uses_of(partition: Partition) -> list[MachineUse]:
    """The machines of a partition in its order."""
    return [MachineUse(part.agent_id, partition.name) for part in partition.slices]


@dataclass(frozen=True, slots=True)
class Taken:
    """What was found of the machines of active partitions. ``adopted``: partitions that go on; ``lost``: agents of
    machines that are gone, in order; ``silent``: machines that listen and do not answer."""

    adopted: frozenset[str]
    lost: tuple[str, ...]
    silent: tuple[MachineUse, ...]


def take_over(pool: MachinePool, partitions: Sequence[Partition]) -> Taken:
    """Adopt the machines that an earlier server left. A machine that does not answer counts as one that works: its
    partition was active, so its last operation had configured it."""
    machines = pool.adopt([use for partition in partitions for use in uses_of(partition)])
    adopted: set[str] = set()
    lost: dict[str, None] = {}
    silent: list[MachineUse] = []
    for partition in partitions if machines is not None else ():
        if partition.state is not PartitionState.ACTIVE:
            continue
        found = {use: (machines or {}).get(use) for use in uses_of(partition)}
        silent += [use for use, operation in found.items() if operation == SILENT]
        if all(operation in (partition.operation, SILENT) for operation in found.values()):
            adopted.add(partition.name)
        lost |= dict.fromkeys(use.agent_id for use, operation in found.items() if operation is None)
    return Taken(frozenset(adopted), tuple(lost), tuple(silent))


def work_on_agent(pool: MachinePool, instruction: ev.Instruction) -> None:
    """Start and end machines while the request waits: when it returns, the fresh machine is up."""
    match instruction:
        case ev.StopAgentMachines(agent):
            pool.stop_agent(agent)
        case ev.ReplaceAgentMachines(agent, partitions):
            pool.stop_agent(agent)
            pool.acquire([MachineUse(agent, name) for name in partitions])
        case ev.PowerCycleMachines(agent):
            for use in pool.endpoints():
                if use.agent_id == agent:
                    pool.control(use).power_cycle()


def bring_up(pool: MachinePool, partition: Partition) -> None:
    """Provision or reset: all machines of the partition, cleared and configured with each other's endpoints."""
    uses = uses_of(partition)
    where = pool.acquire(uses)
    pool.release(  # Of the place from which it was moved.
        use for use in pool.endpoints() if use.partition == partition.name and use not in uses
    )
    endpoints = [where[use] for use in uses]
    fresh = partition.generation == 0
    firsts = [first for first, _ in partition.machines()]

    def configure(index: int, use: MachineUse) -> None:
        control = pool.control(use)
        control.configure(
            partition=partition.name,
            first_ipu=firsts[index],
            machine_index=index,
            endpoints=endpoints,
            ipus=partition.slices[index].count,
            owner=partition.owner,
            operation=partition.operation,
        )
        control.reset_links()
        control.reset_ipus(range(partition.slices[index].count))
        if fresh and partition.faults:
            control.inject(partition.faults)

    on_machines(pool, partition, configure)


def on_machines(pool: MachinePool, partition: Partition, work: Callable[[int, MachineUse], None]) -> None:
    """Call ``work`` for all machines of a partition at once. Raises the first error, with the machine's name."""
    uses = uses_of(partition)
    with ThreadPoolExecutor(min(len(uses), 16), thread_name_prefix="podrun-machines") as threads:
        results = [threads.submit(work, index, use) for index, use in enumerate(uses)]
    for use, result in zip(uses, results, strict=True):
        try:
            result.result()
        except PodrunError as error:
            if isinstance(error, UsageError):
                raise
            pool.check(use)
            raise ServiceError(f"machine {use.agent_id}: {error.message}", hint=error.hint) from error
