"""Watches instances from the first start to the last end: output, the first failure, signals, deadlines.

After the first failure the other instances have a moment to end by themselves (they often fail for the same reason
and can then say so), then get SIGTERM, then SIGKILL. A signal to podrun, or a partition that fails, ends all instances
the same way.
"""

from __future__ import annotations

import enum
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from podrun.core.errors import PodrunError
from podrun.launcher.log import Log
from podrun.launcher.output import OutputMixer
from podrun.launcher.process import Command, Ended, Event, Printed

SETTLE_SECONDS = 1.0
"""From the first failure to SIGTERM for the others."""
GRACE_SECONDS = 3.0
"""From SIGTERM to SIGKILL."""
END_SECONDS = 5.0
"""From SIGKILL until podrun gives an instance up (its host does not answer)."""


class Runner(Protocol):
    """Processes of one host: `process.ProcessRunner`, or `remote.RemoteRunner`."""

    def start(self, command: Command) -> int:
        """Start an instance; its process id there."""

    def poll(self, timeout: float) -> list[Event]:
        """The events that happened; waits at most ``timeout`` seconds."""

    def running(self) -> list[int]:
        """The instances that have not been reported as ended."""

    def signal(self, number: int, instances: Sequence[int] | None = None) -> None:
        """Send a signal to the groups of instances."""

    def close(self) -> None:
        """Kill what is left, and let go of everything."""


class StopPhase(enum.Enum):
    """The phases of a launch."""

    RUNNING = "running"
    SETTLING = "settling"
    """An instance failed; the others may end by themselves."""
    TERMINATING = "terminating"
    """SIGTERM has been sent."""
    KILLING = "killing"
    """SIGKILL has been sent."""


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """How a launch ended: the first failing instance, the signal podrun got, or the error that ended it."""

    failed: Ended | None = None
    interrupted: int | None = None
    error: PodrunError | None = None

    @property
    def exit_code(self) -> int:
        """podrun's exit code."""
        if self.error is not None:
            return self.error.exit_code
        if self.interrupted is not None:
            return 128 + self.interrupted
        return self.failed.code if self.failed else 0


class Supervisor:
    """See the module docstring. ``runners[0]`` is this host's; `notify_signal` and `notify_error` may be
    called from any thread or a signal handler, then ``wake`` must make the first runner's poll return."""

    def __init__(
        self,
        runners: Sequence[Runner],
        mixer: OutputMixer,
        log: Log,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runners = runners
        self._mixer = mixer
        self._log = log
        self._wake = wake
        self._clock = clock
        self._mail: queue.SimpleQueue[int | PodrunError] = queue.SimpleQueue()
        self._phase = StopPhase.RUNNING
        self._deadline = float("inf")
        self._failed: Ended | None = None
        self._interrupted: int | None = None
        self._error: PodrunError | None = None

    def notify_signal(self, number: int) -> None:
        """podrun got a signal: end all instances; kill them at the second signal."""
        self._mail.put(number)
        self._wake()

    def notify_error(self, error: PodrunError) -> None:
        """The launch cannot go on."""
        self._mail.put(error)
        self._wake()

    def run(self) -> LaunchOutcome:
        """Supervise until all instances have ended."""
        while self._running():
            self._read_mail()
            for event in self._poll():
                self._handle(event)
            self._mixer.release_due()
            if self._clock() >= self._deadline and not self._escalate():
                break
        return LaunchOutcome(self._failed, self._interrupted, self._error)

    def _running(self) -> list[int]:
        return [instance for runner in self._runners for instance in runner.running()]

    def _poll(self) -> list[Event]:
        first, *others = self._runners
        wait = min(max(self._deadline - self._clock(), 0.0), 0.2 if self._mixer.holding else 1.0)
        events = first.poll(wait)
        for runner in others:
            events += runner.poll(0)
        return events

    def _handle(self, event: Event) -> None:
        match event:
            case Printed(instance, channel, data):
                self._mixer.feed(instance, channel, data)
            case Ended(instance, code):
                self._mixer.finish(instance)
                self._log.debug(f"instance {instance} ended with exit code {code}")
                if code and self._failed is None and self._phase is StopPhase.RUNNING:
                    self._failed = event
                    self._mixer.keep(instance)
                    self._enter(StopPhase.SETTLING, SETTLE_SECONDS)

    def _read_mail(self) -> None:
        while not self._mail.empty():
            message = self._mail.get()
            if isinstance(message, PodrunError):
                if self._phase is StopPhase.RUNNING:
                    self._error = message
                    self._terminate()
            elif self._interrupted is None:
                self._interrupted = message
                self._terminate()
            else:
                self._kill()

    def _enter(self, phase: StopPhase, seconds: float) -> None:
        self._phase = phase
        self._deadline = self._clock() + seconds

    def _escalate(self) -> bool:
        """Enter the next phase after the deadline of this one. False after the last phase."""
        if self._phase is StopPhase.SETTLING:
            self._terminate()
        elif self._phase is StopPhase.TERMINATING:
            self._kill()
        else:
            return False
        return True

    def _terminate(self) -> None:
        if self._phase in (StopPhase.TERMINATING, StopPhase.KILLING):
            return
        self._log.debug(f"ending instances {self._running()}")
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        self._enter(StopPhase.TERMINATING, GRACE_SECONDS)

    def _kill(self) -> None:
        self._log.debug(f"killing instances {self._running()}")
        self._send(signal.SIGKILL)
        self._enter(StopPhase.KILLING, END_SECONDS)

    def _send(self, number: int) -> None:
        for runner in self._runners:
            runner.signal(number, runner.running())
