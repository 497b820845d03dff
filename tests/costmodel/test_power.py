"""Modelled power and temperatures equal the published samples they rest on, and approach them as heat does."""

from __future__ import annotations

import pytest

from podrun.costmodel.power import (
    BOARD_SECONDS,
    BOW_BUSY_WATTS,
    BUSY_WATTS,
    DIE_SECONDS,
    IDLE_WATTS,
    INLET_C,
    BoardHeat,
    modelled_ipu_watts,
)


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 47.5, 49.0), (1.0, 123.5, 124.5)])
def test_power_at_both_ends_is_within_the_published_sample(share: float, low: float, high: float) -> None:
    watts = modelled_ipu_watts("gc200", share, 1330.0)
    assert watts is not None
    assert low <= watts <= high


def test_half_the_clock_halves_power_above_idle() -> None:
    full, half = modelled_ipu_watts("gc200", 0.8, 1330.0), modelled_ipu_watts("gc200", 0.8, 665.0)
    idle = modelled_ipu_watts("gc200", 0.0, 665.0)
    assert full is not None
    assert half is not None
    assert idle is not None
    assert half - idle == pytest.approx((full - idle) / 2)


def test_a_bow_is_extrapolated_from_its_published_gain() -> None:
    """40 % faster with 16 % more speed a watt: 1.207 times the watts."""
    assert modelled_ipu_watts("bow", 1.0, 1850.0) == pytest.approx(BOW_BUSY_WATTS)
    assert pytest.approx(1.207, abs=0.001) == BOW_BUSY_WATTS / BUSY_WATTS


@pytest.mark.parametrize(("target", "clock"), [("c2", 1300.0), ("gc200", None)])
def test_a_chip_without_a_sample_has_unknown_power(target: str, clock: float | None) -> None:
    assert modelled_ipu_watts(target, 0.5, clock) is None


def test_settled_temperatures_equal_the_samples() -> None:
    powertest = BoardHeat.settled((BUSY_WATTS, IDLE_WATTS), 0.0)
    assert powertest.board_c == pytest.approx(37.6, abs=0.1)  # The mean of 41, 40, 36, 32 and 39 C.
    assert 41.3 <= powertest.dies_c[0] <= 46.0  # Still rising in the sample, at 39.9 to 42.7 C.
    bow = BoardHeat.settled((46.15, 46.15), 0.0)
    assert bow.dies_c[0] - bow.board_c == pytest.approx(24.2 - 21.1)


def test_a_die_goes_the_way_of_an_exponential() -> None:
    """After one time constant 63.2 % of the way is gone; steps of any length lead to the same place."""
    idle, busy = (IDLE_WATTS, IDLE_WATTS), (BUSY_WATTS, IDLE_WATTS)
    begin, end = BoardHeat.settled(idle, 0.0), BoardHeat.settled(busy, 0.0)

    def over_board(heat: BoardHeat) -> float:
        return heat.dies_c[0] - heat.board_c

    once = begin.after(busy, DIE_SECONDS)
    way = (over_board(once) - over_board(begin)) / (over_board(end) - over_board(begin))
    assert way == pytest.approx(0.632, abs=0.001)
    steps = begin
    for second in range(1, 13):
        steps = steps.after(busy, float(second))
    assert steps.dies_c == pytest.approx(once.dies_c)
    assert steps.board_c == pytest.approx(once.board_c)
    late = begin.after(busy, 20 * BOARD_SECONDS)
    assert late.dies_c == pytest.approx(end.dies_c)
    assert min(late.dies_c) > INLET_C
    assert begin.after(busy, -5.0).dies_c == pytest.approx(
        begin.dies_c
    )  # A clock that was put back heats nothing.
