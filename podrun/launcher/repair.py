"""Carries out what `podrun.launcher.recovery` decides, on the partition of a launch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import ConflictError, ExhaustedError, NotFoundError, UsageError
from podrun.core.telemetry import MachineReport
from podrun.faults import WHOLE_MACHINES, FaultSpec, FaultTarget, parse_fault, validate
from podrun.launcher.output import Log
from podrun.launcher.partition import PartitionSession, answers, work_since
from podrun.launcher.recovery import (
    Damage,
    GoOnWithFewer,
    PowerCycleMachine,
    Recovery,
    ReplaceMachine,
    ResetThePartition,
    ResetTheseIpus,
    Step,
    TakeSpare,
    damage_of,
    without_partition,
)
from podrun.launcher.spec import LaunchSpec
from podrun.partition.state.values import AgentState, PartitionState

Replan = Callable[[int], LaunchSpec]
"""Returns the launch with another number of replicas. Raises UsageError if there is none."""
ASKED_AGAIN = 4
"""How often a machine that does not answer is asked before it counts as lost."""


class Repairs:
    """Carries out recoveries on the partition of a launch. ``replan`` is None where a launch keeps its replicas."""

    def __init__(self, session: PartitionSession, log: Log, replan: Replan | None = None) -> None:
        self._session = session
        self._log = log
        self._replan = replan
        self._before: Sequence[MachineReport] = ()
        self._reports: Sequence[MachineReport] = ()

    def look(self) -> tuple[Damage, int]:
        """What is broken now, and the batches done since the previous call. Waits for a partition service that is away,
        and for a partition that is on its way. Raises PodrunError if that takes too long.
        """
        session = self._session
        state = session.settled_state()
        if state is PartitionState.REMOVED:
            self._check_ours()
            self._reports = ()
            return without_partition(Damage(), f"partition {session.name} is gone"), 0
        self._reports = answers(
            lambda: session.client.machine_reports(session.name), session.pause, ASKED_AGAIN
        )
        before = self._before or session.before
        first, count = session.first_ipu, session.spec.layout.ipus
        machines = {ipu // IPUS_PER_MACHINE for ipu in range(first, first + count)}
        batches = done_by_all(before, self._reports, machines)
        self._before = self._reports
        damage = damage_of(self._reports)
        if state is PartitionState.ERROR:
            damage = without_partition(damage, f"partition {session.name} in state ERROR")
        return damage, batches

    def carry_out(self, recovery: Recovery) -> tuple[Step, ...] | None:
        """Do the first way that is possible, and return its steps; None if no way is possible. Afterwards the partition
        is on its way to ACTIVE.

        Raises PodrunError for a step that fails half-way.
        """
        left = remaining(self._session.faults, self._reports)
        self._session.keep_faults(left)
        for way in recovery.ways:
            try:
                for step in way:
                    self._do(step)
            except (ExhaustedError, _Impossible) as error:
                self._log.progress(f"not possible: {error.message}")
                continue
            return tuple(way)
        return None

    def plan_again(self) -> None:
        """Plan faults on new machines, once the partition is active."""
        session = self._session
        if session.faults:
            reports = session.client.machine_reports(session.name)
            missing = not_planned(session.faults, self._reports, reports)
            if missing:
                session.client.inject_faults(session.name, missing)

    def _do(self, step: Step) -> None:
        session, client, name = self._session, self._session.client, self._session.name
        match step:
            case ResetTheseIpus(ipus):
                self._log.progress(f"reset IPUs {', '.join(map(str, ipus))}")
                client.reset_ipus(name, ipus)
            case ReplaceMachine(agent):
                self._log.progress(f"replace the machine of {agent}")
                client.restart_agent(agent, self._generation())
            case PowerCycleMachine(agent):
                self._log.progress(f"power-cycle {agent}")
                client.power_cycle_agent(agent, self._generation())
            case ResetThePartition():
                self._log.progress(f"reset partition {name}")
                try:
                    client.reset_partition(name, self._generation())
                except NotFoundError:  # An earlier way of this recovery has removed the partition.
                    session.make_anew()
            case TakeSpare():
                self._check_ours()
                self._check_spare()
                session.make_anew()
                self._log.progress(f"partition {name} was created anew on other machines")
            case GoOnWithFewer(least):
                self._check_ours()
                self._go_on_with_fewer(least)

    def _generation(self) -> int:
        """The generation of the partition: with it a request has its effect once, however often it is made."""
        return self._session.client.get_partition(self._session.name).generation

    def _check_ours(self) -> None:
        """Refuse to remove a partition that podrun did not create."""
        if not self._session.created:
            raise _Impossible(f"partition {self._session.name} was there before, so that podrun keeps it")

    def _check_spare(self) -> None:
        """Refuse to give up the partition while there are surely too few machines for another."""
        session = self._session
        usable = [
            agent
            for agent in session.client.list_agents()
            if agent.state is not AgentState.LOST and set(agent.partitions) <= {session.name}
        ]
        if sum(agent.num_ipus for agent in usable) < session.wanted.size:
            raise _Impossible("the POD has no spare machine")

    def _go_on_with_fewer(self, least: int) -> None:
        session, now = self._session, self._session.spec.layout.replicas
        if self._replan is None:
            raise _Impossible("the launch keeps its replicas")
        for replicas in _halves(now, least):
            try:
                spec = self._replan(replicas)
            except UsageError as error:
                raise _Impossible(f"{replicas} replicas: {error.message}") from error
            faults = [fault for fault in session.faults if _fits(fault, spec.layout.ipus)]
            try:
                session.make_anew(spec, faults)
            except ExhaustedError as error:
                self._log.progress(f"not possible with {replicas} replicas: {error.message}")
                continue
            self._log.progress(f"{replicas} replicas instead of {now}")
            return
        raise _Impossible(f"no machines for {least} replicas or more are left")


class _Impossible(ConflictError):
    """This way of recovery is impossible here; the message says why."""


def done_by_all(
    before: Sequence[MachineReport], now: Iterable[MachineReport], machines: Collection[int]
) -> int:
    """The batches that all of a launch's machines which answer have done since ``before``: when one fails in a batch,
    others may have finished their part of it.
    """
    here = [report for report in now if report.machine_index in machines and report.state == "up"]
    return min((work_since(before, report).batches_done for report in here), default=0)


def planned_on(reports: Iterable[MachineReport]) -> dict[FaultSpec, FaultSpec]:
    """The faults that machines report as planned, by experiment, with the strikes that are left."""
    found: dict[FaultSpec, FaultSpec] = {}
    for report in reports:
        for text in report.planned_faults:
            spec = parse_fault(text)
            known = found.get(spec.experiment)
            if known is None or spec.repeat < known.repeat:
                found[spec.experiment] = spec
    return found


def not_planned(
    faults: Iterable[FaultSpec], before: Sequence[MachineReport], now: Sequence[MachineReport]
) -> list[FaultSpec]:
    """The faults that new machines have still to be given: those that are planned no more, without the strikes since
    ``before``, in the recovery itself.
    """
    there, found = planned_on(now), []
    for spec in faults:
        if spec.experiment not in there:
            struck = max((_strikes(spec, [r]) - _strikes(spec, before, r.agent_id) for r in now), default=0)
            if spec.repeat > max(struck, 0):
                found.append(replace(spec, repeat=spec.repeat - max(struck, 0)))
    return found


def _strikes(spec: FaultSpec, reports: Iterable[MachineReport], agent: str | None = None) -> int:
    """How often a fault struck, as one machine tells it."""
    return sum(
        replace(parse_fault(str(entry["fault"])), launch=spec.launch).experiment == spec.experiment
        for report in reports
        if agent in (None, report.agent_id)
        for entry in report.struck_faults
    )


def remaining(faults: Iterable[FaultSpec], reports: Sequence[MachineReport]) -> tuple[FaultSpec, ...]:
    """The planned faults that have still to strike: those that machines report, and for lost machines those that come
    after the fault that took the machine.
    """
    planned = planned_on(reports)
    lost = {report.machine_index for report in reports if not report.pid or report.state != "up"}
    all_faults = list(faults)
    taken: dict[int, FaultSpec] = {}
    for spec in all_faults:
        if spec.kind == "lost" and spec.indices[0] in lost and spec.experiment not in planned:
            known = taken.get(spec.indices[0])
            taken[spec.indices[0]] = spec if known is None or spec.batch < known.batch else known
    found = []
    for spec in all_faults:
        if spec.experiment in planned:
            found.append(planned[spec.experiment])
        elif spec in taken.values():
            if spec.repeat > 1:
                found.append(replace(spec, repeat=spec.repeat - 1))
        elif any(m in lost and (m not in taken or spec.batch > taken[m].batch) for m in _machines(spec)):
            found.append(spec)
    return tuple(found)


def _machines(spec: FaultSpec) -> set[int]:
    if spec.target in WHOLE_MACHINES:
        return set() if spec.target is FaultTarget.HOST else set(spec.indices)
    return {ipu // IPUS_PER_MACHINE for ipu in spec.indices}


def _fits(fault: FaultSpec, ipus: int) -> bool:
    try:
        validate([fault], ipus=ipus)
    except UsageError:
        return False
    return True


def _halves(replicas: int, least: int) -> list[int]:
    """Half of the replicas, a quarter, ..., not below ``least``."""
    found = []
    while replicas % 2 == 0 and replicas // 2 >= least:
        replicas //= 2
        found.append(replicas)
    return found
