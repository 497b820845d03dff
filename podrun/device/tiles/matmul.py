"""Planner for matrix products and convolutions: how the work is cut over tiles and which vertex does it.

A product of G groups, [M, K] x [K, N] each, is cut into pm x pk x pn pieces per group. Every candidate
split is priced (vertex cycles, operands in, partial sums out, reduction, cast) and the cheapest that stays
within the memory proportion wins, as in the library's planner (facts page 8.1). Convolutions add kernel
positions: either each position is a pass over the field (AMP Nx1), or the field is expanded first so that K
holds the positions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from podrun.device.target import Chip
from podrun.device.tiles import amp, vertices
from podrun.device.tiles.exchange import FRAGMENTED, PHASE_CYCLES
from podrun.device.tiles.plan import Plan
from podrun.errors import InvalidOptionError

DEFAULT_PROPORTION = 0.6
"""availableMemoryProportion: share of a tile's memory that one operation may use for temporary data."""
MAX_SPLITS = 28
PRODUCT_FRAGMENTS = 40.0
"""Exchange fragments of a product on each tile. Derived: 0.34 to 0.52 MB of exchange code per product of
BERT's first layer on 1,472 tiles, at eight bytes each."""
GROUPED_FRAGMENTS = 18.0
"""The same for many small products, each on few tiles: attention's hold 0.2 to 0.34 MB."""
KERNEL_FRAGMENTS = 1.5
"""Further fragments per kernel position, for the rims. Assumed."""
WORKLIST_VERTICES = 1.8
"""Work lists of the kernel form in units of a vertex's state: six workers, eight bytes, per position."""
_BYTES = {"float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "float8": 1}


@dataclass(frozen=True, slots=True)
class Product:
    """G products [M, K] x [K, N]; a convolution if ``kernel`` > 1 (K is then the channels of one position).

    ``row_length``: output pixels side by side. ``stride``: how far apart the input pixels of neighbouring
    outputs are. ``transposed``: the rows' operand must be regrouped first. ``reuse``: how often each input
    element stands in the rows (kernel positions of a weight gradient), so that fewer bytes move than the
    rows hold.
    """

    groups: int
    m: int
    k: int
    n: int
    input_type: str = "float16"
    output_type: str = "float16"
    partials_type: str = "float16"
    kernel: int = 1
    row_length: int = 1
    stride: int = 1
    proportion: float = DEFAULT_PROPORTION
    transposed: bool = False
    reuse: int = 1
    rows_resident: bool = False

    @property
    def macs(self) -> float:
        """Multiply-adds."""
        return float(self.groups) * self.m * self.k * self.n * self.kernel


def splits(size: int, grain: int, most: int) -> NDArray[np.float64]:
    """Ways to cut ``size`` into equal parts of whole grains: numbers of parts, without those that change
    nothing."""
    blocks = math.ceil(size / grain)
    parts = {math.ceil(blocks / math.ceil(blocks / p)) for p in range(1, min(blocks, most) + 1)}
    ordered = sorted(parts)
    if len(ordered) > MAX_SPLITS:
        picks = np.unique(np.round(np.geomspace(1, len(ordered), MAX_SPLITS)).astype(int) - 1)
        ordered = [ordered[i] for i in picks]
    return np.asarray(ordered, dtype=np.float64)


def plan_product(chip: Chip, product: Product, *, tiles: int | None = None) -> Plan:
    """The cheapest plan of a product or convolution on ``chip``, or on so many of its tiles.

    Cached: equal questions get the same answer.

    Raises:
        InvalidOptionError: a memory proportion outside (0, 1].
    """
    check_proportion(product.proportion)
    return _plan(chip.name, tiles or chip.tiles, product)


def check_proportion(proportion: float) -> None:
    """Raises InvalidOptionError for an availableMemoryProportion outside (0, 1]."""
    if not 0.0 < proportion <= 1.0:
        raise InvalidOptionError(
            f"availableMemoryProportion {proportion} is not above 0 and at most 1",
            hint="Give a share of tile memory such as 0.6 (the default).",
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to compute a product; ``fits``: its temporary data stay within the proportion, serially if need
    be.
    """

    plan: Plan
    fits: bool


@functools.lru_cache(maxsize=4096)
def _plan(chip_name: str, tiles: int, product: Product) -> Plan:
    from podrun.device.target import CHIPS

    chip = CHIPS[chip_name]
    if product.macs <= 0:
        return Plan("matmul")
    candidates: list[Candidate] = [_amp_plan(chip, product, tiles)]
    if product.kernel > 1:
        side = round(math.sqrt(product.kernel))
        candidates.append(_expanded_plan(chip, product, tiles, product.kernel))
        if side * side == product.kernel:
            candidates.append(_expanded_plan(chip, product, tiles, side))
            if product.k <= ROW_CHANNELS and product.stride == 1 and product.input_type == "float16":
                candidates.append(_rows_plan(chip, product, tiles, side))
    if 1 < product.k <= 4 and product.n <= 4 and product.groups > 1 and product.kernel > 1:
        candidates.append(_slic_plan(chip, product, tiles))
    few = product.k * product.kernel <= 64 or product.n <= 4
    if few or (product.kernel > 1 and not any(candidate.fits for candidate in candidates)):
        candidates.append(_vector_plan(chip, product, tiles))
    # What fits goes before what is fast: a convolution that the AMP has no room for falls to the vector unit.
    return min(candidates, key=lambda candidate: (not candidate.fits, candidate.plan.cycles(chip))).plan


def _grid(chip: Chip, product: Product, tiles: int, grain_k: int, grain_n: int) -> list[NDArray[np.float64]]:
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
) -> Candidate:
    units = chip.conv_units(product.input_type, product.partials_type)
    grain_k = amp.in_group(product.input_type)
    pg, pm, pk, pn, used = _grid(chip, product, tiles, grain_k, units)
    rows = np.ceil(product.m / pm)
    k = np.ceil(product.k / pk / grain_k) * grain_k
    n = np.ceil(product.n / pn / units) * units
    groups = np.ceil(product.groups / pg)
    if product.kernel == 1:
        compute = amp.matmul_cycles(
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
        compute = amp.kernel_cycles(
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
    halo = _halo(product, rows)
    return _choose(
        chip, product, method, compute, groups, rows * halo, rows, k, n, (pm, pk, pn, used), transform, units
    )


def _expanded_plan(chip: Chip, product: Product, tiles: int, positions: int) -> Candidate:
    """``positions`` of the kernel moved into K first: more bytes, fuller weight blocks.

    All of the kernel, or one of its rows. It pays for few input channels.
    """
    flat = replace(
        product,
        k=product.k * positions,
        kernel=product.kernel // positions,
        stride=product.stride if product.kernel > positions else 1,
    )
    copied = product.groups * product.m * flat.k * _BYTES[product.input_type] / tiles
    if flat.kernel > 1:
        # Rows of the field stand once for each kernel row they meet: strided rows are shared.
        copied = copied * product.stride
    return _amp_plan(chip, flat, tiles, 25.0 + copied * EXPAND_CYCLES, "amp-expanded")


ROW_CHANNELS = 4
"""Channels of a weight block that holds four rows of the kernel."""


def _rows_plan(chip: Chip, product: Product, tiles: int, side: int) -> Candidate:
    """Weight blocks of four kernel rows and four channels: the unit walks the field itself, nothing is
    expanded.

    Source: facts page 8.4. It pays for a short kernel over few channels at stride one.
    """
    blocks = math.ceil(side / ROW_CHANNELS) * side
    pg, pm, pk, pn, used = _grid(chip, product, tiles, ROW_CHANNELS, ROW_CHANNELS)
    rows = np.ceil(product.m / pm)
    row_length = np.minimum(rows, product.row_length)
    groups = np.ceil(product.groups / pg)
    units = chip.conv_units(product.input_type, product.partials_type)
    k, n = np.full_like(rows, ROW_CHANNELS), np.ceil(product.n / pn / units) * units
    compute = amp.kernel_cycles(
        np.ceil(rows / row_length),
        row_length,
        amp.in_group(product.input_type),
        n,
        blocks,
        input_type=product.input_type,
        partials_type=product.partials_type,
        units=units,
        groups=groups,
    )
    in_rows = rows * _halo(product, rows)
    return _choose(
        chip, product, "amp-rows", compute, groups, in_rows, rows, k, n, (pm, pk, pn, used), 0.0, units
    )


EXPAND_CYCLES = 0.34
"""Cycles per byte of expanding a field on its tile. Derived: the planner's figure for ResNet's first
layer."""


def _slic_plan(chip: Chip, product: Product, tiles: int) -> Candidate:
    """Groups of two to four channels on the SLIC unit, four groups side by side. Source: facts page 2 and
    8.5.
    """
    blocks = replace(product, groups=math.ceil(product.groups / SLIC_GROUPS))
    pg, pm, pk, pn, used = _grid(chip, blocks, tiles, 4, 4)
    rows = np.ceil(product.m / pm)
    groups = np.ceil(blocks.groups / pg)
    row_length = np.minimum(rows, product.row_length)
    compute = groups * amp.slic_cycles(np.ceil(rows / row_length), row_length, product.k, product.kernel)
    k, n = np.full_like(rows, product.k), np.full_like(rows, product.n)
    in_rows = rows * _halo(product, rows)
    here = groups * SLIC_GROUPS
    return _choose(chip, product, "slic", compute, here, in_rows, rows, k, n, (pm, pk, pn, used), 0.0, 4)


SLIC_GROUPS = 4
"""Convolution groups of four channels that the unit takes at once: 16 channels."""


def _vector_plan(chip: Chip, product: Product, tiles: int) -> Candidate:
    """Few channels: the vector unit. Groups of one channel run as vertical MAC: 3 cycles per 8 channels."""
    vector = vertices.vector_width(product.input_type)
    if product.groups > 1 and product.k * product.n <= 4 and product.groups >= 8:
        # Depthwise: channels (groups) lie side by side in memory.
        work = product.m * math.ceil(product.groups * product.n * product.k / (2 * vector)) * product.kernel
        per_tile = math.ceil(work / tiles)
        cycles = 100.0 + amp.WORKERS * (20.0 + 3.0 * math.ceil(per_tile / amp.WORKERS))
        width = _BYTES[product.input_type]
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
        return Candidate(plan, moved * 2.0 <= product.proportion * chip.tile_bytes)
    pg, pm, pk, pn, used = _grid(chip, product, tiles, vector, 1)
    rows = np.ceil(product.m / pm)
    k = np.ceil(product.k / pk)
    n = np.ceil(product.n / pn)
    groups = np.ceil(product.groups / pg)
    compute = groups * amp.mac_cycles(rows, k, n, vector=vector, kernel=product.kernel)
    in_rows = rows * _halo(product, rows)
    return _choose(chip, product, "mac", compute, groups, in_rows, rows, k, n, (pm, pk, pn, used), 0.0, 1)


def _halo(product: Product, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Input pixels per output pixel of a piece of ``rows`` pixels: the stride's area and a rim of the
    kernel."""
    if product.kernel == 1:
        return np.ones_like(rows)
    side = np.sqrt(rows)
    rim = math.sqrt(product.kernel) - 1.0
    return np.asarray(((side * product.stride + rim) / side) ** 2)


def _choose(
    chip: Chip,
    product: Product,
    method: str,
    compute: NDArray[np.float64],
    groups: NDArray[np.float64],
    in_rows: NDArray[np.float64],
    rows: NDArray[np.float64],
    k: NDArray[np.float64],
    n: NDArray[np.float64],
    split: tuple[NDArray[np.float64], ...],
    transform: float,
    grain: int,
) -> Candidate:
    """Add what moves to the vertex cycles of each split and take the cheapest that fits.

    A split without the room for all its output channels takes them in turns of at least ``grain``, each of
    which gathers its inputs again.
    """
    pm, pk, pn, used = split
    item, partial = float(_BYTES[product.input_type]), float(_BYTES[product.partials_type])
    in_bytes = groups * in_rows * k * item / np.minimum(in_rows, product.reuse)
    weight_bytes = groups * k * n * item * product.kernel
    partial_bytes = groups * rows * n * partial
    # An operand shared by an even number of neighbours arrives at double width.
    in_rate = chip.exchange_bytes * np.where(pn % 2 == 0, 2.0, 1.0)
    weight_rate = chip.exchange_bytes * np.where((pm >= 2) & (pn % 2 == 1), 2.0, 1.0)
    if product.rows_resident:
        stay_rows, stay_weights = 1.0 / pn, 1.0 / used
    else:
        stay_rows, stay_weights = 1.0 / used, 1.0 / pm
    gather = in_bytes * (1.0 - stay_rows) / in_rate + weight_bytes * (1.0 - stay_weights) / weight_rate
    if product.groups > 1 and product.kernel == 1:
        # Operands of many small products arrive in rows of one group each.
        gather = gather * FRAGMENTED
    spread = np.where(pk > 1, partial_bytes * (1.0 - 1.0 / pk) / chip.exchange_bytes + PHASE_CYCLES, 0.0)
    outputs = groups * rows * n / pk
    vector = vertices.vector_width(product.partials_type)
    reduce = np.where(
        pk > 1,
        33.0
        + amp.WORKERS * (20.0 + np.ceil(outputs / vector / amp.WORKERS) * ((pk + 7.0) / 1.0 * 0.5 + 2.0)),
        0.0,
    )
    cast = np.where(
        product.output_type != product.partials_type,
        12.0 + amp.WORKERS * (37.0 + np.ceil(outputs / vector / amp.WORKERS)),
        0.0,
    )
    rearrange = transform + (in_bytes * 1.25 / 8.0 if product.transposed else in_bytes * 0.0)
    exchange = PHASE_CYCLES + gather + spread
    total = compute + reduce + cast + exchange + rearrange
    limit = product.proportion * chip.tile_bytes
    turns = _serial_turns(limit, in_bytes, weight_bytes + partial_bytes, n, grain)
    temporary = in_bytes + (weight_bytes + partial_bytes) / turns
    total = total + (turns - 1.0) * (exchange + rearrange + TURN_CYCLES)
    fits = temporary <= limit
    # A plan that fits no tile at all cannot run; when none fits the proportion, the smallest one is taken.
    best = int(np.argmin(np.where(fits, total, np.inf))) if fits.any() else int(np.argmin(temporary))
    serial = int(turns[best])
    reductions = 1 if pk[best] > 1 else 0
    plan = Plan(
        "conv" if product.kernel > 1 else "matmul",
        compute=float(compute[best] + reduce[best] + cast[best]) + (serial - 1) * TURN_CYCLES,
        exchange=float(exchange[best]) * serial,
        rearrange=float(rearrange[best]) * serial,
        compute_sets=serial + reductions + (1 if transform else 0),
        exchanges=serial + reductions,
        flops=2.0 * product.macs,
        temporary_bytes=float(temporary[best]),
        tiles=int(used[best]),
        vertices=2.0 + (WORKLIST_VERTICES * product.kernel if product.kernel > 1 else 0.0),
        fragments=(PRODUCT_FRAGMENTS if product.groups == 1 else GROUPED_FRAGMENTS)
        + KERNEL_FRAGMENTS * product.kernel,
        detail=f"{method} {product.m}x{product.k}x{product.n} rows/{pm[best]:.0f} in/{pk[best]:.0f} "
        f"out/{pn[best]:.0f}" + (f" serial/{serial}" if serial > 1 else ""),
    )
    return Candidate(plan, bool(fits.any()))


def _serial_turns(
    limit: float,
    kept: NDArray[np.float64],
    divided: NDArray[np.float64],
    n: NDArray[np.float64],
    grain: int,
) -> NDArray[np.float64]:
    """Turns in which each split computes its output channels so that it stays within ``limit`` bytes.

    Weights and partial sums are those of one turn, the inputs are there in all of them. A turn has at least
    ``grain`` channels; a split that has no room even so takes as many turns as there are.
    """
    room = np.maximum(limit - kept, 1.0)
    return np.clip(np.ceil(divided / room), 1.0, np.maximum(1.0, np.ceil(n / grain)))


TURN_CYCLES = 400.0
"""Cycles of one turn of a serial split beside its product: loop control, slice of the weights, place of the
outputs. Assumed.
"""


def forget() -> None:
    """Drop all kept plans, for measurements of planning itself."""
    _plan.cache_clear()
