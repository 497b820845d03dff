"""The planner of products: bounds, limits, and the sums of its plans."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.core.errors import InvalidOptionError
from podrun.costmodel.matmul import plan_product
from podrun.costmodel.products import Product
from podrun.costmodel.settings import PlanOptions
from podrun.costmodel.splits import splits
from podrun.costmodel.target import BOW, GC2, GC200, Chip
from tests.sampling import examples

SIDES = st.integers(1, 3000)
CHIPS_IN_TURN = (GC2, GC200, BOW)


@settings(max_examples=60, deadline=None)
@given(SIDES, SIDES, SIDES, st.sampled_from(["float16", "float32"]))
def test_a_plan_is_never_below_the_chips_peak(m: int, k: int, n: int, dtype: str) -> None:
    plan = plan_product(GC200, Product(1, m, k, n, dtype, dtype, dtype))
    bound = m * k * n / (GC200.tiles * GC200.amp_macs(dtype, dtype))
    assert plan.cycles(GC200) >= bound
    assert plan.flops == 2 * m * k * n
    assert 0 < plan.tiles <= GC200.tiles
    assert min(plan.compute, plan.exchange, plan.rearrange, plan.temporary_bytes) >= 0


PRODUCTS = st.builds(
    lambda groups, m, k, n, kernel, dtype: Product(
        groups, m, k, n, dtype, dtype, dtype, kernel=kernel, row_length=max(1, math.isqrt(m))
    ),
    st.sampled_from([1, 1, 16]),
    st.integers(1, 1500),
    st.integers(16, 1000),
    st.integers(16, 1000),
    st.sampled_from([1, 1, 9]),
    st.sampled_from(["float16", "float32"]),
)
"""Products and convolutions that have the room for a plan of their own."""


@settings(max_examples=examples(30), deadline=None)
@given(PRODUCTS, st.sampled_from(CHIPS_IN_TURN))
def test_more_work_or_fewer_tiles_never_cost_less(product: Product, chip: Chip) -> None:
    once = plan_product(chip, product).cycles(chip)
    for name in ("groups", "m", "k", "n"):
        twice = replace(product, **{name: 2 * getattr(product, name)})
        assert plan_product(chip, twice).cycles(chip) >= 0.98 * once, name
    assert plan_product(chip, product, tiles=chip.tiles // 2).cycles(chip) >= 0.98 * once
    assert plan_product(chip, replace(product, proportion=1.0)).cycles(chip) <= once


@settings(max_examples=20, deadline=None)
@given(st.integers(256, 1500), st.integers(256, 1500), st.integers(256, 1500))
def test_singles_and_older_chips_cost_more(m: int, k: int, n: int) -> None:
    half = Product(1, m, k, n)
    single = Product(1, m, k, n, "float32", "float32", "float32")
    for product in (half, single):
        assert plan_product(GC2, product).cycles(GC2) > plan_product(GC200, product).cycles(GC200)
        # Bow and GC200 differ by their clock alone: what stays on the chip takes the same cycles.
        assert plan_product(BOW, product).cycles(BOW) == plan_product(GC200, product).cycles(GC200)
    ratio = plan_product(GC200, single).cycles(GC200) / plan_product(GC200, half).cycles(GC200)
    assert 1.1 < ratio < 5.0


@pytest.mark.parametrize(("chip", "least"), [(GC2, 0.45), (GC200, 0.5), (BOW, 0.5)])
def test_large_products_reach_a_share_of_the_peak_and_small_ones_the_fixed_cost(
    chip: Chip, least: float
) -> None:
    def share(side: int) -> float:
        bound = side**3 / (chip.tiles * chip.amp_macs("float16", "float16"))
        return bound / plan_product(chip, Product(1, side, side, side)).cycles(chip)

    found = [share(side) for side in (256, 512, 1024, 2048)]
    assert found == sorted(found)
    assert least < found[-1] < 0.9
    smallest = [plan_product(chip, Product(1, side, 16, 16)).cycles(chip) for side in (1, 2, 4)]
    assert max(smallest) < 1.3 * min(smallest) < 1000


def test_a_smaller_proportion_takes_less_memory_and_not_less_time() -> None:
    wide = plan_product(GC2, Product(1, 2048, 2048, 2048, proportion=0.6))
    tight = plan_product(GC2, Product(1, 2048, 2048, 2048, proportion=0.1))
    assert tight.temporary_bytes <= 0.1 * GC2.tile_bytes
    assert tight.cycles(GC2) >= wide.cycles(GC2)


@pytest.mark.parametrize("proportion", [0.0, -0.1, 1.5])
def test_an_impossible_proportion_is_refused(proportion: float) -> None:
    with pytest.raises(InvalidOptionError, match="availableMemoryProportion"):
        plan_product(GC200, Product(1, 16, 16, 16, proportion=proportion))


def test_a_proportion_of_an_operator_is_for_its_scope_forward_and_backward() -> None:
    plans = PlanOptions(proportion=0.6, proportions=(("MatMul:0", 0.1), ("a/conv:0", 0.2)))
    found = {
        "ipu:0/a/conv:0": 0.2,
        "transpose(jvp(ipu:0))/stage:1/a/conv:0": 0.2,
        "MatMul:0": 0.1,
        "MatMul:0/1": 0.6,
        "ipu:0/b/conv:0": 0.6,
        "": 0.6,
    }
    assert {scope: plans.proportion_in(scope) for scope in found} == found


def test_published_products() -> None:
    """The sparsity notebook's dense products on Bow: 197.7 TFLOPS in FP16, 52.4 in FP32."""
    half = plan_product(BOW, Product(1, 4096, 4096, 1024))
    single = plan_product(BOW, Product(1, 4096, 4096, 512, "float32", "float32", "float32"))
    assert half.flops / half.cycles(BOW) * BOW.clock_hz / 1e12 == pytest.approx(197.7, rel=0.15)
    assert single.flops / single.cycles(BOW) * BOW.clock_hz / 1e12 == pytest.approx(52.4, rel=0.1)


