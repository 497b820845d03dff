"""Pieces are compiled without MLIR but for loops, halves and two operators, and have the same bits or as few errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from podrun.core import executable_file
from podrun.core.executable import Computation
from podrun.device.xla.compiler_options import COMPILER_OPTIONS, WITHOUT_MLIR, options_for
from podrun.device.xla.pieces import PieceCache
from podrun.private_apis.jax import stablehlo

Function = Callable[[Any], Any]


def looped(x: Any) -> Any:
    return jax.lax.fori_loop(0, 9, lambda _, y: y - 0.1 * jnp.sin(y), x)


@jax.jit
def meanwhile(x: Any) -> Any:
    """Its name has that of a loop in it."""
    return jnp.tanh(x) * 2


THROUGH_MLIR: dict[str, Function] = {
    "loop": looped,
    "half": lambda x: jnp.log1p(x.astype(jnp.float16)).astype(jnp.float32),
    "bfloat16": lambda x: (x.astype(jnp.bfloat16) * 3).astype(jnp.float32),
    "cubic root": jnp.cbrt,
    "tangent": lambda x: x + jnp.tan(x),
    "inside of a function": lambda x: jax.jit(lambda y: jnp.cbrt(y) + 1)(x),
}
PLAIN: dict[str, Function] = {
    "a name": lambda x: meanwhile(x) + 1,
    "a step": lambda x: x - 0.1 * (0.9 * x + 0.01 * jnp.square(x)) / (jnp.sqrt(jnp.abs(x)) + 1e-3),
    "functions": lambda x: jnp.log1p(jnp.abs(x)) + jnp.expm1(-jnp.abs(x)) + jax.lax.rsqrt(jnp.abs(x) + 1),
    "integers": lambda x: (x * 7).astype(jnp.int32) % 5,
    "double": lambda x: jnp.exp(x.astype(jnp.float64)),
    "softmax": lambda x: jax.nn.softmax(x.reshape(-1, 10)),
}


@pytest.mark.parametrize(
    ("function", "goes"),
    [(f, True) for f in THROUGH_MLIR.values()] + [(f, False) for f in PLAIN.values()],
    ids=[*THROUGH_MLIR, *PLAIN],
)
def test_what_needs_mlir_goes_through_it(function: Function, goes: bool) -> None:
    with jax.enable_x64(True):
        lowered = jax.jit(function).lower(jax.ShapeDtypeStruct((20,), np.float32))
    assert options_for(stablehlo(lowered)) == {**COMPILER_OPTIONS, **({} if goes else WITHOUT_MLIR)}


def computed(function: Function, value: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """The results of a piece with a function of one value."""
    with jax.enable_x64(True):
        exported = export.export(jax.jit(function), platforms=["cpu"])(
            jax.ShapeDtypeStruct(value.shape, value.dtype)
        )
    program = bytes(exported.serialize())
    executable_file.remember(program)
    outputs = tuple(f"y{number}" for number in range(len(exported.out_avals)))
    results = PieceCache(None).piece(Computation("f", program, ("x",), outputs), ()).call(value)
    return [np.asarray(result) for result in results]


@pytest.mark.parametrize(
    "functions",
    [PLAIN, {name: THROUGH_MLIR[name] for name in ("half", "cubic root", "tangent")}],
    ids=["plain", "through MLIR"],
)
def test_bits_do_not_depend_on_how_values_are_divided(functions: dict[str, Function]) -> None:
    """What each of several machines computes of a part has the bits of one that computes it all."""

    def all_of_them(x: Any) -> tuple[Any, ...]:
        return tuple(function(x) for function in functions.values())

    value = np.random.default_rng(3).standard_normal(4000, np.float32)
    whole = computed(all_of_them, value)
    for size in (20, 500):
        parts = [computed(all_of_them, part) for part in np.split(value[: size * 3], 3)]
        for name, right, *divided in zip(functions, whole, *parts, strict=True):
            part = np.concatenate(divided)
            np.testing.assert_array_equal(part, right[: len(part)], err_msg=name)


@pytest.mark.parametrize(
    "operator", [jnp.log1p, jax.lax.rsqrt, jnp.cbrt, jnp.tan, jax.nn.softplus, jnp.arctanh]
)
def test_operators_on_halves_are_rounded_once(operator: Function) -> None:
    value = np.linspace(1e-3, 0.999, 900).astype(np.float16)
    with jax.enable_x64(True):
        exact = np.asarray(operator(value.astype(np.float64)))
    ulp = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64)
    most = 0.51 if operator in (jnp.log1p, jax.lax.rsqrt, jnp.cbrt, jnp.tan) else 1.3
    (result,) = computed(operator, value)
    assert (np.abs(result.astype(np.float64) - exact) / ulp).max() < most
