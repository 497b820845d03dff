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
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from podrun.core.errors import InvalidOptionError
from podrun.costmodel.target import Chip

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
    """``a += k * b``, the optimizer's workhorse: 21 to start, two cycles per vector (one when
    interleaved)."""
    if elements <= 0:
        return 0.0
    return SUPERVISOR + WORKERS * (21.0 + 2.0 * per_worker_vectors(elements, dtype))


def fill_cycles(elements: float, dtype: str) -> float:
    """Fill or zero: 26 + n / v."""
    return SUPERVISOR + 26.0 + WORKERS * per_worker_vectors(elements, dtype)


def reduce_cycles(outputs: float, depth: float, dtype: str) -> float:
    """Strided reduce of ``depth`` values into each of ``outputs``: accumulators two cycles per vector and
    value."""
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
    """Pooling: 3 cycles per 64-bit vector and kernel position forward, 5 backward, + 20 per row of
    positions."""
    per = 5.0 if backward else 3.0
    return 60.0 + WORKERS * (30.0 + window * 20.0 + per_worker_vectors(outputs, dtype) * window * per)


def random_cycles(elements: float, dtype: str) -> float:
    """Random numbers from the tile's generator: 4 per vector + 24 per thread."""
    return SUPERVISOR + WORKERS * (24.0 + 4.0 * per_worker_vectors(elements, dtype))


def pool_rows_cycles(outputs: float, window: float, channels: float, dtype: str) -> float:
    """Pooling on one tile, row by row: 15 worker cycles per output, kernel position and vector of channels.

    Start-up of the call and its work lists takes 246 per worker. Derived: popnn's estimator (3 per vector +
    13 per row when a row is one vector) and three simulator points, which share slope and intercept.
    """
    vectors = math.ceil(channels / vector_width(dtype))
    return WORKERS * (246.0 + math.ceil(outputs / WORKERS) * window * vectors * 15.0)


def two_stage_reduce_cycles(outputs: float, depth: float, dtype: str) -> tuple[float, float]:
    """A reduction on one tile split over its workers, then the six partial results joined (popops'
    estimators)."""
    vectors = math.ceil(outputs / vector_width(dtype))
    share = math.ceil(depth / WORKERS)
    first = 33.0 + WORKERS * (20.0 + vectors * 2.0 * share)
    second = 33.0 + WORKERS * (20.0 + math.ceil(vectors / WORKERS) * (2.0 * WORKERS + 10.0))
    return first, second


def last_stage_cycles(outputs: float, partials: float, *, continuous: bool) -> float:
    """The last stage of a reduction: ``partials`` values into each of ``outputs`` on one tile (popops'
    estimators)."""
    if continuous:
        share = math.ceil(outputs / WORKERS)
        return WORKERS * (17.0 + share * (partials / 2.0 + 10.0))
    return 33.0 + WORKERS * (20.0 + outputs * (partials + 10.0))


def supervisor_loop_cycles(iterations: float) -> float:
    """A loop on a volatile counter in the supervisor: load, add, store, load, compare, taken branch, a slot
    of six cycles each, and half a cycle for the loop's own stalls; 255 around it with the timing block."""
    return 255.0 + 36.5 * iterations


LOAD_LATENCY = 6.0
"""Cycles of a load from a tile's own memory. Published: one round of the six threads."""
LOOP_SLOTS = 6.3
"""Issue slots of a compiled triad body. Derived: GC2 STREAM rows, one constant for three of them."""
COISSUE_EFFICIENCY = 0.991
"""What remains of the ports' rate after loop set-up in hand-written loops. Published: a STREAM triad
(SciCoLab/WaveEquation-IPU)."""
LIBRARY_TRIAD_SLOTS = 2.0 + 2.0
"""Issue slots of a triad per 64-bit vector where the library's own operations make it. They have no such operation: the
benchmark's program copies one operand to the result (a load and a store), and `scaled_add_cycles` adds the other in
place (a load of both and a store)."""
COMPILED_LOAD_SLOTS = 2.0
"""Slots of a compiled load loop per 64-bit load. Derived: plain loops reach about a quarter of the
ceiling."""


