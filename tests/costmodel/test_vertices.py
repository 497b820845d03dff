"""Cycle formulas against their check points, and properties of every formula."""

from __future__ import annotations

import numpy as np
import pytest
from fidelity_kinds import four_rows, own_formulas
from hypothesis import given
from hypothesis import strategies as st

from podrun.costmodel import exchange, product_vertices, vertices
from podrun.costmodel.target import BOW, GC2, GC200

DTYPES = st.sampled_from(["float16", "float32"])
SIZES = st.integers(1, 200_000)


@pytest.mark.parametrize(("rows", "slope_rows"), [(960, 1008), (1920, 2016)])
def test_an_amp_row_takes_four_cycles(rows: int, slope_rows: int) -> None:
    """Published: slope 4.000 cycles per [1, 16] x [16, 16] row on Bow."""
    low, high = product_vertices.matmul_cycles([rows, slope_rows], 16, 16)
    assert (high - low) / (slope_rows - rows) == pytest.approx(4.0)


@given(st.integers(1, 3000), st.integers(1, 300), st.integers(1, 300), DTYPES)
def test_amp_is_never_below_its_peak_rate(rows: int, k: int, n: int, dtype: str) -> None:
    cycles = float(product_vertices.matmul_cycles(rows, k, n, input_type=dtype, partials_type=dtype))
    assert cycles >= rows * k * n / GC200.amp_macs(dtype, dtype)


@given(st.integers(18, 3000), st.integers(1, 300), st.integers(1, 300), DTYPES)
def test_amp_grows_with_every_side(rows: int, k: int, n: int, dtype: str) -> None:
    def cost(r: int, i: int, o: int) -> float:
        return float(product_vertices.matmul_cycles(r, i, o, input_type=dtype, partials_type=dtype))

    assert cost(rows, k, n) <= min(cost(rows + 6, k, n), cost(rows, k + 16, n), cost(rows, k, n + 16))


def test_formulas_price_many_splits_at_once_as_they_price_one() -> None:
    rows, k = np.asarray([1.0, 17.0, 400.0]), np.asarray([16.0, 64.0, 512.0])
    together = product_vertices.kernel_cycles(rows, 14, k, 64, 9)
    assert list(together) == [
        float(product_vertices.kernel_cycles(r, 14, i, 64, 9)) for r, i in zip(rows, k, strict=True)
    ]


def test_four_row_vertex_is_near_the_published_estimate() -> None:
    """16 to 16 channels, 6x6 field, 3x3 kernel, batch 4: simulator 24,661, library's estimate 22,181."""
    total, supervisor = four_rows.four_row_cycles(16, 4, 16, 16, 3, 3)
    assert total == pytest.approx(22_181, rel=0.02)
    assert supervisor == pytest.approx(5400, rel=0.05)
    assert pytest.approx(178) == four_rows.FOUR_ROW_CALL


def test_a_four_row_trace_is_its_parts() -> None:
    """The published trace of that convolution: 3,857 instructions, 1,381 stalls, 162 syncs."""
    parts = four_rows.four_row_parts(16, 4, 16, 16, 3, 3)
    assert parts["instructions"] == pytest.approx(3857, rel=0.03)
    assert parts["stalls"] == pytest.approx(1381, rel=0.1)
    assert parts["syncs"] == 162
    _, supervisor = four_rows.four_row_cycles(16, 4, 16, 16, 3, 3)
    assert parts["instructions"] + parts["stalls"] + parts["syncs"] == pytest.approx(supervisor)


def test_a_wider_four_row_kernel_turns_its_column_loop_as_often() -> None:
    narrow, wide = (four_rows.four_row_cycles(16, 4, 16, 16, 3, columns)[1] for columns in (3, 4))
    each = four_rows.FOUR_ROW_CALL + four_rows.FOUR_ROW_LOOPS[-1]
    assert wide - narrow == pytest.approx(8 * each)


