"""Which planner prices which equation, and the planners of the smaller families, one function each.

Among the families are dense factorisations, triangular systems and Fourier transforms; products, chains, reductions and
look-ups have modules of their own. Each planner takes the chip and an `Equation` and gives a `Plan`. Tensors are taken
as spread evenly over all tiles. The tables at the end are the whole list of what the model knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from podrun.costmodel import elementwise, lookups, vertices
from podrun.costmodel.elementwise import OPS, spread_over_tiles
from podrun.costmodel.equations import Equation, Plan
from podrun.costmodel.exchange import PHASE_CYCLES, exchange_cycles, rearrange_cycles
from podrun.costmodel.target import Chip


def plan_movement(chip: Chip, equation: Equation) -> Plan:
    """Transpose, pad, concatenate, slice: every byte of the result crosses the exchange once and is regrouped."""
    result = max(equation.results, key=lambda t: t.nbytes)
    tiles, _ = spread_over_tiles(chip, result.size)
    nbytes = result.nbytes / tiles
    transposing = equation.primitive in ("transpose", "rev")
    return Plan(
        "rearrangement",
        exchange=exchange_cycles(chip, nbytes, fragmented=transposing),
        rearrange=rearrange_cycles(nbytes, small_groups=transposing),
        compute_sets=1,
        exchanges=1,
        temporary_bytes=nbytes,
        tiles=tiles,
        vertices=0.3,
        fragments=4.0,
        detail=equation.primitive,
    )


def plan_pooling(chip: Chip, equation: Equation) -> Plan:
    """Windows over a field, forward or backward; neighbours' rims arrive by exchange."""
    dims = equation.params.get("window_dimensions", (1,))
    window = float(math.prod(dims))
    backward = equation.primitive.startswith("select_and")
    subject = max((*equation.operands, *equation.results), key=lambda t: t.size)
    outputs = min(equation.operands[0].size, equation.results[0].size)
    tiles, here = spread_over_tiles(chip, outputs)
    moved = subject.nbytes / tiles
    return Plan(
        "pooling",
        compute=vertices.pool_cycles(here, window, subject.dtype, backward=backward),
        exchange=exchange_cycles(chip, moved, fragmented=True),
        rearrange=rearrange_cycles(moved),
        compute_sets=2,
        exchanges=1,
        flops=outputs * window,
        temporary_bytes=moved * 1.5,
        tiles=tiles,
        vertices=2.0,
        fragments=min(128.0, 8.0 + window * 4.0),
        detail=f"window {window:.0f}",
    )


def plan_random(chip: Chip, equation: Equation) -> Plan:
    """Random numbers: each tile fills its part from its own generator."""
    result = max(equation.results, key=lambda t: t.size)
    tiles, here = spread_over_tiles(chip, result.size)
    return Plan(
        "random",
        compute=vertices.random_cycles(here, result.dtype),
        compute_sets=1,
        tiles=tiles,
        vertices=1.0,
        detail=f"{result.size} values",
    )


def plan_fill(chip: Chip, equation: Equation) -> Plan:
    """Constants made on the tiles (iota): one store per vector."""
    result = equation.results[0]
    tiles, here = spread_over_tiles(chip, result.size)
    return Plan(
        "fill",
        compute=vertices.fill_cycles(here, result.dtype),
        compute_sets=1,
        tiles=tiles,
        vertices=1.0,
        detail="fill",
    )


def plan_scan_reduce(chip: Chip, equation: Equation) -> Plan:
    """Running sums and maxima along one axis: log2(n) sweeps of element-wise steps with a neighbour exchange."""
    source = equation.operands[0]
    axis = equation.params.get("axis", 0)
    sweeps = max(1, math.ceil(math.log2(max(2, source.shape[axis] if source.shape else 2))))
    tiles, here = spread_over_tiles(chip, source.size)
    return Plan(
        "scan",
        compute=vertices.elementwise_cycles(here, source.dtype, ("add",), 2),
        exchange=exchange_cycles(chip, here * 2.0),
        compute_sets=1,
        exchanges=1,
        temporary_bytes=here * 4.0,
        tiles=tiles,
        vertices=1.0,
        fragments=4.0,
        detail=f"{sweeps} sweeps",
    ).repeated(sweeps)


