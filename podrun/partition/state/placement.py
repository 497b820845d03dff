"""Where a partition goes: aligned runs of free IPUs in one allocation, and which IPUs are free.

IPUs are numbered through the POD. A partition of *n* IPUs in one IPU-Link domain (ILD) takes *n* consecutive
IPUs that start at a multiple of *n* within the ILD, so that its own IPU-Links are those of a smaller POD. A
partition over *d* ILDs takes the same *n/d* places in each of *d* neighbouring ILDs.

The search looks at IPUs as the bits of one number: some 50 microseconds for 65,536 IPUs, a few for 128.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Collection, Iterable
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from podrun.core.cluster import IPUS_PER_MACHINE, ROUTINGS, Allocation, Cluster, LinkTopology, Routing
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.partition.state.records import Partition


@dataclass(frozen=True, slots=True)
class MachineSlice:
    """A partition's IPUs on one machine: ``count`` slots from ``first_slot`` (0 to 3, in device order)."""

    agent_id: str
    first_slot: int
    count: int


def least_ilds(cluster: Cluster, size: int) -> int:
    """The fewest ILDs of a V-IPU cluster that hold ``size`` IPUs."""
    return max(1, size // cluster.topology.ild_ipus)


def slices_of(cluster: Cluster, ipus: Iterable[int]) -> tuple[MachineSlice, ...]:
    """IPUs of the POD as slices of machines, in partition order."""
    by_agent: dict[str, list[int]] = {}
    for ipu in ipus:
        by_agent.setdefault(cluster.agent_of(ipu).id, []).append(ipu % IPUS_PER_MACHINE)
    return tuple(MachineSlice(agent, slots[0], len(slots)) for agent, slots in by_agent.items())


def ipus_of(cluster: Cluster, slices: Iterable[MachineSlice]) -> tuple[int, ...]:
    """The IPUs of the POD in ``slices``, in partition order."""
    return tuple(chain.from_iterable(range(begin, end) for begin, end in ranges_of(cluster, slices)))


def ranges_of(cluster: Cluster, slices: Iterable[MachineSlice]) -> list[tuple[int, int]]:
    """The IPUs of the POD in ``slices`` as (first, end), neighbouring slices joined, in partition order."""
    agents, ranges = cluster.agents_by_id, list[tuple[int, int]]()
    for part in slices:
        begin = agents[part.agent_id].index * IPUS_PER_MACHINE + part.first_slot
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], begin + part.count)
        else:
            ranges.append((begin, begin + part.count))
    return ranges


DIRECT_IPUS = 16
"""Most IPUs of a domain that are routed directly."""


def routing_named(text: str) -> str:
    """V-IPU's name of a routing in any spelling (``ring-swnc``). Raises UsageError, which lists the names."""
    plain = text.upper().replace("-", "").replace("_", "")
    name = {"RINGSWNC": "RINGSWNC", "RINGSSWNC": "RINGSWNC"}.get(plain, plain)
    if name not in ROUTINGS:
        raise UsageError(f"there is no routing {text!r}", hint=f"There are: {', '.join(ROUTINGS)}.")
    return name


def place_of_index(cluster: Cluster, size: int, ilds: int, index: int) -> tuple[int, ...]:
    """The IPUs of a V-IPU cluster's ``index``-th place of this size, from 1, in the order of its agents. Raises
    UsageError if there are fewer."""
    domain, share = cluster.topology.ild_ipus, size // ilds
    per_group = domain // share
    places = len(cluster.ilds) // ilds * per_group
    if index > places:
        raise UsageError(
            f"{cluster.name} has {places} places for {size} IPUs, no place {index}",
            hint=f"--index 1 to {places}",
        )
    return place_at(cluster, size, ilds, *divmod(index - 1, per_group))


