"""Which device a program gets, where machines are lost or taken."""

from __future__ import annotations

import pytest

from podrun.core.errors import SilentMachineError, UnrecoverableRuntimeError
from podrun.runtime.device import RunDevice
from podrun.runtime.device_pool import DevicePool

Outcome = str | Exception | None
SILENT = SilentMachineError("machine 0 does not answer")
LOST = UnrecoverableRuntimeError("machine 0 is lost")


def answering(monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome) -> DevicePool:
    """A pool whose devices of 32 IPUs answer so, in their order."""
    answers = iter(outcomes)

    def refusal(device: RunDevice) -> str | None:
        outcome = next(answers)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(RunDevice, "refusal", refusal)
    return DevicePool({"PODRUN_STANDALONE_IPUS": "64"})


@pytest.mark.parametrize("error", [SILENT, LOST])
def test_a_lost_machine_is_passed_over(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    acquired = answering(monkeypatch, error, None).acquire(32)
    assert acquired.device is not None
    assert acquired.device.ipus.first == 32


def test_its_error_is_raised_where_no_machine_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnrecoverableRuntimeError, match="machine 0 is lost"):
        answering(monkeypatch, LOST, SILENT).acquire(32)


def test_all_reasons_are_told_where_the_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    acquired = answering(monkeypatch, LOST, "process 7 has them").acquire(32)
    assert acquired.device is None
    assert acquired.refusals == (LOST.message, "process 7 has them")
