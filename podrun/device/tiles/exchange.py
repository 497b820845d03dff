"""What moves between tiles of one IPU, and the barriers around it.

An exchange phase lasts as long as its busiest tile: words received or sent, one per cycle, plus a latency;
many fragments cost more than their words. All functions return cycles.
"""

from __future__ import annotations

import math

from podrun.device.target import Chip

PHASE_CYCLES = 100.0
"""Fixed part of an exchange phase: multiplexer set-up and flight. Derived: halo exchanges of published
stencils (`benchmarks/data/measurements.json`)."""
DELIVERED = 0.82
"""Share of the nominal rate that the exchange of a product's operands reaches: gaps of its schedule.
Published: 0.819 over all of ResNet-50's inference."""
FRAGMENTED = 1.5
"""Schedule length over word bound when a pattern breaks into many fragments. Published: 1.35 to 1.6."""


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


HALO_FRAGMENTS = 1.2
"""Schedule length over word bound of a halo swap with rows and columns. Derived: 1.17 to 1.3."""
LOADED_LATENCY = 0.24
"""Growth of tile-to-tile latency under full load. Published for GC2."""
COUNTER_READ = 14.0
"""Cycles between two counter reads beside the barrier itself. Derived: mean gap 90 against a barrier of
76."""
ARRANGE_PER_BYTE = 2.1
"""Cycles per byte of element-wise rearrangement on a tile. Derived: GC2 stencil's pre- and post-arrange
phases."""
PHASES = {"implicit": 1, "two_wave_copies": 2, "grouped_directions": 4, "many_tensors": 1}
"""Exchange phases that a halo swap becomes, by how its copies are written."""


def halo_cycles(chip: Chip, height: int, width: int, item: int, implementation: str = "implicit") -> float:
    """Receive a rim of one element from all eight neighbours of a ``height`` x ``width`` block."""
    rim = (2 * (height + width) + 4) * item
    phases = PHASES.get(implementation, 1)
    return phases * PHASE_CYCLES + math.ceil(rim / chip.exchange_bytes) * HALO_FRAGMENTS
