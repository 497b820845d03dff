"""The IPUoF interface: how a host process uses the IPUs it holds, and how it connects to them.

A *job* is one program on a contiguous range of a partition's IPUs. One or more host processes (instances) take part
in a job; each owns a contiguous sub-range of its IPUs. Calls on a Connection concern the IPUs this process owns.
`connect` gives the same interface over gRPC and for in-process machines.

Array layout. For each input stream: ``[batches, accumulation_factor, local_replicas, *shape]`` (no replica
axis if the stream is broadcast). For each anchor, by retrieval: ALL the same; EVERY_N ``[ticks,
local_replicas, *shape]`` with ``ticks = batches * accumulation_factor // period``; FINAL and SUM
``[local_replicas, *shape]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from podrun.core.access import quiet_grpc
from podrun.core.environment import (
    IPUOF_CONFIG_PATH,
    IPUOF_VIPU_API_HOST,
    IPUOF_VIPU_API_PARTITION_ID,
    PODRUN_OFFLINE_MODE,
)
from podrun.core.errors import UsageError
from podrun.core.executable import Executable
from podrun.core.layout import IpuRange

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

    def try_attach(self, request: AttachRequest) -> str | None:
        """Take the IPUs. Returns at once: None on success, otherwise the reason for the refusal (who holds them)."""

    @property
    def holds_ipus(self) -> bool:
        """True iff this process is attached. An `IpusTakenError` of any call ends that."""

    def load(self, executable: Executable) -> None:
        """Put the program on the IPUs (an IPU reset: tile memory is lost). All owners of a job load the same
        one.
        """

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


def config_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The IPUoF configuration files that describe IPUs when no partition service is named: that of
    ``IPUOF_CONFIG_PATH``, else all of ``~/.ipuof.conf.d``; empty if there are none. Files of that folder whose
    partition is gone are passed over, which is said in one line.
    """
    if environ.get(IPUOF_VIPU_API_HOST) and environ.get(IPUOF_VIPU_API_PARTITION_ID):
        return ()
    if named := environ.get(IPUOF_CONFIG_PATH):
        return (Path(named),)
    home = environ.get("HOME")
    there = sorted(Path(home, ".ipuof.conf.d").glob("*.conf")) if home else []
    if not there:
        return ()
    quiet_grpc()
    from podrun.device.host.stale_files import still_described

    return still_described(there, environ)


def connect(environ: Mapping[str, str], *, standalone_ipus: int | None = None) -> Connection:
    """A connection to the partition that ``environ`` or an IPUoF configuration file names (`config_files`), else to
    ``standalone_ipus`` IPUs inside this process.

    ``IPUOF_VIPU_API_HOST`` and ``IPUOF_VIPU_API_PARTITION_ID`` name a partition; ``_PORT`` (8090), ``_GCD_ID`` (0)
    and ``_TIMEOUT`` (120, seconds) are optional. If the partition is being created or reset, this waits at most the
    timeout. Nothing is attached yet.

    Raises ServiceError if the partition service or the partition does not answer, NotFoundError for a
    partition that does not exist, UsageError if the program was launched without IPUs (podrun
    --offline-mode).
    """
    if environ.get(PODRUN_OFFLINE_MODE) == "1":
        raise UsageError(
            "this program was launched without IPUs (podrun --offline-mode), but it attaches to IPUs",
            hint="Launch it without --offline-mode, or let it use an offline device.",
        )
    if environ.get(IPUOF_VIPU_API_HOST) and environ.get(IPUOF_VIPU_API_PARTITION_ID):
        quiet_grpc()
        from podrun.device.host.partition_config import connect_partition

        return connect_partition(environ)
    if config_files(environ):
        quiet_grpc()
        from podrun.device.host.partition_config import connect_files

        return connect_files(environ)
    from podrun.device.host.client import connect_in_process

    return connect_in_process(environ, standalone_ipus)
