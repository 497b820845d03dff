"""What the service does with machines: bring partitions up, act on agents, take over what an earlier server left, and
collect reports.

These functions and the `Reporter` work on the pool, without the service's state: they may take long and hold no lock. A
machine that does not answer gets a report that says so.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from podrun.core.cluster import Cluster
from podrun.core.errors import (
    ConflictError,
    PodrunError,
    ServiceError,
    SilentMachineError,
    TakenBy,
    UsageError,
)
from podrun.core.ipu_states import IpuErrorState, MachineState
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import AttachedProcess, IpuReport, MachineReport, attached_processes
from podrun.partition.machines.pool import SILENT, MachinePool
from podrun.partition.state import events as ev
from podrun.partition.state.records import MachineUse, Maintenance, Partition
from podrun.partition.state.values import (
    PartitionState,
)

log = logging.getLogger("podrun.partition")


def uses_of(partition: Partition) -> list[MachineUse]:
    """The machines of a partition in its order."""
    return [MachineUse(part.agent_id, partition.name) for part in partition.slices]


@dataclass(frozen=True, slots=True)
class Taken:
    """The machines of active partitions that a server found at its start. ``adopted``: partitions that go on; ``lost``:
    agents of machines that are gone, in order; ``silent``: machines that listen and do not answer.
    """

    adopted: frozenset[str]
    lost: tuple[str, ...]
    silent: tuple[MachineUse, ...]


def take_over(pool: MachinePool, partitions: Sequence[Partition]) -> Taken:
    """Adopt the machines that an earlier server left. A machine that does not answer counts as working: its partition
    was active, so its last operation had configured it.
    """
    machines = pool.adopt([use for partition in partitions for use in uses_of(partition)])
    adopted: set[str] = set()
    lost: dict[str, None] = {}
    silent: list[MachineUse] = []
    for partition in partitions if machines is not None else ():
        if partition.state is not PartitionState.ACTIVE:
            continue
        operation_of = {use: (machines or {}).get(use) for use in uses_of(partition)}
        silent += [use for use, operation in operation_of.items() if operation == SILENT]
        if all(operation in (partition.operation, SILENT) for operation in operation_of.values()):
            adopted.add(partition.name)
        lost |= dict.fromkeys(use.agent_id for use, operation in operation_of.items() if operation is None)
    return Taken(frozenset(adopted), tuple(lost), tuple(silent))


def work_on_agent(pool: MachinePool, instruction: ev.MachineOrder) -> None:
    """Start and end machines while the request waits: when it returns, the fresh machine is up."""
    match instruction:
        case ev.StopAgentMachines(agent):
            pool.stop_agent(agent)
        case ev.ReplaceAgentMachines(agent, partitions):
            pool.stop_agent(agent)
            pool.acquire([MachineUse(agent, name) for name in partitions])
        case ev.PowerCycleMachines(agent):
            for use in pool.endpoints():
                if use.agent_id == agent:
                    pool.control(use).power_cycle()


def bring_up(pool: MachinePool, partition: Partition, service: str) -> None:
    """Provision or reset: all machines of the partition, cleared and configured with each other's endpoints.
    ``service``: the id of the service, which is a part of the partition's epoch.
    """
    uses = uses_of(partition)
    where = pool.acquire(uses)
    left = [use for use in pool.endpoints() if use.partition == partition.name and use not in uses]
    pool.release(left, TakenBy.MOVE)
    endpoints = [where[use] for use in uses]
    fresh = partition.generation == 0
    firsts = [first for first, _ in partition.machines()]

    def configure(index: int, use: MachineUse) -> None:
        control = pool.control(use)
        control.configure(
            partition=partition.name,
            first_ipu=firsts[index],
            machine_index=index,
            endpoints=endpoints,
            ipus=partition.slices[index].count,
            owner=partition.owner,
            operation=partition.operation,
            epoch=partition.epoch(service),
        )
        control.reset_links()
        control.reset_ipus(range(partition.slices[index].count))
        if fresh and partition.faults:
            control.inject(partition.faults)

    on_machines(pool, partition, configure)


def on_machines(pool: MachinePool, partition: Partition, work: Callable[[int, MachineUse], None]) -> None:
    """Call ``work`` for all machines of a partition at once. Raises the first error, with the machine's name."""
    uses = uses_of(partition)
    with ThreadPoolExecutor(min(len(uses), 16), thread_name_prefix="podrun-machines") as threads:
        results = [threads.submit(work, index, use) for index, use in enumerate(uses)]
    for use, result in zip(uses, results, strict=True):
        try:
            result.result()
        except PodrunError as error:
            if isinstance(error, UsageError):
                raise
            pool.check(use)
            hint = error.hint
            if isinstance(error, SilentMachineError):
                hint = (
                    f"Replace the machine: vipu-admin restart agent {use.agent_id}, then: "
                    f"vipu reset partition {partition.name}"
                )
            raise ServiceError(f"machine {use.agent_id}: {error.message}", hint=hint) from error


