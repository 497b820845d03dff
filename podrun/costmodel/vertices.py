"""Cycles of the library's vertices on one tile: matrix products (AMP, its kernel form, SLIC, MAC) and simpler ones.

The formulas restate the cycle estimators of graphcore/poplibs, as of August 2023: lib/poplin/PerformanceEstimation.hpp
(products), lib/popops/PerformanceEstimation.cpp (element-wise, cast, slice),
lib/popops/reduction/CycleEstimationFunctions.cpp, lib/popnn/popnnCycleEstimators.cpp (nonlinearities, pooling).
``elements`` is what one tile holds; all six workers share it. All take NumPy arrays or numbers and broadcast, so that a
planner prices thousands of splits at once. Cycles are tile cycles: a worker's own cycles times the number of workers
where all of them are busy.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Cycles = NDArray[np.float64]

WORKERS = 6
"""Worker threads of a tile, time-sliced round robin, on every chip (IPU Programmer's Guide)."""
SUPERVISOR = 12.0
"""Cycles of a supervisor call around a library 1-D operation: 11 to 13."""

VECTOR = {
    "float32": 2,
    "float16": 4,
    "bfloat16": 4,
    "int32": 2,
    "uint32": 2,
    "float8": 8,
    "int8": 8,
    "uint8": 8,
    "bool": 8,
}
"""Elements in 64 bits."""

OP_CYCLES: dict[str, tuple[float, float]] = {
    "relu": (1.0, 1.0),
    "add": (1.0, 1.0),
    "mul": (1.0, 1.0),
    "compare": (2.0, 2.0),
    "select": (4.0, 4.0),
    "div": (6.0, 4.0),
    "sqrt": (6.0, 4.0),
    "rsqrt": (5.0, 4.0),
    "exp": (4.0, 2.0),
    "log": (5.0, 4.0),
    "sigmoid": (5.0, 2.0),
    "tanh": (5.0, 1.0),
    "erf": (30.0, 15.0),
    "gelu": (10.0, 5.0),
    "swish": (6.0, 3.0),
    "nonlinear_grad": (3.0, 3.0),
    "gelu_grad": (10.0, 5.0),
    "dropout": (2.0, 2.0),
    "sin": (40.0, 40.0),
    "pow": (20.0, 20.0),
    "cast": (2.0, 2.0),
    "integer": (2.0, 2.0),
}
"""Arithmetic cycles per vector for (FP32, FP16). Source: popnn's estimators for the nonlinearities; the
rest assumed."""


REDUCE_CYCLES = 1.0
"""Cycles per vector that a strided reduce loads, co-issued with the addition."""


def vector_width(dtype: str) -> int:
    """Elements of ``dtype`` that one 64-bit access holds."""
    return VECTOR.get(dtype, 1)


def per_worker_vectors(elements: float, dtype: str) -> int:
    """64-bit vectors that the busiest worker handles of ``elements`` on the tile."""
    return math.ceil(math.ceil(elements / vector_width(dtype)) / WORKERS)


def op_cycles(op: str, dtype: str) -> float:
    """Arithmetic cycles per vector of one element-wise operation."""
    single, half = OP_CYCLES[op]
    return half if dtype in ("float16", "bfloat16") else single


def elementwise_cycles(elements: float, dtype: str, ops: tuple[str, ...], operands: int) -> float:
    """A fused chain of element-wise operations of one type over ``elements`` elements of a tile."""
    return chain_cycles(elements, dtype, tuple((op, dtype) for op in ops), operands)


def chain_cycles(elements: float, dtype: str, ops: tuple[tuple[str, str], ...], operands: int) -> float:
    """A fused chain over ``elements`` elements of a tile, each operation with the type it works in.

    Worker 27 to start, per vector of ``dtype`` one load per operand and a store (two cycles with address
    arithmetic) plus the arithmetic of each operation. Source: popops' estimators.
    """
    if elements <= 0:
        return 0.0
    wide = vector_width(dtype)
    arithmetic = sum(op_cycles(op, kind) * wide / vector_width(kind) for op, kind in ops)
    loop = arithmetic + 2.0 + max(0, operands - 2)
    return SUPERVISOR + WORKERS * (27.0 + per_worker_vectors(elements, dtype) * loop)


def scaled_add_cycles(elements: float, dtype: str) -> float:
    """``a += k * b``, the optimizer's workhorse: 21 to start, two cycles per vector (one when interleaved)."""
    if elements <= 0:
        return 0.0
    return SUPERVISOR + WORKERS * (21.0 + 2.0 * per_worker_vectors(elements, dtype))


def fill_cycles(elements: float, dtype: str) -> float:
    """Fill or zero: 26 + n / v."""
    return SUPERVISOR + 26.0 + WORKERS * per_worker_vectors(elements, dtype)


def reduce_cycles(outputs: float, depth: float, dtype: str) -> float:
    """Strided reduce of ``depth`` values into each of ``outputs``: accumulators two cycles per vector and value."""
    if outputs <= 0 or depth <= 0:
        return 0.0
    by_outputs = 33.0 + WORKERS * (20.0 + per_worker_vectors(outputs, dtype) * (REDUCE_CYCLES * depth + 9.0))
    if outputs / vector_width(dtype) >= WORKERS:
        return by_outputs
    # Too few outputs for six workers: they may split the depth, and a second pass joins the six.
    vectors, share = math.ceil(outputs / vector_width(dtype)), math.ceil(depth / WORKERS)
    by_depth = 33.0 + WORKERS * (32.0 + vectors * (REDUCE_CYCLES * share + 9.0) + vectors * 14.0)
    return min(by_outputs, by_depth)


def continuous_reduce_cycles(outputs: float, depth: float, dtype: str) -> float:
    """Reduce along the fastest dimension: outputs (depth / v + 12) + 17 per worker."""
    if outputs <= 0 or depth <= 0:
        return 0.0
    share = math.ceil(outputs / WORKERS)
    if outputs < WORKERS:
        depth, share = depth * outputs / WORKERS + WORKERS, 1
    return 33.0 + WORKERS * (17.0 + share * (depth / vector_width(dtype) + 12.0))


def multi_slice_cycles(
    slices: ArrayLike, row_elements: ArrayLike, dtype: str, *, in_range: ArrayLike = 1.0
) -> Cycles:
    """Gather rows by index: 19 + 2 per vector for an index in range, 8 otherwise, + 30 per worker."""
    vectors = np.ceil(np.asarray(row_elements, dtype=np.float64) / vector_width(dtype))
    share, inside = np.ceil(np.asarray(slices, dtype=np.float64) / WORKERS), np.asarray(in_range)
    slice_cycles = inside * (19.0 + 2.0 * vectors) + (1.0 - inside) * 8.0
    return np.asarray(25.0 + WORKERS * (30.0 + share * slice_cycles))


def multi_update_cycles(slices: ArrayLike, row_elements: ArrayLike, *, in_range: ArrayLike = 1.0) -> Cycles:
    """Scatter-add rows by index: 12 + 3 per atom for an index in range, 5 otherwise."""
    share = np.ceil(np.asarray(row_elements, dtype=np.float64) / WORKERS)
    slices, inside = np.asarray(slices, dtype=np.float64), np.asarray(in_range)
    slice_cycles = inside * (12.0 + 3.0 * share) + (1.0 - inside) * 5.0
    return np.asarray(25.0 + WORKERS * (30.0 + slices * slice_cycles))


def pool_cycles(outputs: float, window: float, dtype: str, *, backward: bool = False) -> float:
    """Pooling: 3 cycles per 64-bit vector and kernel position forward, 5 backward, + 20 per row of positions."""
    per = 5.0 if backward else 3.0
    return 60.0 + WORKERS * (30.0 + window * 20.0 + per_worker_vectors(outputs, dtype) * window * per)


def random_cycles(elements: float, dtype: str) -> float:
    """Random numbers from the tile's generator: 4 per vector + 24 per thread."""
    return SUPERVISOR + WORKERS * (24.0 + 4.0 * per_worker_vectors(elements, dtype))