def routing_of(cluster: Cluster, size: int, ilds: int, wanted: str = "") -> Routing:
    """Wiring of a partition of a V-IPU cluster; ``wanted``: the routing that was asked for.

    A whole torus ILD is routed as rings (RINGSWNC), up to 16 IPUs directly (DNC), sizes between by sliding window
    (SWNC). Observed on real systems: 4 IPUs default and mesh, 64 IPUs slidingWindow and torus; the rest is inferred.
    """
    if wanted:
        return ROUTINGS[wanted]
    share = size // ilds
    if share == cluster.topology.ild_ipus and cluster.topology.ipu_links is LinkTopology.TORUS:
        return ROUTINGS["RINGSWNC"]
    if share <= DIRECT_IPUS:
        return ROUTINGS["DNC"]
    return ROUTINGS["SWNC"]


Flags = NDArray[np.bool_]
"""One flag for each IPU of the POD."""
IpuIndex = slice | NDArray[np.intp]
"""Selects IPUs in an array over the POD."""


class IpuTable:
    """The IPUs that partitions hold. ``taken``: whether each IPU is held; `holders`: the partitions on an agent.

    A copy shares the holders of its original, which must not change meanwhile, and keeps its own changes apart."""

    def __init__(self, cluster: Cluster, partitions: Iterable[Partition] = ()) -> None:
        self._cluster = cluster
        self.taken: Flags = np.zeros(cluster.ipu_count, bool)
        self._holders: ChainMap[str, tuple[str, ...]] = ChainMap({})
        self._masks: dict[str, tuple[Allocation, Flags]] = {}
        for partition in partitions:
            self.add(partition)

    def copy(self) -> IpuTable:
        """A table that may be changed without changing this one."""
        other = IpuTable.__new__(IpuTable)
        other._cluster, other.taken = self._cluster, self.taken.copy()
        other._holders = self._holders.new_child()
        other._masks = self._masks
        return other

    def add(self, partition: Partition) -> None:
        """The partition takes its IPUs."""
        self.mark(partition.slices, True)
        for agent in dict.fromkeys(part.agent_id for part in partition.slices):
            self._holders[agent] = (*self._holders.get(agent, ()), partition.name)

    def drop(self, partition: Partition) -> None:
        """The partition gives its IPUs back."""
        self.mark(partition.slices, False)
        for agent in {part.agent_id for part in partition.slices}:
            self._holders[agent] = tuple(name for name in self._holders[agent] if name != partition.name)

    def mark(self, slices: Iterable[MachineSlice], taken: bool) -> None:
        """Set the flags of IPUs."""
        for part in slices:
            first = self._cluster.agents_by_id[part.agent_id].first_ipu + part.first_slot
            self.taken[first : first + part.count] = taken

    def holders(self, agent: str) -> tuple[str, ...]:
        """Names of the partitions that hold IPUs of an agent."""
        return self._holders.get(agent, ())

    def all_holders(self) -> dict[str, tuple[str, ...]]:
        """Names of the partitions on every agent that any partition holds."""
        return {agent: names for agent, names in self._holders.items() if names}

    def of_allocation(self, allocation: Allocation, without: Collection[str] = ()) -> Flags:
        """The IPUs of an allocation, except those of some agents. The caller may change the array."""
        known = self._masks.get(allocation.name)
        if known is None or known[0] is not allocation:
            known = self._masks[allocation.name] = (allocation, self.of_agents(allocation.agents))
        mask = known[1].copy()
        for agent in without:
            first = self._cluster.agents_by_id[agent].first_ipu
            mask[first : first + IPUS_PER_MACHINE] = False
        return mask

    def of_agents(self, agents: Iterable[str]) -> Flags:
        """The IPUs of some agents."""
        mask: Flags = np.zeros(self._cluster.ipu_count, bool)
        known = self._cluster.agents_by_id
        for agent in agents:
            first = known[agent].first_ipu
            mask[first : first + IPUS_PER_MACHINE] = True
        return mask


def find_place(cluster: Cluster, size: int, ilds: int, usable: Flags) -> tuple[int, ...] | None:
    """IPUs of a V-IPU cluster for a partition of ``size`` IPUs over ``ilds`` IPU-Link domains, among those usable; None
    if there are none. `find_block` says which.
    """
    block = find_block(cluster, size, ilds, usable)
    return None if block is None else place_at(cluster, size, ilds, *block)


