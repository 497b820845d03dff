"""What the machines of a partition have done for a launch, as their reports tell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from podrun.core.errors import PodrunError, ServiceError
from podrun.core.ipu_states import MachineState
from podrun.core.layout import IpuRange
from podrun.core.telemetry import MachineReport
from podrun.launcher.own_streams import Log

Number = TypeVar("Number", int, float)
PATIENT_ATTEMPTS = 25
"""How often machines are asked what they have done, where it is worth waiting for those that are slow."""
SILENT_ATTEMPTS = 5
"""How often a machine is asked before a launch that needs it is refused; each question takes 2 s."""
BETWEEN_REPORTS_SECONDS = 0.2
"""Pause between two questions to machines that do not answer in time."""


class LaunchReports:
    """The reports of the machines of a launch's partition. ``ask`` gets them from the server, ``pause`` waits."""

    def __init__(
        self, ask: Callable[[], list[MachineReport]], pause: Callable[[float], None], log: Log
    ) -> None:
        self._ask, self._pause, self._log = ask, pause, log
        self.before: Sequence[MachineReport] = ()
        """The work that the machines had done before the launch took the partition."""

    def latest(self, attempts: int = PATIENT_ATTEMPTS) -> list[MachineReport]:
        """What the machines report now. Raises ServiceError, NotFoundError."""
        return reports_of_all(self._ask, self._pause, attempts)

    def answering(self, partition: str, ipus: IpuRange) -> list[MachineReport]:
        """What the machines of a partition report before a launch uses ``ipus`` of it. Raises ServiceError, which
        names the machine, if one that the launch needs does not answer.
        """
        reports = reports_of_all(self._ask, self._pause, SILENT_ATTEMPTS, ipus)
        for report in silent_machines(reports, ipus):
            raise ServiceError(
                f"machine {report.agent_id} of partition {partition} has not answered for "
                f"{report.stale_seconds or 0:.0f} s",
                hint=f"Replace the machine: vipu-admin restart agent {report.agent_id}, then: "
                f"vipu reset partition {partition}",
            )
        return reports

    def of_launch(self, ipus: IpuRange) -> list[MachineReport]:
        """The work in this launch, which uses ``ipus`` of the partition; empty if the server does not answer."""
        try:
            return work_on(ipus, (work_since(self.before, report) for report in self.latest()))
        except PodrunError as error:
            self._log.debug(f"no machine reports: {error.message}")
            return []

    def history(self) -> list[MachineReport]:
        """Reports that list what changed the partition and which faults struck; empty if the server does not answer."""
        try:
            return self._ask()
        except PodrunError as error:
            self._log.debug(f"no history of the partition: {error.message}")
            return []


def reports_of_all(
    ask: Callable[[], list[MachineReport]],
    pause: Callable[[float], None],
    attempts: int = 25,
    ipus: IpuRange | None = None,
) -> list[MachineReport]:
    """Reports of a partition's machines, which are asked again while some do not answer in time, as on a busy host;
    only those that hold some of ``ipus`` count.

    Returns the last reports; a machine that does not answer ``attempts`` questions has a report without an answer.
    """
    reports = ask()
    for _ in range(attempts - 1):
        if not silent_machines(reports, ipus):
            break
        pause(BETWEEN_REPORTS_SECONDS)
        reports = ask()
    return reports


def silent_machines(reports: Iterable[MachineReport], ipus: IpuRange | None = None) -> list[MachineReport]:
    """The reports of machines that do not answer, of those that hold some of ``ipus`` of the partition (None: all)."""
    silent = [report for report in reports if report.state is MachineState.NO_ANSWER]
    return [r for r in silent if ipus is None or any(ipu.partition_ipu in ipus for ipu in r.ipus)]


def work_since(before: Sequence[MachineReport], report: MachineReport) -> MachineReport:
    """A machine's report without the work that it had done ``before``; work that ``before`` does not mention counts as
    0.
    """
    for earlier in before:
        if earlier.agent_id == report.agent_id and earlier.batches_done <= report.batches_done:
            did = {ipu.ipu: ipu.batches_done for ipu in earlier.ipus}
            return replace(
                report,
                batches_done=report.batches_done - earlier.batches_done,
                samples_done=_less(report.samples_done, earlier.samples_done),
                modelled_s=_less(report.modelled_s, earlier.modelled_s),
                emulation_s=_less(report.emulation_s, earlier.emulation_s),
                ipus=tuple(
                    replace(i, batches_done=max(0, i.batches_done - did.get(i.ipu, 0))) for i in report.ipus
                ),
            )
    return report


def work_on(ipus: IpuRange, reports: Iterable[MachineReport]) -> list[MachineReport]:
    """The machines that hold some of ``ipus`` of a partition, each with those of its IPUs. Where other IPUs of a
    machine have worked too, for another launch, only the batches of these IPUs are known.
    """
    own = []
    for report in reports:
        inside = tuple(ipu for ipu in report.ipus if ipu.partition_ipu in ipus)
        if not inside:
            continue
        shared = any(ipu.batches_done for ipu in report.ipus if ipu.partition_ipu not in ipus)
        report = replace(report, ipus=inside)
        if shared:
            batches = max(ipu.batches_done for ipu in inside)
            report = replace(
                report, batches_done=batches, samples_done=None, modelled_s=None, emulation_s=None
            )
        own.append(report)
    return own


def _less(now: Number | None, before: Number | None) -> Number | None:
    return None if now is None else now - (before or 0)


def done_by_all(
    before: Sequence[MachineReport], now: Iterable[MachineReport], machines: Collection[int]
) -> int | None:
    """The batches that all of a launch's machines which answer have done since ``before``: when one fails in a batch,
    others may have finished their part of it. None if no machine answers: nobody knows.
    """
    here = [report for report in now if report.machine_index in machines and report.state is MachineState.UP]
    return min((work_since(before, report).batches_done for report in here), default=None)
