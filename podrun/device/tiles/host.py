"""What the host adds: synchronous stream copies, program calls, prefetch.

A synchronous copy waits for the host, moves its bytes and waits for the host's release; the waits are far
longer than the transfer of a small tensor. Streams that are prefetched or overlapped with compute hide all
but the transfer.
"""

from __future__ import annotations

from podrun.device.target import Chip

WAIT_SECONDS = 61e-6
"""Waiting for the host before a synchronous copy. Derived: 77 to 88 k cycles at 1.33 GHz, median 81 k."""
RELEASE_SECONDS = 62.5e-6
"""Host acknowledges after the copy. Derived: 80 to 84 k cycles at 1.33 GHz."""
TRANSFER_CYCLES = 1500.0
"""Set-up of one transfer. Published: 1.5 k cycles for one word."""
STREAM_BYTES_PER_SECOND = 8.0e9
"""Host link per machine in use. Published: the SDK's IPU model, 40 MB in 5.01 ms."""
PCIE_BYTES_PER_SECOND = 20e9
"""Host link of one IPU when a program reads its data at once. Derived: the matrix-vector tutorial on
hardware moves 40 MB in 2.64 M cycles of 1.33 GHz; PCIe 4 x16 peaks at 32e9.
"""
CALL_SECONDS = 0.8e-3
"""Fixed cost of one session call seen from the host. Published: two notebooks with a trivial model."""
REMOTE_ROUNDS = 5
"""Gateway rounds per micro-batch of a program with remote variables: data in, weights in twice, state in
and out.
Assumed."""


def stream_copy(chip: Chip, nbytes: float) -> dict[str, float]:
    """Cycles of a synchronous host copy: ``begin`` (wait), ``mid`` (transfer), ``end`` (release)."""
    return {
        "begin": WAIT_SECONDS * chip.clock_hz,
        "mid": TRANSFER_CYCLES + nbytes / STREAM_BYTES_PER_SECOND * chip.clock_hz,
        "end": RELEASE_SECONDS * chip.clock_hz,
    }


def session_call_seconds(chip: Chip, rounds: int = 0, nbytes: float = 0.0) -> float:
    """One session call: its fixed cost and ``rounds`` host rounds that nothing hides."""
    each = sum(stream_copy(chip, 0.0).values()) / chip.clock_hz
    return CALL_SECONDS + rounds * each + nbytes / STREAM_BYTES_PER_SECOND
