"""Chip and system facts against the vendor's own totals."""

from __future__ import annotations

import pytest

from podrun.core.errors import InvalidOptionError
from podrun.costmodel.exchange import all_reduce_seconds, neighbour_seconds
from podrun.costmodel.matmul import plan_product
from podrun.costmodel.products import Product
from podrun.costmodel.target import BOW, C600, CHIPS, GC2, GC200, Chip, Status, chip, system


@pytest.mark.parametrize(
    ("target", "types", "tflops"),
    [
        (GC2, ("float16", "float16"), 124.5),
        (GC2, ("float32", "float32"), 31.1),
        (GC200, ("float16", "float16"), 250.0),
        (GC200, ("float32", "float32"), 62.4),
        (BOW, ("float16", "float16"), 350.0),
        (BOW, ("float32", "float32"), 87.0),
        (C600, ("float16", "float16"), 280.0),
        (C600, ("float8", "float16"), 560.0),
        (C600, ("float32", "float32"), 70.0),
    ],
)
def test_peak_rates_are_the_published_ones(target: Chip, types: tuple[str, str], tflops: float) -> None:
    flops = 2.0 * target.amp_macs(*types) * target.tiles * target.clock_hz
    assert flops == pytest.approx(tflops * 1e12, rel=0.011)


def test_memory_and_exchange_totals() -> None:
    assert GC200.sram_bytes == 940_572_672
    assert GC2.sram_bytes == 304 * 2**20
    assert GC200.tiles * GC200.exchange_bytes * GC200.clock_hz == pytest.approx(8e12, rel=0.03)
    streamed = GC200.tiles * (GC200.load_bytes + GC200.store_bytes) * GC200.clock_hz
    assert streamed == pytest.approx(47.5e12, rel=0.02)


def test_every_number_says_where_it_comes_from() -> None:
    for target in CHIPS.values():
        for name, fact in target.facts.items():
            assert fact.source, f"{target.name}.{name}"
            assert fact.unit, f"{target.name}.{name}"
            assert fact.status in Status


def test_chips_and_systems_are_known_by_name() -> None:
    assert chip("bow-pod64") is BOW
    assert system("POD64").ipus == 64


@pytest.mark.parametrize("find", [chip, system])
def test_an_unknown_target_names_the_known_ones(find: object) -> None:
    with pytest.raises(InvalidOptionError, match="gc3000") as caught:
        find("gc3000")  # type: ignore[operator]
    assert "pod16" in str(caught.value.hint)


def test_a_supposed_chip_differs_in_what_is_asked_and_nothing_else() -> None:
    supposed = system("POD16:tile_kib=312,tiles=2944").chip
    assert (supposed.tiles, supposed.tile_bytes, supposed.clock_hz) == (2944, 312 * 1024, GC200.clock_hz)
    assert supposed is chip("gc200:tile_kib=312,tiles=2944")
    assert chip(supposed.name) == supposed
    assert (supposed.base, GC200.base) == ("gc200", "gc200")
    changed = {name for name, fact in supposed.facts.items() if fact.status is Status.SUPPOSED}
    assert changed == {"tiles", "tile_bytes"}
    assert system("pod16:clock_ghz=2").ipus == 16


def test_more_tiles_take_fewer_cycles_and_faster_links_less_time() -> None:
    product = Product(groups=1, m=4096, k=1024, n=1024)
    cycles = [plan_product(c := chip(f"gc200:tiles={n}"), product).cycles(c) for n in (368, 736, 2944)]
    assert cycles == sorted(cycles, reverse=True)
    assert cycles[0] > 3 * cycles[-1]
    for seconds in (lambda c: all_reduce_seconds(c, 16, 1e8), lambda c: neighbour_seconds(c, 1e8)):
        same, twice = (seconds(chip(f"gc200:link_gbps={rate}")) for rate in (128, 256))
        assert same == pytest.approx(seconds(GC200), rel=1e-9)
        assert twice == pytest.approx(same / 2, rel=0.05)


@pytest.mark.parametrize(
    "words", ["gc200:cores=3", "gc200:tiles=many", "gc200:tiles=0", "gc200:tiles=nan", "gc200:,"]
)
def test_what_cannot_be_supposed_is_named(words: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        chip(words)
    assert "tiles=2944" in str(caught.value.hint)
