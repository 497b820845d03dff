"""Ranks that come without waiting, and the last one, which waits for all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from podrun.collectives import RankLostError, RankMissingError
from podrun.collectives.rendezvous import create, join_group
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.executable import Reduction

pytestmark = pytest.mark.usefixtures("path")
SIZE = 100


@contextmanager
def ranks(count: int, timeout: float = 20.0) -> Iterator[list[SharedMemoryGroup]]:
    """The ranks of a group, all in this process."""
    with ExitStack() as stack:
        first, token = create(count, timeout=timeout)
        groups = [first, *(join_group(token, rank, timeout=timeout) for rank in range(1, count))]
        for group in groups:
            stack.callback(group.close)
            assert isinstance(group, SharedMemoryGroup)
            group.allocate("g", "float32", SIZE)
        yield groups  # type: ignore[misc]


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.MEAN, Reduction.MAX])
@pytest.mark.sample(5)
def test_the_last_rank_gets_what_all_gave_in_the_order_of_ranks(count: int, reduction: Reduction) -> None:
    """The others are rounds ahead at times, for they do not wait; only their values have to."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(count, SIZE)).astype(np.float32)
    with ranks(count) as groups:
        runs = [group.at_last({"g": reduction}) for group in groups]
        for group, mine in zip(groups, values, strict=True):
            group.allocate("g", "float32", SIZE)[:] = mine
        found: list[np.ndarray] = []

        def last() -> None:
            found.extend(np.array(runs[-1]()[0]) for _ in range(50))  # type: ignore[index]

        thread = threading.Thread(target=last)
        thread.start()
        for _ in range(50):
            assert [run() for run in runs[:-1]] == [None] * (count - 1)
        thread.join(60)
        assert not thread.is_alive()
        results: list[np.ndarray] = []
        threads = [
            threading.Thread(target=lambda g=group: results.append(np.array(g.all_reduce("g", reduction))))
            for group in groups
        ]
        for caller in threads:
            caller.start()
        for caller in threads:
            caller.join(60)
    assert len(found) == 50
    assert len(results) == count  # the others' way, from the same values
    for one in (*found, *results):
        np.testing.assert_array_equal(one, results[0])


def test_reductions_of_a_group_count_together() -> None:
    """One made ready after another was done waits for those who come to it."""
    with ranks(2, timeout=0.3) as groups:
        for _ in range(2):
            first, last = (group.at_last({"g": Reduction.SUM}) for group in groups)
            assert first() is None
            assert last() is not None
        with pytest.raises(RankMissingError):
            groups[1].at_last({"g": Reduction.MEAN})()


def test_who_waits_names_who_does_not_come() -> None:
    with ranks(3, timeout=0.3) as groups:
        groups[1].at_last({"g": Reduction.SUM})()
        with pytest.raises(RankMissingError, match=r"reduce\('g'.*rank 0 "):
            groups[2].at_last({"g": Reduction.SUM})()
        with pytest.raises(RankMissingError):  # the group has ended for all
            groups[1].at_last({"g": Reduction.SUM})()


def test_who_waits_hears_of_one_that_left() -> None:
    with ranks(2) as groups:
        groups[0].close()
        with pytest.raises(RankLostError, match="left the group"):
            groups[1].at_last({"g": Reduction.SUM})()


def test_an_abort_reaches_who_waits_and_who_comes() -> None:
    with ranks(2) as groups:
        runs = [group.at_last({"g": Reduction.SUM}) for group in groups]
        threading.Timer(0.05, groups[0].abort, [{"type": "UsageError", "message": "enough"}]).start()
        for run in reversed(runs):
            with pytest.raises(UsageError, match="enough"):
                run()


def test_what_cannot_be_reduced_is_refused() -> None:
    with ranks(2) as groups:
        groups[0].shared("w", "float32", SIZE)
        groups[0].allocate("n", "int32", SIZE)
        with pytest.raises(UsageError, match="no arena"):
            groups[0].at_last({"nothing": Reduction.SUM})
        with pytest.raises(UsageError, match="shared"):
            groups[0].at_last({"w": Reduction.SUM})
        with pytest.raises(UnsupportedError, match="mean"):
            groups[0].at_last({"n": Reduction.MEAN})
