"""Planner for matrix products and convolutions: how the work is cut over tiles and which vertex does it.

A product of G groups, [M, K] x [K, N] each, is cut into pm x pk x pn pieces per group. Every candidate split is priced
(vertex cycles, operands in, partial sums out, reduction, cast) and the cheapest that stays within the memory proportion
wins, as in the library's planner (graphcore/poplibs, lib/poplin/ConvModel.cpp). Convolutions add kernel positions:
either each position is a pass over the field (AMP Nx1), or the field is expanded first so that K holds the positions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from podrun.core.errors import InvalidOptionError
from podrun.costmodel import product_vertices, vertices
from podrun.costmodel.equations import Plan
from podrun.costmodel.exchange import PHASE_CYCLES
from podrun.costmodel.products import Product, check_proportion
from podrun.costmodel.splits import BYTES, ProductCandidate, ProductSplits, choose, splits
from podrun.costmodel.target import Chip


def plan_product(chip: Chip, product: Product, *, tiles: int | None = None) -> Plan:
    """The cheapest plan of a product or convolution on ``chip``, or on so many of its tiles.

    Cached: equal questions get the same answer.

    Raises:
        InvalidOptionError: a memory proportion outside (0, 1]; a type that the chip's matrix unit does not take.
    """
    check_proportion(product.proportion)
    if f"amp_inputs_{product.input_type}" not in chip.facts:
        takes = ", ".join(
            fact.removeprefix("amp_inputs_") for fact in chip.facts if fact.startswith("amp_inputs_")
        )
        raise InvalidOptionError(
            f"the matrix unit of {chip.title} takes no {product.input_type}",
            hint=f"It takes {takes}; FP8 needs a C600.",
        )
    return _plan(chip.name, tiles or chip.tiles, product)


@functools.lru_cache(maxsize=4096)
def _plan(chip_name: str, tiles: int, product: Product) -> Plan:
    from podrun.costmodel.target import chip as find_chip

    chip = find_chip(chip_name)
    if product.macs <= 0:
        return Plan("matmul")
    candidates: list[ProductCandidate] = [_amp_plan(chip, product, tiles)]
    if product.kernel > 1:
        side = round(math.sqrt(product.kernel))
        candidates.append(_expanded_plan(chip, product, tiles, product.kernel))
        if side * side == product.kernel:
            candidates.append(_expanded_plan(chip, product, tiles, side))
            if product.k <= ROW_CHANNELS and product.stride == 1 and product.input_type == "float16":
                candidates.append(_rows_plan(chip, product, tiles, side))
    if 1 < product.k <= 4 and product.n <= 4 and product.groups > 1 and product.kernel > 1:
        candidates.append(_slic_plan(chip, product, tiles))
    combined = _combined(product)
    if combined is not product:
        wide = _amp_plan(chip, combined, tiles, method="amp-combined")
        candidates.append(replace(wide, plan=replace(wide.plan, flops=2.0 * product.macs)))
    few = product.k * product.kernel <= 64 or product.n <= 4
    if few or (product.kernel > 1 and not any(candidate.fits for candidate in candidates)):
        candidates.append(_vector_plan(chip, product, tiles))
    # What fits goes before what is fast: a convolution that the AMP has no room for falls to the vector unit.
    # Where nothing fits, the library minimises temporary memory instead of cycles.
    fitting = [candidate.plan for candidate in candidates if candidate.fits]
    if fitting:
        return min(fitting, key=lambda plan: plan.cycles(chip))
    return min((candidate.plan for candidate in candidates), key=lambda plan: plan.temporary_bytes)


def _grid(product: Product, tiles: int, grain_k: int, grain_n: int) -> list[NDArray[np.float64]]:
    """Candidate (groups on a tile, pm, pk, pn, tiles used) as flat arrays."""
    group_splits = splits(product.groups, 1, tiles)
    if len(group_splits) > 6:
        group_splits = group_splits[-6:]
    pm = splits(product.m, 1, tiles)
    pk = splits(product.k, grain_k, tiles)
    pn = splits(product.n, grain_n, tiles)
    pg, pm, pk, pn = (axis.ravel() for axis in np.meshgrid(group_splits, pm, pk, pn, indexing="ij"))
    used = pg * pm * pk * pn
    fits = used <= tiles
    return [axis[fits] for axis in (pg, pm, pk, pn, used)]


def _amp_plan(
    chip: Chip, product: Product, tiles: int, transform: float = 0.0, method: str = "amp"
) -> ProductCandidate:
    units = chip.conv_units(product.input_type, product.partials_type)
    grain_k = product_vertices.in_group(product.input_type)
    pg, pm, pk, pn, used = _grid(product, tiles, grain_k, units)
    rows = np.ceil(product.m / pm)
    k = np.ceil(product.k / pk / grain_k) * grain_k
    n = np.ceil(product.n / pn / units) * units
    groups = np.ceil(product.groups / pg)
    if product.kernel == 1:
        compute = product_vertices.matmul_cycles(
            rows,
            k,
            n,
            input_type=product.input_type,
            partials_type=product.partials_type,
            units=units,
            groups=groups,
        )
    else:
        row_length = np.minimum(rows, product.row_length)
        compute = product_vertices.kernel_cycles(
            np.ceil(rows / row_length),
            row_length,
            k,
            n,
            product.kernel,
            input_type=product.input_type,
            partials_type=product.partials_type,
            units=units,
            groups=groups,
        )
    cut = ProductSplits(pm, pk, pn, used, groups, rows, rows * _halo(product, rows), k, n, compute)
    return choose(chip, product, method, cut, grain=units, transform=transform)


def _combined(product: Product) -> Product:
    """Neighbouring groups of few channels as one group of a whole weight block, with zeros between them.

    The library joins as many groups as fill a block, so that small groups cost no more than one that size.
    """
    factor = product_vertices.in_group(product.input_type) // max(1, product.k, product.n)
    if product.groups == 1 or factor < 2:
        return product
    factor = min(factor, product.groups)
    groups = math.ceil(product.groups / factor)
    return replace(product, groups=groups, k=product.k * factor, n=product.n * factor)


def _expanded_plan(chip: Chip, product: Product, tiles: int, positions: int) -> ProductCandidate:
    """``positions`` of the kernel moved into K first: more bytes, fuller weight blocks.

    All of the kernel, or one of its rows. It pays for few input channels.
    """
    flat = replace(
        product,
        k=product.k * positions,
        kernel=product.kernel // positions,
        stride=product.stride if product.kernel > positions else 1,
    )
    copied = product.groups * product.m * flat.k * BYTES[product.input_type] / tiles
    if flat.kernel > 1:
        # Rows of the field stand once for each kernel row they meet: strided rows are shared.
        copied = copied * product.stride
    return _amp_plan(chip, flat, tiles, 25.0 + copied * EXPAND_CYCLES, "amp-expanded")


ROW_CHANNELS = 4
"""Channels of a weight block that holds four rows of the kernel."""


def _rows_plan(chip: Chip, product: Product, tiles: int, side: int) -> ProductCandidate:
    """Weight blocks of four kernel rows and four channels: the unit walks the field itself, nothing is expanded.

    Source: poplin's estimator of the Nx1 vertex. It pays for a short kernel over few channels at stride one.
    """
    blocks = math.ceil(side / ROW_CHANNELS) * side
    pg, pm, pk, pn, used = _grid(product, tiles, ROW_CHANNELS, ROW_CHANNELS)
    rows = np.ceil(product.m / pm)
    row_length = np.minimum(rows, product.row_length)
    groups = np.ceil(product.groups / pg)
    units = chip.conv_units(product.input_type, product.partials_type)
    k, n = np.full_like(rows, ROW_CHANNELS), np.ceil(product.n / pn / units) * units
    compute = product_vertices.kernel_cycles(
        np.ceil(rows / row_length),
        row_length,
        product_vertices.in_group(product.input_type),
        n,
        blocks,
        input_type=product.input_type,
        partials_type=product.partials_type,
        units=units,
        groups=groups,
    )
    cut = ProductSplits(pm, pk, pn, used, groups, rows, rows * _halo(product, rows), k, n, compute)
    return choose(chip, product, "amp-rows", cut, grain=units)


EXPAND_CYCLES = 0.34
"""Cycles per byte of expanding a field on its tile. Derived: the planner's figure for ResNet's first layer."""


def _slic_plan(chip: Chip, product: Product, tiles: int) -> ProductCandidate:
    """Groups of two to four channels on the SLIC unit, four groups side by side. Source: poplin's
    planner (lib/poplin/ConvModel.cpp) and estimator of the SLIC vertex.
    """
    blocks = replace(product, groups=math.ceil(product.groups / SLIC_GROUPS))
    pg, pm, pk, pn, used = _grid(blocks, tiles, 4, 4)
    rows = np.ceil(product.m / pm)
    groups = np.ceil(blocks.groups / pg)
    row_length = np.minimum(rows, product.row_length)
    compute = groups * product_vertices.slic_cycles(
        np.ceil(rows / row_length), row_length, product.k, product.kernel
    )
    k, n = np.full_like(rows, product.k), np.full_like(rows, product.n)
    cut = ProductSplits(
        pm, pk, pn, used, groups * SLIC_GROUPS, rows, rows * _halo(product, rows), k, n, compute
    )
    return choose(chip, product, "slic", cut, grain=4)


SLIC_GROUPS = 4
"""Convolution groups of four channels that the unit takes at once: 16 channels."""


def _vector_plan(chip: Chip, product: Product, tiles: int) -> ProductCandidate:
    """Few channels: the vector unit. Groups of one channel run as vertical MAC: 3 cycles per 8 channels."""
    vector = vertices.vector_width(product.input_type)
    if product.groups > 1 and product.k * product.n <= 4:
        # Depthwise: channels (groups) lie side by side in memory, filled up to eight.
        work = product.m * math.ceil(product.groups * product.n * product.k / (2 * vector)) * product.kernel
        per_tile = math.ceil(work / tiles)
        cycles = 100.0 + vertices.WORKERS * (20.0 + 3.0 * math.ceil(per_tile / vertices.WORKERS))
        width = BYTES[product.input_type]
        share = product.groups * product.m * product.k * float(_halo(product, np.asarray([64.0]))[0]) * width
        moved = share / tiles + product.groups * product.kernel * width / max(
            1, min(tiles, product.groups // 8)
        )
        plan = Plan(
            "conv",
            compute=cycles,
            exchange=PHASE_CYCLES + moved / chip.exchange_bytes,
            rearrange=moved * 1.25 / 8.0,
            compute_sets=2,
            exchanges=1,
            flops=2.0 * product.macs,
            temporary_bytes=moved * 2.0,
            tiles=tiles,
            vertices=1.0,
            fragments=16.0,
            detail="vertical mac",
        )
        return ProductCandidate(plan, moved * 2.0 <= product.proportion * chip.tile_bytes)
    pg, pm, pk, pn, used = _grid(product, tiles, vector, 1)
    rows = np.ceil(product.m / pm)
    k = np.ceil(product.k / pk)
    n = np.ceil(product.n / pn)
    groups = np.ceil(product.groups / pg)
    compute = groups * product_vertices.mac_cycles(rows, k, n, vector=vector, kernel=product.kernel)
    cut = ProductSplits(pm, pk, pn, used, groups, rows, rows * _halo(product, rows), k, n, compute)
    return choose(chip, product, "mac", cut, grain=1)


def _halo(product: Product, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Input pixels per output pixel of a piece of ``rows`` pixels: the stride's area and a rim of the kernel."""
    if product.kernel == 1:
        return np.ones_like(rows)
    side = np.sqrt(rows)
    rim = math.sqrt(product.kernel) - 1.0
    return np.asarray(((side * product.stride + rim) / side) ** 2)


def forget() -> None:
    """Drop all kept plans, for measurements of planning itself."""
    _plan.cache_clear()
