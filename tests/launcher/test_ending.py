"""Which planned faults a launch counts as struck when it ends."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from podrun.core.errors import ServiceError
from podrun.core.layout import IpuRange
from podrun.core.telemetry import IpuReport, MachineReport
from podrun.faults import FaultSpec, parse_fault
from podrun.launcher.ending import LaunchEnding
from podrun.launcher.launch_faults import LaunchFaults

ON_MACHINE, INSIDE = parse_fault("ipu:0@batch=3:trap"), parse_fault("instance:0@batch=2:killed")


def ending(*, was_active: bool, planned: tuple[FaultSpec, ...] = (), answers: bool = True) -> LaunchEnding:
    wanted = SimpleNamespace(faults=(ON_MACHINE, INSIDE))
    spec = SimpleNamespace(partition=wanted, layout=SimpleNamespace(ipus=4))
    current: Any = SimpleNamespace(wanted=wanted, spec=spec)

    def latest(attempts: int) -> list[MachineReport]:
        if not answers:
            raise ServiceError("nobody answers")
        return [MachineReport("ipum1", planned_faults=planned)]

    partition: Any = SimpleNamespace(
        was_active=was_active,
        first_ipu=0,
        faults=LaunchFaults(current, "4711-1"),
        reports=SimpleNamespace(latest=latest),
    )
    inside: Any = SimpleNamespace(left=lambda: [INSIDE])
    log: Any = None
    return LaunchEnding(current, log, 0.0, 0.0, partition=partition, program_faults=inside)


@pytest.mark.parametrize("answers", [True, False])
def test_nothing_strikes_a_program_that_ends_before_its_partition_is_active(answers: bool) -> None:
    """As one that ends at its imports: its fault made an incident, although nothing had struck."""
    ended = ending(was_active=False, answers=answers)
    told = ended.unstruck_faults()
    assert ON_MACHINE.text in told
    assert INSIDE.text in told
    assert ended._unstruck == {ON_MACHINE, INSIDE}


def test_afterwards_the_machines_say_what_is_left() -> None:
    struck = ending(was_active=True)
    struck.unstruck_faults()
    assert struck._unstruck == {INSIDE}
    left = ending(was_active=True, planned=(replace(ON_MACHINE, launch="4711-1"),))
    left.unstruck_faults()
    assert left._unstruck == {ON_MACHINE, INSIDE}
    assert "cannot tell" in ending(was_active=True, answers=False).unstruck_faults()


@pytest.mark.parametrize("answers", [True, False])
def test_what_an_interrupted_launch_planned_has_not_struck(answers: bool) -> None:
    """The record and the last lines of a launch that was ended by Ctrl-C told of faults that never struck."""
    planned = (replace(ON_MACHINE, launch="4711-1"),)
    ended = ending(was_active=True, planned=planned, answers=answers)
    assert ended.unstruck_faults(interrupted=True) == ""
    assert ended._unstruck == {ON_MACHINE, INSIDE}


def test_a_fault_of_an_instance_is_not_awaited_where_no_instance_runs() -> None:
    """A launch of 4 IPUs shares a partition of 8: both machines are told of the fault, one kills the instance."""
    killed = replace(parse_fault("instance:0@batch=12:killed"), launch="4711-1")
    idle, other = (
        replace(parse_fault(text), launch="4711-1") for text in ("ipu:5@batch=3:trap", "ipu:6@batch=3:trap")
    )
    current: Any = SimpleNamespace(wanted=SimpleNamespace(faults=(killed, idle)))
    faults = LaunchFaults(current, "4711-1")

    def report(machine: int, *planned: FaultSpec) -> MachineReport:
        ipus = tuple(IpuReport(4 * machine + i, i) for i in range(4))
        return MachineReport(f"ipum{machine + 1}", ipus=ipus, planned_faults=tuple(planned))

    both = [report(0), report(1, killed, idle, other)]
    assert faults.unstruck(both, IpuRange(0, 4)) == [
        idle
    ]  # A fault of an IPU is: the launch named the wrong one.
    assert faults.unstruck([report(0, killed), report(1, killed)], IpuRange(0, 4)) == [killed]
