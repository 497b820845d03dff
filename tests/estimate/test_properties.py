"""Properties of every estimate, whatever the layout: answered or refused by name, and sensible trends."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.core.errors import InvalidOptionError, UsageError
from podrun.costmodel.batch import UPDATE_PASSES
from podrun.costmodel.target import GC200, system
from podrun.estimate import Estimate, ProgramLayout, Traced, estimate
from podrun.estimate.tracing import trace_model
from tests.estimate.test_estimate import _perceptron

LAYOUTS = st.builds(
    ProgramLayout,
    micro_batch=st.just(8),
    accumulation=st.integers(1, 100),
    ipus_per_replica=st.integers(1, 9),
    recompute=st.booleans(),
    optimizer=st.sampled_from(sorted(UPDATE_PASSES)),
    state_off_chip=st.booleans(),
    shard_state=st.booleans(),
)
SYSTEMS = ("pod4", "pod16", "pod64", "pod128", "pod256")
CLOCKS = 1.85 / 1.33
"""Bow's clock over GC200's."""


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace_model(_perceptron(64, 4, "Erf"), GC200, ProgramLayout(micro_batch=8), train=True)


def _answer(traced: Traced, name: str, layout: ProgramLayout, *, train: bool = True) -> Estimate | None:
    """The estimate, or None where it is refused for a reason that the layout gives."""
    per = layout.ipus_per_replica
    try:
        found = estimate(traced, system(name), layout, train=train)
    except (InvalidOptionError, UsageError):
        assert system(name).ipus % per or per > len(traced.layers)
        return None
    assert not system(name).ipus % per
    return found


def _total(found: Estimate) -> float:
    return sum(found.seconds.values())


@given(name=st.sampled_from(SYSTEMS), layout=LAYOUTS, train=st.booleans())
@settings(deadline=None, max_examples=25)
def test_every_layout_is_answered_in_full_or_refused(
    traced: Traced, name: str, layout: ProgramLayout, train: bool
) -> None:
    found = _answer(traced, name, layout, train=train)
    if found is None:
        return
    assert all(math.isfinite(value) and value >= 0.0 for value in found.seconds.values())
    assert found.samples == pytest.approx(found.samples_per_second * _total(found))
    assert sum(ipu.layers for ipu in found.ipus) == len(traced.layers)
    assert found.max_tile_bytes == max(ipu.max_tile_bytes for ipu in found.ipus) > 0
    assert all(value >= 0 for ipu in found.ipus for value in ipu.bytes_by_content.values())


@given(name=st.sampled_from(SYSTEMS), layout=LAYOUTS)
@settings(deadline=None, max_examples=25)
def test_what_saves_memory_saves_some_and_costs_time(
    traced: Traced, name: str, layout: ProgramLayout
) -> None:
    layout = replace(layout, state_off_chip=False, shard_state=False, recompute=False)
    before = _answer(traced, name, layout)
    if before is None:
        return
    for changes in ({"state_off_chip": True}, {"shard_state": True}, {"recompute": True}):
        after = estimate(traced, system(name), replace(layout, **changes), train=True)  # type: ignore[arg-type]
        if "recompute" in changes:
            assert after.seconds["compute"] >= before.seconds["compute"]
        if "state_off_chip" in changes:
            assert _total(after) >= _total(before)
        if layout.ipus_per_replica > 1 or "recompute" not in changes:  # One IPU holds the copies' code.
            assert after.max_tile_bytes <= before.max_tile_bytes


@given(name=st.sampled_from(SYSTEMS), layout=LAYOUTS)
@settings(deadline=None, max_examples=25)
def test_more_accumulation_is_a_longer_batch_at_no_lower_rate(
    traced: Traced, name: str, layout: ProgramLayout
) -> None:
    less = _answer(traced, name, layout)
    if less is None:
        return
    more = estimate(traced, system(name), replace(layout, accumulation=layout.accumulation + 1), train=True)
    assert _total(more) > _total(less)
    assert more.samples_per_second >= less.samples_per_second * (1.0 - 1e-9)


@given(sizes=st.sampled_from([*itertools.pairwise(SYSTEMS)]), layout=LAYOUTS)
@settings(deadline=None, max_examples=25)
def test_no_ipu_holds_more_on_a_larger_system(
    traced: Traced, sizes: tuple[str, str], layout: ProgramLayout
) -> None:
    small = _answer(traced, sizes[0], layout)
    if small is None:
        return
    large = estimate(traced, system(sizes[1]), layout, train=True)
    assert large.max_tile_bytes <= small.max_tile_bytes
    for cause in ("all_reduce", "reduce_scatter", "all_gather", "sync", "domains"):
        assert large.seconds.get(cause, 0.0) >= small.seconds.get(cause, 0.0), cause


@given(name=st.sampled_from(("pod16", "pod64", "pod256")), layout=LAYOUTS)
@settings(deadline=None, max_examples=25)
def test_bow_is_faster_by_its_clock_at_most(traced: Traced, name: str, layout: ProgramLayout) -> None:
    found = _answer(traced, name, layout)
    if found is None:
        return
    bow = estimate(traced, system(f"bow-{name}"), layout, train=True)
    assert 1.0 - 1e-9 <= bow.samples_per_second / found.samples_per_second <= CLOCKS * (1.0 + 1e-9)
    assert bow.max_tile_bytes == found.max_tile_bytes
