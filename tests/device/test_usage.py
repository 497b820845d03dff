"""The share of time that something is busy."""

from __future__ import annotations

import pytest

from podrun.device.health import Usage


def test_shares_of_the_last_second_and_of_all_time() -> None:
    usage = Usage(100.0)
    assert usage.recent_percent(100.0) == 0.0
    usage.add(100.0, 101.0)
    usage.add(108.5, 109.0)
    usage.add(109.25, 109.5)
    assert usage.recent_percent(109.5) == pytest.approx(75.0)
    assert usage.session_percent(110.0) == pytest.approx(17.5)
    assert usage.recent_percent(120.0) == 0.0


def test_a_run_that_goes_on_counts() -> None:
    usage = Usage(0.0)
    assert usage.recent_percent(10.0, running_since=2.0) == 100.0
    assert usage.session_percent(10.0, running_since=5.0) == pytest.approx(50.0)