def bytes_per_cycle(chip: Chip, pattern: str, implementation: str, dtype: str) -> float:
    """Bytes moved per cycle and tile: three streams for ``stream_triad``, one for ``load_only``.

    Raises:
        InvalidOptionError: unknown pattern or implementation.
    """
    width = 8.0 / vector_width(dtype)
    compiled = implementation in ("naive_cpp", "optimised_cpp", "compiler_loop")
    if pattern == "load_only":
        taken = width if implementation == "naive_cpp" else 8.0
        return taken / COMPILED_LOAD_SLOTS if compiled else chip.load_bytes * COISSUE_EFFICIENCY
    if pattern == "stream_triad":
        if implementation == "naive_cpp":
            return 3.0 * width / LOOP_SLOTS
        if compiled:
            return 24.0 / LOOP_SLOTS
        if implementation == "vendor_assembly":
            return 24.0 / LIBRARY_TRIAD_SLOTS
        if implementation == "assembly_loop":
            # Load pair and store take a slot each when they are not combined in one instruction.
            return 24.0 / 2.0 * COISSUE_EFFICIENCY
        if implementation == "coissue_codelet":
            return (chip.load_bytes + chip.store_bytes) * COISSUE_EFFICIENCY
    raise InvalidOptionError(f"no bandwidth model for {pattern!r} written as {implementation!r}")


CONV_UNITS = 16


def _ceil(a: ArrayLike, b: ArrayLike) -> Cycles:
    return np.ceil(np.asarray(a, dtype=np.float64) / np.asarray(b, dtype=np.float64))


def in_group(input_type: str) -> int:
    """Input channels of one AMP weight block: pipeline depth 4 times the elements taken per cycle and
    unit."""
    return {"float32": 8, "float8": 32}.get(input_type, 16)


def _worker(rows: Cycles, input_type: str, units: int, zeroing: bool, half_partials: bool) -> Cycles:
    """Thread cycles of one worker for ``rows`` rows of one weight block."""
    clear: Cycles | float = 0.0
    if input_type == "float8":
        # Five cycles fewer where the first pass clears.
        short, per_row = tuple(17.0 + first - 5.0 * zeroing for first in (4.0, 18.0, 23.0, 27.0)), 4.0
    elif input_type == "float32":
        short, per_row = (24.0, 47.0, 46.0, 46.0), 8.0
        clear = 2.0 + (8.0 if units == CONV_UNITS else 4.0) * rows if zeroing else 0.0
    elif half_partials and units == 8:
        short, per_row = (24.0, 39.0, 40.0, 41.0), 4.0
        clear = 2.0 + 2.0 * rows if zeroing else 0.0
    else:
        # Weights stay in the unit between calls on this path: seven cycles saved.
        short, per_row = (14.0, 25.0, 34.0, 30.0), 4.0
        if not zeroing:
            short = (*short[:3], short[3] + 1.0)
    base = np.select([rows == 0, rows == 1, rows == 2], short[:3], short[3] + per_row * (rows - 3.0))
    return np.asarray(base + clear)


def _inner(rows: Cycles, input_type: str, units: int, zeroing: bool, half_partials: bool) -> Cycles:
    """All six workers over ``rows`` rows: the slowest, and not less than the launch stagger allows."""
    most = _worker(_ceil(rows, WORKERS), input_type, units, zeroing, half_partials)
    least = _worker(np.floor(rows / WORKERS), input_type, units, zeroing, half_partials)
    slowest, cheapest = np.maximum(most, least), np.minimum(most, least)
    return np.asarray(np.maximum(WORKERS * slowest, 14.0 + WORKERS * cheapest))


def matmul_cycles(
    rows: ArrayLike,
    in_channels: ArrayLike,
    out_channels: ArrayLike,
    *,
    input_type: str = "float16",
    partials_type: str = "float16",
    units: int = CONV_UNITS,
    load_bytes: int = 8,
    groups: ArrayLike = 1,
) -> Cycles:
    """One AMP 1x1 vertex: ``groups`` products of [rows, in_channels] with [in_channels, out_channels].

    ``units`` is the number of output channels side by side; a block of 16 output channels takes ``16 /
    units`` passes. ``load_bytes`` is how fast weights are loaded: 8 (64 bits) matches the published
    hardware points.
    Source: poplin's estimators of the 1x1 vertices, held against 77 hardware points.
    """
    rows = np.asarray(rows, dtype=np.float64)
    groups = np.asarray(groups, dtype=np.float64)
    half = partials_type == "float16" and input_type != "float32"
    blocks_in = _ceil(in_channels, in_group(input_type))
    blocks_out = _ceil(out_channels, units)
    load = units * 32.0 / load_bytes
    accumulate = _inner(rows, input_type, units, False, half)
    first = _inner(rows, input_type, units, True, half)
    if input_type == "float8":
        later_blocks = (blocks_in - 1.0) * (17.0 * WORKERS + 6.0 + load + accumulate)
        first_block = 6.0 * WORKERS + 10.0 + 20.0 * WORKERS + 11.0 + load + first
        group_cycles = 2.0 * WORKERS + 9.0 + blocks_out * (first_block + later_blocks)
        return np.asarray(46.0 + groups * group_cycles)
    later_blocks = (blocks_in - 1.0) * (15.0 + blocks_out * (19.0 + 6.0 + load + accumulate))
    first_block = 11.0 + blocks_out * (18.0 + 7.0 + load + first)
    launch = 50.0 + WORKERS * (7.0 + 3.0 * (blocks_in * groups - 1.0))
    return np.asarray(launch + groups * (13.0 + later_blocks + first_block))


