"""Cycles of the vertices that multiply: the AMP, SLIC and MAC kernels of products and convolutions."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from podrun.costmodel.vertices import WORKERS, Cycles

CONV_UNITS = 16


def _ceil(a: ArrayLike, b: ArrayLike) -> Cycles:
    return np.ceil(np.asarray(a, dtype=np.float64) / np.asarray(b, dtype=np.float64))


def in_group(input_type: str) -> int:
    """Input channels of one AMP weight block: pipeline depth 4 times the elements taken per cycle and unit."""
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

    ``units`` is the number of output channels side by side; a block of 16 output channels takes ``16 / units`` passes.
    ``load_bytes`` is how fast weights are loaded: 8 (64 bits) matches the published hardware points. Source: poplin's
    estimators of the 1x1 vertices, held against 77 hardware points.
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
    """One AMP vertex of a convolution with ``kernel`` positions: ``rows`` rows of ``row_length`` output pixels.

    Each weight block is used for all rows of one kernel position; workers take whole partitions (rows) in turn. Source:
    poplin's estimator of the Nx1 vertex.
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
