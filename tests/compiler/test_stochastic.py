"""Stochastic rounding of operators' results: on the grid, right on average, gradients too, loops and branches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podrun.compiler import grid_rounding, jaxprs, stochastic

COUNT = 4096
STATES = jax.vmap(lambda i: stochastic.state_at(jnp.array([3, 5], jnp.uint32), i))(jnp.arange(COUNT))


def halves(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).uniform(0.5, 2, shape).astype(np.float16))


@jax.jit
def spread_of(values: Any, states: Any) -> Any:
    """Values rounded with each of the states."""
    return jax.vmap(lambda state: grid_rounding.on_grid(values, state))(states)


def run(function: Any, state: Any, *arguments: Any) -> Any:
    """A function of halves, evaluated with stochastic rounding."""
    closed = jax.make_jaxpr(function)(*arguments)
    return stochastic.evaluate_rounded(closed, arguments, state, {}, jaxprs.bind_equation)[0]


def test_each_of_two_neighbours_by_its_nearness() -> None:
    for value in (1 / 3, -1000.3, 1e-5, 3e-8, 65519.0):
        made = spread_of(jnp.full(8, value, jnp.float32), STATES)
        found = np.unique(np.asarray(made))
        assert len(found) <= 2
        finite = np.asarray(made, np.float64)[np.isfinite(made)]
        if value < 65504:
            np.testing.assert_array_equal(found, found.astype(np.float16))
            step = found.max() - found.min()
            assert abs(finite.mean() - value) < 0.05 * step
    exact = jnp.asarray([0.0, -2.5, 65504.0, jnp.inf, -jnp.inf, 6e-8], jnp.float16).astype(jnp.float32)
    np.testing.assert_array_equal(grid_rounding.on_grid(exact, STATES[0]), exact)
    assert jnp.isnan(grid_rounding.on_grid(jnp.full(1, jnp.nan), STATES[0]))[0]


def test_bits_differ_from_place_to_place_and_neighbours_are_independent() -> None:
    made = np.asarray(spread_of(jnp.full(64, 1 + 2.0**-11), STATES)) > 1
    correlation = np.corrcoef(made.T)
    assert np.abs(correlation - np.eye(64)).max() < 5 / np.sqrt(COUNT)
    along = np.corrcoef(made[:-1].ravel(), made[1:].ravel())[0, 1]
    assert abs(along) < 5 / np.sqrt(made.size)


def test_tables_hold_the_states_of_places() -> None:
    state, places = STATES[3], stochastic.Places(STATES[3], 5)
    for place in range(5):
        here = stochastic.state_at(state, place)
        np.testing.assert_array_equal(places.state(place), here)
        np.testing.assert_array_equal(_state(places.row(place)), here)
        np.testing.assert_array_equal(_state(places.back(place)), stochastic.state_at(here, 0xB4))
        for result in (0, 2):
            value, back = places.of_result(place, result)
            np.testing.assert_array_equal(_state(value), stochastic.state_at(here, result))
            np.testing.assert_array_equal(_state(back), stochastic.state_at(_state(value), 0xB4))


def _state(of: grid_rounding.StateRow) -> Any:
    return of.table[of.row]


def _loop(x: Any, y: Any) -> Any:
    return lax.scan(lambda c, e: (c * e, c + e), x, jnp.stack([y] * 3))[0]


def _while(x: Any, y: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * y), (0, x))[1]


def _branch(x: Any, y: Any) -> Any:
    return lax.cond(x[0] > 0, lambda a: a * y, lambda a: a, x)


FUNCTIONS = {
    "a product and a sum": lambda x, y: x * y + x,
    "a matrix product": lambda x, y: jnp.outer(x, y) @ y,
    "float32 inside": lambda x, y: jnp.mean(x.astype(jnp.float32) ** 3 * jnp.tanh(y)).astype(jnp.float16),
    "a literal": lambda x, y: jax.jit(lambda a, n: a * y * n.astype(a.dtype))(x, 3),
    "a loop": _loop,
    "a loop that data end": _while,
    "a branch": _branch,
    "a jitted function": lambda x, y: jax.jit(lambda a: a * y)(x),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.sample(4)
def test_results_are_halves_and_right_on_average(function: Any) -> None:
    x, y = halves(4), halves(4, seed=1)
    made = jax.jit(jax.vmap(lambda s: run(function, s, x, y)))(STATES)
    assert made.dtype == np.float16
    exact = np.asarray(function(x.astype(jnp.float32), y.astype(jnp.float32)), np.float64)
    values = np.asarray(made, np.float64)
    spread = values.std(0)
    assert (spread > 0).any()
    assert (np.abs(values.mean(0) - exact) <= 6 * spread / np.sqrt(COUNT) + 3e-4 * np.abs(exact)).all()


def test_gradients_are_halves_and_right_on_average() -> None:
    x, y = halves(4), halves(4, seed=1)

    def slope(state: Any) -> Any:
        return jax.grad(lambda v: jnp.sum(run(lambda a, b: a * b + a * a, state, v, y)).astype(jnp.float32))(
            x
        )

    made = jax.jit(jax.vmap(slope))(STATES)
    assert made.dtype == np.float16
    exact = np.asarray(y, np.float64) + 2 * np.asarray(x, np.float64)
    values = np.asarray(made, np.float64)
    assert (np.abs(values.mean(0) - exact) < 2e-4 * exact).all()
    assert (np.abs(values - exact).max(0) > 0).any()


def test_what_only_moves_is_left_as_it_is() -> None:
    x = halves(6)
    moved = run(lambda v: jnp.concatenate([jnp.flip(v), -v[::2], jnp.maximum(v, 1)]), STATES[0], x)
    np.testing.assert_array_equal(moved, np.concatenate([x[::-1], -x[::2], np.maximum(x, 1)]))
    scattered = run(lambda v: jnp.zeros(8, jnp.float16).at[2:].set(v), STATES[0], x)
    np.testing.assert_array_equal(scattered, [0, 0, *np.asarray(x)])


def test_each_call_of_a_function_rounds_with_bits_of_its_own() -> None:
    x, y = halves(512), halves(512, seed=1)
    product = jax.jit(lambda a, b: a * b)

    def calls(a: Any, b: Any) -> Any:
        return jnp.stack([product(a, b), product(a, b), a * b])

    made = np.asarray(run(calls, STATES[0], x, y))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (made[one] != made[other]).mean() > 0.2
    exact = np.asarray(x, np.float64) * np.asarray(y, np.float64)
    np.testing.assert_allclose(made.astype(np.float64), np.stack([exact] * 3), rtol=2.0**-10)


def test_a_gradient_of_a_gradient_passes_through_roundings() -> None:
    x, y = halves(4), halves(4, seed=1)

    def cubed(v: Any) -> Any:
        return jnp.sum(run(lambda a, b: a * a * a * b, STATES[1], v, y).astype(jnp.float32))

    curvature = jax.grad(lambda v: jnp.sum(jax.grad(cubed)(v).astype(jnp.float32)))(x)
    exact = 6 * np.asarray(x, np.float64) * np.asarray(y, np.float64)
    np.testing.assert_allclose(np.asarray(curvature, np.float64), exact, rtol=0.02)
