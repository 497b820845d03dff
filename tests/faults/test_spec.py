"""Fault plans as text and as data."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.errors import ErrorCode, RecoverableRuntimeError, RecoveryAction, UsageError, error_from_dict
from podrun.faults import (
    EFFECTS,
    FaultPoint,
    FaultSpec,
    FaultTarget,
    error_for,
    parse_fault,
    parse_faults,
    validate,
)

small = st.integers(0, 99)


@st.composite
def specs(draw: st.DrawFn) -> FaultSpec:
    target, kind = draw(st.sampled_from(sorted(EFFECTS)))
    first = draw(small)
    indices = (first, first + 1 + draw(small)) if target == "link" else (first,)
    return FaultSpec(FaultTarget(target), indices, draw(small), kind, draw(st.none() | small))


@given(specs())
def test_what_is_printed_is_read(spec: FaultSpec) -> None:
    assert parse_fault(str(spec)) == spec


def test_the_documented_forms() -> None:
    assert parse_fault("ipu:5@step=17:tile-parity") == FaultSpec(FaultTarget.IPU, (5,), 17, "tile-parity")
    assert parse_fault("link:3-2@step=17:down") == FaultSpec(FaultTarget.LINK, (2, 3), 17, "down")
    assert parse_fault(" machine:1@step=17,instruction=12:lost ") == FaultSpec(
        FaultTarget.MACHINE, (1,), 17, "lost", 12
    )
    assert [str(s) for s in parse_faults("ipu:0@step=0:trap;\n link:0-1@step=2:down ")] == [
        "ipu:0@step=0:trap",
        "link:0-1@step=2:down",
    ]
    assert parse_faults("  ") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not of the form TARGET@step=N:KIND"),
        ("ipu:5@step=17", "is not of the form"),
        ("ipu:5@step=-1:tile-parity", "is not of the form"),
        ("ipu:5@17:tile-parity", "is not of the form"),
        ("tile:5@step=17:tile-parity", "targets are ipu, link and machine"),
        ("ipu:5@step=17:tile-party", "did you mean 'tile-parity'"),
        ("ipu:5@step=17:down", "ipu has no fault 'down'"),
        ("ipu:5-6@step=17:tile-parity", "takes one index"),
        ("link:5@step=17:down", "link takes the two IPUs"),
        ("link:5-5@step=17:down", "link takes the two IPUs"),
    ],
)
def test_bad_text_is_refused_with_the_kinds_there_are(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_fault(text)
    if "link takes" not in message and "one index" not in message:
        assert "ipu:N@step=S:tile-parity" in (caught.value.hint or "")


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_fault(str(parse_fault(text)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ipu:16@step=0:trap", "no IPU 16, only 0 to 15"),
        ("machine:4@step=0:lost", "no machine 4, only 0 to 3"),
        ("link:15-16@step=0:down", "no IPU 16"),
        ("link:1-2@step=0:down", "no IPU-Link joins IPUs 1 and 2"),
    ],
)
def test_what_cannot_happen_on_the_partition_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate([parse_fault(text)], ipus=16)


def test_what_can_happen_is_not_refused() -> None:
    validate(
        parse_faults("ipu:15@step=0:trap machine:3@step=9:lost link:2-3@step=1:down link:5-7@step=1:down"),
        ipus=16,
    )
    with pytest.raises(UsageError, match="no IPU-Link joins"):
        validate([parse_fault("link:2-3@step=1:down")], ipus=16, links=[(0, 1)])


@pytest.mark.parametrize(("target", "kind"), sorted(EFFECTS))
def test_every_kind_has_an_error_that_crosses_processes(target: str, kind: str) -> None:
    spec = FaultSpec(FaultTarget(target), (2, 3) if target == "link" else (2,), 17, kind)
    error = error_for(spec, partition="p16")
    effect = EFFECTS[target, kind]
    assert type(error) is effect.error
    assert "17" in error.message
    assert error.code is effect.code
    assert error.code is not ErrorCode.NONE
    assert error.hint
    again = error_from_dict(error.to_dict())
    assert type(again) is type(error)
    assert again.to_dict() == error.to_dict()
    if isinstance(error, RecoverableRuntimeError):
        assert error.recovery_action is effect.action


def test_every_class_and_recovery_action_can_be_had() -> None:
    names = {effect.error.type_name for effect in EFFECTS.values()}
    assert names == {
        "application_runtime_error",
        "recoverable_runtime_error",
        "unrecoverable_runtime_error",
        "unknown_runtime_error",
    }
    actions = {effect.action for effect in EFFECTS.values() if effect.error is RecoverableRuntimeError}
    assert actions == {RecoveryAction.IPU_RESET, RecoveryAction.PARTITION_RESET, RecoveryAction.FULL_RESET}


def test_a_fault_strikes_once_at_its_place_on_its_machine() -> None:
    point = FaultPoint(range(4, 8), machine=1)
    point.plan(
        parse_faults(
            "ipu:5@step=3:trap ipu:1@step=0:trap link:3-5@step=3,instruction=2:down machine:1@step=4:power"
        )
    )
    assert str(point.planned[0]) == "ipu:5@step=3:trap"
    assert len(point.planned) == 3, "faults of other machines are not kept"
    assert point.ask(2, 0, [4, 5, 6, 7], leads=True) is None
    assert point.ask(3, 1, [4, 5, 6, 7], leads=True) is None
    assert point.ask(3, 0, [4, 6], leads=True) is None, "not an IPU of this list"
    first = point.ask(3, 0, [5, 7], leads=False)
    assert first is not None
    assert first.kind == "trap"
    assert point.ask(3, 0, [5, 7], leads=False) is None
    second = point.ask(3, 2, [4, 5, 6, 7], leads=True)
    assert second is not None
    assert second.kind == "down"
    assert point.ask(4, 0, [5, 7], leads=False) is None, "faults of the machine strike in its first list only"
    third = point.ask(4, 0, [4, 6], leads=True)
    assert third is not None
    assert third.kind == "power"
    assert point.planned == ()
