"""Carries out what `podrun.launcher.recovery` decides, on the partition of a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import ExhaustedError, NotFoundError, UsageError
from podrun.core.telemetry import MachineReport
from podrun.launcher.launch_faults import can_strike_on, not_planned, remaining
from podrun.launcher.machine_work import done_by_all
from podrun.launcher.own_streams import Log
from podrun.launcher.partition import LaunchPartition
from podrun.launcher.recovery import (
    Damage,
    GoOnWithFewer,
    Recovery,
    RecoveryStep,
    damage_of,
    without_partition,
)
from podrun.launcher.repair_requests import (
    ImpossibleRecoveryError,
    MakeAnewRequest,
    PowerCycleRequest,
    RepairRequest,
    ResetIpusRequest,
    ResetPartitionRequest,
    RestartAgentRequest,
    requests_for,
)
from podrun.launcher.spec import LaunchSpec
from podrun.partition.state.values import AgentState, PartitionState

Replan = Callable[[int], LaunchSpec]
"""Returns the launch with another number of replicas. Raises UsageError if there is none."""
ASKED_AGAIN = 4
"""How often a machine that does not answer is asked before it counts as lost."""


class Repairs:
    """Carries out recoveries on the partition of a launch. ``replan`` is None where a launch keeps its replicas."""

    def __init__(self, partition: LaunchPartition, log: Log, replan: Replan | None = None) -> None:
        self._partition = partition
        self._log = log
        self._replan = replan
        self._before: Sequence[MachineReport] = ()
        self._reports: Sequence[MachineReport] = ()

    def look(self) -> tuple[Damage, int | None]:
        """What is broken now, and the batches done since the previous call (None: unknown). Waits for a partition
        service that is away, and for a partition that is on its way. Raises PodrunError if that takes too long.
        """
        partition = self._partition
        state = partition.state_at_rest()
        if state is PartitionState.REMOVED:
            self._check_ours()
            self._reports = ()
            return without_partition(Damage(), f"partition {partition.name} is gone"), None
        self._reports = partition.reports.latest(ASKED_AGAIN)
        before = self._before or partition.reports.before
        first, count = partition.first_ipu, partition.current.spec.layout.ipus
        machines = {ipu // IPUS_PER_MACHINE for ipu in range(first, first + count)}
        batches = done_by_all(before, self._reports, machines)
        self._before = self._reports
        damage = damage_of(self._reports)
        if state is PartitionState.ERROR:
            damage = without_partition(damage, f"partition {partition.name} in state ERROR")
        return damage, batches

    def carry_out(self, recovery: Recovery) -> tuple[RecoveryStep, ...] | None:
        """Do the first way that is possible, and return its steps; None if no way is possible. Afterwards the partition
        is on its way to ACTIVE.

        Raises PodrunError for a step that fails half-way.
        """
        left = remaining(self._partition.faults.planned, self._reports)
        self._partition.current.keep_faults(left)
        for way in recovery.ways:
            try:
                for step in way:
                    self._do(step)
            except (ExhaustedError, ImpossibleRecoveryError) as error:
                self._log.progress(f"not possible: {error.message}")
                continue
            return tuple(way)
        return None

    def plan_again(self) -> None:
        """Plan faults on new machines, once the partition is active."""
        partition = self._partition
        if partition.faults.planned:
            reports = partition.client.machine_reports(partition.name)
            missing = not_planned(partition.faults.planned, self._reports, reports)
            if missing:
                partition.client.inject_faults(partition.name, missing)

    def _do(self, step: RecoveryStep) -> None:
        requests = requests_for(step, _SessionFacts(self._partition, self._replan is not None))
        if isinstance(step, GoOnWithFewer):
            self._go_on_with_fewer(step.at_least, requests)
            return
        for request in requests:
            self._ask(request)

    def _ask(self, request: RepairRequest) -> None:
        partition, client, name = self._partition, self._partition.client, self._partition.name
        match request:
            case ResetIpusRequest(ipus):
                self._log.progress(f"reset IPUs {', '.join(map(str, ipus))}")
                client.reset_ipus(name, ipus)
            case RestartAgentRequest(agent, generation):
                self._log.progress(f"replace the machine of {agent}")
                client.restart_agent(agent, generation)
            case PowerCycleRequest(agent, generation):
                self._log.progress(f"power-cycle {agent}")
                client.power_cycle_agent(agent, generation)
            case ResetPartitionRequest(generation):
                self._log.progress(f"reset partition {name}")
                try:
                    client.reset_partition(name, generation)
                except NotFoundError:  # An earlier way of this recovery has removed the partition.
                    partition.make_anew()
            case MakeAnewRequest():
                partition.make_anew()
                self._log.progress(f"partition {name} was created anew on other machines")

    def _check_ours(self) -> None:
        """Refuse to remove a partition that podrun did not create."""
        if not self._partition.created:
            raise ImpossibleRecoveryError(
                f"partition {self._partition.name} was there before, so that podrun keeps it"
            )

    def _go_on_with_fewer(self, least: int, requests: Sequence[RepairRequest]) -> None:
        partition, now = self._partition, self._partition.current.spec.layout.replicas
        for request in requests:
            replicas = request.replicas if isinstance(request, MakeAnewRequest) else None
            if replicas is None or self._replan is None:
                continue
            try:
                spec = self._replan(replicas)
            except UsageError as error:
                raise ImpossibleRecoveryError(f"{replicas} replicas: {error.message}") from error
            planned = partition.faults.planned
            faults = [fault for fault in planned if can_strike_on(fault, spec.layout.ipus)]
            try:
                partition.make_anew(spec, faults)
            except ExhaustedError as error:
                self._log.progress(f"not possible with {replicas} replicas: {error.message}")
                continue
            self._log.progress(f"{replicas} replicas instead of {now}")
            return
        raise ImpossibleRecoveryError(f"no machines for {least} replicas or more are left")


class _SessionFacts:
    """A launch's partition as `requests_for` asks for it: what takes a call is called for when it is asked."""

    def __init__(self, partition: LaunchPartition, replans: bool) -> None:
        self._partition, self.replans = partition, replans

    @property
    def name(self) -> str:
        return self._partition.name

    @property
    def created(self) -> bool:
        return self._partition.created

    @property
    def wanted(self) -> int:
        return self._partition.wanted.size

    @property
    def replicas(self) -> int:
        return self._partition.current.spec.layout.replicas

    def generation(self) -> int:
        try:
            return self._partition.client.get_partition(self._partition.name).generation
        except NotFoundError:  # An earlier way of this recovery has removed the partition.
            return 0

    def usable_ipus(self) -> int:
        return sum(
            agent.num_ipus
            for agent in self._partition.client.list_agents()
            if agent.state is not AgentState.LOST and set(agent.partitions) <= {self._partition.name}
        )
