"""Cuts of layers over IPUs: as even as the best of all cuts, and never over the memory limit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.costmodel.splitting import cut_chain

COSTS = st.lists(st.integers(1, 50).map(float), min_size=1, max_size=9)


def _spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *ends)))


def _dearest(costs: Sequence[float], ends: Sequence[int]) -> float:
    return max(sum(costs[first:end]) for first, end in _spans(ends))


def _every_cut(layers: int, ipus: int) -> list[tuple[int, ...]]:
    return [(*inner, layers) for inner in itertools.combinations(range(1, layers), ipus - 1)]


@given(COSTS, st.integers(1, 4))
def test_no_other_cut_is_cheaper(costs: list[float], ipus: int) -> None:
    found = cut_chain(costs, ipus)
    if len(costs) < ipus:
        assert found is None
        return
    assert found is not None
    assert len(found) == ipus
    assert found[-1] == len(costs)
    assert all(end > first for first, end in _spans(found))
    best = min(_dearest(costs, ends) for ends in _every_cut(len(costs), ipus))
    assert _dearest(costs, found) == pytest.approx(best)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=8), st.integers(1, 4))
def test_a_cheaper_last_ipu_takes_more(layers: list[tuple[int, int]], ipus: int) -> None:
    last = [float(least) for least, _ in layers]
    costs = [float(least + more) for least, more in layers]

    def dearest(ends: Sequence[int]) -> float:
        *before, (first, end) = _spans(ends)
        return max(sum(last[first:end]), *(sum(costs[a:b]) for a, b in before), 0.0)

    found = cut_chain(costs, ipus, last=last)
    assert (found is None) == (len(costs) < ipus)
    if found is not None:
        assert dearest(found) == pytest.approx(min(map(dearest, _every_cut(len(costs), ipus))))


@given(COSTS, st.integers(1, 4), st.integers(1, 9))
def test_memory_is_kept_where_the_cut_says_so(costs: list[float], ipus: int, room: int) -> None:
    """Later IPUs have room for more layers, as in a training pipeline."""

    def fits(ipu: int, first: int, end: int) -> bool:
        return end - first <= room + ipu

    found = cut_chain(costs, ipus, fits)
    if found is not None:
        assert all(fits(ipu, first, end) for ipu, (first, end) in enumerate(_spans(found)))
    elif len(costs) >= ipus:
        assert sum(room + ipu for ipu in range(ipus)) < len(costs)
