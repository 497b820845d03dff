"""Host processes that hold IPUs of a machine, and their calls to load and run their job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Generic, TypeVar, cast

from podrun.core.error_codec import copy_error
from podrun.core.errors import ApplicationRuntimeError, PoplarError
from podrun.core.executable import Array, Executable
from podrun.core.layout import IpuRange
from podrun.core.quick_dataclass import dataclass
from podrun.device.activity import BatchActivity, TrafficCounters, Usage
from podrun.device.connection import AttachRequest
from podrun.device.health import Health

Call = TypeVar("Call", "LoadCall", "RunCall")
Result = TypeVar("Result")

HOST_SYNC_TIMEOUT = 300.0
"""Seconds; the SDK's default of the engine option target.hostSyncTimeout."""


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
        """The owner in words, for error messages."""
        return f"process {self.request.pid} ({self.request.command or 'unknown command'}, user {self.request.user})"

    @property
    def instance(self) -> int:
        """The index of the owner's instance in its program: all instances hold equally many IPUs."""
        return (self.request.owned.first - self.request.job.first) // self.request.owned.count


@dataclass(frozen=True, slots=True)
class MachineMoment:
    """What a report needs of a machine at ``now`` (its clock), by IPU of the partition: who holds it, batches done,
    counters, and the activity of a batch of the program that is loaded (absent without a program or its model)."""

    health: Health
    owners: Mapping[int, Owner]
    batches: Mapping[int, int]
    traffic: Mapping[int, TrafficCounters]
    activity: Mapping[int, BatchActivity]
    now: float


@dataclass(slots=True)
class OwnerRendezvous(Generic[Call, Result]):
    """One load or one run of a job on one machine: when all owners have arrived, the last one does the work, and all
    get its result.

    ``arrivals``: each owner's call, by owner id. Guarded by the machine's lock.
    """

    arrivals: dict[int, Call] = field(default_factory=dict)
    started: bool = False
    done: bool = False
    result: Result | None = None
    error: PoplarError | None = None

    def fail(self, error: PoplarError) -> None:
        """End the rendezvous with an error for all owners. The first error stands."""
        if not self.done:
            self.error = self.error or error
            self.done = True

    def succeed(self, result: Result | None) -> None:
        """End the rendezvous with a result for all owners."""
        self.result, self.done = result, True

    def outcome(self) -> Result:
        """What the last owner's work gave. Raises a copy of the error, if the work or an owner failed."""
        if self.error is not None:
            raise copy_error(self.error)  # each thread that raises it needs a traceback of its own
        return cast("Result", self.result)


@dataclass(frozen=True, slots=True)
class LoadCall:
    """An owner's call of load. ``digest``: of the program's bytes. ``timeout``: seconds."""

    digest: str
    executable: Callable[[], Executable]
    timeout: float


@dataclass(frozen=True, slots=True)
class RunCall:
    """An owner's call of run: arrays as in `podrun.device.program.streams.OwnerArrays`.

    ``checked``: a run with these very arrays has succeeded since the program was loaded.
    """

    batches: int
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    checked: bool = False


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
