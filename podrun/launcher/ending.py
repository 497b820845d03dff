"""How a launch ends: faults that did not strike, the record, and what is said last."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.core.errors import PodrunError, present
from podrun.core.layout import IpuRange
from podrun.core.quick_dataclass import dataclass
from podrun.faults import FaultSpec, PlanOfALaunch, report_unstruck
from podrun.launcher.machine_work import PATIENT_ATTEMPTS
from podrun.launcher.output import OutputMixer
from podrun.launcher.own_streams import Log, error_text
from podrun.launcher.partition import LaunchPartition
from podrun.launcher.spec import CurrentLaunch
from podrun.launcher.summary import launch_summary
from podrun.launcher.supervise import LaunchOutcome
from podrun.record.strikes import FaultTime

if TYPE_CHECKING:
    from podrun.launcher.recording import LaunchRecording


@dataclass(slots=True)
class LaunchEnding:
    """The last things that a launch does and says. ``started``: seconds of the monotonic clock, ``began``: since 1970.

    ``program_faults``: those that strike in instances. ``recording``: None if nothing is recorded. ``signalled``: when
    podrun was told to end the launch, since 1970.
    """

    current: CurrentLaunch
    log: Log
    started: float
    began: float
    partition: LaunchPartition | None = None
    program_faults: PlanOfALaunch | None = None
    recording: LaunchRecording | None = None
    signalled: float = math.inf
    _unstruck: frozenset[FaultSpec] = frozenset()

    def unstruck_faults(self, *, interrupted: bool = False) -> str:
        """The message that names planned faults that did not strike; empty if every fault that had to strike did, and
        where the launch was interrupted, from which nobody expects that.
        """
        try:
            unstruck = self._unstruck_on_machines(1 if interrupted else PATIENT_ATTEMPTS)
            if self.program_faults is not None:
                unstruck += self.program_faults.left()
            said = report_unstruck(unstruck)
        except PodrunError as error:
            wanted = self.current.spec.partition
            unstruck = list(wanted.faults) if interrupted and wanted is not None else []
            said = f"cannot tell whether the planned faults struck: {error.message}\n"
        self._unstruck = frozenset(replace(fault, launch="") for fault in unstruck)
        return "" if interrupted else said

    def _unstruck_on_machines(self, attempts: int) -> list[FaultSpec]:
        """The faults of machines and of the service that did not strike: all of them where instances ended before there
        was a partition, as a program that fails at its imports does.
        """
        if self.partition is None or not self.partition.was_active:
            wanted = self.current.spec.partition  # None offline: nothing could strike there.
            return [spec for spec in wanted.faults if not spec.in_program] if wanted is not None else []
        faults, ipus = self.partition.faults, self._own_ipus(self.partition)
        return faults.unstruck(self.partition.reports.latest(attempts), ipus) if faults.planned else []

    def _own_ipus(self, partition: LaunchPartition) -> IpuRange:
        return IpuRange(partition.first_ipu, self.current.spec.layout.ipus)

    def finish_recording(self, outcome: LaunchOutcome, code: int, mixer: OutputMixer) -> None:
        """Write the record; if anything went wrong, say what it was and what it cost."""
        if self.recording is None:
            return
        if outcome.failed is not None and self.current.spec.restarts is None:
            self.recording.ended(outcome.failed)
        self.recording.note("end", code=code)
        try:
            reports = [] if self.partition is None else self.partition.reports.history()
            struck = [] if self.program_faults is None else self.program_faults.strikes()
            inside = [(who, FaultTime(fault, seconds)) for who, fault, seconds in struck]
            lines = self.recording.finish(self._unstruck, reports, inside, self.signalled).lines
        except PodrunError as error:
            self.log.write(error_text(error))
            return
        if lines and self.current.spec.verbosity >= 0:
            mixer.note_written()
            for line in lines:
                self.log.progress(line)

    def release_output(self, outcome: LaunchOutcome, mixer: OutputMixer) -> None:
        """Write the output that was held back, but not that of the instance whose failure is told last."""
        decisive = outcome.failed if outcome.error is None and outcome.interrupted is None else None
        mixer.release_all(but=None if decisive is None else decisive.instance)

    def report(self, outcome: LaunchOutcome, mixer: OutputMixer) -> None:
        """Say how the launch ended: its summary, or what failed."""
        if outcome.error is not None:
            self.log.write(error_text(outcome.error))
        elif outcome.interrupted is not None:
            name = signal.Signals(outcome.interrupted).name
            self.log.write(f"podrun: {name}: all instances were ended\n")
        elif outcome.failed is not None:
            self._report_failure(outcome, mixer)
        elif self.current.spec.verbosity >= 0:
            partition = self.partition
            reports = partition.reports.of_launch(self._own_ipus(partition)) if partition else []
            first = self.current.spec.instances[0]
            words = [str(Path(first.directory, word)) for word in first.command]
            for line in launch_summary(
                self.current.spec.layout, reports, time.monotonic() - self.started, words
            ):
                self.log.progress(line)

    def _report_failure(self, outcome: LaunchOutcome, mixer: OutputMixer) -> None:
        """Report the failing instance: podrun's line first, the instance's traceback last."""
        failed = present(outcome.failed, "an attempt that failed without an error has a failed instance")
        alone = self.current.spec.layout.instances == 1
        if alone and failed.signal is None and mixer.explains_itself(failed.instance):
            mixer.show_failure(failed.instance)
            return
        how = failed.in_words
        others = "" if alone else "; the others were ended"
        self.log.write(f"podrun: instance {failed.instance} ended with {how}{others}\n")
        if not alone:
            mixer.note_written()
            mixer.show_failure(failed.instance)
