"""Planners for element-wise equations and for reductions.

Chains of element-wise equations run as one compute set over all tiles.

`OPS` lists the elementary operation of each primitive. A chain loads the values that it does not make itself,
does its arithmetic and stores the values that others read. Operands that are broadcast over the chain's shape arrive
by exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from podrun.core.quick_dataclass import dataclass
from podrun.costmodel import vertices
from podrun.costmodel.equations import Equation, FlatTensor, Plan
from podrun.costmodel.exchange import exchange_cycles, launch_cycles, sync_cycles
from podrun.costmodel.target import Chip

GRAIN_BYTES = 16
"""Smallest piece of a tensor that is given a tile of its own by the linear mapper (grain of 8 halves)."""

CHAIN_VERTICES = 0.6
"""State of a chain's vertex on a tile in units of a product's: pointers only. Derived: vertex state of
BERT's layers and of ResNet-50 on GC2, operator by operator.
"""

PASS_VERTICES = 0.3
"""The same for a vertex that adds or multiplies by a vector: two pointers and a length. Derived: vertex state of the
layer normalisations of BERT, less that of their sums.
"""

PASS_FRAGMENTS = 1.25
"""Exchange fragments of the vector on a tile: one run of words, seldom two. Derived: exchange code of the same
layers.
"""

OPS: dict[str, str] = {
    **dict.fromkeys(("add", "sub", "neg", "max", "min", "add_any", "abs"), "add"),
    **dict.fromkeys(("mul", "square", "conj"), "mul"),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "is_finite", "sign", "clamp"), "compare"),
    "select_n": "select",
    **dict.fromkeys(("div", "rem"), "div"),
    **dict.fromkeys(("sqrt", "cbrt"), "sqrt"),
    "rsqrt": "rsqrt",
    **dict.fromkeys(("exp", "exp2", "expm1"), "exp"),
    **dict.fromkeys(("log", "log1p", "log2"), "log"),
    "logistic": "sigmoid",
    "tanh": "tanh",
    **dict.fromkeys(("erf", "erfc", "erf_inv", "lgamma", "digamma"), "erf"),
    **dict.fromkeys(("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh"), "sin"),
    **dict.fromkeys(("asinh", "acosh", "atanh"), "sin"),
    **dict.fromkeys(("pow",), "pow"),
    "integer_pow": "mul",
    **dict.fromkeys(("floor", "ceil", "round", "nextafter", "reduce_precision"), "integer"),
    **dict.fromkeys(("and", "or", "xor", "not", "population_count", "clz"), "integer"),
    **dict.fromkeys(("shift_left", "shift_right_logical", "shift_right_arithmetic"), "integer"),
    **dict.fromkeys(("convert_element_type", "bitcast_convert_type"), "cast"),
    **dict.fromkeys(("real", "imag", "copy", "copy_p"), "add"),
    **{name: name for name in ("relu", "swish", "gelu", "nonlinear_grad", "gelu_grad", "dropout")},
}
"""Elementary operation of each element-wise primitive."""


def plan_chain(chip: Chip, chain: Sequence[Equation], read_outside: set[int], share: float = 0.0) -> Plan:
    """One compute set for ``chain``; ``read_outside``: results that something after the chain needs; ``share``: part of
    its largest tensor on the fullest tile, where it works (0: spread evenly).
    """
    computed = {number for equation in chain for number in equation.outputs}
    largest = max((t for e in chain for t in e.results), key=lambda t: t.size)
    sources: dict[int, int] = {}
    broadcast_bytes = 0
    for equation in chain:
        for number, tensor in zip(equation.inputs, equation.operands, strict=True):
            if number is None or number in computed:
                continue
            if tensor.size * 2 <= largest.size:
                broadcast_bytes += tensor.nbytes if number not in sources else 0
                sources[number] = 0
            else:
                sources[number] = 1
    loads = sum(sources.values())
    stores = max(1, len(computed & read_outside))
    ops = tuple(OPS[e.primitive] for e in chain)
    # Values for each channel or row cost no work for each element.
    whole = [e for e in chain if _is_whole(e.results[0].size, largest.size)]
    kinds = [_kind(e, largest.size) for e in whole]
    widest = min(kinds, key=vertices.vector_width)
    grains = max(1, math.ceil(largest.nbytes / GRAIN_BYTES))
    tiles = min(chip.tiles, grains)
    elements = math.ceil(max(largest.size / tiles, largest.size * share))
    work = tuple((OPS[e.primitive], kind) for e, kind in zip(whole, kinds, strict=True))
    compute = vertices.chain_cycles(elements, widest, work, loads + stores - 1)
    moved = min(broadcast_bytes, elements * 4.0) if len(sources) else 0.0
    scalars = broadcast_bytes <= 8 and not moved > 8
    # A vertex of the library that runs by itself takes its vector in one piece.
    alone = "alone" in chain[0].params
    return Plan(
        "elementwise",
        compute=compute,
        exchange=0.0 if scalars else exchange_cycles(chip, moved),
        compute_sets=1,
        exchanges=0 if scalars else 1,
        flops=float(sum(e.results[0].size for e in chain)),
        temporary_bytes=moved,
        tiles=tiles,
        share=share,
        vertices=PASS_VERTICES if alone else CHAIN_VERTICES,
        fragments=0.0 if scalars else PASS_FRAGMENTS if alone else 3.0,
        detail="+".join(ops[:6]) + ("+..." if len(ops) > 6 else ""),
    )


def _is_whole(size: int, largest: int) -> bool:
    """Whether a tensor has an element for each element of the chain, or all of the chain's tensors are empty."""
    return size * 2 > largest or largest == 0


