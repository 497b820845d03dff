"""Planners for everything that is neither a product nor a chain: one function per family of equations.

Each takes the chip and an `Equation` and gives a `Plan`. Tensors are taken as spread evenly over all tiles.
"""

from __future__ import annotations

import math

from podrun.device.target import Chip
from podrun.device.tiles import vertices
from podrun.device.tiles.exchange import exchange_cycles, rearrange_cycles
from podrun.device.tiles.flatten import Equation
from podrun.device.tiles.plan import Plan


def spread(chip: Chip, elements: float) -> tuple[int, int]:
    """Tiles used and elements on the fullest, for ``elements`` spread evenly in grains of eight."""
    tiles = max(1, min(chip.tiles, math.ceil(elements / 8)))
    return tiles, math.ceil(elements / tiles)


def plan_reduction(chip: Chip, equation: Equation) -> Plan:
    """Reduce in two stages: each tile reduces what it holds, partial results are gathered and joined."""
    source, result = equation.operands[0], equation.results[0]
    if source.size == 0 or result.size == 0:
        return Plan("reduction")
    depth = source.size / result.size
    tiles, elements = spread(chip, source.size)
    outputs_here = max(1.0, min(result.size, elements / max(1.0, min(depth, elements))))
    axes = equation.params.get("axes", ())
    fastest = len(source.shape) - 1 in axes
    local_depth = max(1.0, elements / outputs_here)
    if fastest:
        first = vertices.continuous_reduce_cycles(outputs_here, local_depth, source.dtype)
    else:
        outputs_here = min(float(result.size), max(outputs_here, elements / min(depth, 64.0)))
        local_depth = max(1.0, elements / outputs_here)
        first = vertices.reduce_cycles(outputs_here, local_depth, source.dtype)
    partials = math.ceil(depth / local_depth)
    second = moved = 0.0
    if partials > 1:
        _, mine = spread(chip, result.size)
        moved = mine * partials * 4.0
        second = vertices.reduce_cycles(mine, partials, "float32")
    stages = 2 if partials > 1 else 1
    return Plan(
        "reduction",
        compute=first + second,
        exchange=exchange_cycles(chip, moved, fragmented=partials > 8),
        compute_sets=stages,
        exchanges=stages - 1,
        flops=float(source.size),
        temporary_bytes=outputs_here * 4.0 + moved,
        tiles=tiles,
        vertices=0.8,
        fragments=6.0 if partials > 1 else 0.0,
        detail=f"{result.size} outputs of {depth:.0f}",
    )


def plan_movement(chip: Chip, equation: Equation) -> Plan:
    """Transpose, pad, concatenate, slice: every byte of the result crosses the exchange once and is
    regrouped."""
    result = max(equation.results, key=lambda t: t.nbytes)
    tiles, _ = spread(chip, result.size)
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


