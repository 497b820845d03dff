"""Choosing how a product is cut over tiles: what each split moves and holds, and the cheapest that has the room.

The vertex cycles of every candidate split come from `matmul`. This module adds operands in, partial sums out,
reduction, cast and the turns of a serial split, for all candidates at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from podrun.core.quick_dataclass import dataclass
from podrun.costmodel import vertices
from podrun.costmodel.equations import Plan
from podrun.costmodel.exchange import DELIVERED, FRAGMENTED, PHASE_CYCLES
from podrun.costmodel.target import Chip

if TYPE_CHECKING:
    from podrun.costmodel.products import Product

Values = NDArray[np.float64]
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
BYTES = {"float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "float8": 1}


def splits(size: int, grain: int, most: int) -> Values:
    """Ways to cut ``size`` into equal parts of whole grains: numbers of parts, without those that change nothing."""
    blocks = math.ceil(size / grain)
    parts = {math.ceil(blocks / math.ceil(blocks / p)) for p in range(1, min(blocks, most) + 1)}
    ordered = sorted(parts)
    if len(ordered) > MAX_SPLITS:
        picks = np.unique(np.round(np.geomspace(1, len(ordered), MAX_SPLITS)).astype(int) - 1)
        ordered = [ordered[i] for i in picks]
    return np.asarray(ordered, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class ProductCandidate:
    """A way to compute a product; ``fits``: its temporary data stay within the proportion, serially if need be."""

    plan: Plan
    fits: bool


@dataclass(frozen=True, slots=True)
class ProductSplits:
    """Ways to cut a product over tiles. Each array has one entry for each way: numbers of parts, and one tile's share.

    ``pm``, ``pk``, ``pn``: parts of rows, of input and of output channels. ``used``: tiles. ``groups``, ``rows``,
    ``k``, ``n``: of a tile's part; ``in_rows``: input rows that it reads. ``compute``: cycles of its vertices.
    """

    pm: Values
    pk: Values
    pn: Values
    used: Values
    groups: Values
    rows: Values
    in_rows: Values
    k: Values
    n: Values
    compute: Values


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes that a tile holds of a product, for each way to cut it."""

    inputs: Values
    weights: Values
    partials: Values


def choose(
    chip: Chip, product: Product, method: str, cut: ProductSplits, *, grain: int, transform: float = 0.0
) -> ProductCandidate:
    """Add what moves to the vertex cycles of each way to cut and take the cheapest that fits.

    One without the room for all its output channels takes them in turns of at least ``grain``, each of
    which gathers its inputs again. ``transform``: cycles of rearranging operands first.
    """
    held = _held(product, cut)
    gather_in, gather_weights = _gathered(chip, product, cut, held)
    shared = cut.pk > 1
    rate = chip.exchange_bytes * DELIVERED
    spread = np.where(shared, held.partials * (1.0 - 1.0 / cut.pk) / rate, 0.0)
    phases = np.where(shared, 2.0, 1.0) * PHASE_CYCLES
    closing = _reduced(product, cut), _cast(product, cut)
    rearrange = transform + (held.inputs * 1.25 / 8.0 if product.transposed else held.inputs * 0.0)
    limit = product.proportion * chip.tile_bytes
    turns = serial_turns(limit, held.inputs, held.weights + held.partials, cut.n, grain)
    temporary = held.inputs + (held.weights + held.partials) / turns
    beside = _beside(product, cut, held, turns)
    # A turn moves its own weights and partial sums, and all the inputs.
    exchange = gather_weights + spread + turns * (phases + gather_in)
    total = cut.compute + closing[0] + closing[1] + exchange + turns * rearrange + (turns - 1.0) * TURN_CYCLES
    fits = temporary <= limit
    # A plan that fits no tile at all cannot run; when none fits the proportion, the smallest one is taken.
    best = int(np.argmin(np.where(fits, total, np.inf))) if fits.any() else int(np.argmin(temporary))
    serial = int(turns[best])
    reductions = 1 if shared[best] else 0
    finished = _finished(product, cut)[best]
    plan = Plan(
        "conv" if product.kernel > 1 else "matmul",
        compute=float(cut.compute[best] + closing[0][best] + closing[1][best]) + (serial - 1) * TURN_CYCLES,
        exchange=float(exchange[best]),
        rearrange=float(rearrange[best]) * serial,
        compute_sets=serial + reductions + (1 if transform else 0),
        exchanges=serial + reductions,
        flops=2.0 * product.macs,
        temporary_bytes=float(beside[best]),
        tiles=int(cut.used[best]),
        vertices=2.0 + (WORKLIST_VERTICES * product.kernel if product.kernel > 1 else 0.0),
        fragments=(PRODUCT_FRAGMENTS if product.groups == 1 else GROUPED_FRAGMENTS)
        + KERNEL_FRAGMENTS * product.kernel,
        detail=f"{method} {product.m}x{product.k}x{product.n} rows/{cut.pm[best]:.0f} in/{cut.pk[best]:.0f} "
        f"out/{cut.pn[best]:.0f}" + (f" serial/{serial}" if serial > 1 else ""),
        share=min(1.0, float(finished) / (product.groups * product.m * product.n)),
    )
    return ProductCandidate(plan, bool(fits.any()))


