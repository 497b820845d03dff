"""Work that follows a convolution is part of its call: the same numbers, and no trace of it in the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podrun.device.xla import convolutions, rewrite
from tests.quick_programs import (
    programs_of_default_tests_compile_quickly as programs_of_default_tests_compile_quickly,
)

pytestmark = pytest.mark.skipif(not convolutions.available(), reason="no oneDNN here")

FORMS = {
    "library": ((1, 16, 13, 11), (24, 16, 3, 3), 1, ((1, 1), (1, 1))),
    "product": ((1, 32, 13, 11), (64, 32, 1, 1), 1, ((0, 0), (0, 0))),
    "few rows": ((2, 64, 4, 4), (64, 64, 3, 3), 1, ((1, 1), (1, 1))),
    "groups": ((1, 32, 13, 11), (32, 8, 3, 3), 4, ((1, 1), (1, 1))),
    "cropped": ((1, 16, 15, 15), (24, 16, 3, 3), 1, ((-1, 0), (0, -1))),
}


def arrays(form: str) -> tuple[Any, ...]:
    """Image, weights, bias, another image and a gradient."""
    x, w, *_ = FORMS[form]
    rng = np.random.default_rng(2)
    shape = jax.eval_shape(lambda a, b: correlate(form, a, b), np.ones(x, "f4"), np.ones(w, "f4")).shape
    return tuple(rng.normal(size=s).astype(np.float32) for s in (x, w, w[:1], shape, shape))


def correlate(form: str, x: Any, w: Any) -> Any:
    _, _, groups, pads = FORMS[form]
    return lax.conv_general_dilated(x, w, (1, 1), pads, feature_group_count=groups)


def rewritten(function: Callable[..., Any], *operands: Any) -> tuple[Any, str]:
    """The function rewritten and compiled, and the program's text before XLA sees it."""
    lowered = jax.jit(function).lower(*operands)
    assert rewrite.rewrite_convolutions(lowered) > 0
    return lowered.compile(), str(lowered.compiler_ir("stablehlo"))


def whole(y: Any, bias: Any, other: Any) -> Any:
    y = y + bias[None, :, None, None] + other
    return jnp.where(y > 0, y, 0.0)


EPILOGUES: dict[str, tuple[Callable[..., Any], int]] = {
    "bias": (lambda y, bias, other: y + bias[None, :, None, None], 1),
    "cut": (lambda y, bias, other: jnp.maximum(y, 0), 4),
    "bias and cut": (lambda y, bias, other: jax.nn.relu(bias.reshape(1, -1, 1, 1) + y), 5),
    "other": (lambda y, bias, other: other + y, 2),
    "all": (whole, 7),
}


CASES = [("library", epilogue) for epilogue in EPILOGUES] + [
    (form, "all") for form in FORMS if form != "library"
]


@pytest.mark.parametrize(("form", "epilogue"), CASES)
@pytest.mark.sample(4)
def test_the_call_does_it(form: str, epilogue: str) -> None:
    x, w, bias, other, _ = arrays(form)
    after, follows = EPILOGUES[epilogue]

    def run(x: Any, w: Any, bias: Any, other: Any) -> Any:
        return after(correlate(form, x, w), bias, other)

    compiled, text = rewritten(run, x, w, bias, other)
    np.testing.assert_allclose(compiled(x, w, bias, other), run(x, w, bias, other), rtol=1e-5, atol=1e-4)
    assert f"numbers = array<i64: 0, {follows}, " in text
    assert "stablehlo.add" not in text
    assert "stablehlo.maximum" not in text


def test_what_others_read_stays() -> None:
    """A sum that is read before it is cut off stays; so do two added images, and a cut-off at a value other than 0."""
    x, w, bias, other, _ = arrays("library")

    def run(x: Any, w: Any, bias: Any, other: Any) -> tuple[Any, ...]:
        y = correlate("library", x, w) + bias[None, :, None, None]
        z = correlate("library", x, 2 * w)
        return y, jax.nn.relu(y), jnp.maximum(z + other + other, 1.0), z * 2

    compiled, _ = rewritten(run, x, w, bias, other)
    for got, want in zip(compiled(x, w, bias, other), run(x, w, bias, other), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", ["library", "product", "few rows"])
@pytest.mark.sample(3)
def test_gradients_read_the_cut(form: str) -> None:
    """Gradients find where a sum is positive from the result, so that the sum itself need not be kept."""
    x, w, bias, other, gradient = arrays(form)

    def loss(x: Any, w: Any, bias: Any, other: Any) -> Any:
        return jnp.sum(gradient * whole(correlate(form, x, w), bias, other))

    derived = jax.grad(loss, argnums=(0, 1, 2, 3))
    compiled, _ = rewritten(derived, x, w, bias, other)
    for got, want in zip(compiled(x, w, bias, other), jax.jit(derived)(x, w, bias, other), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_walls_stay_where_convolutions_become_calls() -> None:
    """A wall keeps later readers from working out a chain again; it may stand among images channels last."""
    from podrun.compiler.export import wall

    def network(x: Any, w: Any) -> Any:
        y = wall(jnp.cos(lax.conv_general_dilated(jnp.sin(x), w, (1, 1), "SAME")))
        return lax.conv_general_dilated(wall(y + y * 2), w, (1, 1), "SAME")

    lowered = jax.jit(network).lower(jnp.ones((2, 8, 16, 16)), jnp.ones((8, 8, 3, 3)))
    replaced = rewrite.rewrite_convolutions(lowered)
    text = lowered.as_text()
    assert replaced == 2
    assert text.count('inlineable = "false"') == 2
    assert "optimization_barrier" not in text
    # In the library's own order: nothing is transposed around a wall.
    assert text.count("call @wall_0") == 2
    assert "tensor<2x16x16x8xf32>) -> tensor<2x16x16x8xf32> {" in text


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_walls_stay_where_convolutions_are_too_small_or_halves(dtype: Any) -> None:
    from podrun.compiler.export import wall

    def network(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(wall(jnp.sin(x)), w, (1, 1), "SAME")

    lowered = jax.jit(network).lower(jnp.ones((1, 4, 8, 8), dtype), jnp.ones((4, 4, 3, 3), dtype))
    assert rewrite.rewrite_convolutions(lowered, 1 << 40) == 0
    assert 'inlineable = "false"' in lowered.as_text()
