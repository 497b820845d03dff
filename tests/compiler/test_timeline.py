"""The timeline of a batch: cycles of pipelines counted by hand, and the bubble of each schedule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.compiler.program import PipelineOrder
from podrun.compiler.timeline import CAUSES, SegmentTask, idle_share, makespan, seconds_by_cause

GROUPED, INTERLEAVED = PipelineOrder.GROUPED, PipelineOrder.INTERLEAVED


def training(
    stages: int, schedule: PipelineOrder, forward: float = 1.0, backward: float = 1.0
) -> list[SegmentTask]:
    """Even stages; the last goes forward and backward in one piece."""
    last = stages - 1
    found = [SegmentTask(s, s, forward, 0.0) for s in range(last)]
    found.append(SegmentTask(last, last, forward + backward, 0.0))
    turn = 2 * last + schedule.period - 1
    return [*found, *(SegmentTask(s, turn - s, backward, 0.0) for s in reversed(range(last)))]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 3), (4, 7), (4, 16), (8, 40)])
def test_grouped_takes_as_many_cycles_as_published(stages: int, micro_batches: int) -> None:
    """N + 2F - 2 cycles; with even stages the fill and the flush have cycles with forward or backward work alone."""
    tasks = training(stages, GROUPED, 1.0, 0.0)
    # Backward work for nothing: each cycle is as long as a forward piece, if one runs in it.
    assert makespan(tasks, micro_batches, GROUPED) == micro_batches + stages - 1
    assert makespan(training(stages, GROUPED), micro_batches, None) == 2 * stages * micro_batches


@given(stages=st.integers(2, 8), spare=st.integers(0, 40), backward=st.integers(1, 4))
def test_the_bubble_of_even_stages(stages: int, spare: int, backward: int) -> None:
    """(F - 1) of N + F - 1 turns, forward alone or forward and backward, from the depth on that a pipeline needs."""
    micro_batches = 2 * stages - 1 + spare
    bubble = pytest.approx((stages - 1) / (micro_batches + stages - 1))
    forward = [SegmentTask(stage, stage, 1.0, 0.0) for stage in range(stages)]
    assert idle_share(forward, micro_batches, GROUPED) == bubble
    for schedule in PipelineOrder:
        assert idle_share(training(stages, schedule, 1.0, backward), micro_batches, schedule) == bubble


@given(stages=st.integers(2, 6), micro_batches=st.integers(1, 30))
def test_the_bubble_shrinks_with_more_micro_batches(stages: int, micro_batches: int) -> None:
    for schedule in PipelineOrder:
        tasks = training(stages, schedule)
        now = idle_share(tasks, micro_batches, schedule)
        assert -1e-9 <= now < 1
        assert idle_share(tasks, 2 * micro_batches, schedule) <= now + 1e-9
    sequential = idle_share(training(stages, GROUPED), micro_batches, None)
    assert sequential == pytest.approx(1 - 1 / stages)


@given(
    stages=st.integers(2, 5),
    micro_batches=st.integers(1, 20),
    times=st.lists(st.floats(0.1, 3.0), min_size=9, max_size=9),
)
def test_no_schedule_beats_its_bounds(stages: int, micro_batches: int, times: list[float]) -> None:
    """Never faster than the busiest IPU, nor than one micro-batch alone; never slower than no pipeline at all."""
    for schedule in PipelineOrder:
        plain = training(stages, schedule)
        tasks = [SegmentTask(t.ipu, t.cycle, times[i], 0.01) for i, t in enumerate(plain)]
        each: dict[int, float] = {}
        for task in tasks:
            each[task.ipu] = each.get(task.ipu, 0.0) + task.compute
        total = makespan(tasks, micro_batches, schedule)
        alone = sum(task.compute for task in tasks)
        assert total >= max(micro_batches * max(each.values()), alone) - 1e-9
        assert total <= makespan(tasks, micro_batches, None) + 0.01 * len(tasks) * micro_batches + 1e-9


def test_interleaved_keeps_every_stage_busy_when_pieces_are_even() -> None:
    """One forward, one backward: with N micro-batches each IPU idles for the 2(F - 1) pieces of fill and flush."""
    tasks = training(4, INTERLEAVED)
    assert makespan(tasks, 10, INTERLEAVED) == 2 * 10 + 2 * 3
    assert idle_share(tasks, 10, INTERLEAVED) == pytest.approx(6 / 26)


def test_causes_add_up() -> None:
    tasks = [SegmentTask(0, 0, 1.0, 0.5, 0.0625, 0.25, 0.125, 0.03125), SegmentTask(1, 1, 2.0, 0.0)]
    for schedule in (None, *PipelineOrder):
        found = seconds_by_cause(tasks, 3, schedule)
        assert tuple(found) == CAUSES
        assert sum(found.values()) == pytest.approx(makespan(tasks, 3, schedule))
    assert seconds_by_cause(tasks, 3, None) == {
        "compute": 9.0,
        "copies": 1.5,
        "streaming": 0.1875,
        "update": 0.75,
        "all_reduce": 0.375,
        "collectives": 0.09375,
    }


def test_what_is_preloaded_hides_behind_the_piece_before() -> None:
    """Pieces of 2 s that want 1, 3 and 0 s of streaming: only 1 s of the second one's shows, and the first one's
    once."""
    pieces = [(2.0, 1.0), (2.0, 3.0), (2.0, 0.0)]
    tasks = [
        SegmentTask(0, i, compute, 0.0, wanted, preload=True) for i, (compute, wanted) in enumerate(pieces)
    ]
    assert makespan(tasks, 1, None) == 6 + 1 + 1
    assert makespan(tasks, 4, None) == 4 * 7 + 1
    on_demand = [SegmentTask(0, t.cycle, t.compute, 0.0, t.streaming) for t in tasks]
    assert makespan(on_demand, 4, None) == 4 * 10
    assert "streaming" not in seconds_by_cause([SegmentTask(0, 0, 1.0, 0.0)], 1, None)
