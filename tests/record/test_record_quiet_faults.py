"""Faults without an error of their own in a record."""

from __future__ import annotations

import pytest

from podrun.faults import parse_fault
from podrun.record.events import Event, LaunchHeader, Record, TimedEvent
from podrun.record.incidents import incidents_of
from podrun.record.strikes import with_faults


@pytest.mark.parametrize("text", ["instance:1@batch=12:killed", "ipu:5@batch=3:slow,factor=100.0"])
def test_a_fault_without_an_error_explains_none(text: str) -> None:
    error = Event("instance 0", 0, 5, "error", {"error": "runtime_error", "message": "m", "where": "ipu 5"})
    found = with_faults([TimedEvent(error, 2.0)], [parse_fault(text)])
    assert {timed.event.kind for timed in found} == {"error", "fault"}


@pytest.mark.parametrize("text", ["instance:1@batch=12:killed", "disk:1@during=checkpoint-write:full"])
def test_the_end_of_an_instance_is_explained_by_what_struck_it(text: str) -> None:
    events = [
        TimedEvent(Event("launch", 0, 3, "ended", {"instance": 1, "code": 1}), 3.0),
        TimedEvent(Event("launch", 0, 3, "restart", {"text": "again"}), 4.0),
        TimedEvent(Event("launch", 1, 9, "end", {"code": 0}), 9.0),
    ]
    kinds = [timed.event.kind for timed in with_faults(events, [parse_fault(text)])]
    assert kinds == ["fault", "ended", "restart", "end"]
    found = [
        (timed.event.life, timed.event.clock)
        for timed in with_faults(events, [parse_fault(text)])
        if timed.event.kind == "fault"
    ]
    assert found == [(0, 3)]


def test_a_fault_in_the_reset_of_a_recovery_stands_where_that_broke_off() -> None:
    """The machine that it ended cannot say when; the launch went on, and its incident says how."""
    fault = "machine:1@during=partition-reset:lost"
    events = [
        TimedEvent(Event("instance 0", 0, 2, "ran", {"batch": 0, "batches": 1}), 2.0),
        TimedEvent(Event("launch", 0, 3, "ended", {"instance": 0, "code": 1, "how": "exit code 1"}), 3.0),
        TimedEvent(
            Event("launch", 0, 3, "repair", {"text": "the recovery failed: machine ipum2 is lost"}), 4.0
        ),
        TimedEvent(Event("launch", 0, 3, "restart", {"text": "replace machine ipum2"}), 5.0),
        TimedEvent(Event("instance 0", 2, 2, "load", {}), 6.0),
        TimedEvent(Event("instance 0", 2, 3, "ran", {"batch": 0, "batches": 1}), 7.0),
        TimedEvent(Event("launch", 2, 9, "end", {"code": 0}), 9.0),
    ]
    placed = tuple(timed.event for timed in with_faults(events, [parse_fault(fault)]))
    *_, incident = incidents_of(Record(LaunchHeader(("--", "x"), "/", (parse_fault(fault),)), placed))
    assert incident.faults == (fault,)
    assert "replace machine ipum2" in incident.action
    assert incident.batch == 1


def test_a_fault_in_the_reset_of_a_command_still_comes_at_the_end() -> None:
    end = TimedEvent(Event("launch", 0, 9, "end", {"code": 0}), 9.0)
    *_, last = with_faults([end], [parse_fault("machine:1@during=partition-reset:lost")])
    assert last.event.kind == "fault"
