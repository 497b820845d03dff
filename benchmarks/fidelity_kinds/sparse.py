"""Sparse times dense products, and sweeps over a graph's frontier.

The sparse matrix is cut into pm x pk parts over tiles; a tile gathers the dense rows of its columns,
multiplies its non-zeros and sends partial sums of its rows. Non-zeros are spread evenly (the library
balances them). Cycles per block restate poplibs' estimators
(graphcore/poplibs, lib/popsparse/PerformanceEstimation.hpp).
"""

from __future__ import annotations

import math

from fidelity_kinds.benchmark_only import benchmark_only
from podrun.costmodel.equations import Plan
from podrun.costmodel.exchange import PHASE_CYCLES, launch_cycles, sync_cycles
from podrun.costmodel.target import Chip
from podrun.costmodel.vertices import SUPERVISOR, WORKERS, vector_width

BLOCK_ROW = {4: 2.0, 8: 4.0, 16: 4.0}
"""Worker cycles of one dense column on one FP16 block, by the block's side; FP32 takes twice."""
BLOCK_START = 20.0
"""Worker cycles before the first column of a block: 14 to 25."""
ELEMENT_VECTOR = 2.0
"""Cycles of one vector of dense columns on one non-zero element. Derived: four densities of one published
product (the library's own estimator says 3 to 5).
"""


@benchmark_only
def plan_sparse(chip: Chip, m: int, k: int, n: int, density: float, block: int, dtype: str) -> Plan:
    """The cheapest cut of [m, k] (share ``density`` of blocks of ``block`` non-zero) times [k, n]."""
    item = 2.0 if dtype == "float16" else 4.0
    best: Plan | None = None
    for parts in range(1, int(math.sqrt(chip.tiles)) + 1):
        for pm, pk in ((parts, chip.tiles // parts), (chip.tiles // parts, parts)):
            gathered = math.ceil(k / pk) * n * item
            partial = math.ceil(m / pm) * n * 4.0 * (1.0 - 1.0 / pk)
            blocks = math.ceil(m * k * density / (block * block) / (pm * pk))
            compute = SUPERVISOR + WORKERS * 23.0 + blocks * _block_cycles(block, n, dtype)
            compute += partial / 4.0 / 2.0  # Partial sums are added two a cycle.
            exchange = 2.0 * PHASE_CYCLES + (gathered + partial) / chip.exchange_bytes
            plan = Plan(
                "sparse",
                compute=compute,
                exchange=exchange,
                compute_sets=2,
                exchanges=2,
                flops=2.0 * m * k * n * density,
                temporary_bytes=gathered + partial,
                tiles=pm * pk,
                vertices=4.0,
                fragments=64.0,
                detail=f"{m}x{k}x{n} density {density:.4g} block {block} rows/{pm} in/{pk}",
            )
            if best is None or plan.cycles(chip) < best.cycles(chip):
                best = plan
    assert best is not None
    return best


def _block_cycles(block: int, n: int, dtype: str) -> float:
    """Tile cycles of one non-zero block (or element) over ``n`` dense columns, all workers on it."""
    wide = 1.0 if dtype == "float16" else 2.0
    if block == 1:
        return 8.0 + ELEMENT_VECTOR * n / vector_width(dtype)
    side = min(BLOCK_ROW, key=lambda known: abs(known - block))
    load = block * block / 4.0 * wide + 15.0
    passes = 2.0 if side == 16 else 1.0
    return passes * (load / passes + WORKERS * BLOCK_START + BLOCK_ROW[side] * wide * n)


EDGE_CYCLES = 40.0
"""Tile cycles of one edge: two loads, a compare and a store in compiled code, times the imbalance of a
power-law graph. Derived: slope of breadth-first searches over Kronecker graphs of scale 15 to 19.
"""
LEVEL_CYCLES = 12_800.0
"""Cycles of one level beside its edges: the frontier spread along a row of tiles and joined along a column.
Derived: intercept of the same."""
LEVELS = 7
"""Levels of a search over a small-world graph. Published: diameters of 6 to 8."""


@benchmark_only
def search_cycles(chip: Chip, edges: float, tiles: int, levels: int = LEVELS) -> float:
    """A breadth-first search over ``edges`` edges spread over ``tiles`` tiles."""
    each = LEVEL_CYCLES + sync_cycles(chip) + launch_cycles(chip)
    return edges / tiles * EDGE_CYCLES + levels * each
