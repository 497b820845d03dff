"""What a host process sees of the IPUs it holds: the IPUoF interface, the same in process and over gRPC.

A *job* is one program on a contiguous range of a partition's IPUs. One or more host processes (instances)
take part in a job; each owns a contiguous sub-range of its IPUs. Calls on a Connection concern the IPUs this
process owns.

Array layout. For each input stream: ``[batches, accumulation_factor, local_replicas, *shape]`` (no replica
axis if the stream is broadcast). For each anchor, by retrieval: ALL the same; EVERY_N ``[ticks,
local_replicas, *shape]`` with ``ticks = batches * accumulation_factor // period``; FINAL and SUM
``[local_replicas, *shape]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from podrun.executable import Executable


@dataclass(frozen=True, slots=True)
class IpuRange:
    """IPUs ``[first, first + count)`` of a partition."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        """One past the last IPU."""
        return self.first + self.count

    def __iter__(self) -> Any:
        return iter(range(self.first, self.stop))


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """Who attaches to what: the job's whole range, the part this process owns, and who it is (for
    gc-monitor).
    """

    job: IpuRange
    owned: IpuRange
    pid: int
    user: str
    command: str


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run gave: anchors by name, batches done since load, modelled seconds, and emulation seconds
    apart.
    """

    anchors: Mapping[str, np.ndarray]
    batches_done: int
    modelled_seconds: float
    emulation_seconds: float
    details: Mapping[str, Any] = field(default_factory=dict)


class Connection(Protocol):
    """A host process's hold on its IPUs.

    Every call raises `podrun.errors.PoplarError` (or a subclass, by class of error) for what the system
    reports, within a deadline; no call waits for ever.
    """

    @property
    def total_ipus(self) -> int:
        """IPUs of the partition behind this connection."""

    def try_attach(self, request: AttachRequest) -> str | None:
        """Take the IPUs. None when done; otherwise why not (who holds them), at once: no waiting."""

    def load(self, executable: Executable) -> None:
        """Put the program on the IPUs (an IPU reset: tile memory is lost). All owners of a job load the same
        one.
        """

    def write_variables(self, values: Mapping[str, np.ndarray]) -> None:
        """Write weights, optimizer state, scalars or the seed. Owners of one job must write equal values."""

    def read_variables(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Copies of variables as they stand after the last run."""

    def run(self, batches: int, inputs: Mapping[str, np.ndarray]) -> RunResult:
        """Run ``batches`` batches; returns when they are done on all machines of the job that this process
        owns.
        """

    def detach(self) -> None:
        """Let the IPUs go. Idempotent."""

    def close(self) -> None:
        """Detach and end the connection. Idempotent."""
