"""Bytes by tile as intervals, and the error that says what does not fit."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.device.target import GC200
from podrun.device.tiles.cost import cost_jaxpr
from podrun.device.tiles.fit import check_fits
from podrun.device.tiles.mapping import stack
from podrun.errors import GraphMemoryAllocationError

PIECES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2000), st.integers(1, 10**6)), max_size=20)


@given(PIECES)
def test_intervals_cover_all_tiles_once_and_keep_every_byte(pieces: list[tuple[str, int, int]]) -> None:
    intervals = stack(GC200, [(name, tiles, float(size)) for name, tiles, size in pieces])
    assert intervals[0].first == 0
    assert intervals[-1].last == GC200.tiles
    assert all(a.last == b.first for a, b in itertools.pairwise(intervals))
    held = sum((i.last - i.first) * i.total for i in intervals)
    assert held == pytest.approx(sum(min(tiles, GC200.tiles) * size for _, tiles, size in pieces))


def test_a_report_says_what_each_tile_holds() -> None:
    half = jax.ShapeDtypeStruct((256, 256), jnp.float16)
    report = cost_jaxpr(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(half, half), "gc200")
    intervals = report["memory"]["by_tile"]
    assert intervals[0]["first"] == 0
    assert intervals[-1]["last"] == 1472
    on_chip = sum((i["last"] - i["first"]) * sum(i["bytes"].values()) for i in intervals)
    assert on_chip == pytest.approx(report["memory"]["total_bytes"], rel=0.05)
    check_fits(report)


def test_out_of_memory_names_tile_bytes_contents_and_help() -> None:
    def run(x: jax.Array) -> jax.Array:
        with jax.named_scope("huge"):
            return jnp.concatenate([x, x]) * 2

    closed = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((300_000_000,), jnp.float16))
    with pytest.raises(
        GraphMemoryAllocationError, match=r"IPU 3, tile 0: .* bytes used, 638,976 available"
    ) as caught:
        check_fits(cost_jaxpr(closed, "gc200"), ipu=3, profile_path="report.json")
    assert "huge" in str(caught.value)
    assert caught.value.profile_path == "report.json"
    assert caught.value.hint
    assert caught.value.hint.startswith("To fit:")
