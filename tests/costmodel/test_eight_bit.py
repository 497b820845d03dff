"""Products of 8-bit floats: what the C600 multiplies at once, and other chips after a cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podrun.costmodel.cost import cost_jaxpr

SMALL = jnp.zeros((768, 768), jnp.float8_e4m3fnuz)
HALF = jnp.zeros((768, 768), jnp.float16)


def wide(x: Any) -> Any:
    """An 8-bit operand as front ends trace it."""
    return (x.astype(jnp.float32) * jnp.float32(0.5)).astype(jnp.float16)


def product(x: Any, y: Any) -> Any:
    return wide(x) @ wide(y)


def cycles(function: Callable[..., Any], target: str, *arguments: Any) -> dict[str, int]:
    report = cost_jaxpr(jax.make_jaxpr(function)(*arguments), target, partials_type="float16")
    return {name: entry["cycles"] for name, entry in report["by_operator"].items()}


def test_the_c600_multiplies_eight_bits_without_a_cast_and_faster() -> None:
    halves = cycles(lambda x, y: x @ y, "c600", HALF, HALF)
    small = cycles(product, "c600", SMALL, SMALL)
    assert small.keys() == halves.keys()
    assert small["matmul"] < 0.75 * halves["matmul"]


def test_a_chip_without_such_products_casts_first() -> None:
    for target in ("gc200", "bow"):
        halves = cycles(lambda x, y: x @ y, target, HALF, HALF)
        small = cycles(product, target, SMALL, SMALL)
        assert small["matmul"] == halves["matmul"]
        assert small["elementwise"] > 0


def test_one_wide_operand_makes_it_a_product_of_halves() -> None:
    halves = cycles(lambda x, y: x @ y, "c600", HALF, HALF)
    mixed = cycles(lambda x, y: wide(x) @ y, "c600", SMALL, HALF)
    assert mixed["matmul"] == halves["matmul"]
    assert mixed["elementwise"] > 0
    added = cycles(lambda x, y: (wide(x) + jnp.float16(1)) @ wide(y), "c600", SMALL, SMALL)
    assert added["matmul"] == halves["matmul"]


def test_a_cast_that_something_else_reads_stays() -> None:
    both = cycles(lambda x, y: (product(x, y), wide(x)), "c600", SMALL, SMALL)
    assert both["matmul"] == cycles(product, "c600", SMALL, SMALL)["matmul"]
    assert both["elementwise"] > 0


def test_products_in_branches_are_of_eight_bits_too() -> None:
    def chosen(index: Any, x: Any, y: Any) -> Any:
        return jax.lax.cond(index > 0, product, lambda x, y: jnp.zeros((768, 768), jnp.float16), x, y)

    index = jnp.int32(0)
    assert (
        cycles(chosen, "c600", index, SMALL, SMALL)["matmul"]
        == cycles(product, "c600", SMALL, SMALL)["matmul"]
    )
