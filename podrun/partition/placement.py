"""Where a partition goes: aligned runs of free IPUs in one allocation.

IPUs are numbered through the POD. A partition of *n* IPUs in one IPU-Link domain (ILD) takes *n* consecutive
IPUs that start at a multiple of *n* within the ILD, so that its own IPU-Links are those of a smaller POD. A
partition over *d* ILDs takes the same *n/d* places in each of *d* neighbouring ILDs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from podrun.cluster import IPUS_PER_MACHINE, Cluster, LinkTopology


@dataclass(frozen=True, slots=True)
class MachineSlice:
    """IPUs of one machine that a partition holds: ``count`` slots from ``first_slot`` (device order, 0 to
    3)."""

    agent_id: str
    first_slot: int
    count: int


@dataclass(frozen=True, slots=True)
class Routing:
    """How the IPUs of a partition are wired, in V-IPU's words and in those of Poplar's target options."""

    ild_routing: str
    link_configuration: str
    link_topology: str


def is_power_of_two(number: int) -> bool:
    """True for 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def least_ilds(cluster: Cluster, size: int) -> int:
    """As few ILDs as ``size`` IPUs need."""
    return max(1, size // cluster.topology.ild_ipus)


def candidates(cluster: Cluster, size: int, ilds: int) -> Iterator[tuple[int, ...]]:
    """Every place for a partition, best first, as the IPUs it would take in partition order."""
    domain = cluster.topology.ild_ipus
    share = size // ilds
    if share < 1 or share > domain:
        return
    for first_ild in range(0, len(cluster.ilds) - ilds + 1, ilds):
        for offset in range(0, domain, share):
            yield tuple(
                (first_ild + i) * domain + offset + place for i in range(ilds) for place in range(share)
            )


def find_place(
    cluster: Cluster, size: int, ilds: int, allowed: Container[str], taken: Container[int]
) -> tuple[int, ...] | None:
    """IPUs for a partition on agents ``allowed`` without those ``taken``, or None if there is no such
    place."""
    for ipus in candidates(cluster, size, ilds):
        if all(ipu not in taken and cluster.agent_of(ipu).id in allowed for ipu in ipus):
            return ipus
    return None


def slices_of(cluster: Cluster, ipus: Iterable[int]) -> tuple[MachineSlice, ...]:
    """The IPUs of a place by machine, in partition order."""
    by_agent: dict[str, list[int]] = {}
    for ipu in ipus:
        by_agent.setdefault(cluster.agent_of(ipu).id, []).append(ipu % IPUS_PER_MACHINE)
    return tuple(MachineSlice(agent, slots[0], len(slots)) for agent, slots in by_agent.items())


def ipus_of(cluster: Cluster, slices: Iterable[MachineSlice]) -> tuple[int, ...]:
    """The IPUs of the POD that slices hold, in partition order."""
    agents = cluster.agents_by_id
    return tuple(
        agents[part.agent_id].first_ipu + part.first_slot + slot
        for part in slices
        for slot in range(part.count)
    )


def routing_of(cluster: Cluster, size: int, ilds: int) -> Routing:
    """Wiring of a partition.

    A whole torus ILD is routed as rings (RINGSWNC); up to 16 IPUs directly (DNC); between, sliding window.
    Observed on real systems: 4 IPUs default and mesh, 64 IPUs slidingWindow and torus. The size between is
    our inference.
    """
    share = size // ilds
    if share == cluster.topology.ild_ipus and cluster.topology.ipu_links is LinkTopology.TORUS:
        return Routing("RINGSWNC", "slidingWindow", "torus")
    if share <= 16:
        return Routing("DNC", "default", "mesh")
    return Routing("SWNC", "slidingWindow", "mesh")
