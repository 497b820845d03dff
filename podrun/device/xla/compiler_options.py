"""The options with which XLA compiles a piece.

XLA passes every fusion of a piece through MLIR, which is most of the time that a piece of a few operations takes to
compile. The code that XLA makes of fusions without MLIR runs as long and has the same bits, but in three cases, in
which pieces go through MLIR:

- Bodies of loops, such as the steps of an LSTM, run twice as long without.
- Operators on halves would be computed by steps that are each rounded to half, `log1p` with errors of 1.8 units in the
  last place in place of 0.5.
- Cubic roots and tangents have ten times and twice the error.

The options depend on the operations of a piece alone, not on its size: what is divided over more machines has the same
bits. docs/benchmarks.md has times of both for pieces of many kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podrun.device.xla.custom_calls import operations_inside

if TYPE_CHECKING:
    from podrun.private_apis.mlir_types import MlirModule, MlirOperation

COMPILER_OPTIONS: dict[str, bool | int] = {
    "xla_cpu_multi_thread_eigen": False,
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_enable_fast_math": False,
}
"""Passed to XLA for every piece; part of the cache key. Without excess precision halves are rounded between operators,
as tiles do. The last three are XLA's own values: ``jax_disable_most_optimizations`` or ``XLA_FLAGS`` may say others.
"""
WITHOUT_MLIR: Mapping[str, bool | int] = {"xla_cpu_use_fusion_emitters": False}
_THROUGH_MLIR = frozenset({"stablehlo.while", "stablehlo.cbrt", "stablehlo.tan", "chlo.tan"})
_EXACT = frozenset({"f32", "f64"})
"""Floating point that every operator rounds once without MLIR too."""


def options_for(module: MlirModule) -> dict[str, bool | int]:
    """XLA's options by name for the piece ``module``, as it is after it was rewritten and before it is compiled."""
    seen: dict[Any, bool] = {}
    for op, _ in operations_inside(module.operation):
        if op.name in _THROUGH_MLIR or _has_halves(op, seen):
            return dict(COMPILER_OPTIONS)
    return {**COMPILER_OPTIONS, **WITHOUT_MLIR}


def _has_halves(op: MlirOperation, seen: dict[Any, bool]) -> bool:
    """Whether an operation has a result of fewer than 32 bits of floating point. ``seen``: the answer for types."""
    for result in op.results:
        kind = result.type
        if kind not in seen:
            element = str(getattr(kind, "element_type", kind))
            seen[kind] = element.startswith(("f", "bf")) and element not in _EXACT
        if seen[kind]:
            return True
    return False
