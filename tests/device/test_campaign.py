"""Faults at places and in plans that nobody chose: the right error everywhere, and the right result after recovery."""

from __future__ import annotations

import pytest

from podrun.device.xla.pieces import PieceCache

from .campaign import Training, digits, every_place, live_through, random_plan, small

pytestmark = pytest.mark.usefixtures("no_threads_left")


@pytest.fixture(scope="module")
def linear_training() -> Training:
    return small()


@pytest.mark.parametrize("instances", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_kind_and_every_place_of_a_small_program(
    pieces: PieceCache, linear_training: Training, instances: int
) -> None:
    places = len(linear_training.places())
    plans = list(every_place(linear_training))
    # A quarter of all pairs, in which each kind and each place occurs; the slow tests and the campaign take all.
    chosen = [spec for k, spec in enumerate(plans) if (k // places + k % places + instances) % 4 == 0]
    assert {spec.kind for spec in chosen} == {spec.kind for spec in plans}
    assert {spec.instruction for spec in chosen} == {spec.instruction for spec in plans}
    for spec in chosen:
        assert len(live_through(linear_training, pieces, [spec], instances)) == 1, spec.text


@pytest.mark.parametrize("seed", range(30))
def test_a_random_plan_ends_with_the_right_result(
    pieces: PieceCache, linear_training: Training, seed: int
) -> None:
    faults, instances = random_plan(linear_training, seed)
    assert live_through(linear_training, pieces, faults, instances)


@pytest.mark.slow
@pytest.mark.parametrize("instances", [1, 2])
def test_every_kind_at_every_place_of_the_digits_training(pieces: PieceCache, instances: int) -> None:
    training = digits()
    for spec in every_place(training):
        assert len(live_through(training, pieces, [spec], instances)) == 1, spec.text