def plan_gather(chip: Chip, equation: Equation) -> Plan:
    """Gather and slices at run-time offsets: rows looked up on the tiles that hold them, then joined."""
    table, result = equation.operands[0], equation.results[0]
    row = max(1, math.prod(equation.params.get("slice_sizes", (1,))))
    slices = max(1, result.size // row) if equation.primitive == "gather" else 1
    # Columns are split over tiles first (each tile holds part of every row), then rows.
    column_parts = max(1, min(chip.tiles, math.ceil(row * 2 / 64)))
    row_parts = max(1, min(chip.tiles // column_parts, math.ceil(table.size / row)))
    index_parts = max(1, chip.tiles // (column_parts * row_parts))
    here = math.ceil(slices / index_parts)
    compute = vertices.multi_slice_cycles(
        here, math.ceil(row / column_parts), table.dtype, in_range=1.0 / row_parts
    )
    tiles, _ = spread(chip, result.size)
    moved = result.nbytes / tiles * min(row_parts, 8)
    indices = here * 4.0
    return Plan(
        "gather",
        compute=compute,
        exchange=exchange_cycles(chip, indices) + exchange_cycles(chip, moved),
        compute_sets=2,
        exchanges=2,
        temporary_bytes=indices + moved + result.nbytes / tiles,
        tiles=min(chip.tiles, column_parts * row_parts * index_parts),
        vertices=2.0,
        fragments=16.0,
        detail=f"{slices} rows of {row}",
    )


def plan_scatter(chip: Chip, equation: Equation) -> Plan:
    """Scatter, scatter-add and run-time updates: rows go to the tiles that hold the table."""
    table = equation.operands[0]
    update = equation.operands[-1] if equation.primitive.startswith("scatter") else equation.operands[1]
    dims = equation.params.get("dimension_numbers")
    window = getattr(dims, "update_window_dims", ())
    row = max(1, math.prod(update.shape[d] for d in window)) if window else 1
    if equation.primitive == "dynamic_update_slice":
        row = max(1, update.size)
    slices = max(1, update.size // row)
    column_parts = max(1, min(chip.tiles, math.ceil(row * 2 / 64)))
    row_parts = max(1, min(chip.tiles // column_parts, math.ceil(table.size / row)))
    index_parts = max(1, chip.tiles // (column_parts * row_parts))
    here = math.ceil(slices / index_parts)
    compute = vertices.multi_update_cycles(here, math.ceil(row / column_parts), in_range=1.0 / row_parts)
    moved = here * (4.0 + math.ceil(row / column_parts) * 2.0)
    return Plan(
        "scatter",
        compute=compute,
        exchange=exchange_cycles(chip, moved, double_width=row_parts > 1),
        compute_sets=1,
        exchanges=1,
        temporary_bytes=moved,
        tiles=min(chip.tiles, column_parts * row_parts * index_parts),
        vertices=1.0,
        fragments=16.0,
        detail=f"{slices} rows of {row}",
    )


def plan_pooling(chip: Chip, equation: Equation) -> Plan:
    """Windows over a field, forward or backward; neighbours' rims arrive by exchange."""
    dims = equation.params.get("window_dimensions", (1,))
    window = float(math.prod(dims))
    backward = equation.primitive.startswith("select_and")
    subject = max((*equation.operands, *equation.results), key=lambda t: t.size)
    outputs = min(equation.operands[0].size, equation.results[0].size)
    tiles, here = spread(chip, outputs)
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
    tiles, here = spread(chip, result.size)
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
    tiles, here = spread(chip, result.size)
    return Plan(
        "fill",
        compute=vertices.fill_cycles(here, result.dtype),
        compute_sets=1,
        tiles=tiles,
        vertices=1.0,
        detail="fill",
    )


def plan_scan_reduce(chip: Chip, equation: Equation) -> Plan:
    """Running sums and maxima along one axis: log2(n) sweeps of element-wise steps with a neighbour
    exchange."""
    source = equation.operands[0]
    axis = equation.params.get("axis", 0)
    sweeps = max(1, math.ceil(math.log2(max(2, source.shape[axis] if source.shape else 2))))
    tiles, here = spread(chip, source.size)
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

    Top-k sorts runs of k and keeps the larger half of each pair of runs: log2(n/k) merges of log2(k) steps
    more.
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
    tiles, here = spread(chip, source.size)
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


def plan_arg_reduce(chip: Chip, equation: Equation) -> Plan:
    """Arg-max and arg-min: a reduction that carries the index with the value, twice the cycles per
    element."""
    plan = plan_reduction(chip, equation)
    return Plan(
        "reduction",
        compute=2.0 * plan.compute,
        exchange=2.0 * plan.exchange,
        compute_sets=plan.compute_sets,
        exchanges=plan.exchanges,
        flops=plan.flops,
        temporary_bytes=2.0 * plan.temporary_bytes,
        tiles=plan.tiles,
        vertices=plan.vertices,
        fragments=plan.fragments,
        detail=plan.detail,
    )


def plan_bound(chip: Chip, equation: Equation) -> Plan:
    """An equation that no planner knows, costed by a stated bound.

    Every operand and result byte crosses the exchange once, and each result element takes a plain C++ loop
    of 20 worker cycles per element. Reported as ``bound`` with the primitive's name.
    """
    nbytes = sum(t.nbytes for t in (*equation.operands, *equation.results))
    largest = max((t.size for t in (*equation.operands, *equation.results)), default=0)
    tiles, here = spread(chip, max(1, largest))
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