def kernel_cycles(
    rows: ArrayLike,
    row_length: ArrayLike,
    in_channels: ArrayLike,
    out_channels: ArrayLike,
    kernel: ArrayLike,
    *,
    input_type: str = "float16",
    partials_type: str = "float16",
    units: int = CONV_UNITS,
    groups: ArrayLike = 1,
) -> Cycles:
    """One AMP vertex of a convolution with ``kernel`` positions: ``rows`` rows of ``row_length`` output
    pixels.

    Each weight block is used for all rows of one kernel position; workers take whole partitions (rows) in
    turn.
    Source: poplin's estimator of the Nx1 vertex.
    """
    rows = np.asarray(rows, dtype=np.float64)
    kernel = np.asarray(kernel, dtype=np.float64)
    groups = np.asarray(groups, dtype=np.float64)
    half = partials_type == "float16" and input_type != "float32"
    blocks_in = _ceil(in_channels, in_group(input_type))
    blocks_out = _ceil(out_channels, units)
    load = units * 32.0 / 8.0
    total = rows * np.asarray(row_length, dtype=np.float64)
    per_worker = _ceil(total, WORKERS)
    partitions = np.maximum(1.0, _ceil(rows, WORKERS))
    pixels = per_worker / partitions
    per_pixel, start = (8.0, 45.0) if input_type == "float32" else (4.0, 34.0)
    body = np.where(pixels < 3.0, start - 1.0, start + per_pixel * (pixels - 3.0)) - 9.0
    worker = 17.0 + (1.0 if half else 0.0) + partitions * (3.0 + body)
    inner = kernel * (load + 18.0 + WORKERS * worker)
    per_group = 16.0 + blocks_in * (14.0 + blocks_out * (14.0 + inner))
    clear = blocks_out * (17.0 + total * units * (2.0 if half else 4.0) / 8.0 / WORKERS * 6.0)
    return np.asarray(109.0 + WORKERS * 19.0 + groups * (per_group + clear))


def four_row_cycles(
    rows: float, row_length: float, in_channels: int, out_channels: int, kernel_h: int, kernel_w: int
) -> tuple[float, float]:
    """AMP vertex whose weight block holds four kernel rows of four channels, FP16, on one tile: (all,
    supervisor).

    One call for each block of four input channels, four kernel rows, one kernel column and eight output
    channels; ``rows`` output rows of ``row_length`` pixels are shared by the workers. Source: poplin's
    estimator of the Nx1 vertex and the loops of its code.
    """
    loops = _FourRowLoops.of(in_channels, out_channels, kernel_h, kernel_w)
    partitions = math.ceil(rows / WORKERS)
    body = 34.0 + 4.0 * max(0.0, row_length - 3.0) - 9.0
    worker = 18.0 + partitions * (3.0 + body)
    clear = loops.out_groups * rows * row_length * 2.0
    supervisor = loops.cycles + loops.calls * FOUR_ROW_CALL
    return supervisor + loops.calls * WORKERS * worker + clear, supervisor


@dataclass(frozen=True, slots=True)
class _FourRowLoops:
    """How often each loop of the Nx1 vertex's supervisor turns: groups of input and output channels, groups of kernel
    rows, kernel columns.
    """

    in_groups: int
    out_groups: int
    row_groups: int
    columns: int

    @classmethod
    def of(cls, in_channels: int, out_channels: int, kernel_h: int, kernel_w: int) -> _FourRowLoops:
        """The loops of a convolution."""
        return cls(math.ceil(in_channels / 4), math.ceil(out_channels / 8), math.ceil(kernel_h / 4), kernel_w)

    @property
    def turns(self) -> tuple[int, int, int, int]:
        """Turns of the loops over input groups, output groups, kernel rows and kernel columns."""
        outputs = self.in_groups * self.out_groups
        return self.in_groups, outputs, outputs * self.row_groups, self.calls

    @property
    def calls(self) -> int:
        """Launches of the workers on a weight block."""
        return self.in_groups * self.out_groups * self.row_groups * self.columns

    @property
    def cycles(self) -> float:
        """Cycles of the supervisor beside its calls: start, clearing of each output group, and loops."""
        clearing = self.out_groups * 17.0 + (self.out_groups - 1) * BRANCH_STALL + 2.0
        turning = sum(
            turns * loop_cycles for turns, loop_cycles in zip(self.turns, FOUR_ROW_LOOPS, strict=True)
        )
        return 109.0 + WORKERS * 18.0 + 16.0 + clearing + turning

    @property
    def stalls(self) -> float:
        """Those of its cycles in which the supervisor issues nothing, calls included."""
        waited = zip(self.turns, FOUR_ROW_LOOPS, FOUR_ROW_INSTRUCTIONS, strict=True)
        return sum(turns * (all_of - issued) for turns, all_of, issued in waited) + self.calls * CALL_STALL


