"""Rules for requests, whatever else is on the POD (names, sizes, GCDs, IPU-Link domains), and invariants of the
allocator's state. Pure; the invariants are for tests, for stored state and for repair.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.cluster import IPUS_PER_MACHINE, ROUTINGS, Allocation, Cluster, LinkTopology
from podrun.core.errors import InternalError, NotFoundError, PodrunError, UsageError
from podrun.core.layout import is_power_of_two
from podrun.partition.host.holders import parse_holder
from podrun.partition.state.placement import (
    DIRECT_IPUS,
    ipus_of,
    least_ilds,
    place_of_index,
    routing_named,
)
from podrun.partition.state.values import (
    NAME_PATTERN,
    PartitionState,
    Requirements,
    SyncType,
    check_name,
)

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator
    from podrun.partition.state.records import Partition


def unknown_name(kind: str, name: str, known: Iterable[str], make: str) -> NotFoundError:
    """The error for an unknown name: the nearest name, then all of them, else ``make``, the command that makes one."""
    numbered = {text: [part.zfill(9) for part in re.split(r"(\d+)", text)] for text in known}
    names = sorted(numbered, key=lambda text: numbered[text])  # ipum2 before ipum10
    close = difflib.get_close_matches(name, names, n=1)
    did_you_mean = f"Did you mean {close[0]}? " if close else ""
    shown = ", ".join(names[:8]) + (" ..." if len(names) > 8 else ".")
    there = f"There are: {shown}" if names else f"There are none: {make}"
    return NotFoundError(f"there is no {kind} {name!r}", hint=did_you_mean + there)


def complete_requirements(needs: Requirements, cluster: Cluster) -> Requirements:
    """The requirements with defaults for what they leave open. Raises UsageError if the V-IPU cluster can never meet
    them."""
    check_name(needs.name, "a partition")
    if not is_power_of_two(needs.size):
        raise UsageError(
            f"the size of a partition is a power of two, not {needs.size}", hint=_sizes_near(needs.size)
        )
    ilds = needs.num_ilds or least_ilds(cluster, needs.size)
    _check_domains(needs.size, ilds, cluster)
    _check_routing(needs, ilds, cluster)
    if needs.index:
        place_of_index(cluster, needs.size, ilds, needs.index)
    gcds = needs.num_gcds or 1
    if needs.reconfigurable:
        _check_reconfigurable(needs, gcds, ilds)
    if not is_power_of_two(gcds) or gcds > needs.size:
        raise UsageError(f"{gcds} GCDs do not divide {needs.size} IPUs", hint="Use a power of two.")
    if gcds < ilds:
        raise UsageError(
            f"a GCD lies in one IPU-Link domain: {ilds} domains need at least {ilds} GCDs, not {gcds}",
            hint=f"Use --num-gcds {ilds} (podrun: --num-instances {ilds} or more).",
        )
    default = SyncType.C2_COMPATIBLE if needs.reconfigurable else SyncType.POD_NATIVE_DEFAULT
    return replace(needs, num_gcds=gcds, num_ilds=ilds, sync_type=needs.sync_type or default)


def _check_domains(size: int, ilds: int, cluster: Cluster) -> None:
    if size > cluster.ipu_count:
        from podrun.core.cluster_file import smallest_holding

        larger = smallest_holding(size, cluster.target)
        raise UsageError(
            f"a partition of {size} IPUs is larger than {cluster.name} of {cluster.ipu_count}",
            hint="Ask for fewer"
            + (f", or start a larger POD: vipu-server --cluster {larger.name}" if larger else "."),
        )
    if not is_power_of_two(ilds) or ilds > size or ilds > len(cluster.ilds):
        most = min(size, len(cluster.ilds))
        raise UsageError(
            f"{size} IPUs cannot lie in {ilds} IPU-Link domains of {cluster.name}",
            hint=f"Leave out --num-ilds, or use a power of two up to {1 << (most.bit_length() - 1)}.",
        )
    if size // ilds > cluster.topology.ild_ipus:
        raise UsageError(
            f"{size} IPUs do not fit {ilds} IPU-Link domains of {cluster.topology.ild_ipus}",
            hint=f"Use --num-ilds {least_ilds(cluster, size)}.",
        )


def _check_routing(needs: Requirements, ilds: int, cluster: Cluster) -> None:
    """Raise UsageError for a routing that IPU-Links of the partition cannot have."""
    share, topology = needs.size // ilds, cluster.topology
    ring = share == topology.ild_ipus and topology.ipu_links is LinkTopology.TORUS
    routing = ROUTINGS.get(needs.routing)
    if routing is not None and routing.link_topology is LinkTopology.TORUS and not ring:
        raise UsageError(
            f"rings ({needs.routing}) need a whole IPU-Link domain of {topology.ild_ipus} IPUs, a torus, not {share}",
            hint="Leave out --routing, or use SWNC.",
        )
    if needs.routing == "DNC" and share > DIRECT_IPUS:
        raise UsageError(
            f"direct links (DNC) join at most {DIRECT_IPUS} IPUs of a domain, not {share}",
            hint="Leave out --routing, or use SWNC.",
        )
    if needs.routing and routing is None:
        routing_named(needs.routing)


def _check_reconfigurable(needs: Requirements, gcds: int, ilds: int) -> None:
    if needs.sync_type not in (None, SyncType.C2_COMPATIBLE):
        raise UsageError(
            f"a reconfigurable partition has sync type c2-compatible, not {needs.sync_type.value}",
            hint="Leave out --sync-type or --reconfigurable.",
        )
    if gcds != 1:
        raise UsageError(
            f"a reconfigurable partition has one GCD, not {gcds}",
            hint="Leave out --num-gcds or --reconfigurable.",
        )
    if ilds != 1:
        raise UsageError(
            f"a reconfigurable partition lies in one IPU-Link domain; {needs.size} IPUs need {ilds}",
            hint=f"Leave out --reconfigurable and use --num-gcds {ilds} or more.",
        )


def _sizes_near(size: int) -> str:
    if size < 1:
        return "Use 1, 2, 4, 8, ..."
    lower = 1 << (size.bit_length() - 1)
    return f"Use {lower} or {2 * lower}."


def validate_state(
    cluster: Cluster,
    partitions: Mapping[str, Partition],
    allocations: Mapping[str, Allocation],
    lost: Set[str],
) -> None:
    """Check every cross-link of a state. Raises InternalError naming the first one that does not hold."""
    _check_allocations(cluster, allocations, lost)
    holders: dict[int, str] = {}
    for name, partition in partitions.items():
        _require(name == partition.name, f"partition {name} is recorded as {partition.name}")
        _check_partition(cluster, partition)
        _check_place(cluster, partition)
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
        _check_request(allocator, entry.needs)
        asked = entry.needs.reservation
        _require(not asked or asked in allocator.reservations, f"request {name} waits for no reservation")
    _require(set(allocator.maintenance) <= known, "an unknown agent is out of service")
    for reservation in allocator.reservations.values():
        _require(bool(reservation.agents), f"reservation {reservation.name} has no agents")
        _require(reservation.start < reservation.end, f"reservation {reservation.name} ends before it begins")
        _require(set(reservation.agents) <= known, f"reservation {reservation.name} has an unknown agent")
    taken = {ipu for p in allocator.partitions.values() for ipu in ipus_of(allocator.cluster, p.slices)}
    _require(
        int(allocator.table.taken.sum()) == len(taken), "the table of IPUs is not that of the partitions"
    )


def _check_request(allocator: Allocator, needs: Requirements) -> None:
    """Check a queued request by itself: its cluster and allocation, and that this cluster could hold it."""
    pod = allocator.cluster
    clusters = {cluster.name: cluster for cluster in pod.clusters}
    _require(needs.cluster in ("", *clusters), f"request {needs.name} names no cluster {needs.cluster!r}")
    allocation = allocator.allocations.get(needs.allocation)
    known = not needs.allocation or allocation is not None
    _require(known, f"request {needs.name} names no allocation {needs.allocation!r}")
    cluster = clusters.get(needs.cluster, pod)
    if allocation is not None:
        cluster = pod.clusters_by_agent[allocation.agents[0]]
        inside = needs.cluster in ("", cluster.name)
        _require(inside, f"request {needs.name} names a cluster in which its allocation is not")
    try:
        settled = complete_requirements(needs, cluster)
    except PodrunError as error:
        raise InternalError(f"{_BROKEN}: request {needs.name}: {error.message}") from error
    _require(settled == needs, f"request {needs.name} leaves open what was decided")


def _check_allocations(cluster: Cluster, allocations: Mapping[str, Allocation], lost: Set[str]) -> None:
    known = set(cluster.agents_by_id)
    agents = [agent for allocation in allocations.values() for agent in allocation.agents]
    _require(len(agents) == len(set(agents)), "an agent is in two allocations")
    _require(set(agents) <= known, f"an allocation names an unknown agent: {sorted(set(agents) - known)}")
    _require(lost <= known, f"an unknown agent is lost: {', '.join(sorted(lost - known))}")
    clusters = cluster.clusters_by_agent
    for allocation in allocations.values():
        first = clusters.get(allocation.agents[0]) if allocation.agents else None
        inside = first is not None and all(clusters.get(agent) is first for agent in allocation.agents)
        _require(inside, f"allocation {allocation.name} does not lie in one cluster")


def _check_partition(cluster: Cluster, partition: Partition) -> None:
    """Check one partition by itself: its state, its size, its place."""
    name, size = partition.name, partition.size
    _require(partition.state is not PartitionState.REMOVED, f"partition {name} is removed but recorded")
    _require(bool(NAME_PATTERN.fullmatch(name)), f"{name!r} is no name for a partition")
    _require(partition.routing in ("", *ROUTINGS), f"partition {name}: no routing {partition.routing!r}")
    _require(is_power_of_two(partition.num_gcds), f"partition {name} has {partition.num_gcds} GCDs")
    _require(partition.num_gcds <= size, f"partition {name} has {partition.num_gcds} GCDs and {size} IPUs")
    broken = partition.state is PartitionState.ERROR
    _require(broken == bool(partition.error), f"partition {name}: error and state disagree")
    for part in partition.slices:
        _require(part.agent_id in cluster.agents_by_id, f"partition {name}: unknown agent {part.agent_id}")
        inside = part.first_slot >= 0 and part.first_slot + part.count <= IPUS_PER_MACHINE
        _require(inside and part.count > 0, f"partition {name}: {part.agent_id} has no such IPUs")
    ipus = ipus_of(cluster, partition.slices)
    _require(is_power_of_two(size), f"partition {name} has {size} IPUs")
    _require(len(ipus) == size, f"partition {name} holds {len(ipus)} IPUs, not {size}")


def _check_place(pod: Cluster, partition: Partition) -> None:
    """What holds for a partition's place: in one V-IPU cluster, aligned."""
    name, size, domains = partition.name, partition.size, partition.num_ilds
    cluster = pod.clusters_by_agent.get(partition.slices[0].agent_id)
    inside = cluster is not None and all(
        pod.clusters_by_agent.get(part.agent_id) is cluster for part in partition.slices
    )
    if cluster is None or not inside:
        raise InternalError(f"{_BROKEN}: partition {name} does not lie in one cluster")
    domain = cluster.topology.ild_ipus
    ipus = [ipu - cluster.first_ipu for ipu in ipus_of(pod, partition.slices)]
    _require(is_power_of_two(domains) and domains <= size, f"partition {name} has {domains} IPU-Link domains")
    _require(size // domains <= domain, f"partition {name} has too few IPU-Link domains")
    _require(ipus[0] % domain % (size // domains) == 0, f"partition {name} is not aligned")
    _require(len({ipu // domain for ipu in ipus}) == domains, f"partition {name} lies in other ILDs")


_BROKEN = "the allocator's state does not hold together"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InternalError(f"{_BROKEN}: {message}")


def check_end(needs: Requirements) -> None:
    """Raise UsageError for a request whose time limit or holder is none."""
    if needs.limit_s < 0 or not math.isfinite(needs.limit_s):
        raise UsageError(f"a partition cannot last {needs.limit_s:g} s", hint="Use --time-limit SECONDS.")
    try:
        if needs.holder:
            parse_holder(needs.holder)
    except ValueError as error:
        raise UsageError(
            str(error), hint="Leave it empty: the partition then stays until it is removed."
        ) from None
