"""What always holds in the allocator's state: one pure check, for tests, for stored state and for repair."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from podrun.core.cluster import IPUS_PER_MACHINE, Allocation, Cluster
from podrun.core.errors import InternalError
from podrun.vipu.events import Partition
from podrun.vipu.ipu_placement import ipus_of, is_power_of_two
from podrun.vipu.types import PartitionState

if TYPE_CHECKING:
    from podrun.vipu.allocator import Allocator


def validate_state(
    cluster: Cluster,
    partitions: Mapping[str, Partition],
    allocations: Mapping[str, Allocation],
    lost: Set[str],
) -> None:
    """Check every cross-link of a state. Raises InternalError naming the first that does not hold."""
    _check_allocations(cluster, allocations, lost)
    holders: dict[int, str] = {}
    for name, partition in partitions.items():
        _require(name == partition.name, f"partition {name} is recorded as {partition.name}")
        _check_partition(cluster, partition)
        allocation = allocations.get(partition.allocation)
        _require(allocation is not None, f"partition {name} is in no allocation")
        agents = {part.agent_id for part in partition.slices}
        inside = allocation is not None and agents <= set(allocation.agents)
        _require(inside, f"partition {name} spans allocations")
        for ipu in ipus_of(cluster, partition.slices):
            _require(ipu not in holders, f"IPU {ipu} belongs to partitions {holders.get(ipu)} and {name}")
            holders[ipu] = name
        if agents & lost:
            usable = partition.state not in (PartitionState.ERROR, PartitionState.REMOVING)
            _require(not usable, f"partition {name} is {partition.state.name} without a machine")


def validate_plans(allocator: Allocator) -> None:
    """Check queue, maintenance and reservations against the rest. Raises InternalError."""
    known = set(allocator.cluster.agents_by_id)
    sequences = [entry.sequence for entry in allocator.queue.values()]
    _require(len(sequences) == len(set(sequences)), "two queued requests have one place in the queue")
    both = set(allocator.queue) & set(allocator.partitions)
    _require(not both, f"requests are queued and served: {sorted(both)}")
    for name, entry in allocator.queue.items():
        _require(entry.needs.name == name, f"request {name} is recorded as {entry.needs.name}")
        asked = entry.needs.reservation
        _require(not asked or asked in allocator.reservations, f"request {name} waits for no reservation")
    _require(set(allocator.maintenance) <= known, "an unknown agent is out of service")
    for reservation in allocator.reservations.values():
        _require(set(reservation.agents) <= known, f"reservation {reservation.name} has an unknown agent")
    taken = {ipu for p in allocator.partitions.values() for ipu in ipus_of(allocator.cluster, p.slices)}
    _require(
        int(allocator.table.taken.sum()) == len(taken), "the table of IPUs is not that of the partitions"
    )


def _check_allocations(cluster: Cluster, allocations: Mapping[str, Allocation], lost: Set[str]) -> None:
    known = set(cluster.agents_by_id)
    agents = [agent for allocation in allocations.values() for agent in allocation.agents]
    _require(len(agents) == len(set(agents)), "an agent is in two allocations")
    _require(set(agents) <= known, f"an allocation names an unknown agent: {sorted(set(agents) - known)}")
    _require(lost <= known, f"an unknown agent is lost: {sorted(lost - known)}")


def _check_partition(cluster: Cluster, partition: Partition) -> None:
    """What holds within one partition: its state, its size, its place."""
    name, size = partition.name, partition.size
    _require(partition.state is not PartitionState.REMOVED, f"partition {name} is removed but recorded")
    broken = partition.state is PartitionState.ERROR
    _require(broken == bool(partition.error), f"partition {name}: error and state disagree")
    for part in partition.slices:
        _require(part.agent_id in cluster.agents_by_id, f"partition {name}: unknown agent {part.agent_id}")
        inside = part.first_slot >= 0 and part.first_slot + part.count <= IPUS_PER_MACHINE
        _require(inside and part.count > 0, f"partition {name}: {part.agent_id} has no such IPUs")
    ipus = ipus_of(cluster, partition.slices)
    _require(is_power_of_two(size), f"partition {name} has {size} IPUs")
    _require(len(ipus) == size, f"partition {name} holds {len(ipus)} IPUs, not {size}")
    domain, domains = cluster.topology.ild_ipus, partition.num_ilds
    _require(0 < domains <= size, f"partition {name} has {domains} IPU-Link domains")
    _require(ipus[0] % domain % (size // domains) == 0, f"partition {name} is not aligned")
    _require(len({ipu // domain for ipu in ipus}) == domains, f"partition {name} lies in other ILDs")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InternalError(f"the allocator's state does not hold together: {message}")
