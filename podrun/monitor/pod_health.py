"""What is broken in a POD: each problem with its place, since when, who is hit, and what to type.

`examine_pod` asks a partition service; `problems_of` is pure. A *broken* thing stops work that uses it; one that needs
*attention* works, or is out of service because somebody wanted that. ``health.schema.json`` in this folder describes
the JSON form.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from podrun.core.ipu_states import IpuErrorState
from podrun.core.quick_dataclass import dataclass
from podrun.monitor.devices import Device, View, diagnose_device, views_of
from podrun.partition.state.values import PartitionState

if TYPE_CHECKING:
    from podrun.core.fault_spec import Struck
    from podrun.core.telemetry import ControlEvent, MachineReport
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import AgentInfo

THROTTLED_BELOW = 0.99
"""Share of the fastest IPU's clock in the same partition below which an IPU counts as throttled."""


class Severity(enum.StrEnum):
    """How bad a problem is."""

    BROKEN = "broken"
    ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class HealthProblem:
    """One thing that is wrong.

    ``ipus``: indices in the partition; empty: the whole machine or partition. ``since_s``: seconds since 1970, or None
    if nobody noted it. ``hit``: processes that hold IPUs of the partition, as ``PID COMMAND (USER)``. ``remedy``:
    what to type.
    """

    severity: Severity
    what: str
    partition: str
    agent: str
    ipus: tuple[int, ...]
    since_s: float | None
    hit: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True)
