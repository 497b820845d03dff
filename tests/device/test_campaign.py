"""Faults at places and in plans that nobody chose: the right error everywhere, and the right result after recovery."""

from __future__ import annotations

import pytest

from podrun.core.fault_kinds import WHERE, events_of, strikes_in_batches
from podrun.device.xla.pieces import PieceCache
from podrun.faults import FaultSpec, error_for, parse_fault

from .campaign import Training, digits, live_through, random_plan, small
from .fault_kinds import KINDS, Trainings, errors_wanted, live_through_kind, plans

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture(scope="module")
def trainings() -> Trainings:
    return Trainings(small(), small(checked=True))


def chosen(faults: list[tuple[FaultSpec, ...]], number: int, instances: int) -> list[tuple[FaultSpec, ...]]:
    """An eighth of the plans for instruction boundaries, other ones for each kind, and one for an event; with one
    instance, in the slow tests, those for all events.
    """
    events = [each for each in faults if each[-1].during]
    places = [each for each in faults if not each[-1].during]
    some = events if instances == 1 else events[number % len(events) :][:1] if events else []
    return [each for k, each in enumerate(places) if (k + number + 4 * instances) % 8 == 0] + some


@pytest.mark.parametrize("instances", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("target", "kind"), KINDS)
def test_a_kind_is_lived_through(
    pieces: PieceCache, trainings: Trainings, target: str, kind: str, instances: int
) -> None:
    training = trainings.checked if kind == "corrupt" else trainings.plain
    found = list(plans(target, kind, training, range(1, 2), instances))
    if instances == 1 and target == "instance-network":
        assert found == []
        return
    assert {each[-1].during for each in found} == {*events_of(target, kind)} | (
        {""} if strikes_in_batches(target, kind) else set()
    )
    for faults in chosen(found, KINDS.index((target, kind)), instances):
        spec = faults[-1]
        assert parse_fault(spec.text) == spec
        if spec.raises:
            assert error_for(spec).where.startswith(target)
        assert live_through_kind(faults, trainings, pieces, instances) == errors_wanted(faults), spec.text


def test_every_target_has_kinds_and_every_boundary_is_among_the_chosen(trainings: Trainings) -> None:
    assert {target for target, _ in KINDS} == set(WHERE)
    struck = {
        faults[0].instruction
        for number, (target, kind) in enumerate(KINDS)
        for faults in chosen(list(plans(target, kind, trainings.plain, range(1, 2), 2)), number, 2)
        if faults[0].instruction is not None
    }
    assert struck == set(trainings.plain.places())


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(30))
def test_a_random_plan_ends_with_the_right_result(
    pieces: PieceCache, trainings: Trainings, seed: int
) -> None:
    faults, instances = random_plan(trainings.plain, seed)
    assert live_through(trainings.plain, pieces, faults, instances)


@pytest.mark.slow
@pytest.mark.parametrize("instances", [1, 2])
def test_every_kind_at_every_place_of_the_digits_training(pieces: PieceCache, instances: int) -> None:
    trainings = Trainings(digits(), digits(checked=True))
    for target, kind in KINDS:
        training: Training = trainings.checked if kind == "corrupt" else trainings.plain
        for faults in plans(target, kind, training, (1,), instances):
            met = live_through_kind(faults, trainings, pieces, instances)
            assert met == errors_wanted(faults), [spec.text for spec in faults]