def _kind(equation: Equation, size: int) -> str:
    """The type that an equation works in: the widest of its operands and result, whose truth value may be narrow."""
    subjects = [t.dtype for t in (*equation.operands, *equation.results) if _is_whole(t.size, size)]
    return min(subjects, key=vertices.vector_width)


GRAIN = 8
"""Elements that stay together when a tensor is spread over tiles."""
PARTIAL_BYTES = 4.0
"""Bytes of a partial sum between tiles."""
LEAST_BYTES = 128
"""Least bytes that a tile holds of a tensor spread over tiles. Published: the library's linear mapper."""
MOST_OUTPUTS = 8
"""Most outputs that one tile joins while other tiles are free."""
DEPTH_HELD = 64.0
"""Most values of an output that a tile holds when other dimensions than the fastest are reduced. Assumed."""


def spread_over_tiles(chip: Chip, elements: float) -> tuple[int, int]:
    """Tiles used and elements on the fullest, for ``elements`` spread evenly in grains of eight."""
    tiles = max(1, min(chip.tiles, math.ceil(elements / GRAIN)))
    return tiles, math.ceil(elements / tiles)


@dataclass(frozen=True, slots=True)
class JoinedPartials:
    """The stages behind the first: cycles, and the bytes that the fullest tile receives."""

    compute: float = 0.0
    exchange: float = 0.0
    stages: int = 0
    received: float = 0.0


def _joins(chip: Chip, outputs: int, partials: int) -> Iterator[JoinedPartials]:
    """Ways to join so many partial results of each output: outputs per tile, and tiles that share an output."""
    for here in (1, 2, 4, MOST_OUTPUTS):
        groups = math.ceil(outputs / here)
        if groups > chip.tiles and here < MOST_OUTPUTS:
            continue
        if groups > chip.tiles:
            here = math.ceil(outputs / chip.tiles)
            groups = math.ceil(outputs / here)
        sharing = 1
        while sharing == 1 or (groups * sharing <= chip.tiles and sharing**2 <= 2 * partials):
            share = math.ceil(partials / sharing)
            first = here * share * PARTIAL_BYTES
            compute = vertices.reduce_cycles(here, share, "float32")
            exchange = exchange_cycles(chip, first, fragmented=share > 8)
            if sharing > 1:
                compute += vertices.reduce_cycles(here, sharing, "float32")
                exchange += exchange_cycles(chip, here * sharing * PARTIAL_BYTES, fragmented=sharing > 8)
            yield JoinedPartials(compute, exchange, 1 if sharing == 1 else 2, first)
            sharing *= 2


