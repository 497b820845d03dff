"""The load of gc-flops and gc-powertest: matrix products on every tile, compared with results known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.executable import (
    Compute,
    Executable,
    LoadStream,
    Retrieval,
    StoreStream,
    Stream,
    StreamDirection,
    Sync,
    SyncScope,
    TensorSpec,
)
from podrun.monitor.tool_programs import Array, ToolWork, computation, one_ipu_replicas, tool_program
from podrun.monitor.tool_times import streamed_product_cycles

if TYPE_CHECKING:
    from podrun.costmodel.target import Chip
    from podrun.device.connection import Connection

BLOCK = 16
"""Channels in and out of the product: a weight block of the matrix unit (two of them for float32)."""
ROWS = 16
"""Rows of values on each tile."""
PASSES = 2049
"""Products in one launch. An odd number, so that the result is not what the values were. Assumed: with it the tile
model gives 99.9 % of the peak for FP32; the published sample is 99.96."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """One launch on all IPUs: floating point operations of each IPU, modelled seconds, seconds of this host's clock,
    and wrong values by IPU."""

    flops: float
    modelled_s: float
    emulation_s: float
    wrong: tuple[int, ...]


class ProductsRun:
    """Products on the IPUs that ``connection`` holds, ``ipus`` of them; ``dtype``: "float16" or "float32"."""

    def __init__(self, connection: Connection, chip: Chip, ipus: int, dtype: str, passes: int) -> None:
        from podrun.costmodel import amp
        from podrun.costmodel.exchange import sync_cycles

        self._connection = connection
        self.flops = 2.0 * chip.tiles * ROWS * BLOCK * BLOCK * passes
        blocks = BLOCK // amp.in_group(dtype)
        cycles = blocks * streamed_product_cycles(chip, dtype, ROWS * passes) + sync_cycles(chip)
        matrix = mixing_matrix()
        shape = (1, 1, ipus, chip.tiles * ROWS, BLOCK)
        values = np.random.default_rng(1).integers(-4, 5, shape).astype(dtype)
        self._inputs = {"x": values, "w": matrix.astype(dtype)[None, None]}
        # Sums of 16 products of small integers and quarters: exact in every type, in any order.
        exact = values.astype(np.float32) @ matrix.astype(np.float32) if passes % 2 else values
        self._expected: Array = exact.astype(dtype)[0, 0]
        seconds = cycles / chip.clock_hz
        connection.load(products(chip, ipus, dtype, chip.tiles, ROWS, passes, seconds))

    def run(self) -> LaunchResult:
        """Run one launch and compare its results."""
        result = self._connection.run(1, self._inputs)
        differ = result.anchors["y"] != self._expected
        return LaunchResult(
            self.flops,
            result.modelled_seconds,
            result.emulation_seconds,
            tuple(int(np.count_nonzero(of_one)) for of_one in differ),
        )


def mixing_matrix(seed: int = 0) -> Array:
    """A symmetric orthogonal matrix of quarters, ``w @ w = 1``: Hadamard's of order 16 with signs."""
    h = np.ones((1, 1))
    while len(h) < BLOCK:
        h = np.block([[h, h], [h, -h]])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], BLOCK)
    return np.asarray(signs[:, None] * h * signs[None, :] / 4.0)


def products(
    chip: Chip, ipus: int, dtype: str, tiles: int, rows: int, passes: int, seconds: float
) -> Executable:
    """On every tile of every IPU: ``passes`` products of ``rows`` x 16 values with a 16 x 16 matrix, each with the
    result of the one before. Stream ``x``: the values; ``w``: the matrix, the same for all; anchor ``y``: the result.
    """
    import jax

    layout, shape = one_ipu_replicas(ipus), (tiles * rows, BLOCK)
    replicas = layout.replicas_per_machine

    def launch(x: Any, w: Any) -> Any:
        flat = x.reshape(-1, BLOCK)
        return (jax.lax.fori_loop(0, passes, lambda _, y: y @ w[0], flat).reshape(x.shape),)

    piece = computation(
        "products",
        launch,
        {"in:x": ((1, replicas, *shape), dtype), "in:w": ((1, BLOCK, BLOCK), dtype)},
        ("out:y",),
    )
    steps = (
        Sync(SyncScope.HOST),
        LoadStream("x", "in:x", 0, 1),
        LoadStream("w", "in:w", 0, 1),
        Compute(piece.name),
        StoreStream("y", "out:y", 0, 1),
    )
    streams = {
        "x": Stream(TensorSpec("x", dtype, shape), StreamDirection.TO_DEVICE),
        "w": Stream(TensorSpec("w", dtype, (BLOCK, BLOCK)), StreamDirection.TO_DEVICE, broadcast=True),
        "y": Stream(TensorSpec("y", dtype, shape), StreamDirection.TO_HOST, retrieval=Retrieval.FINAL),
    }
    return tool_program("flops", chip, layout, ToolWork((steps,), [piece], streams), seconds)
