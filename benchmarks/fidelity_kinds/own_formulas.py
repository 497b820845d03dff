"""Formulas that only published measurements need: kernels and copies that no program of a user becomes in podrun."""

from __future__ import annotations

import math

from fidelity_kinds.benchmark_only import benchmark_only
from podrun.core.errors import InvalidOptionError
from podrun.costmodel import exchange
from podrun.costmodel.exchange import PHASE_CYCLES
from podrun.costmodel.target import Chip
from podrun.costmodel.vertices import SUPERVISOR, WORKERS, per_worker_vectors, vector_width

HALO_FRAGMENTS = 1.2
"""Schedule length over word bound of a halo swap with rows and columns. Derived: 1.17 to 1.3."""


PHASES = {"implicit": 1, "two_wave_copies": 2, "grouped_directions": 4, "many_tensors": 1}
"""Exchange phases that a halo swap becomes, by how its copies are written."""


CALL_SECONDS = 0.8e-3
"""Fixed cost of one session call seen from the host. Published: two notebooks with a trivial model."""


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


LOADED_LATENCY = 0.24
"""Growth of tile-to-tile latency under full load. Published for GC2."""


COUNTER_READ = 14.0
"""Cycles between two counter reads beside the barrier itself. Derived: mean gap 90 against a barrier of 76."""


ARRANGE_PER_BYTE = 2.1
"""Cycles per byte of element-wise rearrangement on a tile. Derived: GC2 stencil's pre- and post-arrange phases."""


PCIE_BYTES_PER_SECOND = 20e9
"""Host link of one IPU when a program reads its data at once. Derived: the matrix-vector tutorial on hardware moves
40 MB in 2.64 M cycles of 1.33 GHz; PCIe 4 x16 peaks at 32e9."""


REMOTE_ROUNDS = 5
"""Gateway rounds per micro-batch of a program with remote variables: data in, weights in twice, state in and out.
Assumed."""


def stream_copy(chip: Chip, nbytes: float) -> dict[str, float]:
    """Cycles of each part of a synchronous host copy: ``begin`` (wait), ``mid`` (transfer), ``end`` (release). Programs
    of users wait, transfer and release as long (`podrun.costmodel.batch`, `podrun.compiler.timeline`)."""
    return {
        "begin": exchange.WAIT_SECONDS * chip.clock_hz,
        "mid": exchange.transfer_seconds(chip, nbytes) * chip.clock_hz,
        "end": exchange.RELEASE_SECONDS * chip.clock_hz,
    }


@benchmark_only
def halo_cycles(chip: Chip, height: int, width: int, item: int, implementation: str = "implicit") -> float:
    """Receive a rim of one element from all eight neighbours of a ``height`` x ``width`` block."""
    rim = (2 * (height + width) + 4) * item
    phases = PHASES.get(implementation, 1)
    return phases * PHASE_CYCLES + math.ceil(rim / chip.exchange_bytes) * HALO_FRAGMENTS


@benchmark_only
def session_call_seconds(chip: Chip, rounds: int = 0, nbytes: float = 0.0) -> float:
    """Seconds of one session call: its fixed cost and ``rounds`` host rounds that nothing hides."""
    round_seconds = sum(stream_copy(chip, 0.0).values()) / chip.clock_hz
    return CALL_SECONDS + rounds * round_seconds + nbytes / exchange.STREAM_BYTES_PER_SECOND


@benchmark_only
def pool_rows_cycles(outputs: float, window: float, channels: float, dtype: str) -> float:
    """Pooling on one tile, row by row: 15 worker cycles per output, kernel position and vector of channels.

    Start-up of the call and its work lists takes 246 per worker. Derived: popnn's estimator (3 per vector +
    13 per row when a row is one vector) and three simulator points, which share slope and intercept.
    """
    vectors = math.ceil(channels / vector_width(dtype))
    return WORKERS * (246.0 + math.ceil(outputs / WORKERS) * window * vectors * 15.0)


@benchmark_only
def two_stage_reduce_cycles(outputs: float, depth: float, dtype: str) -> tuple[float, float]:
    """A reduction on one tile split over its workers, then the six partial results joined (popops'
    estimators)."""
    vectors = math.ceil(outputs / vector_width(dtype))
    share = math.ceil(depth / WORKERS)
    first = 33.0 + WORKERS * (20.0 + vectors * 2.0 * share)
    second = 33.0 + WORKERS * (20.0 + math.ceil(vectors / WORKERS) * (2.0 * WORKERS + 10.0))
    return first, second


@benchmark_only
def last_stage_cycles(outputs: float, partials: float, *, continuous: bool) -> float:
    """The last stage of a reduction: ``partials`` values into each of ``outputs`` on one tile (popops'
    estimators)."""
    if continuous:
        share = math.ceil(outputs / WORKERS)
        return WORKERS * (17.0 + share * (partials / 2.0 + 10.0))
    return 33.0 + WORKERS * (20.0 + outputs * (partials + 10.0))


@benchmark_only
def supervisor_loop_cycles(iterations: float) -> float:
    """A loop on a volatile counter in the supervisor: load, add, store, load, compare, taken branch, a slot
    of six cycles each, and half a cycle for the loop's own stalls; 255 around it with the timing block."""
    return 255.0 + 36.5 * iterations


@benchmark_only
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


@benchmark_only
def dot_cycles(elements: float, dtype: str) -> float:
    """A dot product on one tile: two loads and a multiply-add per vector, then the workers' sums joined."""
    return SUPERVISOR + WORKERS * (30.0 + 2.0 * per_worker_vectors(elements, dtype))


@benchmark_only
def compiled_loop_cycles(elements: float) -> float:
    """A compiled loop over elements on one tile, which takes its issue slots for every element."""
    return SUPERVISOR + WORKERS * (27.0 + LOOP_SLOTS * math.ceil(elements / WORKERS))


@benchmark_only
def householder_cycles(elements: float, dtype: str) -> float:
    """A Householder step on one tile: a product with the matrix and an update, a vector at a time."""
    return SUPERVISOR + WORKERS * (27.0 + 4.0 * per_worker_vectors(elements, dtype))


@benchmark_only
def load_latency_cycles() -> float:
    """A load from a tile's own memory on which the next instruction waits."""
    return LOAD_LATENCY
