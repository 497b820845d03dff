"""Chip and system facts against the vendor's own totals."""

from __future__ import annotations

import pytest

from podrun.device.target import BOW, C600, CHIPS, GC2, GC200, Chip, Status, chip, system
from podrun.errors import InvalidOptionError


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


def test_systems() -> None:
    assert chip("bow-pod64") is BOW
    assert system("POD64").ipus == 64


@pytest.mark.parametrize("find", [chip, system])
def test_an_unknown_target_names_the_known_ones(find: object) -> None:
    with pytest.raises(InvalidOptionError, match="gc3000") as caught:
        find("gc3000")  # type: ignore[operator]
    assert "pod16" in str(caught.value.hint)