@pytest.mark.parametrize(
    ("width", "height", "dtype", "milliseconds"),
    [(768, 1024, "float16", 45.3), (2200, 1122, "float16", 148.5), (2200, 1122, "float32", 181.5)],
)
def test_a_convolution_without_room_on_the_amp_takes_the_vector_unit(
    width: int, height: int, dtype: str, milliseconds: float
) -> None:
    """The blur as a library convolution on GC2 with a proportion of 0.1: 200 sweeps, thirty times slower."""
    blur = Product(
        1, width * height, 4, 4, dtype, dtype, "float32", kernel=9, row_length=width, proportion=0.1
    )
    tight, roomy = plan_product(GC2, blur), plan_product(GC2, replace(blur, proportion=1.0))
    assert tight.detail.startswith("mac")
    assert tight.cycles(GC2) > 5.0 * roomy.cycles(GC2)
    assert 200 * tight.cycles(GC2) / GC2.clock_hz * 1e3 == pytest.approx(milliseconds, rel=0.15)


def test_a_serial_split_moves_weights_once_and_inputs_in_every_turn() -> None:
    wide = Product(1, 2048, 2048, 2048, proportion=1.0)
    plans = [plan_product(GC2, replace(wide, proportion=share)) for share in (1.0, 0.3, 0.15)]
    turns = [int(plan.detail.partition("serial/")[2] or 1) for plan in plans]
    assert turns[0] < turns[1] < turns[2]
    # If each turn moved everything again, exchange would grow as the turns do.
    assert plans[2].exchange < 0.5 * turns[2] / turns[0] * plans[0].exchange


def test_few_input_channels_are_expanded() -> None:
    """ResNet's first layer on GC2: the library's plan takes 40,195 cycles."""
    first = Product(
        1, 4 * 112 * 112, 4, 64, "float16", "float16", "float32", kernel=49, row_length=112, stride=2
    )
    plan = plan_product(GC2, first)
    assert "expanded" in plan.detail
    assert plan.cycles(GC2) == pytest.approx(40_195, rel=0.25)


@pytest.mark.parametrize("chip", CHIPS_IN_TURN, ids=lambda chip: chip.name)
def test_eight_bits_need_a_chip_that_takes_them(chip: Chip) -> None:
    with pytest.raises(InvalidOptionError, match="takes no float8"):
        plan_product(chip, Product(1, 64, 64, 64, "float8"))


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


@pytest.mark.parametrize("chip", CHIPS_IN_TURN, ids=lambda chip: chip.name)
def test_groups_of_few_channels_never_cost_more_than_groups_of_more(chip: Chip) -> None:
    """256 channels over 28 x 28, by channels of a group: as many groups are joined as fill a weight block."""
    found = []
    for width in (8, 16, 32, 64, 128, 256):
        product = Product(-(-256 // width), 8 * 28 * 28, width, width, kernel=9, row_length=28)
        plan = plan_product(chip, product)
        assert plan.flops == 2 * product.macs
        found.append(plan.cycles(chip))
    assert found == sorted(found)


@pytest.mark.parametrize("chip", CHIPS_IN_TURN, ids=lambda chip: chip.name)
def test_more_channels_of_a_depthwise_convolution_never_cost_less(chip: Chip) -> None:
    found = [
        plan_product(chip, Product(groups, 16 * 28 * 28, 1, 1, kernel=9, row_length=28)).cycles(chip)
        for groups in (2, 4, 7, 8, 33, 96, 240, 480, 1152)
    ]
    assert found == sorted(found)


SHAPES = st.tuples(*(st.integers(0, 11) for _ in range(3)))


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.sampled_from(CHIPS_IN_TURN), st.sampled_from(["float16", "float32"]))
def test_doubling_a_side_costs_no_less_and_no_more_than_twice_and_its_start(
    powers: tuple[int, int, int], chip: Chip, dtype: str
) -> None:
    """From tiny and skinny products to 2,048 cubed. Where memory is short, a larger product takes turns."""

    def cycles(m: int, k: int, n: int) -> float:
        return plan_product(chip, Product(1, max(m, n), k, min(m, n), dtype, dtype, dtype)).cycles(chip)

    sides = [2**power for power in powers]
    once = cycles(*sides)
    for axis in range(3):
        twice = cycles(*(side * 2 if at == axis else side for at, side in enumerate(sides)))
        assert 0.9 * once <= twice <= 2.6 * once + 600.0, (sides, axis, once, twice)
