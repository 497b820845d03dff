"""Materialised values keep the readers of long chains from computing them again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.compiler.export import LONGEST, PieceFunction, export_piece, trace_piece, walled

ROWS, WIDTH = 32, 64
HALF = jnp.float16


def network(layers: int, dtype: Any = HALF) -> PieceFunction:
    """Gradients of residual layers with normalisation; products read widened copies, as halves are computed."""

    def normalised(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        middle = wide - wide.mean(-1, keepdims=True)
        return (middle * jax.lax.rsqrt((middle**2).mean(-1, keepdims=True) + 1e-3)).astype(dtype)

    def product(x: Any, w: Any) -> Any:
        return (x.astype(jnp.float32) @ w.astype(jnp.float32)).astype(dtype)

    def loss(weights: dict[str, Any], x: Any) -> Any:
        for name in sorted(weights):
            x = normalised(x + product(jnp.tanh(product(x, weights[name])), weights[name].T))
        return x.astype(jnp.float32)[0].sum()

    names = [f"w{index:02}" for index in range(layers)]

    def run(values: Any) -> Any:
        return jax.grad(loss)({name: values[name] for name in names}, values["x"])

    inputs = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype) for name in names}
    return PieceFunction(
        "piece", run, inputs | {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)}, tuple(names)
    )


def compiled(piece: PieceFunction) -> Any:
    exported = jax.export.deserialize(bytearray(export_piece(piece).stablehlo))
    return jax.jit(exported.call).lower(*exported.in_avals).compile()


def test_a_short_program_has_no_wall() -> None:
    traced = trace_piece(network(1))
    assert not walled(traced.jaxpr.jaxpr)
    assert b"inlineable" not in export_piece(network(1)).stablehlo


def test_small_states_of_a_long_recurrence_are_kept_too() -> None:
    def run(values: Any) -> Any:
        state = values["x"]
        for _ in range(80):
            state = state * jnp.tanh(state) + jnp.exp(-state)
        return {"y": state}

    piece = PieceFunction("piece", run, {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}, ("y",))
    closed = trace_piece(piece).jaxpr.jaxpr
    assert 2 <= len(walled(closed)) <= len(closed.eqns) // LONGEST


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.sample(2)
def test_walls_stand_at_even_distances(dtype: Any) -> None:
    few, many = (len(walled(trace_piece(network(n, dtype)).jaxpr.jaxpr)) for n in (8, 16))
    assert 0 < few < many <= 3 * few


def test_values_that_one_equation_reads_have_none() -> None:
    def chain(values: Any) -> Any:
        x = values["x"]
        for step in range(3 * LONGEST):
            x = jnp.sin(x) if step % 2 else jnp.cos(x)
        return {"y": x}

    piece = PieceFunction("piece", chain, {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, ("y",))
    assert not walled(trace_piece(piece).jaxpr.jaxpr)


@pytest.fixture(scope="module")
def few() -> Any:
    return compiled(network(4))


@pytest.mark.slow
def test_what_is_compiled_grows_with_depth_and_not_with_its_square(few: Any) -> None:
    assert len(compiled(network(8)).as_text()) < 2.2 * len(few.as_text())  # Without walls 2.5.


def test_gradients_behind_walls_are_those_without(few: Any) -> None:
    piece = network(4)
    random = np.random.default_rng(0)
    values = {
        name: jnp.asarray(random.standard_normal(spec.shape) * 0.1, spec.dtype)
        for name, spec in piece.inputs.items()
    }
    found, wanted = jax.tree.leaves(few(*values.values())), jax.jit(piece.function)(values)
    for name, value in zip(piece.outputs, found, strict=True):
        np.testing.assert_allclose(value, wanted[name], rtol=2e-2, atol=2e-3)


def test_the_equations_of_a_call_count() -> None:
    """Rounding is one call of many equations, and reads its operand several times."""

    @jax.jit
    def long(x: Any) -> Any:
        for _ in range(LONGEST // 4):
            x = jnp.sin(x) + x
        return x

    def chain(values: Any) -> Any:
        x = values["x"]
        for _ in range(4):
            x = long(x)
        return {"y": x}

    piece = PieceFunction("piece", chain, {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, ("y",))
    assert len(walled(trace_piece(piece).jaxpr.jaxpr)) == 1
