"""Carries out what `podrun.launcher.recovery` decides, on the partition of a launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import ExhaustedError, NotFoundError, UsageError, present
from podrun.core.telemetry import MachineReport
from podrun.launcher.launch_faults import can_strike_on, not_planned, remaining
from podrun.launcher.machine_work import done_by_all
from podrun.launcher.own_streams import Log
from podrun.launcher.partition import LaunchPartition
from podrun.launcher.recovery import Damage, Recovery, RecoveryStep, damage_of, without_partition
from podrun.launcher.repair_steps import ImpossibleRecoveryError, carry_out_step, check_created
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
        self._worked_on = _LaunchedPartition(partition, log, replan)
        self._before: Sequence[MachineReport] = ()
        self._reports: Sequence[MachineReport] = ()

    def look(self) -> tuple[Damage, int | None]:
        """What is broken now, and the batches done since the previous call (None: unknown). Waits for a partition
        service that is away, and for a partition that is on its way. Raises PodrunError if that takes too long.
        """
        partition = self._partition
        state = partition.state_at_rest()
        if state is PartitionState.REMOVED:
            check_created(self._worked_on)
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
                    carry_out_step(step, self._worked_on)
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


class _LaunchedPartition:
    """The partition of a launch as `carry_out_step` works on it."""

    def __init__(self, partition: LaunchPartition, log: Log, replan: Replan | None) -> None:
        self._partition, self._log, self._replan = partition, log, replan
        self.replans = replan is not None

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

    def _generation(self) -> int:
        """The generation of the partition: with it a request has its effect once, however often it is made. 0 if an
        earlier way of the recovery has removed it."""
        try:
            return self._partition.client.get_partition(self.name).generation
        except NotFoundError:
            return 0

    def usable_ipus(self) -> int:
        return sum(
            agent.num_ipus
            for agent in self._partition.client.list_agents()
            if agent.state is not AgentState.LOST and set(agent.partitions) <= {self.name}
        )

    def reset_ipus(self, ipus: tuple[int, ...]) -> None:
        self._log.progress(f"reset IPUs {', '.join(map(str, ipus))}")
        self._partition.client.reset_ipus(self.name, ipus)

    def replace_machine(self, agent: str) -> None:
        generation = self._generation()
        self._log.progress(f"replace the machine of {agent}")
        self._partition.client.restart_agent(agent, generation)

    def power_cycle(self, agent: str) -> None:
        generation = self._generation()
        self._log.progress(f"power-cycle {agent}")
        self._partition.client.power_cycle_agent(agent, generation)

    def reset(self) -> None:
        generation = self._generation()
        self._log.progress(f"reset partition {self.name}")
        try:
            self._partition.client.reset_partition(self.name, generation)
        except NotFoundError:  # An earlier way of this recovery has removed the partition.
            self._partition.make_anew()

    def make_anew(self) -> None:
        self._partition.make_anew()
        self._log.progress(f"partition {self.name} was created anew on other machines")

    def make_anew_for(self, replicas: int) -> bool:
        replan, now = present(self._replan, "a launch that keeps its replicas does not replan"), self.replicas
        try:
            spec = replan(replicas)
        except UsageError as error:
            raise ImpossibleRecoveryError(f"{replicas} replicas: {error.message}") from error
        planned = self._partition.faults.planned
        faults = [fault for fault in planned if can_strike_on(fault, spec.layout.ipus)]
        try:
            self._partition.make_anew(spec, faults)
        except ExhaustedError as error:
            self._log.progress(f"not possible with {replicas} replicas: {error.message}")
            return False
        self._log.progress(f"{replicas} replicas instead of {now}")
        return True
