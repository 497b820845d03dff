"""Modelled power equals the published sample at both ends, and nothing is invented where there is none."""

from __future__ import annotations

import pytest

from podrun.costmodel.target import modelled_ipu_watts


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


@pytest.mark.parametrize(("target", "clock"), [("bow", 1850.0), ("gc200", None)])
def test_a_chip_without_a_sample_has_unknown_power(target: str, clock: float | None) -> None:
    assert modelled_ipu_watts(target, 0.5, clock) is None
