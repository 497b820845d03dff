"""The quick bound of a piece's operations is never below what XLA counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podrun.device.xla.operation_bounds import most_operations
from podrun.private_apis.jax import stablehlo

SQUARE, WIDE, IMAGE = (40, 40), (8, 50), (2, 3, 12, 12)
FORMULAS: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "a step of elementwise operators": (lambda x: jnp.tanh(x) * x**3.3 + x**13 - jnp.arctan2(x, x), [WIDE]),
    "formulas of others": (lambda x: jax.scipy.special.gammaln(x) + jax.scipy.special.digamma(x), [WIDE]),
    "two formulas of loops": (lambda x: jax.scipy.special.gammainc(x, x), [(3,)]),
    "a product": (lambda x, y: jax.nn.relu(x @ y), [SQUARE, SQUARE]),
    "products of a batch": (lambda x, y: x @ y, [(64, 3, 1), (64, 1, 7)]),
    "gradients of a product": (jax.grad(lambda x, y: jax.nn.log_softmax(x @ y)[0].sum()), [SQUARE, SQUARE]),
    "a convolution": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), [IMAGE, (5, 3, 3, 3)]),
    "a convolution of groups": (
        lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "SAME", feature_group_count=3),
        [IMAGE, (6, 1, 3, 3)],
    ),
    "pooling": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "VALID"),
        [IMAGE],
    ),
    "gradients of pooling": (
        jax.grad(
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 1, 1), "VALID").sum()
        ),
        [IMAGE],
    ),
    "reductions": (lambda x: x.var(0) + jnp.argmax(x, 1) + x.std(), [SQUARE]),
    "running sums": (lambda x: jnp.cumsum(x, 1) + lax.cumlogsumexp(x, 0), [SQUARE]),
    "a reduction that calls": (lambda x: lax.reduce(x, np.float32(0), _long, (0, 1)), [SQUARE]),
    "rows": (lambda x: x.at[jnp.array([1, 3])].add(x[:2]).at[jnp.array([0])].multiply(2.0), [SQUARE]),
    "functions called twice": (lambda x: _twice(_twice(x)), [SQUARE]),
    "a large product": (lambda x, y: x @ y, [(200, 200), (200, 200)]),
    "a deep convolution": (lambda x, w: lax.conv(x, w, (1, 1), "VALID"), [(1, 64, 9, 9), (64, 64, 3, 3)]),
    "a loop": (lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0], [SQUARE]),
    "no element": (lambda x: x + 1, [(0, 5)]),
}


@jax.jit
def _twice(value: Any) -> Any:
    return _product(value) + _product(value)


@jax.jit
def _long(value: Any, other: Any) -> Any:
    for _ in range(7):
        value = value * 0.5 + other
    return value


@jax.jit
def _product(value: Any) -> Any:
    return jnp.sin(value) @ value


@pytest.mark.parametrize("kind", FORMULAS)
def test_it_is_not_below_what_xla_counts(kind: str) -> None:
    formula, shapes = FORMULAS[kind]
    lowered = jax.jit(formula).lower(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes))
    by_xla = (lowered.cost_analysis() or {}).get("flops", 0.0)
    bound = most_operations(stablehlo(lowered))
    assert by_xla <= bound
    assert (bound == math.inf) == ("loop" in kind or "calls" in kind)
    # Pieces of a test are far below a billion operations, and so are bounds that are worth their time.
    assert bound == math.inf or bound < 1e8
