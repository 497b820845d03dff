"""Pooling and convolution over generated shapes, windows and groups, against torch in float64: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.core.errors import InputMismatch
from podrun.numerics import convolution, pools
from podrun.numerics.windows import Window, fitted_window

torch = pytest.importorskip("torch")
functional = torch.nn.functional

SEEDS = range(6)
pytestmark = pytest.mark.sample(4)


class Draw:
    """A generated window over a small image of 1 to 3 spatial axes."""

    def __init__(self, seed: int, dilated: bool = True) -> None:
        self.random = np.random.default_rng([22, seed])
        self.rank = 1 + seed % 3
        self.sizes = self._whole(5, 9)
        self.kernel = self._whole(1, 4)
        self.strides = self._whole(1, 4)
        self.dilations = self._whole(1, 3) if dilated else (1,) * self.rank
        self.pads = tuple(int(self.random.integers(0, k // 2 + 1)) for k in self.kernel)
        self.ceil = bool(self.random.integers(2))

    def _whole(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(int(n) for n in self.random.integers(low, high, self.rank))

    def array(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape)

    def window(self, ceil: bool = False) -> Window:
        return fitted_window(
            self.sizes, self.kernel, self.strides, self.dilations, (*self.pads, *self.pads), ceil
        )


def agree(ours: Callable[..., Any], theirs: Callable[..., Any], *arrays: np.ndarray) -> None:
    """Values, and the gradient of their sum with random weights, in float32 against float64."""
    inputs = [torch.from_numpy(a).requires_grad_() for a in arrays]
    expected = theirs(*inputs)
    weights = np.random.default_rng(3).uniform(0.5, 1.5, tuple(expected.shape))
    gradients = torch.autograd.grad((expected * torch.from_numpy(weights)).sum(), inputs)
    narrow = [a.astype(np.float32) for a in arrays]
    value, pullback = jax.vjp(jax.jit(ours), *narrow)
    np.testing.assert_allclose(value, expected.detach().numpy(), 1e-4, 1e-5)
    for made, wanted in zip(pullback(jnp.asarray(weights, jnp.float32)), gradients, strict=True):
        np.testing.assert_allclose(made, wanted.numpy(), 2e-4, 2e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sample(4)
def test_maximum_and_its_places(seed: int) -> None:
    draw = Draw(seed)
    x, window = draw.array(2, 3, *draw.sizes), draw.window(draw.ceil)
    pool = getattr(functional, f"max_pool{draw.rank}d")
    settings = (draw.kernel, draw.strides, draw.pads, draw.dilations, draw.ceil)
    agree(lambda x: pools.maximum_of_windows(x, window), lambda x: pool(x, *settings), x)
    places = np.arange(int(np.prod(draw.sizes)), dtype=np.int32).reshape(1, 1, *draw.sizes)
    values, where = pools.maximum_with_places(jnp.asarray(x, jnp.float32), window, jnp.asarray(places))
    expected, expected_where = pool(torch.from_numpy(x), *settings, True)
    np.testing.assert_allclose(values, expected.numpy(), 1e-6)
    np.testing.assert_array_equal(where, expected_where.numpy())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("with_pads", [False, True])
def test_averages_of_windows_are_torchs(seed: int, with_pads: bool) -> None:
    draw = Draw(seed, dilated=False)
    window = draw.window(draw.ceil)
    pool = getattr(functional, f"avg_pool{draw.rank}d")
    agree(
        lambda x: pools.average_of_windows(x, window, with_pads),
        lambda x: pool(x, draw.kernel, draw.strides, draw.pads, draw.ceil, with_pads),
        draw.array(2, 3, *draw.sizes),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sample(8)
def test_adaptive_averages_are_torchs(seed: int) -> None:
    draw = Draw(seed)
    x, out = draw.array(2, 3, *draw.sizes), tuple(n // 2 + 1 for n in draw.sizes)
    agree(
        lambda x: pools.adaptive_average(x, out),
        lambda x: getattr(functional, f"adaptive_avg_pool{draw.rank}d")(x, out),
        x,
    )
    values, places = pools.adaptive_maximum(jnp.asarray(x, jnp.float32), out)
    expected, where = getattr(functional, f"adaptive_max_pool{draw.rank}d")(torch.from_numpy(x), out, True)
    np.testing.assert_allclose(values, expected.numpy(), 1e-6)
    np.testing.assert_array_equal(places, where.numpy())


@pytest.mark.sample(7)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolutions_are_torchs(seed: int, groups: int) -> None:
    draw = Draw(seed)
    window = draw.window()
    convolve = getattr(functional, f"conv{draw.rank}d")
    agree(
        lambda x, w, b: convolution.convolved(x, w, b, groups, window),
        lambda x, w, b: convolve(x, w, b, draw.strides, draw.pads, draw.dilations, groups),
        *(draw.array(2, 4, *draw.sizes), draw.array(8, 4 // groups, *draw.kernel), draw.array(8)),
    )


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("groups", "one_by_one"), [(1, True), (2, True), (2, False)])
def test_transposed_convolution(seed: int, groups: int, one_by_one: bool) -> None:
    draw = Draw(seed)
    added = tuple(min(s, d, 2) - 1 for s, d in zip(draw.strides, draw.dilations, strict=True))
    window = Window(
        draw.kernel, draw.strides, draw.dilations, tuple((p, p) for p in draw.pads), (0,) * draw.rank
    )
    turn = getattr(functional, f"conv_transpose{draw.rank}d")
    agree(
        lambda x, w: convolution.transposed(x, w, groups, window, added, one_by_one=one_by_one),
        lambda x, w: turn(x, w, None, draw.strides, draw.pads, added, groups, draw.dilations),
        *(draw.array(2, 4, *draw.sizes), draw.array(4, 3, *draw.kernel)),
    )


@pytest.mark.parametrize("seed", [1, 4, 7])
def test_columns_and_the_image_they_come_from(seed: int) -> None:
    draw = Draw(seed)
    window = draw.window()
    settings = (draw.kernel, draw.dilations, draw.pads, draw.strides)
    x = draw.array(2, 3, *draw.sizes)
    agree(lambda x: convolution.columns_of(x, window), lambda x: functional.unfold(x, *settings), x)
    columns = functional.unfold(torch.from_numpy(x), *settings).numpy()
    agree(
        lambda c: convolution.image_of(c, draw.sizes, window),
        lambda c: functional.fold(c, draw.sizes, *settings),
        columns,
    )


def test_elements_that_meet_in_one_place_all_have_a_gradient() -> None:
    x, places = np.asarray([[1.0, 2.0, 3.0]], np.float32), np.asarray([[1, 1, 0]])
    value, pullback = jax.vjp(lambda x: pools.unpooled(x, places, 4), x)
    assert value.tolist() == [[3.0, 2.0, 0.0, 0.0]]
    assert pullback(jnp.asarray([[1.0, 10.0, 100.0, 1000.0]]))[0].tolist() == [[10.0, 10.0, 1.0]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((5, 5), (3, 3), (1,)), "strides has 1 elements for 2 spatial axes"),
        (((5, 5), (3,)), "kernel_shape has 1 elements for 2 spatial axes"),
        (((5, 5), (3, 3), (), (), (1, 1)), "pads has 2 elements; it must have 4"),
        (((2, 2), (3, 3)), "does not fit an input of"),
        (((5, 5), (3, 3), (0, 1)), "must be at least 1"),
    ],
)
def test_windows_that_do_not_fit_are_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputMismatch, match=words):
        fitted_window(*arguments)


def test_channels_that_do_not_fit_are_refused() -> None:
    x, window = jnp.zeros((1, 4, 5)), fitted_window((5,), (3,))
    with pytest.raises(InputMismatch, match="3 groups do not fit 4 channels"):
        convolution.convolved(x, jnp.zeros((6, 2, 3)), None, 3, window)
    with pytest.raises(InputMismatch, match="4 channels do not fit weights"):
        convolution.transposed(x, jnp.zeros((5, 2, 3)), 1, window, (0,), one_by_one=True)
