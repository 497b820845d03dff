"""Records about whole matrix products, dense and sparse."""

from __future__ import annotations

import math
from typing import Any

from fidelity_kinds import own_formulas, sparse
from fidelity_kinds.benchmark_only import benchmark_only
from fidelity_kinds.record import BYTES, TYPES, NotPredicted, Record
from podrun.costmodel import exchange, product_vertices, vertices
from podrun.costmodel.matmul import plan_product
from podrun.costmodel.products import Product
from podrun.costmodel.target import GC2, Chip

ITEM = {"float8": 1.0, "float16": 2.0, "float32": 4.0}
TRAINING_PASSES = 3.0
"""Products of a layer's training step: forward, gradient of the data, gradient of the weights."""


def gemm(record: Record) -> float:
    """A whole matrix product."""
    m, k, n = record.need("m", "k", "n")
    chip, params = record.chip, record.params
    flops = 2.0 * m * k * n * params["chained"]
    if params["implementation"] == "custom_codelet":
        return _matrix_vector(record, m, k, n)
    input_type, partials = record.product_types()
    splits, phase = params["serial_split_k"], params["phase"]
    if params.get("tiles") == 1:
        if phase not in ("total", "compute"):
            raise NotPredicted(f"phase {phase!r} of a product on one tile is not separated")
        cycles = _one_tile(chip, m, k, n, input_type, partials, splits, params["serial_split_variant"])
        return record.rate(cycles * params["chained"], flops=flops)
    product = Product(1, max(m, n), math.ceil(k / splits), min(m, n), input_type, input_type, partials)
    phases = _library_phases(chip, product, params.get("tiles") or chip.tiles)
    if params["allocator"] == "linear":
        # Operands that lie element by element over the tiles: every one of them moves.
        phases["exchange"] += (m * k + k * n) * BYTES[params["input_type"]] / chip.tiles / chip.exchange_bytes
    if phase != "total" and phase not in phases:
        raise NotPredicted(f"phase {phase!r} of a library product is not separated")
    cycles = sum(phases.values()) if phase == "total" else phases[phase]
    if splits > 1:
        cycles *= splits
        if phase in ("total", "compute"):
            cycles += (splits - 1) * vertices.scaled_add_cycles(m * n / chip.tiles, partials)
    # The regression suite of GC2's time reports cycles of a layer's training step; a rate is that of one
    # product.
    suite = record.metric == "cycles" and phase == "total" and chip is GC2 and params["chained"] == 1
    return record.rate(cycles * params["chained"] * (TRAINING_PASSES if suite else 1.0), flops=flops)


def _library_phases(chip: Chip, product: Product, tiles: int) -> dict[str, float]:
    """Cycles of a library product by phase; what is rearranged on tiles counts as compute."""
    if tiles > chip.tiles:
        raise NotPredicted(f"{tiles} tiles are more than {chip.title} has")
    plan = plan_product(chip, product, tiles=tiles)
    launch, sync = plan.overhead(chip)
    return {"compute": plan.compute + plan.rearrange + launch, "exchange": plan.exchange, "sync": sync}


@benchmark_only
def _matrix_vector(record: Record, m: int, k: int, n: int) -> float:
    """The tutorial's product: one hand-written C++ vertex per output, operands mapped linearly."""
    chip, item = record.chip, BYTES[record.params["input_type"]]
    per_tile = m * n / chip.tiles
    rounds = math.ceil(per_tile / vertices.WORKERS)
    moved = (m * k / chip.tiles + k * n) * item / chip.exchange_bytes
    nbytes = (m * k + k * n + m * n) * item
    streams = own_formulas.stream_copy(chip, nbytes)
    phases = {
        "compute": vertices.WORKERS * rounds * (30.0 + k * CPP_MAC),
        "exchange": exchange.PHASE_CYCLES + moved * LINEAR_FRAGMENTS,
        # Waiting for the host at both ends of the program shows as sync.
        "sync": 3.0 * exchange.sync_cycles(chip) + streams["begin"] + streams["end"],
        "host": exchange.TRANSFER_CYCLES + nbytes / own_formulas.PCIE_BYTES_PER_SECOND * chip.clock_hz,
    }
    phase = record.params["phase"]
    if phase == "total":
        raise NotPredicted(
            "the host's own time between its calls is inside the total and is not published apart"
        )
    if phase not in phases:
        raise NotPredicted(f"phase {phase!r} of a matrix-vector product is not separated")
    return record.rate(phases[phase], flops=2.0 * m * k * n)


