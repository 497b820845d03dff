"""Where a partition goes: aligned runs of free IPUs in one allocation.

IPUs are numbered through the POD. A partition of *n* IPUs in one IPU-Link domain (ILD) takes *n* consecutive
IPUs that start at a multiple of *n* within the ILD, so that its own IPU-Links are those of a smaller POD. A
partition over *d* ILDs takes the same *n/d* places in each of *d* neighbouring ILDs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from podrun.core.cluster import IPUS_PER_MACHINE, Cluster, LinkTopology


@dataclass(frozen=True, slots=True)
class MachineSlice:
    """A partition's IPUs on one machine: ``count`` slots from ``first_slot`` (0 to 3, in device order)."""

    agent_id: str
    first_slot: int
    count: int


@dataclass(frozen=True, slots=True)
class Routing:
    """How the IPUs of a partition are wired, in the words of V-IPU and of Poplar's target options."""

    ild_routing: str
    link_configuration: str
    link_topology: str


def is_power_of_two(number: int) -> bool:
    """True for 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def least_ilds(cluster: Cluster, size: int) -> int:
    """The fewest ILDs that hold ``size`` IPUs."""
    return max(1, size // cluster.topology.ild_ipus)


def slices_of(cluster: Cluster, ipus: Iterable[int]) -> tuple[MachineSlice, ...]:
    """IPUs of the POD as slices of machines, in partition order."""
    by_agent: dict[str, list[int]] = {}
    for ipu in ipus:
        by_agent.setdefault(cluster.agent_of(ipu).id, []).append(ipu % IPUS_PER_MACHINE)
    return tuple(MachineSlice(agent, slots[0], len(slots)) for agent, slots in by_agent.items())


def ipus_of(cluster: Cluster, slices: Iterable[MachineSlice]) -> tuple[int, ...]:
    """The IPUs of the POD in ``slices``, in partition order."""
    agents = cluster.agents_by_id
    return tuple(
        agents[part.agent_id].first_ipu + part.first_slot + slot
        for part in slices
        for slot in range(part.count)
    )


def routing_of(cluster: Cluster, size: int, ilds: int) -> Routing:
    """Wiring of a partition.

    A whole torus ILD is routed as rings (RINGSWNC), up to 16 IPUs directly (DNC), sizes between by sliding window
    (SWNC). Observed on real systems: 4 IPUs default and mesh, 64 IPUs slidingWindow and torus; the rest is inferred.
    """
    share = size // ilds
    if share == cluster.topology.ild_ipus and cluster.topology.ipu_links is LinkTopology.TORUS:
        return Routing("RINGSWNC", "slidingWindow", "torus")
    if share <= 16:
        return Routing("DNC", "default", "mesh")
    return Routing("SWNC", "slidingWindow", "mesh")
