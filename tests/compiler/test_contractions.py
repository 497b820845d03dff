"""Products in the form that XLA computes fast give what the products as written give."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from podrun.compiler import export


def both(function: Any, *operands: Any) -> tuple[Any, Any, str]:
    """The function's values as written and as rewritten, and the rewritten jaxpr as text."""
    closed = jax.make_jaxpr(function)(*operands)
    written = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *operands)
    rewritten = export.evaluate_for_export(closed, operands)
    text = str(jax.make_jaxpr(lambda *given: export.evaluate_for_export(closed, given))(*operands))
    return written, rewritten, text


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + len(shape)).integers(-4, 5, shape).astype(np.float32)


PRODUCTS = given(
    summed=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    batch=st.lists(st.integers(1, 3), max_size=1),
    left=st.sampled_from([1, 3, 8, 300]),
    right=st.sampled_from([1, 2, 8, 300]),
    first=st.booleans(),
)


@settings(max_examples=12, deadline=None)
@PRODUCTS
def test_same_product_for_any_axes(
    summed: list[int], batch: list[int], left: int, right: int, first: bool
) -> None:
    check_product(summed, batch, left, right, first)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@PRODUCTS
def test_same_product_for_many_axes(
    summed: list[int], batch: list[int], left: int, right: int, first: bool
) -> None:
    check_product(summed, batch, left, right, first)


def check_product(summed: list[int], batch: list[int], left: int, right: int, first: bool) -> None:
    """Against NumPy. Small whole numbers: sums are exact, so any order of them gives the same bits."""
    b, s = len(batch), len(summed)
    a = values(*batch, *summed, left) if first else values(*batch, left, *summed)
    c = values(*batch, *summed, right, seed=7)
    axes = range(b, b + s) if first else range(b + 1, b + 1 + s)
    numbers = ((tuple(axes), tuple(range(b, b + s))), (tuple(range(b)), tuple(range(b))))
    closed = jax.make_jaxpr(lambda a, c: lax.dot_general(a, c, numbers))(a, c)
    (found,) = jax.jit(lambda *given: export.evaluate_for_export(closed, given))(a, c)
    k = "uvw"[:s]
    expected = np.einsum(f"...{k}l,...{k}r->...lr" if first else f"...l{k},...{k}r->...lr", a, c)
    np.testing.assert_array_equal(found, expected)
    assert found.shape == expected.shape
    text = str(jax.make_jaxpr(lambda *given: export.evaluate_for_export(closed, given))(a, c))
    assert f"(({list(axes)}" not in text or s == 1


def test_axes_that_do_not_lie_side_by_side_stay() -> None:
    numbers = (((0, 2), (0, 1)), ((), ()))
    a, c = values(3, 5, 4), values(3, 4, 6)
    written, rewritten, text = both(lambda a, c: lax.dot_general(a, c, numbers), a, c)
    np.testing.assert_array_equal(written[0], rewritten[0])
    assert "([0, 2], [0, 1])" in text


@pytest.mark.parametrize("swapped", [False, True])
def test_a_narrow_operand_becomes_the_rows_of_the_result(swapped: bool) -> None:
    wide, narrow = values(32, 512), values(32, 10, seed=3)
    operands = (narrow, wide) if swapped else (wide, narrow)
    written, rewritten, _ = both(lambda a, c: a.T @ c, *operands)
    np.testing.assert_array_equal(written[0], rewritten[0])
    _, _, plain = both(lambda a, c: a.T @ c, values(32, 512), values(32, 256, seed=3))
    assert "optimization_barrier" not in plain
    jaxpr = jax.make_jaxpr(lambda a, c: lax.dot_general(a, c, (((0,), (0,)), ((), ()))))(*operands)
    again = jax.make_jaxpr(lambda *given: export.evaluate_for_export(jaxpr, given))(*operands)
    product = next(e for e in again.jaxpr.eqns if e.primitive.name == "dot_general")
    assert product.outvars[0].aval.shape == (10, 512)
    assert "optimization_barrier" in str(again)


def test_products_inside_of_loops_branches_and_calls() -> None:
    a, c = values(2, 3, 5), values(2, 3, 7, seed=1)

    def product(a: Any, c: Any) -> Any:
        return lax.dot_general(a, c, (((0, 1), (0, 1)), ((), ())))

    def function(a: Any, c: Any) -> Any:
        total, _ = lax.scan(lambda sum_, _: (sum_ + product(a, c), None), jnp.zeros((5, 7)), None, length=3)
        chosen = lax.cond(a[0, 0, 0] > 100, lambda: product(a, c), lambda: -product(a, c))
        kept = jax.checkpoint(product)(a, c)
        return total + chosen + jax.jit(product)(a, c) + kept

    written, rewritten, text = both(function, a, c)
    np.testing.assert_array_equal(written[0], rewritten[0])
    assert "([0, 1], [0, 1])" not in text
    assert "([0], [0])" in text


def test_products_beside_random_keys_that_a_loop_carries() -> None:
    a = values(3, 3)

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        key, total = state
        key, drawn = jax.random.split(key)
        return key, total @ a + jax.random.normal(drawn, (3, 3))

    def function(a: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, state: step(state), (jax.random.key(0), a))[1]

    written, rewritten, _ = both(function, a)
    np.testing.assert_array_equal(written[0], rewritten[0])
