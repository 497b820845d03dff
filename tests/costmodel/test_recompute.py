"""Recomputation and cutting of flat steps: every result is made, once; recomputed values are no longer kept."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from podrun.core.names import BACKWARD
from podrun.costmodel.cost import cost_flat
from podrun.costmodel.equations import FlatJaxpr
from podrun.costmodel.flatten import flatten_jaxpr
from podrun.costmodel.recompute import recomputed
from podrun.costmodel.schedule import split_flat
from podrun.costmodel.settings import NOTHING, Recompute
from podrun.costmodel.splitting import Spot
from podrun.costmodel.target import GC200

WIDTH, ROWS = 64, 512
ACTIVATION = WIDTH * ROWS * 2


def step(layers: int, places: int = 1, shared: bool = False, rows: int = ROWS) -> FlatJaxpr:
    """Forward and backward of dense layers over places (scopes ``ipu:i``)."""

    def loss(weights: list[Any], x: Any) -> Any:
        for index in range(layers):
            weight = weights[0 if shared else index]
            with jax.named_scope(f"ipu:{index * places // layers}"), jax.named_scope(f"dense{index}"):
                x = jnp.maximum(x @ weight, 0)
        return jnp.sum(x)

    half = jnp.float16
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), half)] * (1 if shared else layers)
    return flatten_jaxpr(
        jax.make_jaxpr(jax.value_and_grad(loss))(weights, jax.ShapeDtypeStruct((rows, WIDTH), half))
    )


def place(scope: str) -> int | None:
    found = re.search(r"ipu:(\d+)", scope)
    return int(found[1]) if found else None


def peak(flat: FlatJaxpr) -> int:
    return int(cost_flat(flat, GC200, results_stay=False)["memory"]["activations_peak_bytes"])


def check(flat: FlatJaxpr) -> None:
    """Everything that is read was made before, by one equation; all results are there."""
    made = {*flat.arguments, *flat.constants}
    for equation in flat.equations:
        assert {n for n in equation.inputs if n is not None} <= made
        assert made.isdisjoint(equation.outputs)
        made.update(equation.outputs)
    assert set(flat.results) <= made


RULES = [
    Recompute("standard"),
    Recompute("all"),
    Recompute("pipeline"),
    Recompute(scopes=frozenset({"dense1", "dense2"})),
    Recompute("all", kept=frozenset({"dense3"})),
]


@pytest.mark.parametrize("what", RULES, ids=str)
@pytest.mark.parametrize("places", [1, 3])
def test_every_result_is_still_made(what: Recompute, places: int) -> None:
    flat = step(9, places)
    again = recomputed(flat, what, place)
    check(again)
    assert again.results == flat.results
    made = [e for e in again.equations if "checkpoint(" in e.scope]
    assert all(BACKWARD in e.scope for e in made)
    if what.scopes:
        assert {re.search(r"dense\d", e.scope)[0] for e in made} <= what.scopes  # type: ignore[index]
    assert not any("dense3" in e.scope for e in made if "dense3" in what.kept)


def test_nothing_to_do_leaves_the_step_as_it_is() -> None:
    flat = step(3)
    assert recomputed(flat, NOTHING) is flat


def test_checkpoints_save_most_of_what_a_deep_step_keeps() -> None:
    flat = step(36)
    before, after = peak(flat), peak(recomputed(flat, Recompute("standard")))
    assert before >= 36 * ACTIVATION
    # The square root of the depth is kept and as much is made again, besides masks and what is at work.
    assert after < 4 * 6 * ACTIVATION


@pytest.mark.parametrize("what", [NOTHING, Recompute("pipeline")], ids=str)
def test_segments_hold_every_equation_and_say_what_crosses(what: Recompute) -> None:
    flat = recomputed(step(8, 4), what, place)
    parts = split_flat(flat, lambda scope: None if place(scope) is None else Spot(place(scope) or 0))
    assert [part.place for part in parts] == [0, 1, 2, 3, 2, 1, 0]
    there = set(flat.arguments)
    for part in parts:
        check(part.flat)
        assert set(part.flat.arguments) <= there
        there |= set(part.crossing)
    kept = {id(e) for part in parts for e in part.flat.equations}
    assert {id(e) for e in flat.equations} <= kept
    assert sorted(n for part in parts for n in part.flat.results if n not in part.crossing) == sorted(
        flat.results
    )
    # Without recomputation the first stage leaves its activations to its backward work, with it nothing.
    own = set(parts[0].crossing) & set(parts[-1].flat.arguments)
    assert bool(own) == (what is NOTHING)


def memory(flat: FlatJaxpr) -> dict[str, Any]:
    found: dict[str, Any] = cost_flat(flat, GC200, results_stay=False)["memory"]
    return found


def test_recomputing_saves_what_the_tiles_hold_not_activations_alone() -> None:
    """Copies run the code of their originals: a deep step of large activations needs much less in all."""
    flat = step(36, rows=32 * ROWS)
    kept, again = memory(flat), memory(recomputed(flat, Recompute("standard")))
    # Masks that only the backward pass reads are now steps of their own there.
    for part, most in (("vertex_state", 1.12), ("exchange_code", 1.01), ("control_code", 1.2)):
        assert kept["code"][part] <= again["code"][part] <= most * kept["code"][part]
    saved = kept["activations_peak_bytes"] - again["activations_peak_bytes"]
    assert kept["max_tile_bytes"] - again["max_tile_bytes"] > 0.9 * saved / GC200.tiles
    assert again["max_tile_bytes"] < 0.6 * kept["max_tile_bytes"]


def test_without_outlining_copies_have_code_of_their_own() -> None:
    flat = step(36)
    own = memory(recomputed(flat, Recompute("standard", outlined=False)))["code"]
    assert own["vertex_state"] > 1.2 * memory(flat)["code"]["vertex_state"]


def test_a_copy_whose_original_is_gone_has_its_own_code() -> None:
    """What only the backward pass reads is made there alone once it is made again."""
    again = recomputed(step(6), Recompute("all"))
    made = {number for equation in again.equations for number in equation.outputs}
    copies = [e for e in again.equations if "checkpoint(" in e.scope]
    called = [e for e in copies if e.outlined]
    assert called
    assert len(called) + sum(not e.outlined for e in copies) == len(copies)
    assert not any(e.outlined for e in again.equations if "checkpoint(" not in e.scope)
    # As many originals are there as copies that call them.
    shapes = {number: again.tensors[number] for number in made}
    for equation in called:
        twins = [
            e
            for e in again.equations
            if not e.outlined and (e.primitive, e.params) == (equation.primitive, equation.params)
        ]
        assert any(shapes[e.outputs[0]] == shapes[equation.outputs[0]] for e in twins)


def test_scopes_share_out_all_code() -> None:
    report = cost_flat(recomputed(step(12), Recompute("standard")), GC200, results_stay=False)
    whole = report["memory"]["code"]
    for part in ("vertex_state", "control_code"):
        listed = sum(code[part] for code in report["code_by_scope"].values())
        assert listed == pytest.approx(whole[part], rel=1e-3)
