"""Convolutions rewritten into calls of oneDNN: same numbers as XLA's, same bits on any number of threads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from podrun.device.xla import convolutions, rewrite


@dataclass(frozen=True)
class Case:
    """A convolution ``[n, c, h, w] * [m, c, *kernel]``."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: int = 1
    pads: tuple[int, int] = (0, 0)
    dilation: int = 1

    def arrays(self) -> tuple[Any, ...]:
        rng = np.random.default_rng(0)
        x, w = (rng.normal(size=s).astype(np.float32) for s in (self.x, self.w))
        g = rng.normal(size=jax.eval_shape(self.run, x, w).shape).astype(np.float32)
        return x, w, g

    def run(self, x: Any, w: Any) -> Any:
        pads = (self.pads,) * 2
        return lax.conv_general_dilated(x, w, (self.stride,) * 2, pads, rhs_dilation=(self.dilation,) * 2)

    def all(self, x: Any, w: Any, g: Any) -> tuple[Any, ...]:
        """The result and both gradients."""
        return self.run(x, w), *jax.vjp(self.run, x, w)[1](g)


CASES = (
    Case((2, 16, 13, 11), (24, 16, 3, 3), 1, (1, 1)),
    Case((2, 16, 13, 11), (24, 16, 3, 3), 2, (1, 1)),
    Case((2, 16, 12, 11), (24, 16, 3, 2), 2, (1, 1)),
    Case((1, 3, 33, 33), (16, 3, 7, 7), 2, (3, 3)),
    Case((2, 16, 13, 11), (24, 16, 3, 3), 1, (2, 2), 2),
    Case((2, 64, 8, 8), (64, 64, 1, 1), 2),
    Case((2, 64, 8, 8), (64, 64, 1, 1), 1),
    Case((16, 32, 2, 2), (64, 32, 3, 3), 1, (1, 1)),
    Case((2, 16, 14, 14), (24, 16, 3, 3), 3),
    Case((2, 16, 14, 14), (24, 16, 2, 2), 3),
    Case((2, 32, 9, 9), (32, 32, 5, 5), 1, (2, 0)),
    Case((3, 8, 37, 29), (16, 8, 3, 3), 1, (1, 1)),
)


def compiled(function: Callable[..., Any], *arrays: Any) -> tuple[Any, int]:
    """The function rewritten and compiled, and how many convolutions were replaced."""
    lowered = jax.jit(lambda *a: function(*a)).lower(*arrays)
    count = rewrite.rewrite(lowered)
    return lowered.compile(), count


known = pytest.mark.skipif(not convolutions.available(), reason="this jaxlib holds no known oneDNN")


@known
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_are_those_of_plain_convolutions(case: Case) -> None:
    arrays = case.arrays()
    expected = jax.jit(case.all)(*arrays)
    run, count = compiled(case.all, *arrays)
    assert count == 3
    for got, want in zip(run(*arrays), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * float(jnp.abs(want).max()))


@known
def test_a_gradient_of_a_large_image_is_one_call() -> None:
    """Not a view for each of its positions, which XLA would compile for minutes."""
    case = Case((3, 8, 90, 70), (16, 8, 3, 3), 1, (1, 1))
    lowered = jax.jit(case.all).lower(*case.arrays())
    assert rewrite.rewrite(lowered) == 3
    assert lowered.as_text().count("stablehlo.slice") < 30


def network(x: Any, w0: Any, w1: Any, w2: Any, scale: Any) -> tuple[Any, Any]:
    """Convolutions with normalisation, pooling, a concatenation, a sum and a loop around them."""
    pads = ((1, 1), (1, 1))
    y = lax.conv_general_dilated(x, w0, (1, 1), pads)
    mean = jnp.mean(y, axis=(0, 2, 3), keepdims=True)
    y = jax.nn.relu((y - mean) * scale[None, :, None, None])
    y = jnp.maximum(y[:, :, ::2, ::2], jnp.pad(y, ((0, 0), (0, 0), (0, 1), (0, 0)))[:, :, 1::2, 1::2])
    z = lax.fori_loop(0, 2, lambda _, v: v + lax.conv_general_dilated(v, w1, (1, 1), pads), y)
    z = jnp.concatenate([z, y], axis=1)
    z = lax.conv_general_dilated(z, w2, (1, 1), pads)
    return jnp.mean(z, axis=(2, 3)), z.reshape(z.shape[0], -1)


