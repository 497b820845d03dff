"""Automatic placement: costs by operator, and cuts that leave the fullest IPU as empty as can be."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.compiler.operator_balance import OperatorCost, balanced_places, operator_costs
from podrun.compiler.program import AnchorSpec, InputSpec, ParameterSpec, Program
from podrun.core.errors import UsageError
from podrun.core.executable import TensorSpec

from .programs import Sgd

COSTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8)


def fullness(costs: list[OperatorCost], places: tuple[int, ...], ratios: list[float]) -> float:
    cycles, nbytes = (max(1, sum(c)) for c in ([c.cycles for c in costs], [c.parameter_bytes for c in costs]))
    worst = 0.0
    for ipu, ratio in enumerate(ratios):
        mine = [cost for cost, place in zip(costs, places, strict=True) if place == ipu]
        shares = sum(c.cycles for c in mine) / cycles, sum(c.parameter_bytes for c in mine) / nbytes
        worst = max(worst, max(shares) / ratio)
    return worst


@given(drawn=COSTS, ipus=st.integers(1, 4), uneven=st.booleans())
def test_no_cut_is_better(drawn: list[tuple[int, int]], ipus: int, uneven: bool) -> None:
    costs = [OperatorCost(str(i), c, b) for i, (c, b) in enumerate(drawn)]
    ratios = [(k + 1 if uneven else 1) for k in range(ipus)]
    ratios = [r / sum(ratios) for r in ratios]
    if len(costs) < ipus:
        with pytest.raises(UsageError, match="cannot be spread"):
            balanced_places(costs, ratios)
        return
    found = balanced_places(costs, ratios)
    assert found == tuple(sorted(found))
    assert set(found) == set(range(ipus))
    best = min(
        fullness(costs, tuple(sum(i >= cut for cut in cuts) for i in range(len(costs))), ratios)
        for cuts in itertools.combinations(range(1, len(costs)), ipus - 1)
    )
    assert fullness(costs, found, ratios) == pytest.approx(best)


def test_costs_of_operators_with_nested_names() -> None:
    sizes = {"small": (8, 8), "block/large": (8, 512), "block/last": (512, 8)}

    def forward(p: dict, inputs: dict, key: object) -> dict:
        x = inputs["x"]
        for name in sizes:
            with jax.named_scope(name):
                x = jax.nn.relu(x @ p[name])
        with jax.named_scope("loss"):
            return {"loss": jnp.sum(x)}

    program = Program(
        name="nested",
        forward=forward,
        parameters={n: ParameterSpec(TensorSpec(n, "float32", s), True) for n, s in sizes.items()},
        inputs={"x": InputSpec(TensorSpec("x", "float32", (16, 8)))},
        anchors=(AnchorSpec("loss"),),
        loss="loss",
        update=Sgd(),
    )
    costs = operator_costs(program, [*sizes, "loss", "nothing"])
    assert [c.name for c in costs] == [*sizes, "loss", "nothing"]
    small, large, last, loss, nothing = costs
    assert (small.parameter_bytes, large.parameter_bytes, loss.parameter_bytes) == (256, 16384, 0)
    assert min(large.cycles, last.cycles) > loss.cycles > nothing.cycles == 0
    assert balanced_places([small, large, last, loss], [0.5, 0.5]) == (0, 0, 1, 1)


def test_weights_that_have_room_do_not_decide() -> None:
    costs = [OperatorCost(str(i), 10, 1000 if i == 0 else 1) for i in range(4)]
    assert balanced_places(costs, [0.5, 0.5]) == (0, 1, 1, 1)
    assert balanced_places(costs, [0.5, 0.5], room_bytes=2000) == (0, 0, 1, 1)
    assert balanced_places(costs, [0.5, 0.5], room_bytes=900) == (0, 1, 1, 1)
