"""Where a machine stands in its partition, and what it shares with its jobs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import field

from podrun.core.errors import ApplicationRuntimeError, PoplarError
from podrun.core.layout import IpuRange
from podrun.core.quick_dataclass import dataclass
from podrun.device.activity import TrafficCounters
from podrun.device.connection import AttachRequest
from podrun.device.health import Health, WorkDone
from podrun.device.program.fabric import Fabric, OfferBook
from podrun.device.xla.pieces import PieceCache
from podrun.faults import FaultPoint, FaultSpec


@dataclass(frozen=True, slots=True)
class MachinePlace:
    """Where a machine stands in its partition.

    ``first_ipu``: partition index of its first IPU. ``ipus``: IPUs of each machine of the partition. ``endpoints``: of
    all machines of the partition.
    """

    partition: str
    machine: int
    first_ipu: int
    ipus: int
    endpoints: tuple[str, ...]

    @property
    def range(self) -> IpuRange:
        """The machine's IPUs."""
        return IpuRange(self.first_ipu, self.ipus)

    @property
    def endpoint(self) -> str:
        """The machine's endpoint."""
        return self.endpoints[self.machine] if self.machine < len(self.endpoints) else "in process"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the partition's machines, each once, in the order of machines."""
        return tuple(dict.fromkeys(endpoint.rpartition(":")[0] for endpoint in self.endpoints))

    @property
    def leads_host(self) -> int | None:
        """The index of this machine's host among them, if it is the first machine there."""
        here = self.endpoint.rpartition(":")[0]
        first = next(
            (k for k, endpoint in enumerate(self.endpoints) if endpoint.rpartition(":")[0] == here), None
        )
        return self.hosts.index(here) if first == self.machine else None

    def rendezvous_address(self, first: int, machines: int) -> str | None:
        """The address at which ``machines`` machines from ``first`` on reach this one; None if all are on this host."""
        hosts = [endpoint.rpartition(":")[0] for endpoint in self.endpoints[first : first + machines]]
        return self.endpoint.rpartition(":")[0] if len(set(hosts)) > 1 else None


@dataclass(slots=True)
class MachineContext:
    """What a machine gives each of its jobs: its place, fabric, compiled pieces, clock and counters. ``changed`` is the
    lock for all that changes, here and in jobs.

    ``clock``: wall time in seconds, for reports. ``grace``: see `Machine`. ``cores`` to choose from, and whether the
    process is ``shared``: see `podrun.device.program.machine_groups`. ``batches``: done, by IPU, and their ``traffic``.
    ``work``: done in training (True) and inference.
    """

    place: MachinePlace
    fabric: Fabric
    pieces: PieceCache
    agent: str
    claim: Callable[[FaultSpec], bool]
    on_lost: Callable[[], None] | None
    on_host_lost: Callable[[], None] | None
    clock: Callable[[], float]
    grace: float
    cores: list[int]
    shared: bool
    sleep: Callable[[float], None]
    changed: threading.Condition = field(default_factory=threading.Condition)
    offers: OfferBook = field(default_factory=OfferBook)
    health: Health = field(init=False)
    faults: FaultPoint = field(init=False)
    batches: dict[int, int] = field(init=False)
    traffic: dict[int, TrafficCounters] = field(init=False)
    work: dict[bool, WorkDone] = field(init=False)
    lost: PoplarError | None = None
    silent_until: float = -math.inf
    """When the machine answers the partition service again, on ``clock``."""

    def __post_init__(self) -> None:
        self.begin_ipus(self.place)
        self.begin_work(self.place)

    def begin_ipus(self, place: MachinePlace) -> None:
        """IPUs of which nothing is known yet."""
        self.health = Health(place.range, place.partition, self.agent)
        self.batches = dict.fromkeys(place.range, 0)
        self.traffic = {ipu: TrafficCounters() for ipu in place.range}

    def begin_work(self, place: MachinePlace) -> None:
        """Without work and faults of earlier partitions."""
        self.faults = FaultPoint(place.range, place.machine, self.claim, self.clock, place.leads_host)
        self.work = {True: WorkDone(), False: WorkDone()}


def owned_part(place: MachinePlace, request: AttachRequest) -> IpuRange:
    """The owned IPUs on a machine. Raises ApplicationRuntimeError for invalid ranges."""
    mine, job, owned = place.range, request.job, request.owned
    here = owned.overlap(mine)
    total = place.ipus * max(len(place.endpoints), 1)
    if not (0 <= job.first <= owned.first < owned.stop <= job.stop <= total) or not here.count:
        raise ApplicationRuntimeError(
            f"machine {place.machine} (IPUs {mine.first}-{mine.stop - 1}) cannot attach IPUs "
            f"{owned.first}-{owned.stop - 1} of a job on IPUs {job.first}-{job.stop - 1}"
        )
    if len(job.machines(place.ipus)) > 1 and (job.first % place.ipus or job.count % place.ipus):
        raise ApplicationRuntimeError(
            f"a job on IPUs {job.first}-{job.stop - 1} neither fits in one machine nor fills machines of "
            f"{place.ipus} IPUs"
        )
    return here


def machines_of(place: MachinePlace, job: IpuRange) -> tuple[int, int]:
    """The first machine of a job and its number of machines."""
    machines = job.machines(place.ipus)
    return machines.start, len(machines)


def part_of(place: MachinePlace, job: IpuRange) -> IpuRange:
    """The IPUs of a job that lie on a machine."""
    return job.overlap(place.range)
