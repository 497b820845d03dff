"""What a monitor sees of a POD at one moment: machines with their IPUs, jobs, the queue, problems.

`look_at_pod` asks a partition service once; `PodSighting.plain` and `sighting_from_plain` are the JSON form, which
recordings hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any

from podrun.core.cluster import ipu_number
from podrun.core.errors import ConfigError
from podrun.core.quick_dataclass import dataclass
from podrun.monitor.devices import Device, View
from podrun.monitor.pod_health import HealthProblem, Severity, problems_of
from podrun.partition.state.values import IpuofConfig

if TYPE_CHECKING:
    from podrun.core.telemetry import IpuReport, MachineReport
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import PartitionInfo, QueueInfo


RECENT_FAULTS = 10


@dataclass(frozen=True, slots=True)
class IpuSight:
    """One IPU. ``number``: its IPU# on the machine; ``busy_percent``: of the last second; None: unknown."""

    partition_ipu: int
    number: int
    error: str
    busy_percent: float | None
    session_percent: float | None
    clock_mhz: float | None
    power_w: float | None
    batches: int
    process: str
    links_down: tuple[int, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    """What it does, in percent of the last second: see `IpuReport.shares`."""
    die_c: float | None = None
    tile_bytes: int | None = None
    tile_capacity_bytes: int | None = None
    parity_errors: int | None = None
    link_errors: int | None = None
    link_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MachineSight:
    """One IPU-M2000 in one partition, or on standby (no partition). ``age_s``: of what is known, if it is silent."""

    agent: str
    partition: str
    state: str
    health: str
    power_w: float | None
    batches: int
    samples: int | None
    modelled_s: float | None
    emulation_s: float | None
    age_s: float | None
    ipus: tuple[IpuSight, ...]
    board_c: float | None = None
    faults: tuple[str, ...] = ()
    """The last faults that struck it, oldest first."""


@dataclass(frozen=True, slots=True)
class JobSight:
    """A partition with the processes that hold its IPUs. ``since_s``: seconds since 1970, when it was created."""

    partition: str
    state: str
    ipus: int
    owner: str
    since_s: float
    processes: tuple[str, ...]
    batches: int


@dataclass(frozen=True, slots=True)
class WaitSight:
    """A request that waits for IPUs, and for whom."""

    name: str
    size: int
    owner: str
    since_s: float
    position: int
    blockers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PodSighting:
    """All that was seen at ``time_s`` (seconds since 1970)."""

    time_s: float
    server: str
    machines: tuple[MachineSight, ...]
    jobs: tuple[JobSight, ...]
    waiting: tuple[WaitSight, ...]
    problems: tuple[HealthProblem, ...]

    def plain(self) -> dict[str, Any]:
        """What was seen, as values of JSON."""
        return asdict(self)


def look_at_pod(client: VipuClient, now: float) -> PodSighting:
    """Ask a service once. Machines that do not answer are there with what they said last. Raises PodrunError."""
    partitions, agents = client.list_partitions(), client.list_agents()
    reports = client.machine_reports()
    by_partition = {info.name: tuple(r for r in reports if r.partition == info.name) for info in partitions}
    views = [_view_of(info, by_partition[info.name]) for info in partitions]
    health = {agent.agent_id: agent.health for agent in agents}
    return PodSighting(
        now,
        f"{client.host}:{client.port}",
        tuple(_machine(report, health.get(report.agent_id, "up")) for report in reports),
        tuple(_job(info, by_partition[info.name]) for info in partitions),
        tuple(_waiting(request) for request in client.list_queue()),
        problems_of(views, agents, now),
    )


def _view_of(info: PartitionInfo, reports: tuple[MachineReport, ...]) -> View:
    devices = tuple(
        Device(ipu.partition_ipu, report.agent_id, ipu_number(ipu.ipu), report, ipu)
        for report in reports
        for ipu in report.ipus
    )
    return View(info, IpuofConfig(info.name, info.state, (), {}), reports, devices, active=False)


def _machine(report: MachineReport, health: str) -> MachineSight:
    return MachineSight(
        report.agent_id,
        report.partition,
        report.state,
        health,
        report.board_power_w,
        report.batches_done,
        report.samples_done,
        report.modelled_s,
        report.emulation_s,
        report.stale_seconds,
        tuple(_ipu(ipu) for ipu in report.ipus),
        report.board_temperature_c,
        tuple(strike.fault.text for strike in report.struck_faults[-RECENT_FAULTS:]),
    )


def _ipu(ipu: IpuReport) -> IpuSight:
    process = ipu.process
    return IpuSight(
        ipu.partition_ipu,
        ipu_number(ipu.ipu),
        ipu.error_state if ipu.has_error else "",
        ipu.utilisation_percent,
        ipu.utilisation_session_percent,
        ipu.clock_mhz,
        ipu.power_w,
        ipu.batches_done,
        "" if process is None else f"{process.pid} {process.command} ({process.user})",
        ipu.links_down,
        ipu.shares,
        ipu.die_temperature_c,
        ipu.tile_bytes,
        ipu.tile_capacity_bytes,
        ipu.parity_errors,
        ipu.link_correctable_errors,
        ipu.link_bytes,
        ipu.host_bytes,
    )


def _job(info: PartitionInfo, reports: Sequence[MachineReport]) -> JobSight:
    held = {
        f"{ipu.process.pid} {ipu.process.command} ({ipu.process.user})"
        for report in reports
        for ipu in report.ipus
        if ipu.process is not None
    }
    batches = max((report.batches_done for report in reports), default=0)
    return JobSight(
        info.name, info.state.name, info.size, info.owner, info.created, tuple(sorted(held)), batches
    )


def _waiting(request: QueueInfo) -> WaitSight:
    return WaitSight(
        request.name, request.size, request.owner, request.since, request.position, request.blockers
    )


def sighting_from_plain(plain: Mapping[str, Any]) -> PodSighting:
    """The sighting that `PodSighting.plain` described. Raises ConfigError if the data are none."""
    try:
        return PodSighting(
            float(plain["time_s"]),
            str(plain["server"]),
            tuple(_machine_from(machine) for machine in plain["machines"]),
            tuple(JobSight(**{**job, "processes": tuple(job["processes"])}) for job in plain["jobs"]),
            tuple(WaitSight(**{**one, "blockers": tuple(one["blockers"])}) for one in plain["waiting"]),
            tuple(_problem_from(problem) for problem in plain["problems"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"this is no sighting of a POD: {error}", hint="Recordings are written by: podrun record FILE"
        ) from error


def _machine_from(plain: Mapping[str, Any]) -> MachineSight:
    ipus = tuple(_ipu_from(ipu) for ipu in plain["ipus"])
    return MachineSight(**{**plain, "ipus": ipus, "faults": tuple(plain.get("faults", ()))})


def _ipu_from(plain: Mapping[str, Any]) -> IpuSight:
    return IpuSight(**{**plain, "links_down": tuple(plain["links_down"])})


def _problem_from(plain: Mapping[str, Any]) -> HealthProblem:
    return HealthProblem(
        **{
            **plain,
            "severity": Severity(plain["severity"]),
            "ipus": tuple(plain["ipus"]),
            "hit": tuple(plain["hit"]),
        }
    )
