"""Who holds which IPUs of a machine, and what they bring to a load or a run: plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podrun.device.connection import AttachRequest, IpuRange
from podrun.device.engine import Engine
from podrun.device.meeting import Meeting
from podrun.device.streams import anchor_shape, anchors_of
from podrun.device.usage import Usage
from podrun.errors import ApplicationRuntimeError, PoplarError
from podrun.executable import Executable

HOST_SYNC_TIMEOUT = 300.0
"""Seconds; the SDK's default of the engine option target.hostSyncTimeout."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a machine stands in its partition.

    ``first_ipu``: partition index of its first IPU; ``ipus``: how many it has; ``endpoints``: of all machines
    of the partition, which all have that many.
    """

    partition: str
    machine: int
    first_ipu: int
    ipus: int
    endpoints: tuple[str, ...]

    @property
    def range(self) -> IpuRange:
        """Its IPUs."""
        return IpuRange(self.first_ipu, self.ipus)

    @property
    def endpoint(self) -> str:
        """Its own."""
        return self.endpoints[self.machine] if self.machine < len(self.endpoints) else "in process"


@dataclass(slots=True)
class Owner:
    """A host process that holds IPUs of this machine."""

    id: int
    request: AttachRequest
    ipus: IpuRange
    host: str
    started: float | None
    usage: Usage
    written: dict[str, bytes] = field(default_factory=dict)

    @property
    def who(self) -> str:
        """For messages."""
        return (
            f"process {self.request.pid} ({self.request.command or 'unknown command'}, user "
            f"{self.request.user})"
        )


@dataclass(slots=True)
class Job:
    """One program's place on this machine."""

    range: IpuRange
    ipus: IpuRange
    owners: dict[int, Owner] = field(default_factory=dict)
    engine: Engine | None = None
    failed: PoplarError | None = None
    timeout: float = HOST_SYNC_TIMEOUT
    loading: Meeting | None = None
    running: Meeting | None = None

    def missing(self, arrivals: Iterable[int]) -> list[int]:
        """IPUs of the job on this machine whose owners are not among ``arrivals``."""
        there = {ipu for owner in arrivals if owner in self.owners for ipu in self.owners[owner].ipus}
        return [ipu for ipu in self.ipus if ipu not in there]


@dataclass(frozen=True, slots=True)
class LoadCall:
    """What an owner brings to a load. ``digest`` names the program's bytes; ``timeout``: seconds."""

    digest: str
    executable: Callable[[], Executable]
    timeout: float


@dataclass(frozen=True, slots=True)
class RunCall:
    """What an owner brings to a run: see `podrun.device.streams.OwnerArrays`."""

    batches: int
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]


def check_agreement(owners: Sequence[Owner], runs: Sequence[RunCall]) -> None:
    """Owners of one machine run equally many batches and wrote equal values since the last run."""
    if len({run.batches for run in runs}) > 1:
        listed = ", ".join(f"{o.who}: {r.batches}" for o, r in zip(owners, runs, strict=True))
        raise ApplicationRuntimeError(
            f"the instances do not run the same number of batches: {listed}",
            hint="Call run with the same batches in every instance.",
        )
    for other in owners[1:]:
        if other.written != owners[0].written:
            names = sorted(
                name
                for name in other.written.keys() | owners[0].written.keys()
                if other.written.get(name) != owners[0].written.get(name)
            )
            raise ApplicationRuntimeError(
                f"{owners[0].who} and {other.who} wrote different values to: {', '.join(names[:10])}",
                hint="Write the same values in every instance (same initial weights, same random seed).",
            )


def check_outputs(executable: Executable, batches: int, replicas: int, outputs: Mapping[str, Any]) -> None:
    for name, stream in anchors_of(executable).items():
        shape = anchor_shape(executable, stream, batches, replicas)
        if name not in outputs or outputs[name].shape != shape:
            found = "missing" if name not in outputs else str(list(outputs[name].shape))
            raise ApplicationRuntimeError(
                f"the buffer for anchor {name!r} is {found}; {list(shape)} was expected"
            )
