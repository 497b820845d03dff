"""Structured grids on tiles: a block of the grid per tile, a rim from its neighbours, copies around the
exchange.

Each sweep: barrier, exchange of the rims (between chips too), pre-arrange of the block with its rim, compute,
post-arrange. Compute is taps times what one tap costs for the way the codelet is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from podrun.device.target import Chip
from podrun.device.tiles import exchange, links

TAP_CYCLES = {
    "scalar": 2.85,
    "vector": 0.86,
    "simple_vertex": 3.9,
    "optimised_vertex": 1.75,
    "generated": 4.1,
}
"""Tile cycles per tap and value. Derived: compiled scalar and half4 codelets of the GC2 blur (103.6 and 31
cycles per four-channel point of nine taps), a 3D kernel before and after co-issue (27 and 16 cycles per
point, less its copies), code generated from a symbolic description."""
SWEEP_CYCLES = 500.0
"""Start of one sweep's compute set: workers, loop set-up, row hand-out. Derived: intercept of the blur's
compute."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of ``width`` x ``height`` x ``depth`` points of ``values`` values of ``item`` bytes on
    ``ipus`` chips.

    ``taps`` per value; ``radius`` of the stencil; ``code`` is a key of `TAP_CYCLES`; ``arranged``: the
    codelet wants its block and rim in one region, so copies surround the exchange.
    """

    width: int
    height: int
    depth: int
    values: int
    item: int
    taps: int
    radius: int
    code: str
    ipus: int = 1
    arranged: bool = True

    @property
    def points(self) -> int:
        """Grid points."""
        return self.width * self.height * self.depth


def sweep(chip: Chip, grid: Grid) -> dict[str, float]:
    """Cycles of one sweep by phase: sync, global_exchange, exchange, pre_arrange, compute, post_arrange."""
    points = grid.points / (grid.ipus * chip.tiles)
    cell = grid.values * grid.item
    if grid.depth > 1:
        rim = 6.0 * grid.radius * points ** (2.0 / 3.0)
    else:
        rim = 4.0 * grid.radius * math.sqrt(points) + 4.0 * grid.radius**2
    received = rim * cell / chip.exchange_bytes
    phases = {
        "sync": exchange.global_sync_cycles(chip, grid.ipus),
        "exchange": exchange.PHASE_CYCLES + received * exchange.HALO_FRAGMENTS,
        "compute": SWEEP_CYCLES + points * grid.values * grid.taps * TAP_CYCLES[grid.code],
    }
    if grid.ipus > 1:
        face = (
            cell
            * grid.radius
            * min(grid.width * grid.height, grid.points / max(grid.width, grid.height, grid.depth))
        )
        phases["global_exchange"] = links.neighbour_seconds(chip, face) * chip.clock_hz
        phases["sync"] += (grid.ipus > 1) * GLOBAL_SKEW
    if grid.arranged:
        phases["pre_arrange"] = exchange.arrange_cycles(rim, cell)
        phases["post_arrange"] = exchange.arrange_cycles(rim, cell) * POST_SHARE
    return phases


POST_SHARE = 0.84
"""Post-arrange over pre-arrange: what is sent is less than block and rim together. Derived: GC2 blur."""
GLOBAL_SKEW = 200.0
"""Cycles by which chips wait for each other in a global barrier beside its latency. Derived: 501 to 642 on
16 GC2."""
