"""Connectionist temporal classification: the loss's alpha and beta recursions and beam search.

The lattice of T time steps and 2 L + 1 extended labels is cut into partitions that tiles walk as a wave
front: ``partitions of time + partitions of labels - 1`` turns, each as long as one partition's cells.
Gradients are then summed into classes by log-add, cell by cell. Sources: facts page, section 5 (sync) and
8.7 (log-add).
"""

from __future__ import annotations

import math

from podrun.device.target import Chip
from podrun.device.tiles.exchange import launch_cycles, sync_cycles
from podrun.device.tiles.vertices import WORKERS, vector_width

CELL_CYCLES = 6.6
"""Tile cycles of one lattice cell with all workers on it. Derived: two partitions of one published loss."""
LOG_ADD = {"float16": 13.0, "float32": 23.0}
"""Worker cycles of a log-add per vector. Published: facts page 8.7."""
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
    side = round(math.sqrt(DEFAULT_TILES))
    step_part, label_part = step_part or math.ceil(steps / side), label_part or math.ceil(label / side)
    turns = math.ceil(steps / step_part) + math.ceil(label / label_part) - 1
    # Halves take half the instructions that singles take: the same ratio as their log-adds.
    each = CELL_CYCLES * LOG_ADD[dtype] / LOG_ADD["float32"]
    return turns * (step_part * (2 * label_part + 1) * each + sync_cycles(chip) + launch_cycles(chip))


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