def four_row_parts(
    rows: float, row_length: float, in_channels: int, out_channels: int, kernel_h: int, kernel_w: int
) -> dict[str, float]:
    """Cycles of the parts of a `four_row_cycles` trace: of one call, of the supervisor's instructions, stalls and
    syncs, of one worker.
    """
    loops = _FourRowLoops.of(in_channels, out_channels, kernel_h, kernel_w)
    inner = 34.0 + 4.0 * max(0.0, row_length - 3.0) - 9.0
    most, least = math.ceil(rows / WORKERS), math.floor(rows / WORKERS)
    clear = 17.0 + rows * row_length * 2.0 / WORKERS
    # One round of the six threads for each call, each clearing and the end.
    syncs = WORKERS * (loops.calls + loops.out_groups + 1.0)
    return {
        "amp_call": FOUR_ROW_CALL,
        "instructions": loops.cycles + loops.calls * FOUR_ROW_CALL - loops.stalls - syncs,
        "stalls": loops.stalls,
        "syncs": syncs,
        "amp_inner": inner,
        "partition_loop": most * (3.0 + inner),
        "zero_loop": clear,
        "busiest_worker": loops.calls * (18.0 + most * (3.0 + inner)) + loops.out_groups * clear,
        "other_workers": loops.calls * (18.0 + least * (3.0 + inner)) + loops.out_groups * clear,
    }


FOUR_ROW_CALL = 64.0 + 60.0 + WORKERS * 9.0
"""Supervisor cycles of one call: weights loaded 64 bits at a time, set-up, and the workers' launch."""
FOUR_ROW_LOOPS = (14.0, 14.0, 14.0, 17.0)
"""Cycles of one turn of the supervisor's loops over input groups, output groups, kernel rows and kernel columns, beside
what is inside. Source: the note on performance in the vertex's code
(graphcore/poplibs, lib/poplin/codelets/asm/conv_partial_nx1_supervisor.S)."""
FOUR_ROW_INSTRUCTIONS = (11.0, 11.0, 13.0, 6.0)
"""Instructions among them. Published: the breakdown of a trace (graphcore/poplibs, df1d490d); the others are stalls."""
BRANCH_STALL = 5.0
"""Cycles that the supervisor waits after a branch that is taken, a write to a register of the matrix unit, or a launch:
one instruction is in its six pipeline stages at a time."""
CALL_STALL = (3.0 + 4.0 + 1.0) * BRANCH_STALL
"""Stalls of a call: three branches (to the code for four rows, to the fragment, back), four addresses of weight rows,
one launch."""


def slic_cycles(rows: ArrayLike, row_length: ArrayLike, channels: ArrayLike, kernel: ArrayLike) -> Cycles:
    """SLIC vertex: FP16 convolutions of up to four channels per group, weights of 1x4 in the unit.

    Source: poplin's estimator of the SLIC vertex; two chains, so two passes per row.
    """
    rows = np.asarray(rows, dtype=np.float64)
    length = np.asarray(row_length, dtype=np.float64)
    sub_kernels = _ceil(kernel, 4) * _ceil(channels, 4)
    row = 15.0 + np.maximum(length - 5.0, 0.0)
    return np.asarray(28.0 + sub_kernels * (28.0 + 2.0 * WORKERS * row * _ceil(rows, WORKERS)))


JOIN_PARTIAL = 6.0
"""Cycles in which a dot product is added to its partial sum in memory. Derived: the blur as a library
convolution with a proportion that leaves the AMP no room (45 ms, and 137 to 160 ms, of 200 sweeps)."""


def mac_cycles(
    rows: ArrayLike, in_channels: ArrayLike, out_channels: ArrayLike, *, vector: int, kernel: ArrayLike = 1
) -> Cycles:
    """Horizontal MAC vertex: dot products on the vector unit (``vector`` elements per 64 bits), each added to
    the partial sum of its output. Source: 8.6.
    """
    rows = np.asarray(rows, dtype=np.float64)
    outs = np.asarray(out_channels, dtype=np.float64)
    dot = 7.0 + JOIN_PARTIAL + _ceil(in_channels, vector)
    kernel = np.asarray(kernel, dtype=np.float64)
    # Workers share rows; if there are too few rows, they share the outputs of each row.
    shared = np.where(
        rows >= WORKERS, _ceil(rows, WORKERS) * (7.0 + outs * dot), 7.0 + _ceil(rows * outs, WORKERS) * dot
    )
    return np.asarray(60.0 + WORKERS * (16.0 + kernel * (16.0 + shared)))
