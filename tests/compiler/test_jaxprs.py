"""Jaxprs are evaluated, pruned and cut as the compiler needs it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.compiler import jaxprs
from podrun.core.names import CLIPPED
from podrun.private_apis.jax import new_primitive


def scoped(x: Any) -> Any:
    with jax.named_scope("ipu:1"):
        y = jnp.sin(x) * 2
    return y + jax.nn.relu(y)


def test_evaluate_keeps_scopes_and_applies_taps() -> None:
    closed = jax.make_jaxpr(scoped)(jnp.ones(3))
    first = closed.jaxpr.eqns[0].outvars[0]
    again = jax.make_jaxpr(
        lambda x: jaxprs.evaluate(closed.jaxpr, closed.consts, [x], {first: lambda v: v + 1})
    )
    scopes = {e.primitive.name: jaxprs.name_scopes(e) for e in again(jnp.ones(3)).jaxpr.eqns}
    assert scopes["sin"] == scopes["mul"] == ("ipu:1",)
    (found,) = jaxprs.evaluate(closed.jaxpr, closed.consts, [jnp.zeros(3)], {first: lambda v: v + 1})
    np.testing.assert_array_equal(found, np.full(3, 4.0))
    (plain,) = jaxprs.evaluate(closed.jaxpr, closed.consts, [jnp.zeros(3)])
    np.testing.assert_array_equal(plain, np.zeros(3))


def test_differentiation_keeps_scopes() -> None:
    closed = jax.make_jaxpr(jax.grad(lambda x: scoped(x).sum()))(jnp.ones(3))
    scopes = {part for e in closed.jaxpr.eqns for part in jaxprs.name_scopes(e)}
    assert {"jvp(ipu:1)", "transpose(jvp(ipu:1))"} <= scopes


def test_pruned_and_sub_jaxprs() -> None:
    table = np.arange(3, dtype=np.float32)

    def both(x: Any, y: Any) -> Any:
        return x + jnp.asarray(table), jnp.cos(y)

    closed = jax.make_jaxpr(both)(jnp.ones(3), jnp.ones(3))
    x, y = closed.jaxpr.invars
    part = jaxprs.sub_jaxpr(closed, [y], closed.jaxpr.eqns, closed.jaxpr.outvars[1:])
    assert [e.primitive.name for e in part.jaxpr.eqns] == ["cos"]
    assert jaxprs.read_arguments(part.jaxpr) >= {y}
    assert x not in jaxprs.read_arguments(part.jaxpr)
    np.testing.assert_allclose(jaxprs.evaluate(part.jaxpr, part.consts, [jnp.zeros(3)])[0], 1)


def test_values_without_infinities_are_clipped_once() -> None:
    clip_p = new_primitive(CLIPPED)
    clip_p.def_abstract_eval(lambda value, **_: jax.core.ShapedArray(value.shape, value.dtype))

    def clipped(value: Any) -> Any:
        return clip_p.bind(value)

    def moved(x: Any, y: Any, pick: Any) -> Any:
        x, y = clipped(x), clipped(y)
        again = clipped(jnp.where(pick, x.reshape(2, 3), -y))  # of clipped values, only moved
        summed = clipped(clipped(again) + y)  # a sum may overflow
        unclipped = clipped(jnp.where(pick, jnp.inf, summed))
        _, constant = jax.jit(lambda value: (-value, jnp.float16(jnp.inf)))(x)
        return clipped(summed), unclipped, clipped(constant)

    operands = jnp.ones(6, jnp.float16), jnp.ones((2, 3), jnp.float16), jnp.ones((2, 3), bool)
    closed = jax.make_jaxpr(moved)(*operands)
    short = jaxprs.without_repeated_clips(closed)

    def count(of: Any) -> int:
        return sum(e.primitive.name == CLIPPED for e in of.jaxpr.eqns)

    assert (count(closed), count(short)) == (8, 5)
    clip_p.def_impl(lambda value: jnp.clip(value, -65504, 65504))
    large = jnp.array([jnp.inf, 2, -jnp.inf, 60000, 5, -0.0], jnp.float16)
    operands = large, large.reshape(2, 3), jnp.array([[1, 0, 1], [0, 1, 0]], bool)
    for wanted, result in zip(
        *(jax.core.eval_jaxpr(c.jaxpr, c.consts, *operands) for c in (closed, short)), strict=True
    ):
        np.testing.assert_array_equal(wanted, result)