def join_partials(chip: Chip, outputs: int, partials: int) -> JoinedPartials:
    """The cheapest way to join ``partials`` partial results of each of ``outputs``, which lie on as many tiles."""
    if partials <= 1:
        return JoinedPartials()
    stage = launch_cycles(chip) + sync_cycles(chip)
    return min(
        _joins(chip, outputs, partials), key=lambda way: way.compute + way.exchange + way.stages * stage
    )


def plan_reduction(chip: Chip, equation: Equation, share: float = 0.0) -> Plan:
    """Reduce on each tile and join the partial results of several tiles; or, if the data are too small for that, bring
    all values of an output to one tile. ``share``: part of the source on its fullest tile (0: spread evenly).
    """
    source, result = equation.operands[0], equation.results[0]
    if source.size == 0 or result.size == 0:
        return Plan("reduction")
    depth = source.size / result.size
    fastest = len(source.shape) - 1 in equation.params.get("axes", ())
    plan = _where_it_lies(chip, source, result.size, depth, fastest, share)
    if source.size <= GRAIN * chip.tiles and (fastest or result.size < MOST_OUTPUTS):
        plan = min(plan, _brought(chip, source, result.size, depth), key=lambda way: way.cycles(chip))
    detail = f"{result.size} outputs of {depth:.0f}"
    return replace(plan, flops=float(source.size), vertices=0.8, detail=detail)


def _where_it_lies(
    chip: Chip, source: FlatTensor, outputs: int, depth: float, fastest: bool, share: float
) -> Plan:
    """Each tile reduces its part of the source; partial results are joined."""
    tiles, even = spread_over_tiles(chip, source.size)
    elements = max(even, math.ceil(source.size * share))
    outputs_here = max(1.0, min(outputs, elements / max(1.0, min(depth, elements))))
    if not fastest:
        outputs_here = min(float(outputs), max(outputs_here, elements / min(depth, DEPTH_HELD)))
    local_depth = max(1.0, elements / outputs_here)
    cycles = vertices.continuous_reduce_cycles if fastest else vertices.reduce_cycles
    partials = math.ceil(depth / local_depth)
    joined = join_partials(chip, outputs, partials)
    return Plan(
        "reduction",
        compute=cycles(outputs_here, local_depth, source.dtype) + joined.compute,
        exchange=joined.exchange,
        compute_sets=1 + joined.stages,
        exchanges=joined.stages,
        temporary_bytes=outputs_here * PARTIAL_BYTES + joined.received,
        tiles=tiles,
        fragments=6.0 * min(1, joined.stages),
    )


def _brought(chip: Chip, source: FlatTensor, outputs: int, depth: float) -> Plan:
    """All values of an output come to one tile, which reduces them at once; almost none of them lies there already."""
    tiles = min(chip.tiles, outputs)
    here = math.ceil(outputs / tiles)
    nbytes = here * depth * source.nbytes / source.size
    moved = 0.0 if nbytes <= LEAST_BYTES else nbytes
    return Plan(
        "reduction",
        compute=vertices.continuous_reduce_cycles(here, depth, source.dtype),
        exchange=exchange_cycles(chip, moved),
        compute_sets=1,
        exchanges=1 if moved else 0,
        temporary_bytes=moved,
        tiles=tiles,
        fragments=6.0 if moved else 0.0,
    )


def plan_arg_reduce(chip: Chip, equation: Equation, share: float = 0.0) -> Plan:
    """Arg-max and arg-min: a reduction that carries the index with the value, twice the cycles per element."""
    plan = plan_reduction(chip, equation, share)
    return replace(
        plan,
        compute=2.0 * plan.compute,
        exchange=2.0 * plan.exchange,
        temporary_bytes=2.0 * plan.temporary_bytes,
    )
