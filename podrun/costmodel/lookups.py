"""Planners for rows by index (gather and scatter, slices and updates at run-time offsets), and for CTC's lattices.

**Rows by index.** The library cuts a table three ways: its columns, its rows, and the indices. Cut columns cost nothing
but start-up. Where rows are cut, every tile sees all its indices and skips those of others, and what the row parts
found is brought together. Where indices are cut, the table (or what is added to it) is there once for each part. All
cuts are priced and the cheapest that has room is taken. Cycles per index: poplibs' estimators
(`podrun.costmodel.vertices`).

**Connectionist temporal classification**: the loss's alpha and beta recursions and beam search. The lattice of T time
steps and 2 L + 1 extended labels is cut into partitions that tiles walk as a wave front: ``partitions of time +
partitions of labels - 1`` turns, each as long as one partition's cells. Gradients are then summed into classes by
log-add, cell by cell. Source of the plan: poplibs (graphcore/poplibs, lib/popnn/CTCLossPlan.cpp).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from podrun.costmodel import vertices
from podrun.costmodel.elementwise import spread_over_tiles
from podrun.costmodel.equations import Equation, Plan
from podrun.costmodel.exchange import PHASE_CYCLES, exchange_cycles
from podrun.costmodel.target import Chip
from podrun.costmodel.vertices import WORKERS, vector_width

Cuts = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
INDEX_BYTES = 4.0
PROPORTION = 0.6
"""Share of a tile's memory for what a cut holds beside its part of the table. Published: the default of the
library's embedding planner."""
_WAYS: dict[int, NDArray[np.float64]] = {}


def _ways(most: int) -> NDArray[np.float64]:
    """Numbers of parts to try, up to ``most``: powers of two, and ``most`` itself."""
    if most not in _WAYS:
        powers = 2.0 ** np.arange(max(1, most).bit_length())
        _WAYS[most] = np.unique(np.append(powers[powers <= most], float(most)))
    return _WAYS[most]


def _cuts(chip: Chip, rows: int, vectors: int, slices: int) -> Cuts:
    """Candidate (column parts, row parts, index parts) as flat arrays.

    The most parts of one axis beside the parts of the others are among them, so that no tile stays idle for
    being no power of two.
    """
    columns, indices = _ways(min(vectors, chip.tiles)), _ways(min(slices, chip.tiles))
    across, apart = (axis.ravel() for axis in np.meshgrid(columns, indices, indexing="ij"))
    fits = across * apart <= chip.tiles
    across, apart = across[fits], apart[fits]
    most = np.minimum(np.floor(chip.tiles / (across * apart)), float(rows))
    factors = 2.0 ** -np.arange(12.0)
    down = np.maximum(1.0, np.floor(most[:, None] * factors[None, :]))
    down = np.concatenate([down, np.ones_like(most)[:, None]], axis=1)
    count = down.shape[1]
    return np.repeat(across, count), down.ravel(), np.repeat(apart, count)


