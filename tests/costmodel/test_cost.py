"""Costing traced functions: the contents of the report, that they add up, and that they never change by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from podrun.core.errors import InvalidOptionError, UnimplementedError
from podrun.costmodel import matmul, planners, products
from podrun.costmodel.cost import cost_jaxpr
from podrun.costmodel.target import GC200

GOLDEN = Path(__file__).parent / "golden"


def _half(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float16)


def _perceptron(weights: list[Any], x: Any) -> Any:
    for index, weight in enumerate(weights):
        with jax.named_scope(f"layer{index}"):
            x = jax.nn.relu(x @ weight)
    return jnp.sum(x)


def _training_step() -> Any:
    weights = [_half(784, 512), _half(512, 512), _half(512, 10)]

    def step(weights: list[Any], x: Any) -> Any:
        loss, gradients = jax.value_and_grad(_perceptron)(weights, x)
        return loss, [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    return jax.make_jaxpr(step)(weights, _half(32, 784))


def _convolution() -> Any:
    def run(image: Any, weight: Any) -> Any:
        out = jax.lax.conv_general_dilated(
            image, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.lax.reduce_window(out, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    return jax.make_jaxpr(run)(_half(4, 28, 28, 32), _half(3, 3, 32, 64))


@pytest.mark.parametrize(("name", "make"), [("perceptron", _training_step), ("convolution", _convolution)])
def test_golden_reports_are_byte_identical(name: str, make: Any, request: pytest.FixtureRequest) -> None:
    text = json.dumps(cost_jaxpr(make(), "gc200"), indent=1, sort_keys=True) + "\n"
    assert (GOLDEN / f"{name}.json").read_text(encoding="utf-8") == text


@given(rows=st.sampled_from((196, 512, 1000)), columns=st.integers(1, 12), reduces=st.booleans())
@settings(max_examples=10, deadline=None, phases=(Phase.generate,))
def test_what_follows_a_product_works_where_its_outputs_lie(rows: int, columns: int, reduces: bool) -> None:
    def close(y: Any) -> Any:
        with jax.named_scope("close"):
            return jnp.sum(y, axis=0) if reduces else jnp.exp(y.reshape(-1))

    columns *= 128
    after = cost_jaxpr(
        jax.make_jaxpr(lambda x, w: close(x @ w))(_half(rows, 64), _half(64, columns)), "gc200"
    )
    alone = cost_jaxpr(jax.make_jaxpr(close)(_half(rows, columns)), "gc200")
    plan = matmul.plan_product(GC200, products.Product(1, rows, 64, columns, partials_type="float32"))
    assert plan.share * plan.tiles > 0.999  # No tile has less than the mean of those that are used.
    most = 1.0 + plan.share * GC200.tiles
    assert alone["by_scope"]["close"] <= after["by_scope"]["close"] <= most * alone["by_scope"]["close"]


def test_what_no_result_needs_is_not_priced() -> None:
    def wasteful(x: Any, y: Any) -> Any:
        with jax.named_scope("dropped"):
            jnp.exp(x @ y)
        return jnp.sum(x)

    x = _half(256, 256)
    needed = jax.make_jaxpr(lambda x, y: jnp.sum(x))(x, x)
    assert cost_jaxpr(jax.make_jaxpr(wasteful)(x, x), "gc200") == cost_jaxpr(needed, "gc200")


def test_causes_and_operators_add_up() -> None:
    report = cost_jaxpr(_training_step(), "bow")
    total = report["step"]["cycles"]
    assert sum(report["step"]["by_cause"].values()) == pytest.approx(total, abs=5)
    assert sum(entry["cycles"] for entry in report["by_operator"].values()) == pytest.approx(total, abs=9)
    assert sum(report["by_scope"].values()) == pytest.approx(total, abs=25)
    assert report["step"]["seconds"] == pytest.approx(total / 1.85e9, rel=1e-4)
    assert report["bounds"] == {}
    assert any("layer1" in scope and "transpose" in scope for scope in report["by_scope"])


def test_memory_holds_weights_and_fits() -> None:
    memory = cost_jaxpr(_training_step(), "gc200")["memory"]
    weights = 2 * (784 * 512 + 512 * 512 + 512 * 10)
    assert memory["always_live_bytes"] >= weights
    assert memory["fits"]
    assert memory["max_tile_bytes"] * 1472 >= memory["total_bytes"]
    assert min(memory["code"].values()) >= 0
    assert memory["largest"] == sorted(memory["largest"], key=lambda item: -item["bytes"])


def test_a_program_too_large_does_not_fit() -> None:
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(_half(600_000_000))
    assert not cost_jaxpr(closed, "gc200")["memory"]["fits"]


def test_a_scan_costs_its_body_each_turn() -> None:
    def body(turns: int) -> Any:
        def run(x: Any, w: Any) -> Any:
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=turns)[0]

        return cost_jaxpr(jax.make_jaxpr(run)(_half(16, 256), _half(256, 256)), "gc200")

    assert body(20)["step"]["cycles"] == pytest.approx(10 * body(2)["step"]["cycles"], rel=0.01)


def test_repeats_scale_time_and_not_memory() -> None:
    once, often = cost_jaxpr(_convolution(), "gc200"), cost_jaxpr(_convolution(), "gc200", repeats=8)
    assert often["step"]["cycles"] == pytest.approx(8 * once["step"]["cycles"], abs=8)
    assert often["memory"] == once["memory"]


def test_running_sums_take_a_sweep_for_each_doubling() -> None:
    """12 sweeps along 4096 elements, 6 along 64, of the same number of elements."""
    values = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
    short, long = (
        cost_jaxpr(jax.make_jaxpr(lambda x, axis=axis: jnp.cumsum(x, axis))(values), "gc200")["step"][
            "cycles"
        ]
        for axis in (0, 1)
    )
    assert long == pytest.approx(2 * short, rel=0.05)


def test_an_unknown_equation_is_bounded_and_counted_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cumsum", "sort"):
        monkeypatch.delitem(planners.PLANNERS, name)
        assert not planners.known(name)

    def run(x: Any) -> Any:
        with jax.named_scope("running"):
            x = jnp.cumsum(x, 0)
        with jax.named_scope("ranked"):
            return jnp.sort(x, 1) + jnp.cumsum(x, 1)

    closed = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    report = cost_jaxpr(closed, "gc200")
    assert {name: (entry["count"], entry["scopes"]) for name, entry in report["bounds"].items()} == {
        "cumsum": (2, ["running", "ranked"]),
        "sort": (1, ["ranked"]),
    }
    assert all(entry["cycles"] > 0 for entry in report["bounds"].values())
    # All of them at once, by name and place.
    with pytest.raises(UnimplementedError, match=r"cumsum x 2 \(running, ranked\); sort x 1 \(ranked\)"):
        cost_jaxpr(closed, "gc200", strict=True)


def test_casts_and_squares_before_a_sum_cost_nothing() -> None:
    plain = jax.make_jaxpr(lambda x: jnp.sum(x, 0))(_half(4096, 512))
    squared = jax.make_jaxpr(lambda x: jnp.sum(x * x, 0))(_half(4096, 512))
    assert cost_jaxpr(plain, "gc200")["step"]["cycles"] == cost_jaxpr(squared, "gc200")["step"]["cycles"]


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(InvalidOptionError, match="gc300"):
        cost_jaxpr(_convolution(), "gc300")
    with pytest.raises(InvalidOptionError, match="availableMemoryProportion"):
        cost_jaxpr(_convolution(), "gc200", available_memory_proportion=1.2)


def test_results_used_at_once_hold_less() -> None:
    stay = cost_jaxpr(_training_step(), "gc200")["memory"]["activations_peak_bytes"]
    used = cost_jaxpr(_training_step(), "gc200", results_stay=False)["memory"]["activations_peak_bytes"]
    assert used < stay


def _layers(batch: int, width: int, dtype: Any) -> Any:
    """Training step of two normalised dense layers."""

    def step(weights: list[Any], x: Any) -> Any:
        def loss(weights: list[Any]) -> Any:
            y = x
            for weight in weights:
                y = jax.nn.gelu(y @ weight)
                y = (y - jnp.mean(y, 1, keepdims=True)) * jax.lax.rsqrt(jnp.var(y, 1, keepdims=True) + 1e-5)
            return jnp.sum(y)

        return jax.grad(loss)(weights)

    shapes = [jax.ShapeDtypeStruct((width, width), dtype)] * 2
    return jax.make_jaxpr(step)(shapes, jax.ShapeDtypeStruct((batch, width), dtype))


@pytest.mark.slow
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.integers(64, 256), st.integers(256, 768), st.sampled_from(["gc2", "gc200", "bow", "c600"]))
def test_more_and_wider_never_takes_less_time_or_memory(batch: int, width: int, chip: str) -> None:
    def figures(**changes: Any) -> tuple[int, int, int]:
        given: dict[str, Any] = {"batch": batch, "width": width, "dtype": jnp.float16, **changes}
        report = cost_jaxpr(_layers(**given), chip, partials_type="float16")
        memory = report["memory"]
        return report["step"]["cycles"], memory["always_live_bytes"], memory["activations_peak_bytes"]

    plain = figures()
    twice, wider, single = figures(batch=2 * batch), figures(width=2 * width), figures(dtype=jnp.float32)
    for more in (twice, wider, single):
        # Values move in grains of eight: a few cycles either way.
        assert more[0] >= 0.95 * plain[0]
        assert more[1:] >= plain[1:]
    # Weights alone do not follow the batch; activations follow it, and every byte the type.
    assert twice[1] - plain[1] == 2 * batch * width
    assert twice[2] <= 2 * plain[2]
    assert single[1] == 2 * plain[1]


def test_what_is_made_for_each_row_is_no_work_for_each_element() -> None:
    """A reciprocal square root of a row's variance costs next to nothing, one of every element its cycles."""

    def norm(x: Any, variance: Any) -> Any:
        return x * jax.lax.rsqrt(variance)

    x = _half(4096, 1024)
    each = cost_jaxpr(jax.make_jaxpr(norm)(x, x), "gc200")["step"]["by_cause"]["compute"]
    row = cost_jaxpr(jax.make_jaxpr(norm)(x, _half(4096, 1)), "gc200")["step"]["by_cause"]["compute"]
    plain = cost_jaxpr(jax.make_jaxpr(lambda x, s: x * s)(x, _half(4096, 1)), "gc200")
    assert each > 1.5 * row
    assert row == plain["step"]["by_cause"]["compute"]
