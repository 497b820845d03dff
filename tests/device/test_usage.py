"""What IPUs do with their time: the model's split of a batch, shares of the last second, counters."""

from __future__ import annotations

from typing import Any

import pytest

from podrun.device.activity import (
    PACKET_BYTES,
    BatchActivity,
    TrafficCounters,
    Usage,
    activity_of_batches,
)
from tests.device.programs import linear


def test_pauses_of_the_last_second_and_of_all_time() -> None:
    usage = Usage(100.0)
    assert usage.recent_percent(100.0) == 0.0
    usage.add(100.0, 101.0)
    usage.add(108.5, 108.6)
    assert usage.recent_percent(108.65) == pytest.approx(
        15.0
    )  # A gap of 0.05 s is no pause, the 7.5 s before are.
    usage.add(109.0, 109.5)
    assert usage.recent_percent(109.5) == pytest.approx(60.0)
    assert usage.session_percent(110.0) == pytest.approx(100 * (1 - (7.5 + 0.4) / 10))
    assert usage.recent_percent(120.0) == 0.0


def test_a_run_that_goes_on_counts() -> None:
    usage = Usage(0.0)
    usage.start(5.0, lambda: None, None)
    assert usage.recent_percent(10.0) == 100.0
    assert usage.session_percent(10.0) == pytest.approx(50.0)


BATCH = BatchActivity((0.4, 0.2, 0.2, 0.1, 0.1), 1000, 500)


@pytest.mark.parametrize("slowness", [1, 10, 400])
def test_shares_are_the_models_however_slow_the_emulation_is(slowness: float) -> None:
    """Runs of 1 ms on IPUs, whose emulation and whose gaps on the host take longer."""
    usage, now = Usage(0.0), 0.0
    for _ in range(500):
        usage.add(now, now + 0.001 * slowness, 0.001, (BATCH,))
        now += 0.0015 * slowness
    assert usage.shares(now) == pytest.approx((0.4, 0.2, 0.2, 0.1, 0.1))
    assert usage.recent_percent(now) == 100.0
    assert usage.session_percent(now) == 100.0


def test_two_programs_count_with_their_modelled_seconds() -> None:
    usage = Usage(0.0)
    other = BatchActivity((0.0, 0.0, 0.0, 1.0, 0.0), 0, 0)
    usage.add(0.0, 0.5, 3.0, (BATCH,))
    usage.add(0.5, 1.0, 1.0, (other,))
    assert usage.shares(1.0) == pytest.approx((0.3, 0.15, 0.15, 0.325, 0.075))


def test_a_run_under_way_counts_with_the_batches_it_has_done() -> None:
    usage = Usage(0.0)
    usage.start(1.0, lambda: 0.5, (BATCH,))
    assert usage.shares(3.0) == pytest.approx((0.4, 0.2, 0.2, 0.1, 0.1))
    assert usage.recent_percent(3.0) == 100.0
    usage.add(1.0, 3.0, 1.0, (BATCH,))
    assert usage.shares(6.0) == (0.0,) * 5


def test_a_program_without_a_model_has_no_shares() -> None:
    usage = Usage(0.0)
    usage.add(0.0, 0.5)
    assert usage.shares(1.0) == (None,) * 5
    assert usage.recent_percent(1.0) == 100.0


def test_each_ipu_of_a_replica_has_shares_of_its_own() -> None:
    usage = Usage(0.0)
    other = BatchActivity((0.0, 0.0, 1.0, 0.0, 0.0), 0, 0)
    usage.add(0.0, 1.0, 1.0, (BATCH, other))
    assert usage.shares(1.0, 1) == (0.0, 0.0, 1.0, 0.0, 0.0)
    assert usage.shares(1.0, 2)[0] == pytest.approx(0.4)


def test_packets_sent_again_follow_the_error_rate() -> None:
    """Of packets that are lost with probability 1/5, a quarter as many are sent again."""
    traffic = TrafficCounters()
    traffic.add(BATCH, 8 * PACKET_BYTES, 0.2)
    assert (traffic.link_bytes, traffic.host_bytes) == (8 * 64_000, 8 * 32_000)
    assert traffic.link_errors == pytest.approx(8 * 1000 * 0.25)


def _with_report(report: dict[str, Any]) -> tuple[BatchActivity, ...] | None:
    from dataclasses import replace

    return activity_of_batches(replace(linear(4, accumulation=2), tile_report=report))


def test_the_split_adds_up_to_the_batch() -> None:
    part = {
        "by_cause": {"compute": 60, "exchange": 20, "rearrange": 5, "launch": 5, "sync": 10},
        "cycles": 100,
    }
    report = {
        "step": {
            "cycles": 1000,
            "seconds": 10.0,
            "seconds_by_cause": {"compute": 6.0, "all_reduce": 3.0, "host": 1.0},
        },
        "segments": [{"ipu": 0, "sent_bytes": 7, "report": {"step": part | {"seconds": 3.0}}}],
        "ipus": [{"ipu": 0, "memory": {"max_tile_bytes": 10, "tile_bytes": 100}}],
    }
    split = _with_report(report)
    assert split is not None
    assert split[0].seconds == pytest.approx((3.6, 1.5, 0.9, 3.0, 1.0))  # Two micro-batches of 3 s.
    assert sum(split[0].seconds) == pytest.approx(10.0)
    assert (split[0].tile_bytes, split[0].tile_capacity_bytes) == (10, 100)
    # 4 replicas: an all-reduce as reduce-scatter and all-gather of 1,024 words each, and the segment's bytes twice.
    assert split[0].link_bytes == 2 * 4096 * 3 // 4 + 14
    # Two micro-batches of four rows of five words in, two losses out.
    assert split[0].host_bytes == 2 * (4 * 5 * 4) + 2 * 4


def test_work_that_hides_transfers_never_exceeds_the_batch() -> None:
    part = {"by_cause": {"compute": 100}, "cycles": 100, "seconds": 9.0}
    report = {
        "step": {"cycles": 1000, "seconds": 10.0, "seconds_by_cause": {"copies": 4.0}},
        "segments": [{"ipu": 0, "report": {"step": part}}],
    }
    split = _with_report(report)
    assert split is not None
    assert split[0].seconds == pytest.approx((6.0, 0.0, 0.0, 4.0, 0.0))


def test_without_a_report_there_is_no_split() -> None:
    assert _with_report({}) is None
    split = _with_report({"step": {"cycles": 5, "seconds": 1.0}})
    assert split is not None
    assert split[0].seconds == (1.0, 0.0, 0.0, 0.0, 0.0)
