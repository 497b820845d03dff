"""Structured grids on tiles: a rectangle of the grid per IPU, per tile and per worker, with rims from
neighbours.

Each sweep: barrier, exchange of the rims (between chips too), pre-arrange of every worker's block with its
rim into one region, compute, post-arrange. Compute is taps times what one tap costs for the way the codelet
is written; a tile waits for its worker with the most points, so small blocks pay for whole rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fidelity_kinds import own_formulas
from fidelity_kinds.benchmark_only import benchmark_only
from podrun.costmodel import exchange
from podrun.costmodel.target import Chip
from podrun.costmodel.vertices import WORKERS

TAP_CYCLES = {
    "scalar": 2.7,
    "vector": 3.24,
    "simple_vertex": 3.9,
    "optimised_vertex": 1.75,
    "generated": 4.1,
}
"""Tile cycles per tap: of one value, or of one 64-bit vector for ``vector``, so that two FP32 or four FP16
values share them. Derived: compiled scalar and half4 codelets of the GC2 blur (96.6 and 29.2 cycles per
four-channel point of nine taps), a 3D kernel before and after co-issue (27 and 16 cycles per point, less
its copies), code generated from a symbolic description.
"""
SWEEP_CYCLES = 600.0
"""Start of one sweep's compute set: workers, loop set-up, row hand-out. Derived: intercept of the blur's
compute."""
GATHER_START, SCATTER_START = 1136.0, 620.0
"""Cycles of an arrangement before its first row: six workers with nine sources (block and rims), or with one.
Derived: intercepts of the GC2 blur's pre- and post-arrange phases."""
ROW_CYCLES = 7.5
"""Cycles of an arrangement per row of a worker's block, beside its bytes at the tile's memcpy rate.
Derived: the same phases at 2,030 and 127 points a tile, both item sizes.
"""
CELL_PACKETS = 2.2
"""Cycles that one boundary cell takes between chips when cells travel one by one. Derived: weak scaling of
the GC2 blur, where 500 cells more cost as much in FP16 as in FP32.
"""
GLOBAL_SKEW = 200.0
"""Cycles by which chips wait for each other in a global barrier beside its latency. Derived: 501 to 642 on
16 GC2.
"""
SMALLEST = 6
"""Rows and columns of the smallest block a tile is given. Published: the blur's own default."""