def _held(product: Product, cut: ProductSplits) -> _Held:
    item, partial = float(BYTES[product.input_type]), float(BYTES[product.partials_type])
    return _Held(
        inputs=cut.groups * cut.in_rows * cut.k * item / np.minimum(cut.in_rows, product.reuse),
        weights=cut.groups * cut.k * cut.n * item * product.kernel,
        partials=cut.groups * cut.rows * cut.n * partial,
    )


def _gathered(chip: Chip, product: Product, cut: ProductSplits, held: _Held) -> tuple[Values, Values]:
    """Cycles in which a tile's inputs arrive, and cycles in which its weights arrive."""
    # An operand shared by an even number of neighbours arrives at double width.
    rate = chip.exchange_bytes * DELIVERED
    in_rate = rate * np.where(cut.pn % 2 == 0, 2.0, 1.0)
    weight_rate = rate * np.where((cut.pm >= 2) & (cut.pn % 2 == 1), 2.0, 1.0)
    if product.rows_resident:
        stay_rows, stay_weights = 1.0 / cut.pn, 1.0 / cut.used
    else:
        stay_rows, stay_weights = 1.0 / cut.used, 1.0 / cut.pm
    # Operands of many small products arrive in rows of one group each.
    pieces = FRAGMENTED if product.groups > 1 and product.kernel == 1 else 1.0
    return (
        held.inputs * (1.0 - stay_rows) / in_rate * pieces,
        held.weights * (1.0 - stay_weights) / weight_rate * pieces,
    )


def _beside(product: Product, cut: ProductSplits, held: _Held, turns: Values) -> Values:
    """Bytes on a tile beside operands and outputs, which the step's live values count already: an operand that is
    whole where it is needed is read there, and sums that are the outputs are made there.
    """
    whole = cut.pn == 1 if product.rows_resident else cut.used == 1
    whole_weights = cut.used == 1 if product.rows_resident else cut.pm == 1
    done = (cut.pk == 1) & (product.output_type == product.partials_type)
    inputs = np.where(whole, 0.0, held.inputs)
    weights, sums = np.where(whole_weights, 0.0, held.weights), np.where(done, 0.0, held.partials)
    return np.asarray(inputs + (weights + sums) / turns)


def _finished(product: Product, cut: ProductSplits) -> Values:
    """Outputs that stay on the fullest tile: outputs that several tiles sum are shared among these tiles."""
    return np.asarray(cut.groups * cut.rows * np.minimum(cut.n, product.n) / cut.pk)


def _vectors(product: Product, cut: ProductSplits) -> Values:
    """Turns of the workers over the outputs that a tile finishes."""
    outputs = cut.groups * cut.rows * cut.n / cut.pk
    return np.asarray(np.ceil(outputs / vertices.vector_width(product.partials_type) / vertices.WORKERS))


def _reduced(product: Product, cut: ProductSplits) -> Values:
    """Cycles of adding partial sums, where several tiles share the input channels."""
    vectors = _vectors(product, cut) * ((cut.pk + 7.0) * 0.5 + 2.0)
    return np.where(cut.pk > 1, 33.0 + vertices.WORKERS * (20.0 + vectors), 0.0)


def _cast(product: Product, cut: ProductSplits) -> Values:
    """Cycles of converting partial sums of another type to outputs."""
    if product.output_type == product.partials_type:
        return np.zeros_like(cut.rows)
    return np.asarray(12.0 + vertices.WORKERS * (37.0 + _vectors(product, cut)))


def serial_turns(limit: float, kept: Values, divided: Values, n: Values, grain: int) -> Values:
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