def _moved(chip: Chip, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cycles of a phase in which the busiest tile receives so many bytes; 0 without bytes."""
    return np.where(nbytes > 0, PHASE_CYCLES + np.ceil(nbytes / chip.exchange_bytes), 0.0)


def plan_gather(chip: Chip, equation: Equation) -> Plan:
    """Gather and slices at run-time offsets: rows are looked up on the tiles that hold them, then joined."""
    table, result = equation.operands[0], equation.results[0]
    row = max(1, math.prod(equation.params.get("slice_sizes", (1,))))
    slices = max(1, result.size // row) if equation.primitive == "gather" else 1
    item, rows = table.nbytes / max(1, table.size), max(1, math.ceil(table.size / row))
    across, down, apart = _cuts(chip, rows, math.ceil(row / vertices.vector_width(table.dtype)), slices)
    here, width, held = np.ceil(slices / apart), np.ceil(row / across), np.ceil(rows / down)
    copied = np.where(apart > 1, held * width * item * (1.0 - 1.0 / apart), 0.0)
    # Of each row part a tile has a place for all its indices; another look finds the part that knows.
    partial_rows = np.where(down > 1, here * width * item, 0.0)
    _, share = spread_over_tiles(chip, result.size)
    settled = np.where(down > 1, partial_rows, share * item)
    compute = vertices.multi_slice_cycles(here, width, table.dtype, in_range=1.0 / down) + np.where(
        down > 1, vertices.multi_slice_cycles(np.ceil(here / down), width, table.dtype), 0.0
    )
    exchange = _moved(chip, here * INDEX_BYTES) + _moved(chip, copied) + _moved(chip, settled)
    temporary = here * INDEX_BYTES + copied + partial_rows + here * width * item
    best = _best(chip, compute + exchange, temporary)
    return Plan(
        "gather",
        compute=float(compute[best]),
        exchange=float(exchange[best]),
        compute_sets=2,
        exchanges=2,
        temporary_bytes=float(temporary[best]),
        tiles=int(across[best] * down[best] * apart[best]),
        vertices=2.0,
        fragments=16.0,
        detail=f"{slices} rows of {row}",
    )


def plan_scatter(chip: Chip, equation: Equation) -> Plan:
    """Scatter, scatter-add and run-time updates: rows go to the tiles that hold the table."""
    table = equation.operands[0]
    update = equation.operands[-1] if equation.primitive.startswith("scatter") else equation.operands[1]
    window = getattr(equation.params.get("dimension_numbers"), "update_window_dims", ())
    row = max(1, math.prod(update.shape[d] for d in window)) if window else 1
    if equation.primitive == "dynamic_update_slice":
        row = max(1, update.size)
    slices, rows = max(1, update.size // row), max(1, math.ceil(table.size / row))
    item = table.nbytes / max(1, table.size)
    across, down, apart = _cuts(chip, rows, math.ceil(row / vertices.vector_width(table.dtype)), slices)
    here, width, held = np.ceil(slices / apart), np.ceil(row / across), np.ceil(rows / down)
    brought = here * (INDEX_BYTES + width * item)
    # Parts of the indices each add to a table of their own; the tables are summed where the table is.
    own = np.where(apart > 1, held * width, 0.0)
    compute = vertices.multi_update_cycles(here, width, in_range=1.0 / down) + np.where(
        apart > 1, _sum_cycles(own, apart, table.dtype), 0.0
    )
    exchange = np.where(down > 1, _moved(chip, brought / 2.0), _moved(chip, brought)) + _moved(
        chip, own * 4.0
    )
    temporary = brought + own * 8.0
    best = _best(chip, compute + exchange, temporary)
    stages = 1 if apart[best] == 1 else 2
    return Plan(
        "scatter",
        compute=float(compute[best]),
        exchange=float(exchange[best]),
        compute_sets=2 * stages - 1,
        exchanges=stages,
        temporary_bytes=float(temporary[best]),
        tiles=int(across[best] * down[best] * apart[best]),
        vertices=1.0,
        fragments=16.0,
        detail=f"{slices} rows of {row}",
    )


def _sum_cycles(own: NDArray[np.float64], apart: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Cycles to clear a table of ``own`` elements, and to sum a tile's share of ``apart`` such tables."""
    wide, narrow = vertices.vector_width("float32"), vertices.vector_width(dtype)
    clear = vertices.SUPERVISOR + 26.0 + np.ceil(own / narrow)
    turns = np.ceil(np.ceil(own / apart) / wide / vertices.WORKERS)
    return clear + 33.0 + vertices.WORKERS * (20.0 + turns * (apart + 9.0))


def _best(chip: Chip, cycles: NDArray[np.float64], temporary: NDArray[np.float64]) -> int:
    """The cheapest cut that has room; if none has, the smallest."""
    fits = temporary <= PROPORTION * chip.tile_bytes
    return int(np.argmin(np.where(fits, cycles, np.inf))) if fits.any() else int(np.argmin(temporary))


CELL_CYCLES = 6.6
"""Tile cycles of one lattice cell with all workers on it. Derived: two partitions of one published loss."""
LOG_ADD = {"float16": 13.0, "float32": 23.0}
"""Worker cycles of a log-add per vector. Published: poplibs' cycle estimators of reductions
(graphcore/poplibs, lib/popops/reduction)."""
CANDIDATE_CYCLES = 66.0
"""Worker cycles that beam search spends on one candidate: two log-adds and the comparisons that merge and
rank it. Derived: one published search of 8 steps, 10 classes, 5 beams.
"""
BEAM_CYCLES = 26.0
"""Worker cycles of keeping one beam (the start of a one-worker operation)."""
DEFAULT_TILES = 16
"""Tiles of a loss whose partition is not given, as a square of partitions. Assumed; beam search is published on 16."""


def wave_front(
    steps: int, label: int, dtype: str, step_part: int | None = None, label_part: int | None = None
) -> tuple[int, float]:
    """Turns of the wave front over the partitions, and cycles of a partition."""
    side = round(math.sqrt(DEFAULT_TILES))
    step_part = step_part or max(1, math.ceil(steps / side))
    label_part = label_part or max(1, math.ceil(label / side))
    turns = math.ceil(steps / step_part) + max(1, math.ceil(label / label_part)) - 1
    # Halves take half the instructions that singles take: the same ratio as their log-adds.
    return turns, step_part * (2 * label_part + 1) * CELL_CYCLES * LOG_ADD[dtype] / LOG_ADD["float32"]


def loss_reduction_cycles(steps: int, label: int, dtype: str) -> float:
    """The gradient's sums over the whole lattice by log-add on one tile."""
    return steps * (2 * label + 1) * LOG_ADD[dtype] / vector_width(dtype)


def beam_parts(classes: int, beams: int) -> dict[str, float]:
    """Cycles of one time step of beam search by part: generate, merge, select (a third of a candidate each), update."""
    candidates = WORKERS * CANDIDATE_CYCLES * beams * classes
    parts = dict.fromkeys(("generate", "merge", "select"), candidates / 3.0)
    return {**parts, "update": 20.0 + WORKERS * BEAM_CYCLES * beams}


def plan_loss(chip: Chip, equation: Equation) -> Plan:
    """Loss (and gradient) of a batch: each entry on tiles of its own, as many at a time as there are tiles for."""
    steps, batch, classes = equation.operands[0].shape
    label, gradient = equation.params["label"], equation.params["gradient"]
    dtype = "float16" if equation.operands[0].dtype in ("float16", "bfloat16") else "float32"
    turns, turn_cycles = wave_front(steps, label, dtype)
    rounds, tiles = _rounds(chip, batch)
    # The loss needs alpha alone; the gradient also needs beta, which takes as long, and the sums into classes.
    wave = turns * turn_cycles if gradient else turns * turn_cycles / 2.0
    compute = wave + (loss_reduction_cycles(steps, label, dtype) if gradient else 0.0)
    item = 2.0 if dtype == "float16" else 4.0
    arriving = steps * classes * item / DEFAULT_TILES
    return Plan(
        "ctc",
        compute=compute,
        exchange=exchange_cycles(chip, arriving),
        compute_sets=turns + gradient,
        exchanges=turns + gradient,
        flops=float(batch * steps * (2 * label + 1) * (12 if gradient else 6)),
        temporary_bytes=arriving
        + steps * (2 * label + 1) * item * (2.0 if gradient else 1.0) / DEFAULT_TILES,
        tiles=tiles,
        vertices=4.0,
        fragments=24.0,
        detail=f"loss of {batch} x {steps} steps x {label} labels",
    ).repeated(rounds)


def plan_beam_search(chip: Chip, equation: Equation) -> Plan:
    """Beam search over a batch: per time step its four compute sets, candidates and beams on tiles of the entry."""
    steps, batch, classes = equation.operands[0].shape
    beams = equation.params["beams"]
    rounds, tiles = _rounds(chip, batch)
    parts = beam_parts(classes, beams)
    arriving = steps * classes * 4.0
    return Plan(
        "ctc",
        compute=steps * sum(parts.values()),
        exchange=exchange_cycles(chip, arriving) + steps * exchange_cycles(chip, beams * 8.0),
        compute_sets=steps * len(parts),
        exchanges=steps * len(parts),
        temporary_bytes=arriving + beams * (8.0 * steps + 16.0),
        tiles=tiles,
        vertices=6.0,
        fragments=24.0,
        detail=f"beam search of {batch} x {steps} steps x {classes} classes, {beams} beams",
    ).repeated(rounds)


def _rounds(chip: Chip, batch: int) -> tuple[int, int]:
    """How often the tiles are filled by entries, and tiles in use."""
    width = min(DEFAULT_TILES, chip.tiles)  # A smaller chip computes the parts of an entry in turns.
    at_once = chip.tiles // width
    return math.ceil(batch / at_once) * math.ceil(DEFAULT_TILES / width), min(batch, at_once) * width
