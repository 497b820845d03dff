"""Faults without an error of their own in a record."""

from __future__ import annotations

import pytest

from podrun.record.events import Event, TimedEvent, with_faults


@pytest.mark.parametrize("text", ["instance:1@batch=12:killed", "ipu:5@batch=3:slow,factor=100.0"])
def test_a_fault_without_an_error_explains_none(text: str) -> None:
    error = Event("instance 0", 0, 5, "error", {"error": "runtime_error", "message": "m", "where": "ipu 5"})
    found = with_faults([TimedEvent(error, 2.0)], [text])
    assert {timed.event.kind for timed in found} == {"error", "fault"}
