"""The planner of products: bounds, limits, and what its plans add up to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.device.target import BOW, GC2, GC200
from podrun.device.tiles.matmul import Product, plan_product
from podrun.device.tiles.splits import splits
from podrun.errors import InvalidOptionError

SIDES = st.integers(1, 3000)


@settings(max_examples=60, deadline=None)
@given(SIDES, SIDES, SIDES, st.sampled_from(["float16", "float32"]))
def test_a_plan_is_never_below_the_chips_peak(m: int, k: int, n: int, dtype: str) -> None:
    plan = plan_product(GC200, Product(1, m, k, n, dtype, dtype, dtype))
    bound = m * k * n / (GC200.tiles * GC200.amp_macs(dtype, dtype))
    assert plan.cycles(GC200) >= bound
    assert plan.flops == 2 * m * k * n
    assert 0 < plan.tiles <= GC200.tiles
    assert min(plan.compute, plan.exchange, plan.rearrange, plan.temporary_bytes) >= 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 1500), st.integers(16, 1500), st.integers(16, 1500))
def test_twice_the_rows_never_cost_less(m: int, k: int, n: int) -> None:
    once = plan_product(BOW, Product(1, m, k, n)).cycles(BOW)
    assert plan_product(BOW, Product(1, 2 * m, k, n)).cycles(BOW) >= 0.95 * once


def test_a_smaller_proportion_takes_less_memory_and_not_less_time() -> None:
    wide = plan_product(GC2, Product(1, 2048, 2048, 2048, proportion=0.6))
    tight = plan_product(GC2, Product(1, 2048, 2048, 2048, proportion=0.1))
    assert tight.temporary_bytes <= 0.1 * GC2.tile_bytes
    assert tight.cycles(GC2) >= wide.cycles(GC2)


@pytest.mark.parametrize("proportion", [0.0, -0.1, 1.5])
def test_an_impossible_proportion_is_refused(proportion: float) -> None:
    with pytest.raises(InvalidOptionError, match="availableMemoryProportion"):
        plan_product(GC200, Product(1, 16, 16, 16, proportion=proportion))


def test_published_products() -> None:
    """The sparsity notebook's dense products on Bow: 197.7 TFLOPS in FP16, 52.4 in FP32."""
    half = plan_product(BOW, Product(1, 4096, 4096, 1024))
    single = plan_product(BOW, Product(1, 4096, 4096, 512, "float32", "float32", "float32"))
    assert half.flops / half.cycles(BOW) * BOW.clock_hz / 1e12 == pytest.approx(197.7, rel=0.15)
    assert single.flops / single.cycles(BOW) * BOW.clock_hz / 1e12 == pytest.approx(52.4, rel=0.1)


def test_few_input_channels_are_expanded() -> None:
    """ResNet's first layer on GC2: the library's plan takes 40,195 cycles."""
    first = Product(
        1, 4 * 112 * 112, 4, 64, "float16", "float16", "float32", kernel=49, row_length=112, stride=2
    )
    plan = plan_product(GC2, first)
    assert "expanded" in plan.detail
    assert plan.cycles(GC2) == pytest.approx(40_195, rel=0.25)


def test_half_partials_are_faster_on_mk2_and_not_on_gc2() -> None:
    def cycles(chip: object, partials: str) -> float:
        used = GC2 if chip is GC2 else GC200
        return plan_product(used, Product(1, 4096, 1024, 1024, partials_type=partials)).compute

    assert cycles(GC200, "float32") > 1.5 * cycles(GC200, "float16")
    assert cycles(GC2, "float32") == pytest.approx(cycles(GC2, "float16"), rel=0.25)


@given(st.integers(1, 10_000), st.sampled_from([1, 4, 16]), st.integers(1, 1472))
def test_splits_change_something_each(size: int, grain: int, most: int) -> None:
    found = list(splits(size, grain, most))
    assert found == sorted(set(found))
    assert found[0] == 1
    assert found[-1] <= most


def test_short_groups_run_on_slic_and_depthwise_on_the_vector_unit() -> None:
    """ResNeXt's groups of four channels, and a depthwise convolution."""
    grouped = plan_product(GC200, Product(32, 8 * 56 * 56, 4, 4, kernel=9, row_length=56))
    assert "slic" in grouped.detail
    bound = grouped.flops / 2 / (GC200.tiles * 64)
    assert grouped.cycles(GC200) > bound
    depthwise = plan_product(GC200, Product(144, 8 * 56 * 56, 1, 1, kernel=9, row_length=56))
    assert "vertical mac" in depthwise.detail