def cancel_faults(pool: MachinePool, partition: Partition, texts: Sequence[str]) -> None:
    """Take faults off the plan of a partition's machines, those that are up: those of these texts, or all."""
    uses = pool.endpoints()
    for part in partition.slices:
        use = MachineUse(part.agent_id, partition.name)
        if use in uses:
            pool.control(use).cancel_faults(texts)


def reset_ipus(pool: MachinePool, partition: Partition, ipus: Sequence[int]) -> None:
    """Reset IPUs of a partition by their index in it. Raises UsageError for one that it does not have."""
    for ipu in ipus:
        if not 0 <= ipu < partition.size:
            raise UsageError(
                f"partition {partition.name} has no IPU {ipu}",
                hint=f"Its IPUs are 0 to {partition.size - 1}.",
            )
    for first, part in partition.machines():
        local = [ipu - first for ipu in ipus if first <= ipu < first + part.count]
        if local:
            pool.control(MachineUse(part.agent_id, partition.name)).reset_ipus(local)


REPORT_SECONDS = 2.0
"""Longest wait for a machine's report. Tools wait 10 s for the service, so one stopped machine does not fail them."""
SILENT_REPORT_SECONDS = 0.1
"""Longest wait of those who look for a machine that did not answer before. Heartbeats learn when it does again."""


@dataclass(frozen=True, slots=True)
class _PartitionMachine:
    """A machine of a partition: its index there, its first IPU there, and its number of IPUs."""

    use: MachineUse
    index: int
    first_ipu: int
    count: int


def refuse_in_use(name: str, reports: Iterable[MachineReport]) -> None:
    """Raise ConflictError if a process is attached to the partition of some reports."""
    for process in attached_processes(reports).values():
        raise ConflictError(
            f"partition {name} is in use by {process.in_words} of {process.user}",
            hint=f"Wait until it ends, or end its use: vipu remove partition {name} --force",
        )


HELD_SECONDS = 30.0
"""How long a machine that does not answer counts as held by the process that it named last. A process knows after 8 s
(`podrun.device.service.wire.UNREACHABLE_SECONDS`) that it cannot reach its machine.
"""


def process_runs(process: AttachedProcess) -> bool:
    """False iff a process was on this host and has ended; processes of other hosts count as running."""
    if process.host not in ("", socket.gethostname()):
        return True
    import psutil

    try:
        started = psutil.Process(process.pid).create_time()
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
    return process.start_time_s is None or abs(started - process.start_time_s) < 1.0


