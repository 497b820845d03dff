"""The faults of a launch that strike on machines and at the partition service: which are planned, struck, and left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import PodrunError, UsageError
from podrun.core.ipu_states import MachineState
from podrun.core.layout import IpuRange
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import MachineReport, planned_in
from podrun.faults import OF_INSTANCES, WHOLE_MACHINES, FaultSpec, FaultTarget, validate
from podrun.launcher.own_streams import Log
from podrun.launcher.spec import CurrentLaunch

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient


@dataclass(frozen=True, slots=True)
class LaunchFaults:
    """The faults that a launch plans on its partition. ``launch_id`` marks them; they hit no other launch."""

    current: CurrentLaunch
    launch_id: str = ""

    @property
    def planned(self) -> tuple[FaultSpec, ...]:
        """The faults, marked as this launch's."""
        on_machines = [spec for spec in self.current.wanted.faults if not spec.in_program]
        return tuple(replace(spec, launch=self.launch_id) for spec in on_machines)

    def unstruck(self, reports: Iterable[MachineReport], ipus: IpuRange) -> list[FaultSpec]:
        """The faults that machines report as still planned. ``ipus``: those of the launch. A fault of an instance is
        planned on all machines of a partition, and strikes on those to which the launch attaches.
        """
        planned = planned_on(
            report
            if any(ipu.partition_ipu in ipus for ipu in report.ipus)
            else replace(report, planned_faults=_of_machines(report))
            for report in reports
        )
        return [spec for spec in self.planned if spec.experiment in planned]

    def disarm(self, client: VipuClient, partition: str, log: Log) -> None:
        """Take the launch's remaining faults off the plan, because they must hit nobody else."""
        if not self.launch_id:
            return
        try:
            planned = planned_in(client.machine_reports(partition))
            ours = sorted(str(spec) for spec in planned if spec.launch == self.launch_id)
            if ours:
                client.cancel_faults(partition, ours)
        except PodrunError as error:  # The partition is gone and its faults with it, or nobody answers.
            log.debug(f"faults were not cancelled: {error.message}")


def _of_machines(report: MachineReport) -> tuple[FaultSpec, ...]:
    """The planned faults of a report that hit no instance."""
    return tuple(spec for spec in report.planned_faults if spec.target not in OF_INSTANCES)


def planned_on(reports: Iterable[MachineReport]) -> dict[FaultSpec, FaultSpec]:
    """The faults that machines report as planned, by experiment, with the strikes that are left."""
    planned: dict[FaultSpec, FaultSpec] = {}
    for spec in planned_in(reports):
        known = planned.get(spec.experiment)
        if known is None or spec.repeat < known.repeat:
            planned[spec.experiment] = spec
    return planned


def not_planned(
    faults: Iterable[FaultSpec], before: Sequence[MachineReport], now: Sequence[MachineReport]
) -> list[FaultSpec]:
    """The faults that new machines have still to be given: those that are planned no more, without the strikes since
    ``before``, in the recovery itself.
    """
    planned, missing = planned_on(now), []
    for spec in faults:
        if spec.experiment not in planned:
            struck = max((_strikes(spec, [r]) - _strikes(spec, before, r.agent_id) for r in now), default=0)
            if spec.repeat > max(struck, 0):
                missing.append(replace(spec, repeat=spec.repeat - max(struck, 0)))
    return missing


def _strikes(spec: FaultSpec, reports: Iterable[MachineReport], agent: str | None = None) -> int:
    """How often a fault struck, as one machine tells it."""
    return sum(
        spec.is_same_fault(struck.fault)
        for report in reports
        if agent in (None, report.agent_id)
        for struck in report.struck_faults
    )


def remaining(faults: Iterable[FaultSpec], reports: Sequence[MachineReport]) -> tuple[FaultSpec, ...]:
    """The planned faults that have still to strike: those that machines report, and for lost machines those that come
    after the fault that took the machine.
    """
    planned = planned_on(reports)
    lost = {
        report.machine_index for report in reports if not report.pid or report.state is not MachineState.UP
    }
    all_faults = list(faults)
    taken: dict[int, FaultSpec] = {}
    for spec in all_faults:
        if spec.kind == "lost" and spec.indices[0] in lost and spec.experiment not in planned:
            known = taken.get(spec.indices[0])
            taken[spec.indices[0]] = spec if known is None or spec.batch < known.batch else known
    left = []
    for spec in all_faults:
        if spec.experiment in planned:
            left.append(planned[spec.experiment])
        elif spec in taken.values():
            if spec.repeat > 1:
                left.append(replace(spec, repeat=spec.repeat - 1))
        elif any(m in lost and (m not in taken or spec.batch > taken[m].batch) for m in _machines(spec)):
            left.append(spec)
    return tuple(left)


def _machines(spec: FaultSpec) -> set[int]:
    if spec.target in WHOLE_MACHINES:
        return set() if spec.target is FaultTarget.HOST else set(spec.indices)
    return {ipu // IPUS_PER_MACHINE for ipu in spec.indices}


def can_strike_on(fault: FaultSpec, ipus: int) -> bool:
    """True iff the fault can strike on a partition of so many IPUs."""
    try:
        validate([fault], ipus=ipus)
    except UsageError:
        return False
    return True
