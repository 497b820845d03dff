"""What moving data costs: between tiles of one IPU, with the barriers; between IPUs on IPU-Links; to and from the host.

An exchange phase lasts as long as its busiest tile: words received or sent, one per cycle, plus a latency; many
fragments cost more than their words. Functions return cycles; those whose names end in ``_seconds`` return seconds.
"""

from __future__ import annotations

import math
from dataclasses import replace

from podrun.collectives.timing import (
    FABRICS,
    LINK_LATENCY,
    RAIL_LINKS,
    LinkModel,
    Method,
    all_gather_time,
    all_reduce_time,
    fabric,
    reduce_scatter_time,
)
from podrun.costmodel.target import GC2, Chip

PHASE_CYCLES = 100.0
"""Fixed part of an exchange phase: multiplexer set-up and flight. Derived: halo exchanges of published
stencils (`benchmarks/data/measurements.json`)."""
DELIVERED = 0.82
"""Share of the nominal rate that the exchange of a product's operands reaches: gaps of its schedule.
Published: 0.819 over all of ResNet-50's inference."""
FRAGMENTED = 1.5
"""Schedule length over word bound if a pattern breaks into many fragments. Published: 1.35 to 1.6."""


def exchange_cycles(
    chip: Chip, nbytes: float, *, fragmented: bool = False, double_width: bool = False
) -> float:
    """One exchange phase in which the busiest tile receives (or sends) ``nbytes``. Zero bytes: no phase.

    ``double_width``: a pair of neighbouring tiles receives the same data, 64 bits per cycle.
    """
    if nbytes <= 0:
        return 0.0
    rate = chip.exchange_bytes * (2.0 if double_width else 1.0)
    return PHASE_CYCLES + math.ceil(nbytes / rate) * (FRAGMENTED if fragmented else 1.0)


def rearrange_cycles(nbytes: float, *, small_groups: bool = False) -> float:
    """On-tile copy before or after an exchange when layouts differ. Source: poplin's planner
    (graphcore/poplibs, lib/poplin/ConvModel.cpp)."""
    if nbytes <= 0:
        return 0.0
    return 25.0 + nbytes * (5.0 / 3.0 if small_groups else 5.0 / 4.0) / 8.0


def sync_cycles(chip: Chip) -> float:
    """One barrier between all tiles of a chip."""
    return chip.facts["sync_cycles"].value


def launch_cycles(chip: Chip) -> float:
    """Starting the workers of a compute set and collecting them."""
    return chip.facts["compute_set_cycles"].value


def global_sync_cycles(chip: Chip, ipus: int) -> float:
    """A barrier between IPUs: ceil(15 ns x clock x hops x 2), hops = 1 + ipus / 4, on top of the on-chip one.

    Source: the model that poplibs tests several IPUs with (graphcore/poplibs, lib/poplibs_test/Util.cpp).
    """
    if ipus <= 1:
        return sync_cycles(chip)
    hops = 1.0 + ipus / 4.0
    return sync_cycles(chip) + math.ceil(15e-9 * chip.clock_hz * hops * 2.0)


GC2_NEIGHBOUR_BYTES = 8.9 * 1.6e9
"""Payload that one direction of a neighbour exchange reaches. Derived: 8.9 B per cycle on GC2."""
METHODS = {"meet_in_middle": Method.MEET_IN_MIDDLE, "ring": Method.RING, "pair": Method.BIDIRECTIONAL}
"""Algorithms by the names that measurements use."""


def fabric_of(chip: Chip, *, ild_ipus: int | None = None) -> LinkModel:
    """The links of ``chip``'s systems; a C600's are taken as GC200's. A supposed chip keeps its base's links at its own
    clock and rate.
    """
    model = fabric(chip.base if chip.base in FABRICS else "gc200", ild_ipus=ild_ipus)
    if chip.name == chip.base:
        return model
    rate = chip.facts.get("link_rate")
    return replace(model, clock_hz=chip.clock_hz, link_rate=model.link_rate if rate is None else rate.value)


def neighbour_seconds(chip: Chip, nbytes: float) -> float:
    """Seconds of a copy of ``nbytes`` to a neighbouring chip."""
    if nbytes <= 0:
        return 0.0
    measured = chip.base == GC2.name and "link_rate" not in chip.facts
    rate = GC2_NEIGHBOUR_BYTES if measured else fabric_of(chip).rail
    return LINK_LATENCY + nbytes / rate


def all_reduce_seconds(
    chip: Chip, ranks: int, nbytes: float, *, ipus_per_replica: int = 1, method: str | None = None
) -> float:
    """Seconds of an all-reduce of ``nbytes`` on each of ``ranks`` replicas, by the algorithm that the library would
    choose.
    """
    if ranks <= 1 or nbytes <= 0:
        return 0.0
    chosen = METHODS.get(method) if method else None
    return all_reduce_time(
        nbytes, ranks, fabric_of(chip), ipus_per_rank=ipus_per_replica, method=chosen
    ).seconds


def reduce_scatter_seconds(chip: Chip, ranks: int, nbytes: float, *, ipus_per_replica: int = 1) -> float:
    """Seconds of a reduce-scatter of ``nbytes`` on each of ``ranks`` replicas: each keeps its part of the sum."""
    if ranks <= 1 or nbytes <= 0:
        return 0.0
    return reduce_scatter_time(nbytes, ranks, fabric_of(chip), ipus_per_rank=ipus_per_replica).seconds


def all_gather_seconds(chip: Chip, ranks: int, nbytes: float, *, ipus_per_replica: int = 1) -> float:
    """Seconds of an all-gather to ``nbytes`` on each of ``ranks`` replicas, of which each had its part."""
    if ranks <= 1 or nbytes <= 0:
        return 0.0
    return all_gather_time(nbytes, ranks, fabric_of(chip), ipus_per_rank=ipus_per_replica).seconds


__all__ = [
    "RAIL_LINKS",
    "all_gather_seconds",
    "all_reduce_seconds",
    "fabric_of",
    "neighbour_seconds",
    "reduce_scatter_seconds",
]


WAIT_SECONDS = 61e-6
"""Waiting for the host before a synchronous copy. Derived: 77 to 88 k cycles at 1.33 GHz, median 81 k."""
RELEASE_SECONDS = 62.5e-6
"""Host acknowledges after the copy. Derived: 80 to 84 k cycles at 1.33 GHz."""
TRANSFER_CYCLES = 1500.0
"""Set-up of one transfer. Published: 1.5 k cycles for one word."""
STREAM_BYTES_PER_SECOND = 8.0e9
"""Host link per machine in use. Published: the SDK's IPU model, 40 MB in 5.01 ms."""


def transfer_seconds(chip: Chip, nbytes: float) -> float:
    """Seconds of one transfer between the host and an IPU."""
    return TRANSFER_CYCLES / chip.clock_hz + nbytes / STREAM_BYTES_PER_SECOND
