"""Planner for element-wise equations: chains of them run as one compute set over all tiles.

Which elementary operation each primitive costs stands in `OPS`. A chain loads what it does not itself make,
does its arithmetic and stores what others read. Operands that are broadcast over the chain's shape arrive
by exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from podrun.device.target import Chip
from podrun.device.tiles import vertices
from podrun.device.tiles.exchange import exchange_cycles
from podrun.device.tiles.flatten import Equation
from podrun.device.tiles.plan import Plan

GRAIN_BYTES = 16
"""Smallest piece of a tensor that is given a tile of its own by the linear mapper (grain of 8 halves)."""

CHAIN_VERTICES = 0.6
"""State of a chain's vertex on a tile in units of a product's: pointers only. Derived: vertex state of
BERT's layers and of ResNet-50 on GC2, operator by operator.
"""

PASS_VERTICES = 0.3
"""The same of a vertex that adds or multiplies by a vector: two pointers and a length. Derived: vertex state of
the layer normalisations of BERT, less that of their sums."""

PASS_FRAGMENTS = 1.25
"""Exchange fragments of the vector on a tile: one run of words, seldom two. Derived: exchange code of the same."""

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
    made = {number for equation in chain for number in equation.outputs}
    largest = max((t for e in chain for t in e.results), key=lambda t: t.size)
    sources: dict[int, int] = {}
    broadcast_bytes = 0
    for equation in chain:
        for number, tensor in zip(equation.inputs, equation.operands, strict=True):
            if number is None or number in made:
                continue
            if tensor.size * 2 <= largest.size:
                broadcast_bytes += tensor.nbytes if number not in sources else 0
                sources[number] = 0
            else:
                sources[number] = 1
    loads = sum(sources.values())
    stores = max(1, len(made & read_outside))
    ops = tuple(OPS[e.primitive] for e in chain)
    # What is made for each channel or row is no work for each element.
    each = [e for e in chain if e.results[0].size * 2 > largest.size]
    kinds = [_kind(e, largest.size) for e in each]
    widest = min(kinds, key=vertices.vector_width)
    grains = max(1, math.ceil(largest.nbytes / GRAIN_BYTES))
    tiles = min(chip.tiles, grains)
    elements = math.ceil(max(largest.size / tiles, largest.size * share))
    work = tuple((OPS[e.primitive], kind) for e, kind in zip(each, kinds, strict=True))
    compute = vertices.chain_cycles(elements, widest, work, loads + stores - 1)
    moved = min(broadcast_bytes, elements * 4.0) if len(sources) else 0.0
    scalars = broadcast_bytes <= 8 and not moved > 8
    # A vertex of the library by itself takes its vector in one piece.
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


def _kind(equation: Equation, size: int) -> str:
    """The type that an equation works in: the widest of its operands and result, whose truth value may be narrow."""
    subjects = [t.dtype for t in (*equation.operands, *equation.results) if t.size * 2 > size]
    return min(subjects, key=vertices.vector_width)
