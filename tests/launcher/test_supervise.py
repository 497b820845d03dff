"""The first failure, signals, deadlines: with fake processes and a fake clock."""

from __future__ import annotations

import io
import signal
from collections.abc import Sequence

from podrun.core.errors import ServiceError
from podrun.launcher.output import OutputChannel, OutputMixer
from podrun.launcher.own_streams import Log
from podrun.launcher.process import Command, Ended, InstanceEvent, Printed
from podrun.launcher.recovery import ENDING_TIMES
from podrun.launcher.supervise import Supervisor


class World:
    """A runner whose processes end at planned times, or when a signal they do not ignore reaches them."""

    def __init__(self, ends: dict[int, tuple[float, int]], ignores: Sequence[tuple[int, int]] = ()) -> None:
        self.now = 0.0
        self.ends = dict(ends)
        self.ignores = set(ignores)
        self.signals: list[tuple[float, int, tuple[int, ...]]] = []
        self.at: list[tuple[float, object]] = []
        self.supervisor: Supervisor | None = None

    def clock(self) -> float:
        return self.now

    def start(self, command: Command) -> int:
        raise AssertionError("nothing is started here")

    def running(self) -> list[int]:
        return sorted(self.ends)

    def poll(self, timeout: float) -> list[InstanceEvent]:
        times = [time for time, _ in self.ends.values()] + [time for time, _ in self.at]
        self.now = max(self.now, min([*times, self.now + timeout]))
        events: list[InstanceEvent] = []
        for instance, (time, code) in sorted(self.ends.items(), key=lambda item: item[1]):
            if time <= self.now:
                del self.ends[instance]
                events.append(Printed(instance, OutputChannel.STDERR, b"last words\n"))
                events.append(Ended(instance, code))
        for time, message in list(self.at):
            if time <= self.now:
                self.at.remove((time, message))
                assert self.supervisor is not None
                if isinstance(message, int):
                    self.supervisor.notify_signal(message)
                else:
                    assert isinstance(message, ServiceError)
                    self.supervisor.notify_error(message)
        return events

    def signal(self, number: int, instances: Sequence[int] | None = None) -> None:
        reached = tuple(self.ends if instances is None else instances)
        self.signals.append((self.now, number, reached))
        for instance in reached:
            deadly = number in (signal.SIGTERM, signal.SIGKILL)
            if deadly and (instance, number) not in self.ignores and instance in self.ends:
                self.ends[instance] = (self.now, 128 + number)


def supervise(world: World) -> Supervisor:
    mixer = OutputMixer(8, lambda channel, data: None)
    supervisor = Supervisor([world], mixer, Log(-1, io.StringIO()), wake=lambda: None, clock=world.clock)
    world.supervisor = supervisor
    return supervisor


def test_all_end_well() -> None:
    outcome = supervise(World({0: (1.0, 0), 1: (2.0, 0)})).run()
    assert outcome.exit_code == 0
    assert outcome.failed is None


def test_the_first_failure_decides_and_ends_the_others() -> None:
    world = World({0: (100.0, 0), 1: (1.0, 3), 2: (1.5, 4)})
    outcome = supervise(world).run()
    assert outcome.exit_code == 3
    assert outcome.failed == Ended(1, 3)
    terms = [entry for entry in world.signals if entry[1] == signal.SIGTERM]
    assert terms == [(1.0 + ENDING_TIMES.settle, signal.SIGTERM, (0,))]
    assert not [entry for entry in world.signals if entry[1] == signal.SIGKILL]


def test_one_that_ignores_sigterm_is_killed_after_a_grace() -> None:
    world = World({0: (1e9, 0), 1: (1.0, 1)}, ignores=[(0, signal.SIGTERM)])
    assert supervise(world).run().exit_code == 1
    kills = [entry for entry in world.signals if entry[1] == signal.SIGKILL]
    assert kills == [(1.0 + ENDING_TIMES.settle + ENDING_TIMES.grace, signal.SIGKILL, (0,))]


def test_one_that_cannot_be_killed_does_not_hold_podrun_for_ever() -> None:
    world = World({0: (1e9, 0), 1: (1.0, 1)}, ignores=[(0, signal.SIGTERM), (0, signal.SIGKILL)])
    assert supervise(world).run().exit_code == 1
    assert world.now < 60


def test_a_signal_ends_all_at_once_and_is_the_exit_code() -> None:
    world = World({0: (1e9, 0), 1: (1e9, 0)})
    world.at = [(2.0, signal.SIGINT)]
    outcome = supervise(world).run()
    assert outcome.exit_code == 130
    assert world.now == 2.0


def test_a_second_signal_kills_without_grace() -> None:
    world = World({0: (1e9, 0)}, ignores=[(0, signal.SIGTERM)])
    world.at = [(2.0, signal.SIGINT), (2.5, signal.SIGINT)]
    assert supervise(world).run().exit_code == 130
    assert world.now == 2.5


def test_an_error_of_the_partition_ends_all_and_is_reported() -> None:
    world = World({0: (1e9, 0)})
    error = ServiceError("partition p is in state ERROR")
    world.at = [(1.0, error)]
    outcome = supervise(world).run()
    assert outcome.error is error
    assert outcome.exit_code == 1


def test_a_failure_after_an_interrupt_does_not_change_the_exit_code() -> None:
    world = World({0: (2.1, 7), 1: (1e9, 0)}, ignores=[(0, signal.SIGTERM)])
    world.at = [(2.0, signal.SIGTERM)]
    assert supervise(world).run().exit_code == 143
