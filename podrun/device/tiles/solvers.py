"""Planners for dense factorisations, triangular systems and Fourier transforms.

A factorisation of an n x n matrix is n dependent steps: the pivot's row or column is broadcast (each tile
receives it once, a word a cycle), then every tile updates its part of what is left. Sums over the shrinking
matrix give the factor 1/3 of Cholesky and LU. A transform of n points is log2 n sweeps of butterflies, with
the data exchanged whole between the two halves of the sweeps (the six-step form). Bounds by structure; no
hardware figure was found but one QR vertex whose size is not published.
"""

from __future__ import annotations

import math

from podrun.device.target import Chip
from podrun.device.tiles import vertices
from podrun.device.tiles.exchange import PHASE_CYCLES, exchange_cycles
from podrun.device.tiles.flatten import Equation
from podrun.device.tiles.plan import Plan

REMAINING = {"cholesky": 1.0 / 6.0, "lu": 1.0 / 3.0, "triangular_solve": 0.5, "eigh": 4.0 / 3.0}
"""Share of the whole matrix that a step updates, on average over the steps."""
PASSES = {"householder_product": 2.0, "geqrf": 2.0, "qr": 2.0, "eigh": 4.0, "svd": 6.0}
"""Updates of a step: a reflection is a product with the matrix and an update by an outer product."""


def plan_factorisation(chip: Chip, equation: Equation) -> Plan:
    """Cholesky, LU, QR, eigenvalues, singular values, triangular solve: one broadcast and one update a
    step.
    """
    source = equation.operands[0]
    rows, columns = source.shape[-2:] if len(source.shape) > 1 else (1, source.size)
    steps = max(1, min(rows, columns))
    batch = max(1, source.size // max(1, rows * columns))
    work = rows * columns
    if equation.primitive == "triangular_solve" and len(equation.operands) > 1:
        work = max(1, equation.operands[1].size // batch)
    tiles = max(1, min(chip.tiles // min(batch, chip.tiles), math.ceil(work / 8)))
    turns = math.ceil(batch / max(1, chip.tiles // tiles))
    here = work * REMAINING.get(equation.primitive, 2.0 / 3.0) / tiles
    passes = PASSES.get(equation.primitive, 1.0)
    update = passes * vertices.scaled_add_cycles(here, source.dtype) + PIVOT_CYCLES
    pivot = max(rows, work // max(1, rows)) * 4.0 / 2.0
    step = Plan(
        "factorisation",
        compute=update,
        exchange=passes * exchange_cycles(chip, pivot),
        compute_sets=1 + round(passes),
        exchanges=round(passes),
        flops=2.0 * here * tiles * batch * passes / turns,
        temporary_bytes=pivot * 2.0,
        tiles=min(chip.tiles, tiles * min(batch, chip.tiles)),
        vertices=3.0,
        fragments=16.0,
        detail=f"{equation.primitive} {rows}x{columns}, {steps} steps",
    )
    return step.repeated(steps * turns)


PIVOT_CYCLES = 6.0 * (27.0 + 12.0)
"""One worker's root and division at the pivot."""


def plan_fft(chip: Chip, equation: Equation) -> Plan:
    """Fourier transforms along the last axes: butterflies of ten operations per pair, two whole exchanges."""
    source = max((*equation.operands, *equation.results), key=lambda t: t.size)
    lengths = equation.params.get("fft_lengths", (source.shape[-1] if source.shape else 1,))
    points = max(2, math.prod(lengths))
    sweeps = max(1, math.ceil(math.log2(points)))
    tiles = max(1, min(chip.tiles, math.ceil(source.size / 8)))
    here = math.ceil(source.size / tiles)
    nbytes = here * 8.0
    butterfly = vertices.elementwise_cycles(here * 2, "float32", ("mul", "mul", "add", "add"), 4)
    swaps = 2 if points > here else 0
    return Plan(
        "fft",
        compute=sweeps * butterfly,
        exchange=swaps * (exchange_cycles(chip, nbytes, fragmented=True) if nbytes else PHASE_CYCLES),
        compute_sets=sweeps,
        exchanges=swaps,
        flops=5.0 * source.size * sweeps,
        temporary_bytes=2.0 * nbytes,
        tiles=tiles,
        vertices=2.0,
        fragments=64.0 if swaps else 0.0,
        detail=f"{points} points, {sweeps} sweeps",
    )
