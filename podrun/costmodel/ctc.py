"""Connectionist temporal classification: the loss's alpha and beta recursions and beam search.

The lattice of T time steps and 2 L + 1 extended labels is cut into partitions that tiles walk as a wave
front: ``partitions of time + partitions of labels - 1`` turns, each as long as one partition's cells.
Gradients are then summed into classes by log-add, cell by cell. Source of the plan:
poplibs (graphcore/poplibs, lib/popnn/CTCLossPlan.cpp).
"""

from __future__ import annotations

import math

from podrun.costmodel.exchange import exchange_cycles, launch_cycles, sync_cycles
from podrun.costmodel.flat_graph import Equation
from podrun.costmodel.plan import Plan
from podrun.costmodel.target import Chip
from podrun.costmodel.vertices import WORKERS, vector_width

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
"""Tiles of a loss whose partition is not given, as a square of partitions. Assumed; beam search is
published on 16.
"""


def loss_cycles(
    chip: Chip,
    steps: int,
    label: int,
    dtype: str,
    *,
    step_part: int | None = None,
    label_part: int | None = None,
) -> float:
    """Alpha and beta of one entry, gradient reduction left out.

    ``step_part``, ``label_part``: time steps and labels of a partition.
    """
    turns, each = _wave(steps, label, dtype, step_part, label_part)
    return turns * (each + sync_cycles(chip) + launch_cycles(chip))


def _wave(
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
    """Cycles of one time step of beam search by part: generate, merge, select (a third of a candidate
    each), update.
    """
    candidates = WORKERS * CANDIDATE_CYCLES * beams * classes
    parts = dict.fromkeys(("generate", "merge", "select"), candidates / 3.0)
    return {**parts, "update": 20.0 + WORKERS * BEAM_CYCLES * beams}


def plan_loss(chip: Chip, equation: Equation) -> Plan:
    """Loss (and gradient) of a batch: each entry on tiles of its own, as many at a time as there are tiles
    for.
    """
    steps, batch, classes = equation.operands[0].shape
    label, gradient = equation.params["label"], equation.params["gradient"]
    dtype = "float16" if equation.operands[0].dtype in ("float16", "bfloat16") else "float32"
    turns, each = _wave(steps, label, dtype)
    rounds, tiles = _rounds(chip, batch)
    # Alpha alone makes the loss; beta, as long as it, and the sums into classes make the gradient.
    wave = turns * each if gradient else turns * each / 2.0
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
    """Beam search over a batch: per time step its four compute sets, candidates and beams on tiles of the
    entry.
    """
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
    at_once = chip.tiles // DEFAULT_TILES
    return math.ceil(batch / at_once), min(batch, at_once) * DEFAULT_TILES