def plan_sort(chip: Chip, equation: Equation) -> Plan:
    """Sort and top-k: a bitonic network of log2(n)(log2(n)+1)/2 compare-exchange steps over all tiles.

    Top-k sorts runs of k and keeps the larger half of each pair of runs: log2(n/k) merges of log2(k) steps more.
    """
    source = equation.operands[0]
    axis = equation.params.get("dimension", -1)
    length = source.shape[axis] if source.shape and isinstance(axis, int) else max(2, source.size)
    depth = max(1, math.ceil(math.log2(max(2, length))))
    kept = equation.params.get("k")
    if isinstance(kept, int) and 0 < kept < length:
        runs = max(1, math.ceil(math.log2(max(2, kept))))
        steps = runs * (runs + 1) // 2 + max(0, depth - runs) * (runs + 1)
    else:
        steps = depth * (depth + 1) // 2
    tiles, here = spread_over_tiles(chip, source.size)
    values = sum(1 for t in equation.operands if t.size == source.size) or 1
    return Plan(
        "sort",
        compute=vertices.elementwise_cycles(here * values, source.dtype, ("compare", "select"), 2),
        exchange=exchange_cycles(chip, here * 4.0 * values),
        compute_sets=1,
        exchanges=1,
        temporary_bytes=here * 8.0 * values,
        tiles=tiles,
        vertices=1.0,
        fragments=8.0,
        detail=f"{steps} steps",
    ).repeated(steps)


def plan_bound(chip: Chip, equation: Equation) -> Plan:
    """An equation that no planner knows, costed by a stated bound.

    Every operand and result byte crosses the exchange once, and each result element takes a plain C++ loop
    of 20 worker cycles per element. Reported as ``bound`` with the primitive's name.
    """
    nbytes = sum(t.nbytes for t in (*equation.operands, *equation.results))
    largest = max((t.size for t in (*equation.operands, *equation.results)), default=0)
    tiles, here = spread_over_tiles(chip, max(1, largest))
    return Plan(
        "bound",
        compute=vertices.SUPERVISOR + vertices.WORKERS * (30.0 + 20.0 * math.ceil(here / vertices.WORKERS)),
        exchange=exchange_cycles(chip, nbytes / tiles, fragmented=True),
        compute_sets=1,
        exchanges=1,
        temporary_bytes=nbytes / tiles,
        tiles=tiles,
        vertices=6.0,
        fragments=32.0,
        detail=equation.primitive,
        bound=True,
    )


REMAINING = {"cholesky": 1.0 / 6.0, "lu": 1.0 / 3.0, "triangular_solve": 0.5, "eigh": 4.0 / 3.0}
"""Share of the whole matrix that a step updates, on average over the steps."""
PASSES = {"householder_product": 2.0, "geqrf": 2.0, "qr": 2.0, "eigh": 4.0, "svd": 6.0}
"""Passes over the matrix for one step's update: a reflection is a product with the matrix and an update by an outer
product.
"""


def plan_factorisation(chip: Chip, equation: Equation) -> Plan:
    """Cholesky, LU, QR, eigenvalues, singular values, triangular solve: one broadcast and one update a step."""
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


Planner = Callable[[Chip, Equation], Plan]

VIEWS = frozenset(
    {
        "reshape",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "stop_gradient",
        "optimization_barrier",
        "random_wrap",
        "random_unwrap",
        "random_seed",
        "sharding_constraint",
        "pvary",
        "name",
        "split",
        "unstack",
        "create_token",
        "slice",
        "empty",
    }
)
"""Equations that only rename or select bytes. Poplar keeps them as views; the consumer's exchange moves the bytes."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "product"})
"""Products and convolutions; ``product`` is one whose sizes stand in its parameters (`flatten`)."""

REDUCTIONS: dict[str, Callable[[Chip, Equation, float], Plan]] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"),
        elementwise.plan_reduction,
    ),
    **dict.fromkeys(("argmax", "argmin"), elementwise.plan_arg_reduce),
}
"""Reductions, which begin where their operand lies."""

PLANNERS: dict[str, Planner] = {
    **dict.fromkeys(("transpose", "pad", "concatenate", "stack", "rev", "tile"), plan_movement),
    **dict.fromkeys(("gather", "dynamic_slice"), lookups.plan_gather),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"),
        lookups.plan_scatter,
    ),
    "dynamic_update_slice": lookups.plan_scatter,
    **dict.fromkeys(
        (
            "reduce_window",
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "select_and_scatter_add",
            "select_and_gather_add",
            "select_and_scatter",
        ),
        plan_pooling,
    ),
    **dict.fromkeys(
        (
            "random_bits",
            "threefry2x32",
            "random_fold_in",
            "random_split",
            "rng_bit_generator",
            "random_clone",
        ),
        plan_random,
    ),
    "iota": plan_fill,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), plan_scan_reduce),
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), plan_sort),
    **dict.fromkeys(
        ("cholesky", "lu", "geqrf", "householder_product", "qr", "eigh", "svd", "triangular_solve"),
        plan_factorisation,
    ),
    "fft": plan_fft,
    "ctc_loss": lookups.plan_loss,
    "ctc_beam_search": lookups.plan_beam_search,
}
"""Families priced equation by equation."""


def known(primitive: str) -> bool:
    """True iff a planner prices ``primitive``; otherwise the stated bound does."""
    return any(primitive in those for those in (OPS, VIEWS, PRODUCTS, REDUCTIONS, PLANNERS))
