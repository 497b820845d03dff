"""An upper bound of the floating point operations of a piece, from its StableHLO alone.

XLA counts operations in a translation of the whole module, which takes as long as lowering a small piece did. Whether a
piece is large asks for less: of most, no sum of generous bounds comes near the number from which on two threads share a
piece (`podrun.device.xla.clients.needs_two_threads`). XLA counts only for those whose bound does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from podrun.private_apis.jax_exports import convolution_axes

if TYPE_CHECKING:
    from podrun.private_apis.mlir_types import MlirModule, MlirOperation, MlirRegion, MlirType

PER_ELEMENT = 8
"""Operations of XLA for each element of the operands and results of one operation of StableHLO, at most."""
PER_ELEMENT_OF_CHLO = 1024
"""The same for operations that are formulas of others, such as the logarithm of the gamma function."""
_PRODUCT = "stablehlo.dot_general"
_CONVOLUTION = "stablehlo.convolution"
_WINDOWED = frozenset({"stablehlo.reduce_window", "stablehlo.select_and_scatter"})
_CALLS = frozenset({"func.call", "call"})
_RETURNS = frozenset({"func.return", "return"})
_FEW = 16
"""Operations inside another one at most, such as those of a reduction to the greatest, that are each done for every
element."""
_UNBOUNDED = frozenset(
    {
        "stablehlo.case",
        "stablehlo.cholesky",
        "stablehlo.fft",
        "stablehlo.if",
        "stablehlo.map",
        "stablehlo.sort",
        "stablehlo.triangular_solve",
        "stablehlo.while",
    }
)


def most_operations(module: MlirModule) -> float:
    """A number that XLA's count of a module's floating point operations does not exceed.

    It is infinite for modules with loops and other operations whose types do not tell their work. Source: XLA's
    ``HloCostAnalysis`` counts two for each product of a matrix product or convolution, and one for each element of most
    other operations.
    """
    functions = {
        op.operation.attributes["sym_name"].value: op.operation
        for block in module.operation.regions[0]
        for op in block
    }
    return _in_function("main", functions, {}, {})


def _in_function(
    name: str, functions: Mapping[str, MlirOperation], known: dict[str, float], sizes: dict[MlirType, int]
) -> float:
    if name not in functions:
        return math.inf
    if name not in known:
        known[name] = math.inf  # of a function that calls itself
        total = 0.0
        for block in functions[name].regions[0]:
            for op in block:
                total += _in_operation(op.operation, functions, known, sizes)
                if total == math.inf:
                    return total
        known[name] = total
    return known[name]


def _in_operation(
    op: MlirOperation,
    functions: Mapping[str, MlirOperation],
    known: dict[str, float],
    sizes: dict[MlirType, int],
) -> float:
    if op.name in _CALLS:
        return _in_function(op.attributes["callee"].value, functions, known, sizes)
    if op.name in _RETURNS:
        return 0.0
    inside = sum(_operations_in(region) for region in op.regions)
    if op.name in _UNBOUNDED or inside > _FEW:
        return math.inf
    operands = [_elements(operand.type, sizes) for operand in op.operands]
    results = [_elements(result.type, sizes) for result in op.results]
    if op.name == _PRODUCT:
        # With b products of m x k and k x n numbers, the root is m * k * n times the root of b * b * b.
        return 2.0 * math.sqrt(float(operands[0]) * operands[1] * results[0])
    if op.name == _CONVOLUTION:
        _, of_weights, _ = convolution_axes(op.attributes["dimension_numbers"])
        return 2.0 * results[0] * operands[1] / op.operands[1].type.shape[of_weights[-1]]
    weight = max(inside, PER_ELEMENT if op.name.startswith("stablehlo.") else PER_ELEMENT_OF_CHLO)
    if op.name in _WINDOWED:
        weight *= math.prod(int(size) for size in op.attributes["window_dimensions"])
    return float(weight * (sum(operands) + sum(results)))


def _operations_in(region: MlirRegion) -> int:
    """Operations of a region; more than `_FEW` if some have or call others."""
    inner = [op.operation for block in region for op in block]
    return _FEW + 1 if any(len(op.regions) or op.name in _CALLS for op in inner) else len(inner)


def _elements(kind: MlirType, sizes: dict[MlirType, int]) -> int:
    """Elements of a tensor type, 1 for what is no tensor. ``sizes``: those of the types before."""
    size = sizes.get(kind)
    if size is None:
        size = sizes[kind] = math.prod(getattr(kind, "shape", ()))
    return size
