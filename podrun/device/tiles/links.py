"""Time on IPU-Links as the tile model needs it: neighbour copies, and the collectives of
`podrun.collectives`.

The link figures, the choice of algorithm and its time live in `podrun.collectives`; here they meet chips and
systems.
"""

from __future__ import annotations

from dataclasses import replace

from podrun.collectives.links import FABRICS, LINK_LATENCY, RAIL_LINKS, Fabric, fabric
from podrun.collectives.timing import Method, all_gather, all_reduce, reduce_scatter
from podrun.device.target import GC2, Chip

GC2_NEIGHBOUR_BYTES = 8.9 * 1.6e9
"""Payload that one direction of a neighbour exchange reaches. Derived: 8.9 B per cycle on GC2."""
METHODS = {"meet_in_middle": Method.MEET_IN_MIDDLE, "ring": Method.RING, "pair": Method.BIDIRECTIONAL}
"""Algorithms by the names that measurements use."""


def fabric_of(chip: Chip, *, ild_ipus: int | None = None) -> Fabric:
    """The links of ``chip``'s systems; a C600's are taken as GC200's. A supposed chip's have its clock and its rate."""
    found = fabric(chip.base if chip.base in FABRICS else "gc200", ild_ipus=ild_ipus)
    if chip.name == chip.base:
        return found
    rate = chip.facts.get("link_rate")
    return replace(found, clock_hz=chip.clock_hz, link_rate=found.link_rate if rate is None else rate.value)


def neighbour_seconds(chip: Chip, nbytes: float) -> float:
    """A copy of ``nbytes`` to a neighbouring chip."""
    if nbytes <= 0:
        return 0.0
    measured = chip.base == GC2.name and "link_rate" not in chip.facts
    rate = GC2_NEIGHBOUR_BYTES if measured else fabric_of(chip).rail
    return LINK_LATENCY + nbytes / rate


def all_reduce_seconds(
    chip: Chip, ranks: int, nbytes: float, *, ipus_per_replica: int = 1, method: str | None = None
) -> float:
    """All-reduce of ``nbytes`` on each of ``ranks`` replicas, by the algorithm the library would choose."""
    if ranks <= 1 or nbytes <= 0:
        return 0.0
    chosen = METHODS.get(method) if method else None
    return all_reduce(nbytes, ranks, fabric_of(chip), ipus_per_rank=ipus_per_replica, method=chosen).seconds


def reduce_scatter_seconds(chip: Chip, ranks: int, nbytes: float, *, ipus_per_replica: int = 1) -> float:
    """Reduce-scatter of ``nbytes`` on each of ``ranks`` replicas: each keeps its part of the sum."""
    if ranks <= 1 or nbytes <= 0:
        return 0.0
    return reduce_scatter(nbytes, ranks, fabric_of(chip), ipus_per_rank=ipus_per_replica).seconds


def all_gather_seconds(chip: Chip, ranks: int, nbytes: float, *, ipus_per_replica: int = 1) -> float:
    """All-gather to ``nbytes`` on each of ``ranks`` replicas, of which each had its part."""
    if ranks <= 1 or nbytes <= 0:
        return 0.0
    return all_gather(nbytes, ranks, fabric_of(chip), ipus_per_rank=ipus_per_replica).seconds


__all__ = [
    "RAIL_LINKS",
    "all_gather_seconds",
    "all_reduce_seconds",
    "fabric_of",
    "neighbour_seconds",
    "reduce_scatter_seconds",
]