def find_block(cluster: Cluster, size: int, ilds: int, usable: Flags) -> tuple[int, int] | None:
    """The group of neighbouring domains and the block in each of them in which `find_place` puts a partition.

    Best fit: of all places the one in the smallest free block, so that larger blocks stay whole; of equals the first.
    The flags of all IPUs are the bits of one number. Blocks are aligned and lie in one domain, so that shifts carry no
    bit from one domain into a block of another.
    """
    domain, share = cluster.topology.ild_ipus, size // ilds
    first, count = cluster.first_ipu, cluster.ipu_count
    if share < 1 or share > domain or count < domain * ilds:
        return None
    runs = _bits_of(usable[first : first + count])
    for shift in _doublings(1, share):
        runs &= runs >> shift  # Bits at which as many free IPUs begin.
    fits = runs & _bits_at(share, count)
    if ilds > 1:
        for shift in _doublings(1, ilds):
            fits &= fits >> shift * domain
        fits &= _bits_of_first_domains(domain, ilds, count)
    if not fits:
        return None
    block = share
    while block < domain:
        runs &= runs >> block
        block *= 2
        larger = runs & _bits_at(block, count)
        for shift in _doublings(share, block):
            larger |= larger << shift
        smallest = fits & ~larger  # Places in no free block that is larger.
        if smallest:
            fits = smallest
            break
    place = (fits & -fits).bit_length() - 1
    return place // (domain * ilds), place % domain // share


def _bits_of(usable: Flags) -> int:
    """Flags as the bits of a number, lowest first."""
    return int.from_bytes(np.packbits(usable, bitorder="little").tobytes(), "little")


@functools.lru_cache(maxsize=256)
def _bits_at(share: int, count: int) -> int:
    """The bits at which blocks of ``share`` of so many IPUs may begin."""
    flags: Flags = np.zeros(count, bool)
    flags[::share] = True
    return _bits_of(flags)


@functools.lru_cache(maxsize=64)
def _bits_of_first_domains(domain: int, ilds: int, count: int) -> int:
    """The bits of the first domain of each whole group of domains."""
    flags: Flags = np.zeros(count, bool)
    whole = count // (domain * ilds) * domain * ilds
    flags[:whole].reshape(-1, ilds, domain)[:, 0] = True
    return _bits_of(flags)


@functools.cache
def _doublings(first: int, end: int) -> tuple[int, ...]:
    """``first``, twice it, ... below ``end``."""
    return tuple(first << n for n in range(64) if first << n < end)


def largest_place(cluster: Cluster, usable: Flags) -> int:
    """IPUs of the largest partition of a V-IPU cluster that could be made of the usable IPUs; 0 if none."""
    count = int(usable[cluster.first_ipu : cluster.first_ipu + cluster.ipu_count].sum())
    size = 1 << (max(count, 1).bit_length() - 1)
    while size and find_place(cluster, size, least_ilds(cluster, size), usable) is None:
        size //= 2
    return size


def place_at(cluster: Cluster, size: int, ilds: int, group: int, offset: int) -> tuple[int, ...]:
    """The IPUs of block ``offset`` in each domain of a group of neighbouring domains of a V-IPU cluster, in partition
    order."""
    domain, share = cluster.topology.ild_ipus, size // ilds
    return _ipus_of_block(cluster.first_ipu + group * ilds * domain + offset * share, domain, share, ilds)


@functools.lru_cache(maxsize=4096)
def _ipus_of_block(first: int, domain: int, share: int, ilds: int) -> tuple[int, ...]:
    begins = range(first, first + ilds * domain, domain)
    return tuple(chain.from_iterable(range(begin, begin + share) for begin in begins))


def index_at(cluster: Cluster, size: int, ilds: int, group: int, offset: int) -> IpuIndex:
    """What selects the IPUs of `place_at` in an array over the POD."""
    domain, share = cluster.topology.ild_ipus, size // ilds
    if ilds > 1 and share < domain:
        return np.array(place_at(cluster, size, ilds, group, offset))
    first = cluster.first_ipu + group * ilds * domain + offset * share
    return slice(first, first + size)
