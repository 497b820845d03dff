"""How fast a loop streams through a tile's memory, by how it is written.

A compiled loop body of a triad takes about six issue slots (two loads, multiply-add, store, address and
branch); it handles one element when naive and one 64-bit vector when written for it. A hand-written loop is
bound by the ports.
"""

from __future__ import annotations

from podrun.device.target import Chip
from podrun.device.tiles.vertices import vector_width
from podrun.errors import InvalidOptionError

LOAD_LATENCY = 6.0
"""Cycles of a load from a tile's own memory. Published: one round of the six threads."""
LOOP_SLOTS = 6.3
"""Issue slots of a compiled triad body. Derived: GC2 STREAM rows, one constant for three of them."""
COISSUE_EFFICIENCY = 0.991
"""What remains of the ports' rate after loop set-up in hand-written loops. Published: a STREAM triad
(SciCoLab/WaveEquation-IPU)."""
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
        if implementation in ("vendor_assembly", "assembly_loop"):
            # Load pair and store take a slot each when they are not combined in one instruction.
            return 24.0 / 2.0 * COISSUE_EFFICIENCY
        if implementation == "coissue_codelet":
            return (chip.load_bytes + chip.store_bytes) * COISSUE_EFFICIENCY
    raise InvalidOptionError(f"no bandwidth model for {pattern!r} written as {implementation!r}")
