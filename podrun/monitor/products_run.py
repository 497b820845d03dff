"""The load of gc-flops and gc-powertest: products on every tile, whose results are known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from podrun.monitor.tool_programs import BLOCK, Array, mixing_matrix, products
from podrun.monitor.tool_times import streamed_product_cycles

if TYPE_CHECKING:
    from podrun.device.connection import Connection
    from podrun.device.target import Chip

ROWS = 16
"""Rows of values on each tile."""
PASSES = 2049
"""Products in one launch. An odd number, so that the result is not what the values were. Assumed: with it the tile
model gives 99.9 % of the peak for FP32; the published sample is 99.96."""


@dataclass(frozen=True, slots=True)
class Round:
    """One launch on all IPUs: each IPU's floating point operations, modelled seconds, seconds of this host's clock, and
    wrong values by IPU.
    """

    flops: float
    modelled_s: float
    emulation_s: float
    wrong: tuple[int, ...]


class ProductsRun:
    """Products on the ``ipus`` IPUs that ``connection`` holds; ``dtype``: "float16" or "float32"."""

    def __init__(self, connection: Connection, chip: Chip, ipus: int, dtype: str, passes: int) -> None:
        from podrun.device.tiles import amp
        from podrun.device.tiles.exchange import sync_cycles

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

    def run(self) -> Round:
        """One launch, compared."""
        result = self._connection.run(1, self._inputs)
        differ = result.anchors["y"] != self._expected
        return Round(
            self.flops,
            result.modelled_seconds,
            result.emulation_seconds,
            tuple(int(np.count_nonzero(of_one)) for of_one in differ),
        )
