"""What follows a failed attempt: look at the damage, ask the coordinator, repair, and start the instances again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from podrun.core.errors import PodrunError, present
from podrun.core.quick_dataclass import dataclass
from podrun.launcher.output import OutputMixer
from podrun.launcher.own_streams import Log, error_text
from podrun.launcher.partition import LaunchPartition
from podrun.launcher.recovery import Attempt, Coordinator, Damage, Recovery, RecoveryStep, Verdict
from podrun.launcher.repair import Repairs
from podrun.launcher.supervise import LaunchOutcome, Stopping

if TYPE_CHECKING:
    from podrun.launcher.recording import LaunchRecording


@dataclass(slots=True)
class Restarts:
    """The recoveries of one launch. Without a ``partition`` nothing needs repair. ``recording``: notes what is done;
    None: nothing is recorded.
    """

    coordinator: Coordinator
    stopping: Stopping
    log: Log
    partition: LaunchPartition | None = None
    repairs: Repairs | None = None
    recording: LaunchRecording | None = None

    def may_help(self, outcome: LaunchOutcome) -> bool:
        """Whether restarts help: an instance failed, or the partition did while instances were started again."""
        if outcome.interrupted is not None:
            return False
        return outcome.failed is not None if outcome.error is None else bool(self.coordinator.attempts)

    def recover(self, outcome: LaunchOutcome, mixer: OutputMixer, seconds: float) -> bool:
        """Do what the coordinator decides about a failed attempt. True iff the instances are to start again.

        A recovery that fails half-way is itself an attempt that failed: it is tried again while restarts remain.
        """
        failed = _how_failed(outcome, seconds)
        if self.recording is not None and outcome.failed is not None:
            self.recording.ended(outcome.failed)
        tried = len(self.coordinator.attempts)
        broke: PodrunError | None = None
        while True:
            try:
                verdict = self._repair(failed, mixer)
                break
            except PodrunError as error:
                broke = error
                if len(self.coordinator.attempts) == tried:  # Nobody even says what is broken.
                    verdict = self.coordinator.broke_off(error.message)
                    break
                if self.recording is not None:
                    self.recording.recovery_failed(error.message)
                failed = Attempt(
                    f"the recovery failed: {error.message}", error.exit_code, Damage(), in_recovery=True
                )
                tried = len(self.coordinator.attempts)
        if verdict is None:
            mixer.begin_attempt()
            return True
        if (
            broke is not None
        ):  # The lines of attempts have its message; only here nothing follows that makes it moot.
            self.log.write(error_text(broke))
        if self.recording is not None:
            self.recording.gave_up(verdict)
        self.log.write(f"podrun: not started again: {verdict.text}\n")
        mixer.note_written()
        return False

    def _repair(self, failed: Attempt, mixer: OutputMixer) -> Verdict | None:
        """Repair what is broken, so that the instances can start again. The verdict if they are not to."""
        damage, batches = (
            (Damage(), 0) if self.repairs is None else self.stopping.wait_for(self.repairs.look, self._cancel)
        )
        reached = None if self.recording is None else self.recording.reached()
        attempt = dataclasses.replace(failed, damage=damage, batches=batches, reached=reached)
        decision = self.coordinator.failed(attempt)
        if isinstance(decision, Verdict):
            return decision
        mixer.release_all()
        self.log.progress(f"{self.coordinator.attempts[-1].text}")
        self.log.progress(f"restart {decision.number} of {self.coordinator.policy.max_restarts}")
        steps = self.stopping.wait_for(lambda: self._carry_out(decision), self._cancel)
        if steps is None:
            return self.coordinator.impossible()
        if self.recording is not None:
            self.recording.started_again(decision.number, steps)
        return None

    def _carry_out(self, recovery: Recovery) -> tuple[RecoveryStep, ...] | None:
        """Make the partition usable again and plan the faults that have still to strike, before instances start. The
        steps that were taken; None if that is impossible.
        """
        if self.partition is None or self.repairs is None:
            return ()
        steps = self.repairs.carry_out(recovery)
        if steps is None:
            return None
        if self.partition.faults.planned:
            self.partition.wait_again()
            self.repairs.plan_again()
        if recovery.pause_seconds:
            self.partition.pause(recovery.pause_seconds)
        return steps

    def _cancel(self) -> None:
        if self.partition is not None:
            self.partition.cancel()


def _how_failed(outcome: LaunchOutcome, seconds: float) -> Attempt:
    """How an attempt failed after so many seconds, before anybody has looked at what is broken."""
    if outcome.error is not None:
        cause = f"the partition did not become active: {outcome.error.message}"
        return Attempt(cause, outcome.exit_code, Damage(), seconds=seconds, in_recovery=True)
    failed = present(outcome.failed, "an attempt that failed without an error has a failed instance")
    cause = f"instance {failed.instance} ended with {failed.in_words}"
    return Attempt(cause, failed.code, Damage(), seconds=seconds)