def network_arrays() -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    shapes = ((2, 8, 12, 12), (16, 8, 3, 3), (16, 16, 3, 3), (8, 32, 3, 3), (16,))
    return tuple(rng.normal(size=s, scale=0.3).astype(np.float32) for s in shapes)


@known
def test_a_network_keeps_its_numbers_and_its_images_channels_last() -> None:
    arrays = network_arrays()
    run, count = compiled(network, *arrays)
    assert count == 3
    for got, want in zip(run(*arrays), jax.jit(network)(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    lowered = jax.jit(lambda *a: network(*a)).lower(*arrays)
    rewrite.rewrite(lowered)
    text = str(lowered.compiler_ir("stablehlo"))
    assert "dim = 3" in text  # the concatenation is along the last axis
    assert "stablehlo.convolution" not in text


@known
def test_gradients_of_a_network_are_kept() -> None:
    arrays = network_arrays()

    def loss(*a: Any) -> Any:
        return jnp.sum(network(*a)[0] ** 2)

    run, _ = compiled(jax.grad(loss, argnums=(0, 1, 3)), *arrays[:2], *arrays[2:])
    expected = jax.jit(jax.grad(loss, argnums=(0, 1, 3)))(*arrays)
    for got, want in zip(run(*arrays), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(jnp.abs(want).max()))


def test_small_and_wide_convolutions_stay() -> None:
    x, w = np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32)
    assert compiled(lambda a, b: lax.conv_general_dilated(a, b, (1, 1), "SAME"), x, w)[1] == 0
    with jax.enable_x64(True):
        x64, w64 = np.ones((2, 16, 13, 11)), np.ones((24, 16, 3, 3))
        assert compiled(lambda a, b: lax.conv_general_dilated(a, b, (1, 1), "SAME"), x64, w64)[1] == 0


def test_without_the_library_nothing_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite, "available", lambda: False)
    case = CASES[0]
    run, count = compiled(case.all, *case.arrays())
    assert count == 0
    assert run(*case.arrays())[0].shape == (2, 24, 13, 11)


def _digests() -> str:
    found = []
    for case in (*CASES, Case((4, 16, 40, 40), (16, 16, 3, 3), 1, (1, 1))):
        arrays = case.arrays()
        run, _ = compiled(case.all, *arrays)
        found += [hashlib.sha256(np.asarray(a).tobytes()).hexdigest()[:12] for a in run(*arrays)]
    return " ".join(found)


@known
@pytest.mark.system
@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """NPROC is how many threads XLA's client starts with; it is read once, so each count takes a process."""
    results = {
        subprocess.run(
            [sys.executable, "-c", "from tests.device import test_convolutions as t; print(t._digests())"],
            env={**os.environ, "NPROC": str(threads), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for threads in (1, 2, 5)
    }
    assert len(results) == 1


@known
@pytest.mark.parametrize("groups", [2, 4])
def test_a_channel_shuffle_stays_channels_last(groups: int) -> None:
    def shuffled(x: Any, w: Any) -> Any:
        y = lax.conv_general_dilated(x, w, (1, 1), ((1, 1), (1, 1)))
        y = y.reshape(y.shape[0], groups, -1, *y.shape[2:]).swapaxes(1, 2).reshape(y.shape)
        return lax.conv_general_dilated(y, w, (1, 1), ((1, 1), (1, 1)))

    rng = np.random.default_rng(4)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((2, 16, 9, 11), (16, 16, 3, 3)))
    run, count = compiled(shuffled, x, w)
    assert count == 2
    np.testing.assert_allclose(run(x, w), jax.jit(shuffled)(x, w), rtol=1e-4, atol=1e-3)
    lowered = jax.jit(shuffled).lower(x, w)
    rewrite.rewrite(lowered)
    text = str(lowered.compiler_ir("stablehlo"))
    assert f"tensor<2x9x11x{groups}x{16 // groups}xf32>" in text
