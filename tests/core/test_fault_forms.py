"""Fault plans as text and as data."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.error_codec import error_from_dict, error_to_dict
from podrun.core.errors import ErrorCode, RecoverableRuntimeError, RecoveryAction, UsageError
from podrun.core.fault_kinds import strikes_in_batches
from podrun.core.fault_spec import PAIRS
from podrun.faults import (
    EFFECTS,
    FaultSpec,
    FaultTarget,
    error_for,
    parse_fault,
    parse_faults,
    validate,
)
from tests.conftest import CHARACTERS

small = st.integers(0, 99)


@st.composite
def specs(draw: st.DrawFn) -> FaultSpec:
    target, kind = draw(st.sampled_from([key for key in sorted(EFFECTS) if strikes_in_batches(*key)]))
    first = draw(small)
    indices = (first, first + 1 + draw(small)) if FaultTarget(target) in PAIRS else (first,)
    launch = draw(st.sampled_from(["", "4711-99"]))
    return FaultSpec(
        FaultTarget(target), indices, draw(small), kind, draw(st.none() | small), draw(st.booleans()), launch
    )


@given(specs())
def test_what_is_printed_is_read(spec: FaultSpec) -> None:
    assert parse_fault(str(spec)) == spec


def test_the_documented_forms() -> None:
    assert parse_fault("ipu:5@batch=17:tile-parity") == FaultSpec(FaultTarget.IPU, (5,), 17, "tile-parity")
    assert parse_fault("link:3-2@batch=17:down") == FaultSpec(FaultTarget.LINK, (2, 3), 17, "down")
    assert parse_fault(" machine:1@batch=17,instruction=12:lost ") == FaultSpec(
        FaultTarget.MACHINE, (1,), 17, "lost", 12
    )
    assert [str(s) for s in parse_faults("ipu:0@batch=0:trap;\n link:0-1@batch=2:down ")] == [
        "ipu:0@batch=0:trap",
        "link:0-1@batch=2:down",
    ]
    assert parse_faults("  ") == ()


def test_step_means_batch_and_optional_is_remembered() -> None:
    assert parse_fault("ipu:5@step=17,instruction=2:trap") == parse_fault("ipu:5@batch=17,instruction=2:trap")
    optional = parse_fault("ipu:5@batch=17:trap:optional")
    assert optional.optional
    assert optional.text == "ipu:5@batch=17:trap:optional"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not of the form TARGET@batch=N:KIND"),
        ("ipu:5@batch=17", "is not of the form"),
        ("ipu:5@batch=-1:tile-parity", "is not of the form"),
        ("ipu:5@17:tile-parity", "is not of the form"),
        (
            "tile:5@batch=17:tile-parity",
            "targets are ipu, link, gw-link, network, instance-network, machine, host, instance, disk and service",
        ),
        ("ipu:5@batch=17:tile-party", "did you mean 'tile-parity'"),
        ("ipu:5@batch=17:down", "ipu has no fault 'down'"),
        ("ipu:5-6@batch=17:tile-parity", "takes one index"),
        ("link:5@batch=17:down", "link takes the two IPUs"),
        ("link:5-5@batch=17:down", "link takes the two IPUs"),
    ],
)
def test_bad_text_is_refused_with_the_kinds_there_are(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_fault(text)
    if "link takes" not in message and "one index" not in message:
        assert "podrun faults kinds" in (caught.value.hint or "")


@given(st.text(CHARACTERS, max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_fault(str(parse_fault(text)))


def test_a_word_about_the_moment_among_the_settings_is_told_its_place() -> None:
    with pytest.raises(UsageError, match="throttled has no setting 'for'") as refused:
        parse_fault("ipu:1@batch=3:throttled,mhz=665,for=10")
    assert refused.value.hint == (
        "for= says when: it stands before the kind, as in @batch=3,for=10:throttled"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ipu:16@batch=0:trap", "no IPU 16, only 0 to 15"),
        ("machine:4@batch=0:lost", "no machine 4, only 0 to 3"),
        ("link:15-16@batch=0:down", "no IPU 16"),
        ("link:1-2@batch=0:down", "no IPU-Link joins IPUs 1 and 2"),
    ],
)
def test_what_cannot_happen_on_the_partition_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate([parse_fault(text)], ipus=16)


def test_what_can_happen_is_not_refused() -> None:
    validate(
        parse_faults(
            "ipu:15@batch=0:trap machine:3@batch=9:lost link:2-3@batch=1:down link:5-7@batch=1:down"
        ),
        ipus=16,
    )
    with pytest.raises(UsageError, match="no IPU-Link joins"):
        validate([parse_fault("link:2-3@batch=1:down")], ipus=16, links=[(0, 1)])


@pytest.mark.parametrize(("target", "kind"), sorted(EFFECTS))
def test_every_kind_has_an_error_that_crosses_processes(target: str, kind: str) -> None:
    during = "" if strikes_in_batches(target, kind) else "load"
    indices = (2, 3) if FaultTarget(target) in PAIRS else (2,)
    error = error_for(FaultSpec(FaultTarget(target), indices, 17, kind, during=during), partition="p16")
    effect = EFFECTS[target, kind]
    assert type(error) is effect.error
    assert ("17" in error.message) is strikes_in_batches(target, kind)
    assert error.code is effect.code
    assert (error.code is not ErrorCode.NONE) is strikes_in_batches(target, kind)
    assert error.hint
    again = error_from_dict(error_to_dict(error))
    assert type(again) is type(error)
    assert error_to_dict(again) == error_to_dict(error)
    if isinstance(error, RecoverableRuntimeError):
        assert error.recovery_action is effect.action


def test_every_class_and_recovery_action_can_be_had() -> None:
    names = {effect.error.type_name for effect in EFFECTS.values()}
    assert names == {
        "application_runtime_error",
        "graph_memory_allocation_error",
        "recoverable_runtime_error",
        "stream_memory_allocation_error",
        "unrecoverable_runtime_error",
        "unknown_runtime_error",
    }
    actions = {effect.action for effect in EFFECTS.values() if effect.error is RecoverableRuntimeError}
    assert actions == {RecoveryAction.IPU_RESET, RecoveryAction.PARTITION_RESET, RecoveryAction.FULL_RESET}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("disk:0@batch=3:full", "faults of a disk strike at a write: during=checkpoint-write"),
        ("disk:0@during=load:full", "there is no event 'load', only checkpoint-write"),
        ("ipu:0@during=checkpoint-write:trap", "there is no event 'checkpoint-write', only load"),
        ("instance:0@during=load:killed", "there is no event 'load', only checkpoint-write"),
        ("ipu:0@batch=1:out-of-memory", "out-of-memory strikes at an event: during=load"),
        ("machine:0@during=read:out-of-memory", "there is no event 'read', only load"),
        ("network:1@batch=1:partitioned", "network takes the two machines it joins, as network:2-3"),
        ("disk:0@during=checkpoint-write:full,bytes=-1", "bytes=-1 is no number from 0"),
    ],
)
def test_kinds_that_strike_only_at_events(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_fault(text)


def test_what_strikes_in_a_program_says_so_and_is_validated() -> None:
    disk = parse_fault("disk:2@during=checkpoint-write,repeat=2:full,bytes=4096")
    killed = parse_fault("instance:0@during=checkpoint-write:killed")
    assert disk.in_program
    assert killed.in_program
    assert not parse_fault("instance:0@batch=1:killed").in_program
    validate([disk, killed, parse_fault("network:0-3@batch=1:delayed,seconds=2")], ipus=16, instances=3)
    for text, message in (
        ("disk:2@during=checkpoint-write:full", "the launch has no instance 2, only 0 to 1"),
        ("network:0-4@batch=1:partitioned", "the partition has no machine 4, only 0 to 3"),
    ):
        with pytest.raises(UsageError, match=message):
            validate([parse_fault(text)], ipus=16, instances=2)
