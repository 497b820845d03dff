"""Resizing and sampling of images against torch and onnxruntime's rules in NumPy float64: values and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.core.errors import InputMismatch
from podrun.numerics.interpolation import (
    Resizing,
    interpolated,
    interpolation_matrix,
    resized,
    source_positions,
    stepped_nearest,
    stepped_positions,
)
from podrun.numerics.sampling import affine_positions, sampled

torch = pytest.importorskip("torch")
functional = torch.nn.functional

SIZES = [(5, 8), (8, 5), (4, 12), (7, 1), (1, 3)]


@pytest.mark.parametrize(("size", "count"), SIZES)
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize(("mode", "name"), [("linear", "linear"), ("cubic", "bicubic")])
def test_matrices_are_torchs(size: int, count: int, align: bool, mode: str, name: str) -> None:
    places = stepped_positions(size, count, align)
    matrix = interpolation_matrix(np.maximum(places, 0) if mode == "linear" else places, size, Resizing(mode))
    rows = torch.eye(size, dtype=torch.float64)
    image = rows[None] if mode == "linear" else rows[None, :, None]
    shape = count if mode == "linear" else (1, count)
    expected = functional.interpolate(image, shape, mode=name, align_corners=align).reshape(size, count)
    np.testing.assert_allclose(matrix.T, expected.numpy(), 1e-9, 1e-9)


@pytest.mark.parametrize(("size", "count"), SIZES)
@pytest.mark.parametrize("exact", [False, True])
def test_nearest_elements_are_torchs(size: int, count: int, exact: bool) -> None:
    numbers = torch.arange(size, dtype=torch.float64)[None, None]
    mode = "nearest-exact" if exact else "nearest"
    expected = functional.interpolate(numbers, count, mode=mode)[0, 0].numpy()
    np.testing.assert_array_equal(stepped_nearest(size, count, exact), expected)


@pytest.mark.parametrize("rule", ["half_pixel", "align_corners", "pytorch_half_pixel"])
@pytest.mark.parametrize(("size", "count"), SIZES[:3])
def test_both_ways_to_a_position_agree(rule: str, size: int, count: int) -> None:
    by_scale = source_positions(rule, count / size, size, count)
    np.testing.assert_allclose(by_scale, stepped_positions(size, count, rule == "align_corners"), atol=1e-12)


def test_an_image_is_resized_axis_by_axis_with_its_gradient() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4))
    how = Resizing("cubic")
    leaf = torch.from_numpy(x).requires_grad_()
    expected = functional.interpolate(leaf, (8, 7), mode="bicubic")
    expected.square().sum().backward()

    def run(x: Any) -> Any:
        return resized(x, how, (2, 3), (8, 7), (8 / 5, 7 / 4))

    def squares(x: Any) -> tuple[Any, Any]:
        result = run(x)
        return jnp.sum(jnp.square(result)), result

    (_, result), gradient = jax.jit(jax.value_and_grad(squares, has_aux=True))(x.astype(np.float32))
    np.testing.assert_allclose(result, expected.detach().numpy(), 1e-4, 1e-5)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), 1e-4, 1e-4)


def test_integers_are_rounded_and_halves_once() -> None:
    x = np.asarray([[0, 255, 3]], np.uint8)
    assert resized(x, Resizing("linear"), (1,), (2,), (2 / 3,)).tolist() == [[64, 66]]
    halves = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float16)
    how = Resizing("linear", antialias=True)
    wide = resized(halves.astype(np.float32), how, (1,), (3,), (0.6,))
    np.testing.assert_array_equal(resized(halves, how, (1,), (3,), (0.6,)), wide.astype(np.float16))


def test_what_lies_outside_is_left_out_or_filled() -> None:
    x = np.ones((1, 4), np.float32)
    inside = Resizing("cubic", exclude_outside=True)
    np.testing.assert_allclose(resized(x, inside, (1,), (7,), (1.75,)), np.ones((1, 7)), 1e-6)
    crop = Resizing("linear", "tf_crop_and_resize", extrapolation=9.0)
    assert resized(x, crop, (1,), (3,), (0.75,), (-0.5, 0.5)).tolist() == [[9.0, 1.0, 1.0]]


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize(("mode", "rank"), [("nearest", 2), ("linear", 2), ("linear", 3), ("cubic", 2)])
@pytest.mark.sample(8)
def test_samples_are_torchs(padding: str, align: bool, mode: str, rank: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, 3, 4, 5, 3)[: 2 + rank])
    grid = 1.4 * rng.uniform(-1, 1, (*(2, 3, 2, 4)[: 1 + rank], rank))
    name = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    leaf = torch.from_numpy(x).requires_grad_()
    expected = functional.grid_sample(leaf, torch.from_numpy(grid), name, padding, align)
    expected.square().sum().backward()

    def run(x: Any) -> Any:
        return sampled(x, jnp.asarray(grid, jnp.float32), mode, padding, align)

    narrow = x.astype(np.float32)
    np.testing.assert_allclose(jax.jit(run)(narrow), expected.detach().numpy(), 1e-3, 1e-4)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(run(x)))))(narrow)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), 1e-3, 1e-3)


@pytest.mark.parametrize("align", [False, True])
def test_affine_positions_are_torchs(align: bool) -> None:
    theta = np.random.default_rng(2).standard_normal((2, 2, 3))
    expected = functional.affine_grid(torch.from_numpy(theta), [2, 1, 4, 3], align)
    made = affine_positions(jnp.asarray(theta, jnp.float32), (4, 3), align)
    np.testing.assert_allclose(made, expected.numpy(), 1e-5, 1e-5)


def test_unknown_modes_are_refused() -> None:
    x = np.ones((1, 1, 4), np.float32)
    with pytest.raises(InputMismatch, match="coordinate_transformation_mode 'x'"):
        resized(x, Resizing("linear", "x"), (2,), (8,), (2.0,))
    with pytest.raises(InputMismatch, match="nearest_mode 'x'"):
        resized(x, Resizing(nearest="x"), (2,), (8,), (2.0,))
    with pytest.raises(InputMismatch, match="mode 'area'"):
        sampled(x, np.ones((1, 2, 1), np.float32), "area", "zeros", False)


def test_a_matrix_meets_the_axis_it_is_given() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert interpolated(x, 0, np.asarray([[1.0, 0.0], [0.5, 0.5]])).tolist() == [[0, 1, 2], [1.5, 2.5, 3.5]]
