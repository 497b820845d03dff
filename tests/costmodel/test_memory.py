"""The contents of an IPU: one sum by content, by tile and in all; and the error that says what does not fit."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.errors import GraphMemoryAllocationError
from podrun.costmodel.cost import cost_jaxpr
from podrun.costmodel.report_checks import check_fits, remedy_hint
from podrun.costmodel.settings import Location
from podrun.costmodel.target import CHIPS, GC200, Chip
from podrun.costmodel.tile_memory import (
    LASTING,
    TIME_POINTS,
    Demand,
    fits,
    fullest_tile,
    in_flight,
    section,
    thinned,
)

SIZES = st.integers(0, 2**31)
DEMANDS = st.builds(
    Demand,
    st.dictionaries(st.sampled_from(LASTING), SIZES),
    SIZES,
    SIZES,
    st.dictionaries(st.sampled_from(("vertex_code", "exchange_code")), SIZES),
)


@given(DEMANDS, st.sampled_from(sorted(CHIPS.values(), key=lambda chip: chip.name)))
def test_the_fullest_tile_is_the_first_of_the_tiles_and_they_hold_everything_once(
    demand: Demand, chip: Chip
) -> None:
    found = section(chip, demand)
    tiles = found["by_tile"]
    assert (tiles[0]["first"], tiles[-1]["last"]) == (0, chip.tiles)
    assert all(a["last"] == b["first"] for a, b in itertools.pairwise(tiles))
    sums = [sum(interval["bytes"].values()) for interval in tiles]
    assert sums[0] == max(sums) == found["max_tile_bytes"] == fullest_tile(chip, demand)
    assert found["fits"] == fits(chip, demand) == (sums[0] <= chip.tile_bytes)
    held = sum((i["last"] - i["first"]) * size for i, size in zip(tiles, sums, strict=True))
    # Each tile's bytes are whole: at most half a byte off for each of the five categories.
    assert abs(held - found["total_bytes"]) <= 2.5 * chip.tiles + 1
    assert sum(found["by_content"].values()) == found["total_bytes"]


@given(st.integers(1, 10**9), st.sampled_from((1, 2, 4)), st.integers(1, 256))
def test_a_location_never_holds_more_than_the_whole(elements: int, width: int, shards: int) -> None:
    whole = elements * width
    assert Location().on_chip(elements, width) == whole
    sharded = Location(shards=shards).on_chip(elements, width)
    assert whole / shards <= sharded <= whole
    assert (sharded < whole) == (shards > 1 and elements >= 8192)
    assert Location(off_chip=True).on_chip(elements, width) == (0 if elements >= 2 else whole)


def test_the_first_stage_keeps_most_micro_batches() -> None:
    assert [in_flight(4, stage) for stage in range(4)] == [7, 5, 3, 1]


def test_a_report_says_what_each_tile_holds() -> None:
    half = jax.ShapeDtypeStruct((256, 256), jnp.float16)
    report = cost_jaxpr(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(half, half), "gc200")
    memory = report["memory"]
    assert memory["by_content"]["arguments"] == memory["always_live_bytes"] == 2 * 256 * 256 * 2
    assert memory["max_tile_bytes"] == max(sum(i["bytes"].values()) for i in memory["by_tile"])
    check_fits(report["memory"])


def test_out_of_memory_names_tile_bytes_and_contents() -> None:
    def run(x: jax.Array) -> jax.Array:
        with jax.named_scope("huge"):
            return jnp.concatenate([x, x]) * 2

    closed = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((300_000_000,), jnp.float16))
    memory = cost_jaxpr(closed, "gc200")["memory"]
    with pytest.raises(GraphMemoryAllocationError) as caught:
        check_fits(memory, ipu=3, tiles=GC200.tiles, profile_path="report.json")
    # The stem is what tools that read the SDK's messages look for: tile over all IPUs, bytes without
    # separators.
    stem = re.match(r"Out of memory on tile (\d+): (\d+) bytes", str(caught.value))
    assert stem
    assert (int(stem[1]), int(stem[2])) == (3 * 1472, memory["max_tile_bytes"])
    assert "638976 available" in str(caught.value)
    assert "huge" in str(caught.value)
    assert "Profile saved to: report.json" in str(caught.value)
    assert caught.value.profile_path == "report.json"
    assert caught.value.hint is None


def test_advice_is_what_was_tried() -> None:
    tried = {
        "what": "keep weights off chip",
        "setting": "weightTensorLocationSettings",
        "max_tile_bytes": 294_968,
    }
    bounded = [
        {"what": what, "setting": "", "max_tile_bytes": None}
        for what in ("use a smaller micro-batch", "compute in FLOAT16")
    ]
    need = {"name": "w", "bytes": 12_000_000, "trained": False}
    for remedies, hint in (
        (
            [tried],
            "To fit, by the model: keep weights off chip (weightTensorLocationSettings): 294,968 B on the fullest "
            "tile.",
        ),
        (bounded, "It may fit if you use a smaller micro-batch, or compute in FLOAT16."),
        (
            [],
            "No setting makes it fit: 'w' takes 12,000,000 B. Cut the largest tensors into parts on several IPUs.",
        ),
    ):
        assert remedy_hint({"remedies": remedies, "largest_need": need}) == hint
    assert remedy_hint({}) is None, "nothing was tried, so nothing is advised"


@pytest.mark.parametrize(("side", "stays"), [(2944, True), (3072, False)])
def test_the_largest_square_product_of_singles_on_a_gc2(side: int, stays: bool) -> None:
    """2,944 was the largest that a single GC2 took with the library of 2019. Source: arXiv 1912.03413."""
    matrix = jax.ShapeDtypeStruct((side, side), jnp.float32)
    report = cost_jaxpr(jax.make_jaxpr(jnp.matmul)(matrix, matrix), "gc2")
    assert report["memory"]["fits"] is stays


def test_long_curves_keep_their_largest_values_in_each_part() -> None:
    curve = [step * 7919 % 1000 for step in range(1000)]
    short = thinned(curve)
    assert len(short) == TIME_POINTS
    assert max(short) == max(curve)
    assert short[0] == max(curve[:3])
    assert short[-1] == max(curve[996:])
    assert thinned(curve[:TIME_POINTS]) == curve[:TIME_POINTS]