class Reporter:
    """Asks all machines at once for telemetry and adds what only the service knows."""

    def __init__(
        self,
        cluster: Cluster,
        pool: MachinePool,
        clock: Callable[[], float] = time.monotonic,
        process_runs: Callable[[AttachedProcess], bool] = process_runs,
    ) -> None:
        self.cluster, self._pool, self._process_runs = cluster, pool, process_runs
        self._clock = clock
        self._answers: dict[MachineUse, tuple[float, MachineReport]] = {}
        self._silent: set[MachineUse] = set()

    def reports(
        self, partitions: Iterable[Partition], lost: set[str], *, silent_s: float = REPORT_SECONDS
    ) -> list[MachineReport]:
        """A report for each machine of each partition, in partition order, after `REPORT_SECONDS` at the latest.
        ``silent_s``: seconds for a machine that did not answer before."""
        uses = [
            _PartitionMachine(MachineUse(part.agent_id, partition.name), index, first, part.count)
            for partition in partitions
            for index, (first, part) in enumerate(partition.machines())
        ]
        if not uses:
            return []
        with ThreadPoolExecutor(min(len(uses), 64), thread_name_prefix="podrun-telemetry") as threads:
            return list(threads.map(lambda machine: self._ask(machine, lost, silent_s), uses))

    def _ask(self, machine: _PartitionMachine, lost: set[str], silent_s: float) -> MachineReport:
        use, first, count = machine.use, machine.first_ipu, machine.count
        agent = self.cluster.agents_by_id[use.agent_id]
        where = self._pool.endpoints().get(use, "")
        error = IpuErrorState.MACHINE_LOST if agent.id in lost else IpuErrorState.NOT_READY
        known = MachineReport(
            agent_id=agent.id,
            state=MachineState.LOST if agent.id in lost else MachineState.STANDBY,
            endpoint=where,
            partition=use.partition,
            machine_index=machine.index,
            serial=agent.serial,
            target=self.cluster.target,
            ipus=tuple(IpuReport(first + i, i, error_state=error) for i in range(count)),
        )
        if agent.id in lost or not where:
            return known
        try:
            timeout = silent_s if use in self._silent else REPORT_SECONDS
            report = self._pool.control(use).telemetry(timeout=timeout)
        except PodrunError as error:
            if use not in self._silent:  # Log it once, not with every heartbeat.
                log.warning("machine %s does not report: %s", use.agent_id, error.message)
            self._pool.check(use)
            return self._last_answer(use, known)
        ipus = tuple(replace(ipu, partition_ipu=first + ipu.ipu) for ipu in report.ipus[:count])
        whole = replace(
            report,
            agent_id=agent.id,
            state=MachineState.UP,
            endpoint=where,
            partition=use.partition,
            machine_index=machine.index,
            serial=agent.serial,
            target=self.cluster.target,
            ipus=ipus,
        )
        self._silent.discard(use)
        self._answers[use] = (self._clock(), whole)
        return whole

    def _last_answer(self, use: MachineUse, known: MachineReport) -> MachineReport:
        """The last report of a machine that does not answer, with its age; ``known`` if it never answered in this
        place.
        """
        at, last = self._answers.setdefault(use, (self._clock(), known))
        if last.endpoint != known.endpoint:
            at, last = self._answers[use] = (self._clock(), known)
        self._silent.add(use)
        stale = self._clock() - at
        ipus = tuple(
            replace(ipu, error_state=IpuErrorState.NO_ANSWER, process=self._still_there(ipu.process, stale))
            for ipu in last.ipus
        )
        return replace(last, state=MachineState.NO_ANSWER, ipus=ipus, stale_seconds=stale)

    def _still_there(self, process: AttachedProcess | None, stale: float) -> AttachedProcess | None:
        """The process that held an IPU when its machine answered last; None if it has ended, or must have noticed by
        now that it cannot reach the machine.
        """
        if process is None or stale > HELD_SECONDS:
            return None
        return process if self._process_runs(process) else None

    def note_silent(self, uses: Iterable[MachineUse]) -> None:
        """Note machines that an earlier server left and that did not answer when they were taken over."""
        self._silent.update(uses)

    def silent_agents(self) -> dict[str, float]:
        """Agents with a machine that does not answer, and for how many seconds."""
        now = self._clock()
        silent: dict[str, float] = {}
        for use in list(self._silent):
            at, _ = self._answers.get(use, (now, None))
            silent[use.agent_id] = max(silent.get(use.agent_id, 0.0), now - at)
        return silent

    def facts(
        self,
        lost: set[str],
        maintenance: Mapping[str, Maintenance],
        holders: Mapping[str, tuple[str, ...]],
    ) -> AgentFacts:
        """What is known of agents: from the service, and from their machines."""
        endpoints: dict[str, tuple[str, ...]] = {}
        for use, where in self._pool.endpoints().items():
            endpoints[use.agent_id] = (*endpoints.get(use.agent_id, ()), where)
        running, silent = self._pool.running_agents(), self.silent_agents()
        return AgentFacts(lost, maintenance, holders, running, silent, endpoints, self.attached())

    def attached(self) -> dict[str, int]:
        """IPUs of each agent that processes hold, as its machines said last."""
        ipus_held: dict[str, int] = {}
        for use, (_, report) in list(self._answers.items()):
            held = sum(ipu.process is not None for ipu in report.ipus)
            if held:
                ipus_held[use.agent_id] = ipus_held.get(use.agent_id, 0) + held
        return ipus_held

    def forget(self, in_use: Collection[MachineUse]) -> None:
        """Forget machines that are no longer in use."""
        for use in [use for use in self._answers if use not in in_use]:
            self._answers.pop(use, None)
        self._silent.intersection_update(in_use)

    def whole_pod(self, reports: Sequence[MachineReport], lost: set[str]) -> list[MachineReport]:
        """Reports in the order of agents; an agent that no partition uses gets one without IPUs."""
        running = self._pool.running_agents()
        by_agent: dict[str, list[MachineReport]] = {}
        for report in reports:
            by_agent.setdefault(report.agent_id, []).append(report)
        result: list[MachineReport] = []
        for agent in self.cluster.agents:
            state = MachineState.UP if agent.id in running else MachineState.STANDBY
            state = MachineState.LOST if agent.id in lost else state
            bare = MachineReport(agent.id, state=state, serial=agent.serial, target=self.cluster.target)
            result += by_agent.get(agent.id) or [bare]
        return result


class AgentFacts(NamedTuple):
    """What is known of agents, by id; most of a large POD are in none of these. ``silent``: seconds since its machine
    answered."""

    lost: set[str]
    maintenance: Mapping[str, Maintenance]
    holders: Mapping[str, tuple[str, ...]]
    running: set[str]
    silent: Mapping[str, float]
    endpoints: Mapping[str, tuple[str, ...]]
    attached: Mapping[str, int]