CPP_MAC = 2.33
"""Issue slots per element of a compiled dot product: two loads, a co-issued multiply-add, a third of a
branch."""
LINEAR_FRAGMENTS = 1.1
"""Schedule length over word bound when a linearly mapped matrix moves to row-wise vertices. Derived."""


@benchmark_only
def _one_tile(
    chip: Any, m: int, k: int, n: int, input_type: str, partials: str, splits: int, variant: str
) -> float:
    """A product on one tile with a serial split: every turn slices both operands and arranges them by the matrix unit's
    groups of channels. Outputs are added up as the unit leaves them, and arranged once, behind the loop.
    """
    part = math.ceil(k / splits)
    item, sums = ITEM[input_type], ITEM[partials]
    group = product_vertices.in_group(input_type)
    padded_k, padded_n = (
        math.ceil(part / group) * group,
        math.ceil(n / product_vertices.CONV_UNITS) * product_vertices.CONV_UNITS,
    )
    units = chip.conv_units(input_type, partials)
    turn = float(
        product_vertices.matmul_cycles(m, part, n, input_type=input_type, partials_type=partials, units=units)
    )
    turn += sum(vertices.elementwise_cycles(part * side, input_type, (), 1) for side in (m, n))
    turn += own_formulas.ARRANGE_PER_BYTE * item * padded_k * (m + padded_n)
    join = vertices.scaled_add_cycles(m * n, partials)
    clear = vertices.fill_cycles(m * n, partials)
    joins = splits if variant == "zeroing" else splits - 1
    control = {"if": 120.0, "switch": 0.0, "zeroing": 0.0}[variant] * splits
    arranged = own_formulas.ARRANGE_PER_BYTE * sums * m * n
    return splits * turn + joins * join + control + arranged + (clear if variant == "zeroing" else 0.0)


def sparse_product(record: Record) -> float:
    """A sparse matrix times a dense one; the sizes of the sparse matrix have a default."""
    m, k, n, density = record.need("m", "k", "n", "density")
    if density > 1.0:
        raise NotPredicted(f"a density of {density} is more than all of the matrix")
    input_type = TYPES[record.params["input_type"]]
    if input_type not in ("float16", "float32"):
        raise NotPredicted(f"no sparse product of {input_type}")
    plan = sparse.plan_sparse(record.chip, m, k, n, density, record.params["block_size"], input_type)
    return record.rate(plan.cycles(record.chip), flops=plan.flops)


def graph_search(record: Record) -> float:
    """A breadth-first search: traversed edges per second."""
    (name,) = record.need("name")
    if name != "bfs":
        raise NotPredicted(f"the work of {name!r} depends on its data, which are not in the record")
    if record.metric != "gteps":
        raise NotPredicted(f"metric {record.metric!r} of kind {record.kind!r} is not modelled")
    scale, factor = record.params.get("scale"), record.params.get("edge_factor")
    if scale is not None and scale > LARGEST_SCALE:
        raise NotPredicted(f"a graph of 2^{scale} vertices is beyond any machine's memory")
    edges = record.params.get("edges") or (factor * 2**scale if scale and factor else None)
    if edges is None:
        raise NotPredicted("not stated and no sensible default: edges")
    tiles = record.params.get("tiles") or record.chip.tiles
    return edges * record.chip.clock_hz / sparse.search_cycles(record.chip, edges, tiles) / 1e9


LARGEST_SCALE = 60
