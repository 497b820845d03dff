"""Who holds which IPUs of a machine, and what they bring to a load or a run: plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podrun.device.connection import AttachRequest, IpuRange
from podrun.device.meeting import Meeting
from podrun.device.program.engine import Engine
from podrun.device.program.streams import anchor_shape, anchors_of
from podrun.device.trouble import span
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

    def meeting_address(self, first: int, machines: int) -> str | None:
        """Where machines ``first`` and following meet this one, if they listen on several hosts' addresses; None if
        all are on this host."""
        hosts = [endpoint.rpartition(":")[0] for endpoint in self.endpoints[first : first + machines]]
        return self.endpoint.rpartition(":")[0] if len(set(hosts)) > 1 else None


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

    def is_of(self, owner: Owner) -> bool:
        """True iff one owner holds the whole job, on all machines: nobody can differ from it."""
        return owner.request.owned == self.range

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
    """What an owner brings to a run: see `podrun.device.program.streams.OwnerArrays`."""

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
    """Raises ApplicationRuntimeError if there is no array of the right shape for some anchor."""
    for name, stream in anchors_of(executable).items():
        shape = anchor_shape(executable, stream, batches, replicas)
        if name not in outputs or outputs[name].shape != shape:
            found = "missing" if name not in outputs else str(list(outputs[name].shape))
            raise ApplicationRuntimeError(
                f"the buffer for anchor {name!r} is {found}; {list(shape)} was expected"
            )


def owned_part(place: Place, request: AttachRequest) -> IpuRange:
    """The owned IPUs that lie on a machine. Raises ApplicationRuntimeError for ranges that cannot be right."""
    mine, job, owned = place.range, request.job, request.owned
    first, stop = max(owned.first, mine.first), min(owned.stop, mine.stop)
    total = place.ipus * max(len(place.endpoints), 1)
    if not (0 <= job.first <= owned.first < owned.stop <= job.stop <= total) or first >= stop:
        raise ApplicationRuntimeError(
            f"machine {place.machine} (IPUs {mine.first}-{mine.stop - 1}) cannot attach IPUs "
            f"{owned.first}-"
            f"{owned.stop - 1} of a job on IPUs {job.first}-{job.stop - 1}"
        )
    inside = job.first // place.ipus == (job.stop - 1) // place.ipus
    if not inside and (job.first % place.ipus or job.count % place.ipus):
        raise ApplicationRuntimeError(
            f"a job on IPUs {job.first}-{job.stop - 1} neither fits in one machine nor fills machines of "
            f"{place.ipus} IPUs"
        )
    return IpuRange(first, stop - first)


def machines_of(place: Place, job: IpuRange) -> tuple[int, int]:
    """The first machine of a job and how many it has."""
    first, last = job.first // place.ipus, (job.stop - 1) // place.ipus
    return first, last - first + 1


def part_of(place: Place, job: IpuRange) -> IpuRange:
    """The IPUs of a job that lie on a machine."""
    first, stop = max(job.first, place.first_ipu), min(job.stop, place.range.stop)
    return IpuRange(first, stop - first)


def check_fit(executable: Executable, job: Job, machines: int) -> None:
    """Raises ApplicationRuntimeError if a program is not for the IPUs of a job, or an owner holds parts of replicas."""
    layout = executable.layout
    if layout.machines != machines or layout.ipus != job.range.count:
        raise ApplicationRuntimeError(
            f"the program covers {layout.ipus} IPUs on {layout.machines} machine(s), but its "
            "device is IPUs "
            f"{job.range.first}-{job.range.stop - 1} on {machines} machine(s)"
        )
    for owner in job.owners.values():
        owned = owner.request.owned
        if (owned.first - job.range.first) % layout.ipus_per_replica or owned.count % layout.ipus_per_replica:
            raise ApplicationRuntimeError(
                f"{owner.who} holds {span(owned)}, which are not whole replicas of "
                f"{layout.ipus_per_replica} IPUs"
            )


def replicas_of(executable: Executable, owner: Owner, job: Job) -> tuple[int, int]:
    """The machine-local replicas of an owner: first and count. A machine has one if replicas span machines."""
    each = executable.layout.ipus_per_replica
    if executable.layout.machines_per_replica > 1:
        return 0, 1
    return (owner.ipus.first - job.ipus.first) // each, owner.ipus.count // each


def who_is_missing(job: Job, meeting: Meeting, doing: str) -> str:
    """In words: owners that did not come to a meeting, and IPUs that nobody holds."""
    late = [o for o in job.owners.values() if o.id not in meeting.arrivals]
    names = [f"{o.who} with {span(o.ipus)} did not {doing}" for o in late]
    nobody = [ipu for ipu in job.missing(meeting.arrivals) if all(ipu not in o.ipus for o in late)]
    if nobody:
        names.append(f"no process attached {span(nobody)}")
    return "; ".join(names)
