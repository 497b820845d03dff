"""The IPUoF interface: how a host process uses the IPUs it holds.

A *job* is one program on a contiguous range of a partition's IPUs. One or more host processes (instances) take part
in a job; each owns a contiguous sub-range of its IPUs. Calls on a Connection concern the IPUs this process owns.
`podrun.device.host.connecting.connect` gives the same interface over gRPC and for in-process machines.

Array layout. For each input stream: ``[batches, accumulation_factor, local_replicas, *shape]`` (no replica
axis if the stream is broadcast). For each anchor, by retrieval: ALL the same; EVERY_N ``[ticks,
local_replicas, *shape]`` with ``ticks = batches * accumulation_factor // period``; FINAL and SUM
``[local_replicas, *shape]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, Protocol

import numpy as np

from podrun.core.errors import PodrunError
from podrun.core.executable import Executable
from podrun.core.layout import IpuRange
from podrun.core.quick_dataclass import dataclass

MOST_IN_FLIGHT = 64
"""Runs that may be in flight on a connection."""


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """The job's whole range, the part this process owns, and the process itself (for gc-monitor). ``launch``: the
    ``podrun`` launch that the process belongs to; empty: none.
    """

    job: IpuRange
    owned: IpuRange
    pid: int
    user: str
    command: str
    launch: str = ""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of a run besides its anchors. ``modelled_seconds``: of the batches on IPUs (NaN: not modelled).
    ``seconds``: wall time on this machine.
    """

    batches_done: int
    modelled_seconds: float
    seconds: float


class Refusal(str):
    """Why a process cannot attach, in words. ``broken``: the error of what is broken, if that is why."""

    __slots__ = ("broken",)
    broken: PodrunError | None

    def __new__(cls, words: str, broken: PodrunError | None = None) -> Refusal:
        refusal = super().__new__(cls, words)
        refusal.broken = broken
        return refusal


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run: anchors by name, batches done since load, modelled seconds, and wall time that the emulation
    took.
    """

    anchors: Mapping[str, np.ndarray]
    batches_done: int
    modelled_seconds: float
    emulation_seconds: float
    details: Mapping[str, Any] = field(default_factory=dict)


class RunInFlight(Protocol):
    """A run that was started."""

    @property
    def done(self) -> bool:
        """True iff the result, or the error, is known."""

    def wait(self) -> RunResult:
        """The result, when the run is done. Raises as `Connection.run` does; may be called more than once."""


class Connection(Protocol):
    """A host process's hold on its IPUs.

    Every call raises `podrun.core.errors.PoplarError` (or a subclass, by class of error) for what the system
    reports, within a deadline; no call waits for ever.
    """

    @property
    def total_ipus(self) -> int:
        """IPUs of the partition behind this connection."""

    def try_attach(self, request: AttachRequest) -> Refusal | None:
        """Take the IPUs. Returns at once: None on success, otherwise the reason for the refusal (who holds them)."""

    @property
    def holds_ipus(self) -> bool:
        """True iff this process is attached. An `IpusTakenError` of any call ends that."""

    def load(self, executable: Executable) -> None:
        """Put the program on the IPUs (an IPU reset: tile memory is lost). All owners of a job load the same one."""

    def write_variables(self, values: Mapping[str, np.ndarray]) -> None:
        """Write weights, optimizer state, scalars or the seed. Owners of one job must write equal values."""

    def read_variables(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Copies of variables as they stand after the last run."""

    def read_digests(self) -> list[tuple[int, int]]:
        """For each IPU of the job on the machines of this process: its index in the partition, and a 64-bit digest of
        the weights and optimizer state on it.
        """

    def run(
        self,
        batches: int,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray] | None = None,
    ) -> RunResult:
        """Run ``batches`` batches; returns when they are done on all machines of the job that this process owns.

        ``outputs``: arrays for anchors, of their shapes and dtypes, which the run fills and which the result has for
        these anchors. A run that fails may have written to some of them. For other anchors the result has new arrays.
        """

    def start(
        self,
        batches: int,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray] | None = None,
        *,
        depth: int = 2,
    ) -> RunInFlight:
        """Start a run as `run` does, and return before it is done; runs are done in the order in which they start.

        ``depth``: a power of two; runs that are in flight, this one included. Where there are as many already, this
        waits for the oldest. Arrays must not change before the run is done. Other calls wait for all runs in flight.
        On IPUs of several machines a run starts when the one before it is done.
        One thread starts runs, any may wait for them.
        """

    def detach(self) -> None:
        """Release the IPUs. Idempotent. Runs in flight end with an error."""

    def close(self) -> None:
        """Detach and end the connection. Idempotent."""
