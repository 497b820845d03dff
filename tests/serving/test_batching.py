"""The batching rule against a simulation of every arrival order, and what no order may break."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.core.errors import UsageError
from podrun.serving.batching import BatchDecision, BatchingRule

ARRIVALS = st.lists(st.tuples(st.integers(1, 12), st.floats(0, 0.01)), min_size=1, max_size=20)


@settings(max_examples=40, deadline=None)
@given(ARRIVALS, st.integers(1, 8), st.floats(0, 0.02), st.booleans())
def test_all_rows_run_in_order_and_in_time(
    arrivals: list[tuple[int, float]], most: int, delay: float, whole: bool
) -> None:
    rule = BatchingRule(most, delay, whole_requests=whole)
    queue: list[list[float]] = []  # rows left, since
    now, ran, times = 0.0, 0, [0.0]
    for _, gap in arrivals:
        times.append(times[-1] + gap)
    pending = [(time, rows) for time, (rows, _) in zip(times[1:], arrivals, strict=True)]
    total = sum(rows for rows, _ in arrivals)
    while ran < total:
        while pending and pending[0][0] <= now:
            time, rows = pending.pop(0)
            queue.append([rows, time])
        decision = rule.decide([int(rows) for rows, _ in queue], queue[0][1] if queue else now, now)
        if not decision.rows:
            steps = [decision.until, *(time for time, _ in pending[:1])]
            assert min(steps) < math.inf
            now = max(now, min(steps))
            continue
        assert all(now <= since + delay + 1e-12 for _, since in queue)
        ran += decision.rows
        assert ran <= total
        left = decision.rows
        while left:
            part = min(left, queue[0][0])
            left -= part
            queue[0][0] -= part
            if not queue[0][0]:
                queue.pop(0)
            else:
                assert not whole
    assert not queue


def test_the_rules_of_tritons_batcher() -> None:
    rule = BatchingRule(8, 0.002, preferred_rows=(4,))
    assert rule.decide([3], 0.0, 0.001) == BatchDecision(0, 0.002)
    assert rule.decide([3, 1, 1], 0.0, 0.001) == BatchDecision(4)
    assert rule.decide([3, 2, 4], 0.0, 0.001) == BatchDecision(5)
    assert rule.decide([3, 5], 0.0, 0.001) == BatchDecision(8)
    assert rule.decide([3], 0.0, 0.002) == BatchDecision(3)
    assert rule.decide([9, 1], 0.0, 0.0) == BatchDecision(9)
    assert rule.decide([], 0.0, 0.0) == BatchDecision(0)


def test_a_rule_that_divides_runs_full_batches_at_once() -> None:
    rule = BatchingRule(4, math.inf, whole_requests=False)
    assert rule.decide([7], 0.0, 9e9) == BatchDecision(4)
    assert rule.decide([3, 6], 0.0, 0.0) == BatchDecision(8)
    assert rule.decide([3], 0.0, 9e9) == BatchDecision(0, math.inf)


def test_sizes_that_cannot_be() -> None:
    for most, delay, preferred in ((0, 0.0, ()), (4, -1.0, ()), (4, 0.0, (5,)), (4, math.nan, ())):
        with pytest.raises(UsageError):
            BatchingRule(most, delay, preferred)
