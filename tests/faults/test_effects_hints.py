"""Hints about recovery can be followed: they name no partition or server that ends with the run."""

from __future__ import annotations

import pytest

from podrun.core.errors import (
    ApplicationRuntimeError,
    PoplarError,
    RecoverableRuntimeError,
    RecoveryAction,
    UnrecoverableRuntimeError,
)
from podrun.faults import error_for, hint_in_launch, parse_fault, recovery_hint
from podrun.faults.fault_errors import ENDS_WITH_LAUNCH, NOTHING_BROKEN, SUPERVISED

A, R, U = ApplicationRuntimeError, RecoverableRuntimeError, UnrecoverableRuntimeError


@pytest.mark.parametrize(
    ("action", "error", "partition", "agent", "hint"),
    [
        (
            RecoveryAction.IPU_RESET,
            R,
            "mine",
            "",
            "Load the program again (prepareDevice); after the program has ended: gc-reset -d 2-3",
        ),
        (None, A, "podrun-4711", "", "Load the program again (prepareDevice)."),
        (None, A, "", "", "Load the program again (prepareDevice)."),
        (
            RecoveryAction.PARTITION_RESET,
            R,
            "mine",
            "",
            "End the program and reset the partition: vipu reset partition mine",
        ),
        (
            *(RecoveryAction.PARTITION_RESET, R, "podrun-4711", "ipum2"),
            "The partition ends with this launch: start it again. With --max-restarts 3 podrun recovers by itself.",
        ),
        (
            *(RecoveryAction.FULL_RESET, R, "mine", "ipum2"),
            "Power-cycle the machine: vipu-admin power-cycle agent ipum2, then: vipu reset partition mine",
        ),
        (
            *(None, U, "mine", ""),
            "Replace the machine (gc-monitor names the agent): vipu-admin restart agent AGENT, then: "
            "vipu reset partition mine",
        ),
        (None, U, "", "", "Start the program again: its machines are in its own process."),
    ],
)
def test_hints_can_be_followed(
    action: RecoveryAction | None, error: type[PoplarError], partition: str, agent: str, hint: str
) -> None:
    assert recovery_hint(action, error, "link 2-3", partition, agent) == hint


def test_no_hint_recommends_what_the_launch_does_already() -> None:
    supervised = {SUPERVISED: "1"}
    for text, partition in (
        ("ipu:0@during=load:out-of-memory", ""),
        ("link:0-1@batch=3:down", "podrun-4711"),
    ):
        error = error_for(parse_fault(text), partition=partition)
        assert error.hint in (NOTHING_BROKEN, ENDS_WITH_LAUNCH)
        assert hint_in_launch(error, {}) == error.hint
        assert "podrun recovers by itself" in str(hint_in_launch(error, supervised))
    lasting = error_for(parse_fault("link:0-1@batch=3:down"), partition="mine")
    assert hint_in_launch(lasting, supervised) == lasting.hint
    assert hint_in_launch(ApplicationRuntimeError("a", hint="b"), supervised) == "b"


def test_who_is_not_attached_cannot_load() -> None:
    asked = (RecoveryAction.IPU_RESET, R, "ipu 5")
    assert recovery_hint(*asked, "mine", attached=False) == "Reset it: gc-reset -d 5"
    assert recovery_hint(*asked, "", attached=False).startswith("Start the program again")