class PodHealth:
    """All problems, the worst first, and what was looked at. ``server``: ``host:port`` of the partition service."""

    server: str
    agents: int
    partitions: int
    ipus_in_partitions: int
    ipus_free: int
    requests_waiting: int
    problems: tuple[HealthProblem, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is broken."""
        return not any(problem.severity is Severity.BROKEN for problem in self.problems)

    def plain(self) -> dict[str, Any]:
        """The health as values of JSON."""
        return asdict(self) | {"healthy": self.healthy}


def examine_pod(client: VipuClient, now: float) -> PodHealth:
    """Ask a service about its agents and partitions. Raises PodrunError if it does not answer."""
    partitions = client.list_partitions()
    agents = client.list_agents()
    service = client.service_metrics()
    views = views_of(client, partitions)
    return PodHealth(
        server=f"{client.host}:{client.port}",
        agents=len(agents),
        partitions=len(partitions),
        ipus_in_partitions=sum(info.size for info in partitions),
        ipus_free=service.free_ipus,
        requests_waiting=service.queued,
        problems=problems_of(views, agents, now),
    )


def problems_of(views: Sequence[View], agents: Sequence[AgentInfo], now: float) -> tuple[HealthProblem, ...]:
    """The problems of partitions and agents at ``now`` (seconds since 1970), broken ones first."""
    problems = [problem for view in views for problem in _of_view(view, now)]
    told = {problem.agent for problem in problems}
    problems += [
        problem for agent in agents if agent.agent_id not in told for problem in _of_agent(agent, now)
    ]
    return tuple(sorted(problems, key=lambda problem: problem.severity is not Severity.BROKEN))


def _of_view(view: View, now: float) -> Iterator[HealthProblem]:
    hit = _processes(view)
    name = view.info.name
    by_remedy: dict[tuple[str, str, str], list[Device]] = {}
    for device in view.devices:
        diagnosis = diagnose_device(name, device)
        if diagnosis is not None and device.ipu.error_state is not IpuErrorState.NOT_READY:
            key = (device.machine.agent_id, diagnosis.state, _remedy_of_all(device, diagnosis.remedy))
            by_remedy.setdefault(key, []).append(device)
    for (agent, state, remedy), devices in by_remedy.items():
        machine = devices[0].machine
        whole = machine.state.is_silent
        ipus = () if whole else tuple(sorted(device.ipu.partition_ipu for device in devices))
        yield HealthProblem(
            Severity.BROKEN, state, name, agent, ipus, _machine_since(machine, now), hit, remedy
        )
    if not by_remedy and view.info.state is PartitionState.ERROR:
        what = f"partition in ERROR: {view.info.error}" if view.info.error else "partition in ERROR"
        since = _last_time(event for report in view.reports for event in report.control_events)
        yield HealthProblem(Severity.BROKEN, what, name, "", (), since, hit, f"vipu reset partition {name}")
    yield from _throttled(view, hit)


def _remedy_of_all(device: Device, remedy: str) -> str:
    """The remedy for all IPUs of a machine with one error: a reset that names a device names each of them."""
    return remedy if f"gc-reset -d {device.id}" not in remedy else "IPU_RESET: gc-reset"


def _throttled(view: View, hit: tuple[str, ...]) -> Iterator[HealthProblem]:
    clocks = [(device, device.ipu.clock_mhz) for device in view.devices if device.ipu.clock_mhz is not None]
    full = max((clock for _, clock in clocks), default=0.0)
    slow: dict[tuple[str, float], list[Device]] = {}
    for device, clock in clocks:
        if clock < THROTTLED_BELOW * full:
            slow.setdefault((device.machine.agent_id, clock), []).append(device)
    for (agent, clock), devices in slow.items():
        yield HealthProblem(
            Severity.ATTENTION,
            f"clock {clock:.0f} MHz, others {full:.0f} MHz",
            view.info.name,
            agent,
            tuple(sorted(device.ipu.partition_ipu for device in devices)),
            _last_time(devices[0].machine.struck_faults),
            hit,
            f"vipu-admin drain agent {agent}, then vipu reset partition {view.info.name}",
        )


_AGENT_REMEDIES: Mapping[str, tuple[Severity, str]] = {
    "unreachable": (Severity.BROKEN, "vipu-admin restart agent {agent}"),
    "failed": (Severity.BROKEN, "vipu-admin restart agent {agent}"),
    "suspect": (Severity.ATTENTION, "wait some seconds, then vipu-admin list agents"),
    "cordoned": (Severity.ATTENTION, "vipu-admin return agent {agent}"),
    "draining": (Severity.ATTENTION, "vipu-admin list agents shows when it is empty"),
}


def _of_agent(agent: AgentInfo, now: float) -> Iterator[HealthProblem]:
    if agent.health not in _AGENT_REMEDIES:
        return
    severity, remedy = _AGENT_REMEDIES[agent.health]
    what = f"machine {agent.health}" + (f": {agent.reason}" if agent.reason else "")
    since = None if agent.stale_seconds is None else now - agent.stale_seconds
    yield HealthProblem(
        severity, what, "", agent.agent_id, (), since, (), remedy.format(agent=agent.agent_id)
    )


def _machine_since(machine: MachineReport, now: float) -> float | None:
    """When a machine stopped to answer, else when a fault struck it last."""
    if machine.stale_seconds is not None:
        return now - machine.stale_seconds
    return _last_time(machine.struck_faults)


def _last_time(entries: Iterable[ControlEvent | Struck]) -> float | None:
    return max((entry.time_s for entry in entries), default=None)


def _processes(view: View) -> tuple[str, ...]:
    held = [device.ipu.process for device in view.devices if device.ipu.process is not None]
    return tuple(sorted({f"{process.pid} {process.command} ({process.user})" for process in held}))


def as_text(health: PodHealth, now: float) -> Iterator[str]:
    """Lines for people, at most 80 columns where names allow it."""
    broken = sum(problem.severity is Severity.BROKEN for problem in health.problems)
    rest = len(health.problems) - broken
    state = "healthy" if not health.problems else f"{broken} broken, {rest} to look at"
    yield f"{health.server}: {state}"
    partitions = "1 partition" if health.partitions == 1 else f"{health.partitions} partitions"
    yield (
        f"  {health.agents} machines, {partitions} with {health.ipus_in_partitions} IPUs, "
        f"{health.ipus_free} IPUs free, {health.requests_waiting} waiting"
    )
    for problem in health.problems:
        yield f"{problem.severity.value:<9} {_place(problem)}: {problem.what}{_age(problem.since_s, now)}"
        for process in problem.hit:
            yield f"{'':<9} hits {process}"
        yield f"{'':<9} {problem.remedy}"


def _place(problem: HealthProblem) -> str:
    parts = [f"partition {problem.partition}"] if problem.partition else []
    if problem.agent:
        parts.append(problem.agent)
    if problem.ipus:
        parts.append(f"IPU {', '.join(map(str, problem.ipus))}")
    return ", ".join(parts)


def _age(since_s: float | None, now: float) -> str:
    if since_s is None:
        return ""
    when = datetime.fromtimestamp(since_s, UTC).strftime("%H:%M:%S UTC")
    return f", since {when} ({max(0.0, now - since_s):.0f} s)"
