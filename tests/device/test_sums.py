"""Sums in fewer passes: as accurate as before in float64's eyes, and fewer of them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podrun.device.xla import convolutions, rewrite
from podrun.device.xla.sums import simplify_sums
from tests.quick_programs import (
    programs_of_default_tests_compile_quickly as programs_of_default_tests_compile_quickly,
)

pytestmark = pytest.mark.skipif(not convolutions.available(), reason="no oneDNN here")

BATCH, CHANNELS, PIXELS = 16, 8, 16


def depthwise(x: Any, w: Any, stride: int) -> Any:
    """A weight for each channel and position times the image shifted."""
    wide = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    size = x.shape[2]
    return sum(
        wide[:, :, i : i + size : stride, j : j + size : stride] * w[None, :, None, None, i, j]
        for i in range(3)
        for j in range(3)
    )


def normalised(x: Any, scale: Any) -> Any:
    mean = jnp.mean(x, axis=(0, 2, 3), keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=(0, 2, 3), keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale[None, :, None, None]


def network(stride: int) -> Any:
    """Its images have a mean that is large beside their deviation."""

    def loss(x: Any, first: Any, scale: Any, shifted: Any, last: Any) -> Any:
        y = normalised(lax.conv_general_dilated(x, first, (1, 1), "VALID") + 30, scale)
        y = normalised(depthwise(y, shifted, stride), scale)
        y = lax.conv_general_dilated(jnp.tanh(y), last, (1, 1), "VALID")
        return jnp.sum(jnp.tanh(y) * jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) / y.size)

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))


def arrays(dtype: Any) -> list[Any]:
    rng = np.random.default_rng(3)
    shapes = (
        (BATCH, CHANNELS, PIXELS, PIXELS),
        (CHANNELS, CHANNELS, 1, 1),
        (CHANNELS,),
        (CHANNELS, 3, 3),
        (CHANNELS, CHANNELS, 1, 1),
    )
    return [rng.normal(size=s).astype(np.float32).astype(dtype) for s in shapes]


def error(got: Any, exact: Any) -> list[float]:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True)
    return [float(np.max(np.abs(np.asarray(g) - e)) / np.max(np.abs(e))) for g, e in pairs]


@pytest.mark.slow  # Compiles a network three times; test_convolutions.py compares gradients by default.
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_are_as_close_to_those_in_float64_as_plain_ones(stride: int) -> None:
    run = network(stride)
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, jax.jit(run)(*arrays(np.float64)))
    lowered = jax.jit(lambda *a: run(*a)).lower(*arrays(np.float32))
    before = str(lowered.compiler_ir("stablehlo"))
    assert rewrite.rewrite_convolutions(lowered) == 6
    simplify_sums(lowered.compiler_ir("stablehlo"))
    text = str(lowered.compiler_ir("stablehlo"))
    assert text.count("stablehlo.reduce(") < before.count("stablehlo.reduce(")
    images = re.findall(r"stablehlo.pad .*-> tensor<16x\d+x\d+x8xf32>", text)
    assert len(images) < 9  # a gradient's nine images in zeros are one
    plain = error(jax.jit(run)(*arrays(np.float32)), exact)
    ours = error(lowered.compile()(*arrays(np.float32)), exact)
    assert exact[0].dtype == np.float64
    for here, there in zip(ours, plain, strict=True):
        assert here < max(2 * there, 2e-6)


def test_factors_signs_and_equal_sums() -> None:
    def run(x: Any, w: Any, s: Any, t: Any) -> list[Any]:
        y = lax.conv_general_dilated(x, w, (1, 1), "VALID")
        axes, (a, b) = (0, 2, 3), (v[None, :, None, None] for v in (s, t))
        return [
            jnp.sum(y * y, axis=axes),
            jnp.sum(-(y * a) * (y * b), axis=axes),
            jnp.sum(-(-y * a * b), axis=axes),
            jnp.sum(y, axis=axes),
            jnp.sum(jnp.sin(y) * (y * a), axis=axes),
            jnp.sum(y * jnp.sin(y), axis=axes),
            jnp.sum(y * y, axis=(0, 1)),
            jnp.sum(y * y, axis=(2, 3)),
        ]

    rng = np.random.default_rng(5)
    shapes = ((12, 8, 16, 16), (8, 8, 1, 1), (8,), (8,))
    given = [rng.normal(size=s).astype(np.float32) for s in shapes]
    lowered = jax.jit(lambda *a: run(*a)).lower(*given)
    assert rewrite.rewrite_convolutions(lowered) == 1
    simplify_sums(lowered.compiler_ir("stablehlo"))
    assert str(lowered.compiler_ir("stablehlo")).count("stablehlo.reduce(") == 5
    for got, want in zip(lowered.compile()(*given), jax.jit(run)(*given), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * float(np.max(np.abs(want))))