@pytest.mark.parametrize(("channels", "cycles"), [(4, 2552), (16, 5775), (32, 10070)])
def test_pooling_on_one_tile(channels: int, cycles: int) -> None:
    assert own_formulas.pool_rows_cycles(16, 4, channels, "float16") == pytest.approx(cycles, rel=0.02)


@given(SIZES, DTYPES)
def test_element_wise_work_grows_and_never_beats_the_ports(elements: int, dtype: str) -> None:
    now = vertices.elementwise_cycles(elements, dtype, ("add",), 2)
    assert now <= vertices.elementwise_cycles(elements + 1, dtype, ("add",), 2)
    assert now >= elements / vertices.vector_width(dtype)
    assert vertices.reduce_cycles(elements, 4, dtype) >= 0


def test_nothing_to_do_costs_nothing() -> None:
    assert vertices.elementwise_cycles(0, "float16", ("add",), 2) == 0
    assert vertices.reduce_cycles(0, 5, "float16") == 0
    assert exchange.exchange_cycles(GC200, 0) == 0


def test_stream_kernels_reach_the_published_rates() -> None:
    def terabytes(chip: object, pattern: str, how: str, dtype: str) -> float:
        assert chip in (GC2, GC200)
        used = GC2 if chip is GC2 else GC200
        return own_formulas.bytes_per_cycle(used, pattern, how, dtype) * used.tiles * used.clock_hz / 1e12

    assert terabytes(GC200, "stream_triad", "coissue_codelet", "float32") == pytest.approx(46.55, rel=0.01)
    assert terabytes(GC2, "stream_triad", "naive_cpp", "float32") == pytest.approx(3.726, rel=0.03)
    assert terabytes(GC2, "load_only", "assembly_loop", "float32") == pytest.approx(30.7, rel=0.01)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_librarys_triad_is_a_copy_and_a_scaled_addition(dtype: str) -> None:
    """The library has no operation that writes a third array: two passes, so half the rate of one hand-written loop."""
    million = 1 << 20
    passes = vertices.elementwise_cycles(million, dtype, (), 1) + vertices.scaled_add_cycles(million, dtype)
    moved = 3.0 * million * 8.0 / vertices.vector_width(dtype)
    library = own_formulas.bytes_per_cycle(GC2, "stream_triad", "vendor_assembly", dtype)
    assert library == pytest.approx(moved / passes, rel=0.01)
    assert library < 0.55 * own_formulas.bytes_per_cycle(GC2, "stream_triad", "assembly_loop", dtype)
    assert library > own_formulas.bytes_per_cycle(GC2, "stream_triad", "optimised_cpp", dtype)


def test_exchange_and_sync_check_points() -> None:
    """Halo swaps of 100 x 100 FP32 blocks, and the library's rule for a barrier over 16 chips at 1.6 GHz."""
    assert own_formulas.halo_cycles(GC2, 100, 100, 4) == pytest.approx(568, rel=0.1)
    assert own_formulas.halo_cycles(GC2, 100, 100, 4, "grouped_directions") == pytest.approx(922, rel=0.1)
    beyond = exchange.global_sync_cycles(GC2, 16) - exchange.sync_cycles(GC2)
    assert beyond == pytest.approx(240)
    assert exchange.global_sync_cycles(BOW, 1) == exchange.sync_cycles(BOW)


def test_a_double_width_exchange_takes_half() -> None:
    single = exchange.exchange_cycles(GC200, 40_000) - exchange.PHASE_CYCLES
    double = exchange.exchange_cycles(GC200, 40_000, double_width=True) - exchange.PHASE_CYCLES
    assert single == 2 * double


def test_a_host_round_takes_what_the_tutorial_measured() -> None:
    parts = own_formulas.stream_copy(GC200, 4)
    assert 77_000 < parts["begin"] < 88_400
    assert parts["mid"] == pytest.approx(1501, rel=0.01)
    assert 80_000 < parts["end"] < 84_200
    assert own_formulas.stream_copy(GC200, 40_044_000)["mid"] == pytest.approx(6_663_551, rel=0.01)
