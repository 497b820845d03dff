"""Watches instances from the first start to the last end: output, the first failure, signals, deadlines.

After the first failure the other instances have a moment to end by themselves (they often fail for the same reason
and can then say so), then get SIGTERM, then SIGKILL. A signal to podrun, or a partition that fails, ends all instances
the same way.

Signals to podrun (`Stopping`): handlers record them, and the main thread acts on them at safe places. A handler that
raises may interrupt an import (Python may then ignore the exception, go on, and hang at the import's lock), or the
moment between creating a resource and recording that it must be removed.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from types import FrameType
from typing import Protocol, TypeVar

from podrun.core.errors import PodrunError
from podrun.core.quick_dataclass import dataclass
from podrun.core.stop_signals import in_daemon_thread, stop_signals_handled
from podrun.launcher.output import OutputMixer
from podrun.launcher.own_streams import Log
from podrun.launcher.process import Command, Ended, InstanceEvent, Printed
from podrun.launcher.recovery import ENDING_TIMES


class Runner(Protocol):
    """Processes of one host: `process.ProcessRunner`, or `remote.RemoteRunner`."""

    def start(self, command: Command) -> int:
        """Start an instance; its process id there."""

    def poll(self, timeout: float) -> list[InstanceEvent]:
        """The events that happened; waits at most ``timeout`` seconds."""

    def running(self) -> list[int]:
        """The instances that have not been reported as ended."""

    def signal(self, number: int, instances: Sequence[int] | None = None) -> None:
        """Send a signal to the groups of instances."""

    def close(self) -> None:
        """Kill the remaining processes and release everything."""


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
    """Supervises the instances of a launch, see the module docstring. ``runners[0]`` is this host's.

    `notify_signal` and `notify_error` may be called from any thread or a signal handler; ``wake`` must then make the
    first runner's poll return.
    """

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
        """End the launch with an error, because it cannot go on."""
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

    def _poll(self) -> list[InstanceEvent]:
        first, *others = self._runners
        seconds = min(max(self._deadline - self._clock(), 0.0), 0.2 if self._mixer.holding else 1.0)
        events = first.poll(seconds)
        for runner in others:
            events += runner.poll(0)
        return events

    def _handle(self, event: InstanceEvent) -> None:
        match event:
            case Printed(instance, channel, data):
                self._mixer.feed(instance, channel, data)
            case Ended(instance, code):
                self._mixer.finish(instance)
                self._log.debug(f"instance {instance} ended with exit code {code}")
                if code and self._failed is None and self._phase is StopPhase.RUNNING:
                    self._failed = event
                    self._mixer.keep(instance)
                    self._enter(StopPhase.SETTLING, ENDING_TIMES.settle)

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
        self._enter(StopPhase.TERMINATING, ENDING_TIMES.grace)

    def _kill(self) -> None:
        self._log.debug(f"killing instances {self._running()}")
        self._send(signal.SIGKILL)
        self._enter(StopPhase.KILLING, ENDING_TIMES.end)

    def _send(self, number: int) -> None:
        for runner in self._runners:
            runner.signal(number, runner.running())


T = TypeVar("T")

LOOK_SECONDS = 0.05
"""Interval at which the main thread checks for a signal while another thread works."""
PATIENCE_SECONDS = 1.0
"""Time for background work to end by itself after a signal, before it is cancelled."""
GIVE_UP_SECONDS = 10.0
"""Time for cancelled background work to end."""
CLEARING_SECONDS = 4.0
"""Time for clean-up; after it, one more signal leaves the rest to the guardian process."""


class Interrupted(BaseException):
    """podrun got a signal before instances were started."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stopping:
    """The stop signals of this process while `heard`. ``on_signal`` is called in the handler: it may only note things
    and wake a thread.
    """

    def __init__(
        self, on_signal: Callable[[int], None], *, exit_at_once: Callable[[int], None] = os._exit
    ) -> None:
        self.number: int | None = None
        self._on_signal = on_signal
        self._exit_at_once = exit_at_once
        self._clearing_since: float | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[Stopping]:
        """Handle the signals. Signals that the caller ignores (nohup, a background job of a script) stay ignored."""
        with stop_signals_handled(self._handle):
            yield self

    def clearing(self) -> None:
        """Begin clean-up: signals do not interrupt it unless it takes longer than `CLEARING_SECONDS`."""
        self._clearing_since = time.monotonic()

    def check(self) -> None:
        """Raise Interrupted if a signal has come."""
        if self.number is not None:
            raise Interrupted(self.number)

    def wait_for(self, work: Callable[[], T], cancel: Callable[[], None]) -> T:
        """Run blocking ``work`` in a thread and return its result.

        After a signal the work may end by itself within `PATIENCE_SECONDS`; then ``cancel`` must make it end. Raises
        Interrupted in both cases.
        """
        outcome = in_daemon_thread(work, "podrun-prepare")
        while not outcome.done() and self.number is None:
            wait([outcome], LOOK_SECONDS)
        if self.number is not None and wait([outcome], PATIENCE_SECONDS).not_done:
            cancel()
            wait([outcome], GIVE_UP_SECONDS)
        self.check()
        return outcome.result()

    def _handle(self, number: int, _: FrameType | None) -> None:
        since = self._clearing_since
        if since is not None and time.monotonic() - since > CLEARING_SECONDS:
            self._exit_at_once(128 + number)
        if self.number is None:
            self.number = number
        self._on_signal(number)
