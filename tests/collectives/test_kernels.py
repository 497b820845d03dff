"""The C module's arithmetic beside NumPy's: the same bits, for values of every kind."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.collectives import arithmetic, linux
from podrun.collectives.arithmetic import in_c, kernel, reduce_in_numpy, reduce_into
from podrun.core.executable import Reduction

pytestmark = pytest.mark.skipif(linux.c_module is None, reason="podrun was installed without its C module")

TYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
REDUCTIONS = [reduction for reduction in Reduction if reduction is not Reduction.LOCAL]
PATTERNS = np.arange(1 << 16, dtype=np.uint32)


def same(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> bool:
    """Equal to the bit, but that one NaN is as good as another where several meet."""
    equal = ours.view(f"u{ours.itemsize}") == theirs.view(f"u{ours.itemsize}")
    return bool((equal | (np.isnan(ours) & np.isnan(theirs))).all())


def both(parts: list[np.ndarray[Any, Any]], reduction: Reduction) -> tuple[np.ndarray[Any, Any], ...]:
    """A reduction by the C module and by NumPy."""
    found = kernel(parts[0].dtype, reduction)
    assert found is not None
    ours, theirs = np.empty_like(parts[0]), np.empty_like(parts[0])
    linux.c_module.reduce(in_c(found, parts, [ours]))
    with np.errstate(all="ignore"):
        reduce_in_numpy(theirs, parts, reduction)
    return ours, theirs


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=4, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 65535)), min_size=0, max_size=3))
def test_every_pattern_with_any_others(
    name: str, reduction: Reduction, others: list[tuple[int, int]]
) -> None:
    """Each of the 65,536 half types once, combined with others of any kind; of float32 its upper halves."""
    half = TYPES[name] is not np.float32

    def values(factor: int, shift: int) -> np.ndarray[Any, Any]:
        patterns = PATTERNS * (factor | 1) + shift
        raw = (patterns % 65536).astype(np.uint16) if half else patterns * 65537
        return raw.view(TYPES[name])

    parts = [values(1, 0), *(values(factor, shift) for factor, shift in others)]
    assert same(*both(parts, reduction))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("reduction", [Reduction.SUM, Reduction.PRODUCT])
def test_ties_and_the_rims_of_every_range_are_rounded_alike(name: str, reduction: Reduction) -> None:
    """Every value with its own last places, so that exact halves come up between all neighbours."""
    values = PATTERNS.astype(np.uint16).view(TYPES[name])
    with np.errstate(all="ignore"):
        steps = np.spacing(np.abs(values.astype(np.float32))).astype(np.float32)
        wide = values.astype(np.float32)
        near = np.nextafter(wide.astype(TYPES[name]), np.array(np.inf, TYPES[name])).astype(np.float32) - wide
        halves = (near / 2).astype(TYPES[name])
        for other in (halves, (near / 4).astype(TYPES[name]), -halves, steps.astype(TYPES[name])):
            assert same(*both([values, other, values], reduction))
            assert same(*both([values, other], reduction))


@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 1500])
@pytest.mark.parametrize("name", TYPES)
def test_any_length_into_any_number_of_outs_which_may_be_the_parts(name: str, size: int) -> None:
    random = np.random.default_rng(size)
    parts = [
        random.normal(0, 40, size + 1).astype(TYPES[name])[1:] for _ in range(3)
    ]  # not on a line's start
    want = np.empty_like(parts[0])
    reduce_in_numpy(want, parts, Reduction.MAX)
    found = kernel(want.dtype, Reduction.MAX)
    assert found is not None
    linux.c_module.reduce(in_c(found, parts, parts))
    assert all(same(part, want) for part in parts)


def test_where_numpy_differs_its_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor whose minimum of zeros has another sign: NumPy takes it then."""
    dtype = np.dtype(np.float16)
    monkeypatch.setattr(
        arithmetic,
        "reduce_in_numpy",
        lambda out, parts, reduction: reduce_in_numpy(out, parts[::-1], reduction),
    )
    kernel.cache_clear()
    try:
        assert kernel(dtype, Reduction.MIN) is None
        assert kernel(dtype, Reduction.SUM) is not None
        parts, out = [np.array([x], dtype) for x in (0.0, -0.0)], np.empty(1, dtype)
        reduce_into(out, parts, Reduction.MIN)
        assert np.signbit(out[0]) == np.signbit(np.minimum(np.float32(-0.0), np.float32(0.0)))
    finally:
        kernel.cache_clear()
