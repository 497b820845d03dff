"""Reductions, look-ups and chains over all sizes: more is never cheaper, and nothing is faster than the necessary
moves.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.costmodel import elementwise, lookups, vertices
from podrun.costmodel.equations import Equation, FlatTensor
from podrun.costmodel.target import BOW, GC2, GC200, Chip

CHIPS = (GC2, GC200, BOW)
HALF, SINGLE = "float16", "float32"


def equation(
    primitive: str, operands: list[FlatTensor], results: list[FlatTensor], **params: Any
) -> Equation:
    numbers = tuple(range(len(operands)))
    outputs = tuple(range(len(operands), len(operands) + len(results)))
    return Equation(primitive, params, numbers, outputs, tuple(operands), tuple(results), "")


def reduced(shape: tuple[int, ...], axes: tuple[int, ...], dtype: str = HALF) -> Equation:
    left = tuple(size for axis, size in enumerate(shape) if axis not in axes)
    return equation("reduce_sum", [FlatTensor(shape, dtype)], [FlatTensor(left, dtype)], axes=axes)


def gathered(rows: int, width: int, slices: int, dtype: str = HALF) -> Equation:
    table, found = FlatTensor((rows, width), dtype), FlatTensor((slices, width), dtype)
    return equation("gather", [table, FlatTensor((slices, 1), "int32")], [found], slice_sizes=(1, width))


class Window:
    """The dimension numbers of rows added by index."""

    update_window_dims = (1,)


def scattered(rows: int, width: int, slices: int, dtype: str = HALF) -> Equation:
    table, update = FlatTensor((rows, width), dtype), FlatTensor((slices, width), dtype)
    operands = [table, FlatTensor((slices, 1), "int32"), update]
    return equation("scatter-add", operands, [table], dimension_numbers=Window)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("kind", ["all", "rows", "columns"])
def test_a_longer_reduction_never_takes_much_less_and_never_jumps(chip: Chip, dtype: str, kind: str) -> None:
    """Doubling what is reduced costs at most twice as much and a stage, and saves at most a stage."""
    shapes = [((2**n, 64) if kind != "all" else (2 ** (n + 6),)) for n in range(4, 21)]
    axes = {"all": (0,), "rows": (0,), "columns": (1,)}[kind]
    found = [elementwise.plan_reduction(chip, reduced(shape, axes, dtype)).cycles(chip) for shape in shapes]
    for (shape, small), large in zip(zip(shapes, found, strict=True), found[1:], strict=False):
        assert small - 450.0 <= large <= 2.0 * small + 700.0, (shape, small, large)


@given(st.integers(1, 10**7), st.integers(1, 3000), st.sampled_from(CHIPS), st.sampled_from((HALF, SINGLE)))
@settings(max_examples=20, deadline=None)
def test_no_reduction_is_faster_than_its_loads(depth: int, outputs: int, chip: Chip, dtype: str) -> None:
    if depth * outputs > 10**9:
        return
    for shape, axes in (((depth, outputs), (0,)), ((outputs, depth), (1,))):
        plan = elementwise.plan_reduction(chip, reduced(shape, axes, dtype))
        nbytes = depth * outputs * (2 if dtype == HALF else 4)
        assert plan.cycles(chip) >= nbytes / chip.tiles / chip.load_bytes


def test_a_sum_over_all_tiles_is_joined_in_two_stages() -> None:
    """1,472 partial results go to some forty tiles and then to one: one tile does not take them all."""
    lone = elementwise.join_partials(GC200, 1, 1472)
    assert lone.stages == 2
    assert lone.compute + lone.exchange < 1472 / 4 * 4
    assert elementwise.join_partials(GC200, 1472, 1) == elementwise.JoinedPartials()
    assert elementwise.join_partials(GC200, 10**6, 8).stages == 1


@pytest.mark.parametrize("make", [gathered, scattered], ids=["gather", "scatter"])
@pytest.mark.parametrize(("rows", "width"), [(10_000, 64), (30_522, 1024), (100_000, 8), (64, 64), (1, 512)])
def test_more_rows_by_index_take_more_and_never_twice_as_much_again(make: Any, rows: int, width: int) -> None:
    plan = lookups.plan_gather if make is gathered else lookups.plan_scatter
    found = [plan(GC200, make(rows, width, 2**n)).cycles(GC200) for n in range(0, 21, 2)]
    for small, large in itertools.pairwise(found):
        assert 0.99 * small <= large <= 4.5 * small + 1500.0, found


@given(
    st.integers(1, 10**6),
    st.integers(1, 2048),
    st.integers(1, 10**6),
    st.sampled_from(CHIPS),
    st.sampled_from((HALF, SINGLE)),
)
@settings(max_examples=20, deadline=None)
def test_looking_up_moves_its_result_and_stays_on_the_chip(
    rows: int, width: int, slices: int, chip: Chip, dtype: str
) -> None:
    for found in (
        lookups.plan_gather(chip, gathered(rows, width, slices, dtype)),
        lookups.plan_scatter(chip, scattered(rows, width, slices, dtype)),
    ):
        assert 1 <= found.tiles <= chip.tiles
        nbytes = slices * width * (2 if dtype == HALF else 4)
        # Two neighbours may receive the same word at once.
        assert found.exchange >= nbytes / chip.tiles / (2 * chip.exchange_bytes)
        assert math.isfinite(found.cycles(chip))


def test_many_indices_are_shared_by_tiles() -> None:
    """A million rows of a small table: bound by what they move and the cycles of a row, not by every tile
    reading every index."""
    plan = lookups.plan_gather(GC200, gathered(10_000, 64, 2**20))
    bound = 2**20 / GC200.tiles * (19 + 2 * 16)
    assert bound < plan.cycles(GC200) < 10 * bound


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_a_comparison_costs_the_type_it_compares(chip: Chip) -> None:
    """A truth value is narrow; what is compared is not."""

    def chosen(dtype: str) -> float:
        a, b, flag = (FlatTensor((2**20,), kind) for kind in (dtype, dtype, "bool"))
        chain = [
            Equation("gt", {}, (0, 1), (2,), (a, b), (flag,), ""),
            Equation("select_n", {}, (2, 0, 1), (3,), (flag, a, b), (a,), ""),
        ]
        return elementwise.plan_chain(chip, chain, {3}).compute

    assert chosen(SINGLE) > 1.8 * chosen(HALF)


def test_values_of_one_tile_keep_one_tile_busy() -> None:
    values = FlatTensor((4096,), HALF)
    chain = [Equation("exp", {}, (0,), (1,), (values,), (values,), "")]
    found = [elementwise.plan_chain(GC200, chain, {1}, share).compute for share in (0.0, 0.01, 1.0)]
    assert found == sorted(set(found))
    assert found[-1] == vertices.elementwise_cycles(4096, HALF, ("exp",), 1)


def test_a_chain_of_one_type_costs_what_its_operations_cost() -> None:
    ops = ("add", "tanh", "mul")
    for dtype in (HALF, SINGLE):
        typed = tuple((op, dtype) for op in ops)
        assert vertices.chain_cycles(777, dtype, typed, 3) == vertices.elementwise_cycles(777, dtype, ops, 3)