@dataclass(frozen=True, slots=True)
class StencilGrid:
    """A grid of ``width`` x ``height`` x ``depth`` points of ``values`` values of ``item`` bytes on
    ``ipus`` chips.

    ``taps`` per value; ``radius`` of the stencil; ``code`` is a key of `TAP_CYCLES` and ``lanes`` the
    values that one of its instructions takes; ``arranged``: the codelet wants its block and rim in one
    region, so copies surround the exchange. ``per_ipu``: the size is that of one IPU's part. ``smallest``:
    least rows and columns of a block.
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
    lanes: int = 1
    per_ipu: bool = False
    smallest: tuple[int, int] = (SMALLEST, SMALLEST)

    @property
    def points(self) -> int:
        """Grid points, on all chips."""
        return self.width * self.height * self.depth * (self.ipus if self.per_ipu else 1)


@dataclass(frozen=True, slots=True)
class GridCut:
    """A 2D grid on chips: ``rows`` x ``columns`` points of one chip, means over the tiles that hold a block.

    ``held``: points of a block; ``slowest``: six times the points of its busiest worker; ``bands``: rows
    over all workers; ``rim``: boundary cells received; ``face``: cells of a chip's sides that face other
    chips; ``used``: share of the chip's tiles.
    """

    rows: int
    columns: int
    held: float
    slowest: float
    bands: float
    rim: float
    face: int
    used: float


def sides(ipus: int, height: int, width: int) -> tuple[int, int]:
    """Chips as the most nearly square rectangle; its longer side lies where the grid divides with less left over."""
    short = 2 ** (int(math.log2(ipus)) // 2)
    long = max(1, ipus // short)
    return (long, short) if height % ipus / height < width % ipus / width else (short, long)


def cut_grid(chip: Chip, grid: StencilGrid) -> GridCut:
    """Cut a 2D grid over chips, then tiles in the grid's proportions, then workers by rows or columns."""
    across = sides(grid.ipus, grid.height, grid.width)
    rows, columns = (
        (grid.height, grid.width)
        if grid.per_ipu
        else (math.ceil(grid.height / across[0]), math.ceil(grid.width / across[1]))
    )
    least_rows, least_columns = grid.smallest
    proportion = max(least_columns, columns) / max(least_rows, rows)
    over = max(1, min(columns // least_columns, math.ceil(math.sqrt(chip.tiles * proportion)), chip.tiles))
    down = max(1, min(rows // least_rows, chip.tiles // over))
    held = rows * columns / (over * down)
    slowest, bands, weight = 0.0, 0.0, 0.0
    for height, often in _parts(rows, down):
        for width, times in _parts(columns, over):
            count = often * times
            by_rows = (height % WORKERS) / height <= (width % WORKERS) / width
            busiest = math.ceil(height / WORKERS) * width if by_rows else math.ceil(width / WORKERS) * height
            slowest += count * WORKERS * busiest
            bands += count * (height if by_rows else height * min(WORKERS, width))
            weight += count
    rim = 2.0 * grid.radius * (rows / down + columns / over) + 4.0 * grid.radius**2
    face = grid.radius * (rows * (across[1] > 1) + columns * (across[0] > 1))
    return GridCut(rows, columns, held, slowest / weight, bands / weight, rim, face, over * down / chip.tiles)


def _parts(size: int, parts: int) -> list[tuple[int, int]]:
    """``size`` in nearly equal parts: (size of a part, how many)."""
    longer = size % parts
    return [
        (part, many) for part, many in ((size // parts + 1, longer), (size // parts, parts - longer)) if many
    ]


@benchmark_only
def sweep(chip: Chip, grid: StencilGrid) -> dict[str, float]:
    """Cycles of one sweep by phase: sync, global_exchange, exchange, pre_arrange, compute, post_arrange."""
    cell = float(grid.values * grid.item)
    tap = TAP_CYCLES[grid.code] / grid.lanes
    if grid.depth > 1:
        held = grid.points / (grid.ipus * chip.tiles)
        busiest, rim = held, 6.0 * grid.radius * held ** (2.0 / 3.0)
        face = grid.radius * _plane(grid)
        bands = held ** (2.0 / 3.0)
    else:
        cut = cut_grid(chip, grid)
        held, busiest, rim, face, bands = cut.held, cut.slowest, cut.rim, cut.face, cut.bands
    phases = {
        "sync": exchange.global_sync_cycles(chip, grid.ipus),
        "exchange": exchange.PHASE_CYCLES + rim * cell / chip.exchange_bytes * own_formulas.HALO_FRAGMENTS,
        "compute": SWEEP_CYCLES + busiest * grid.values * grid.taps * tap,
    }
    if grid.ipus > 1:
        bytes_cycles = exchange.neighbour_seconds(chip, face * cell) * chip.clock_hz
        packets = exchange.neighbour_seconds(chip, 1e-9) * chip.clock_hz + face * CELL_PACKETS
        phases["global_exchange"] = max(bytes_cycles, packets) if grid.arranged else bytes_cycles
        phases["sync"] += GLOBAL_SKEW
    if grid.arranged:
        rate = chip.facts["memcpy_bytes"].value
        phases["pre_arrange"] = GATHER_START + bands * ROW_CYCLES + (held + rim + bands) * cell / rate
        phases["post_arrange"] = SCATTER_START + bands * ROW_CYCLES + held * cell / rate
    return phases


def _plane(grid: StencilGrid) -> float:
    """Points of the plane between two chips of a 3D grid cut across its longest side."""
    whole = grid.points / (grid.ipus if grid.per_ipu else 1)
    return whole / max(grid.width, grid.height, grid.depth)
