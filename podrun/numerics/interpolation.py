"""Images in another size: one axis after another by a matrix of weights, or by picking the nearest elements.

Matrices are worked out in NumPy while tracing, so resizing differentiates and batches as a matrix product does. A rule
gives the position in the input of each output element (`source_positions`, `stepped_positions`); `interpolation_matrix`
turns positions into weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from podrun.core.errors import InputMismatch
from podrun.core.quick_dataclass import dataclass
from podrun.numerics.precision import is_float, widen

CUBIC = -0.75
"""The usual free parameter of the cubic kernel (Keys, Cubic Convolution Interpolation, 1981)."""


@dataclass(frozen=True, slots=True)
class Resizing:
    """How an image is resized, in the words of ONNX's Resize.

    ``mode``: nearest, linear or cubic. ``coordinates``: the rule of `source_positions`. ``nearest``: how positions are
    rounded. ``antialias``: kernels widen with the scale where images shrink. ``exclude_outside``: weights of elements
    outside the image are 0, and the others sum to 1; otherwise the nearest element inside stands for them.
    ``extrapolation``: what lies outside with the rule ``tf_crop_and_resize``.
    """

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    antialias: bool = False
    cubic: float = CUBIC
    exclude_outside: bool = False
    extrapolation: float = 0.0


def source_positions(
    rule: str, scale: float, size: int, count: int, part: tuple[float, float] | None = None
) -> np.ndarray:
    """The position in an axis of ``size`` of each of ``count`` output elements (ONNX's
    coordinate_transformation_mode); ``part``: the part of the axis from 0 to 1, for ``tf_crop_and_resize``.
    """
    y = np.arange(count, dtype=np.float64)
    exact = scale * size
    match rule:
        case "align_corners":
            return np.zeros(count) if exact == 1 else y * (size - 1) / (exact - 1)
        case "asymmetric":
            return y / scale
        case "tf_crop_and_resize":
            start, end = part if part is not None else (0.0, 1.0)
            if exact == 1:
                return np.full(count, (end - start) * (size - 1) / 2 + start * (size - 1))
            return y * (end - start) * (size - 1) / (exact - 1) + start * (size - 1)
        case "pytorch_half_pixel":
            return np.full(count, -0.5) if exact == 1 else (y + 0.5) / scale - 0.5
        case "half_pixel":
            return (y + 0.5) / scale - 0.5
        case "tf_half_pixel_for_nn":
            return (y + 0.5) / scale
        case "half_pixel_symmetric":
            return size / 2 * (1 - count / exact) + (y + 0.5) / scale - 0.5
    raise InputMismatch(f"coordinate_transformation_mode '{rule}' is not known")


def stepped_positions(size: int, count: int, align: bool, scale: float | None = None) -> np.ndarray:
    """`source_positions` by torch's rules: ends on ends (``align``), or half a pixel.

    Torch multiplies by ``size / count`` (or by 1 / ``scale``) where ONNX divides by the scale: the last bit differs.
    """
    step = 1 / scale if scale else size / count
    if align:
        return np.arange(count) * ((size - 1) / (count - 1) if count > 1 else 0.0)
    return (np.arange(count) + 0.5) * step - 0.5


def stepped_nearest(size: int, count: int, exact: bool, scale: float | None = None) -> np.ndarray:
    """The nearest elements by torch's rules: rounded down in float32, from the middle of pixels if ``exact``."""
    step = np.float32(1 / scale if scale else size / count)
    places = np.floor((np.arange(count) + (0.5 if exact else 0.0)) * step).astype(np.int32)
    return np.asarray(np.minimum(places, size - 1))


def rounded_positions(places: np.ndarray, mode: str) -> np.ndarray:
    """Positions as whole numbers (ONNX's nearest_mode; ``pytorch`` is the SDK's own and rounds down)."""
    match mode:
        case "round_prefer_floor":
            return np.asarray(np.ceil(places - 0.5))
        case "round_prefer_ceil":
            return np.asarray(np.floor(places + 0.5))
        case "floor":
            return np.asarray(np.floor(places))
        case "ceil":
            return np.asarray(np.ceil(places))
        case "pytorch":  # This mode is the SDK's own; coordinates are asymmetric then.
            return np.asarray(np.floor(places))
    raise InputMismatch(f"nearest_mode '{mode}' is not known")


def _cubic_kernel(distance: np.ndarray, a: float) -> np.ndarray:
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def interpolation_matrix(
    places: np.ndarray, size: int, how: Resizing = Resizing(mode="linear"), scale: float = 1.0
) -> np.ndarray:
    """The matrix ``[out, size]`` of linear or cubic interpolation at positions of an axis of ``size``."""
    shrink = min(scale, 1.0) if how.antialias else 1.0
    cubic = how.mode == "cubic"
    reach = (2 if cubic else 1) / shrink
    low = np.floor(places - reach).astype(int)
    taps = int(np.ceil(2 * reach)) + 2
    index = low[:, None] + np.arange(taps)[None, :]
    distance = (index - places[:, None]) * shrink
    weight = _cubic_kernel(distance, how.cubic) if cubic else np.clip(1 - np.abs(distance), 0, 1)
    if how.exclude_outside:
        weight = np.where((index < 0) | (index >= size), 0, weight)
    if how.exclude_outside or how.antialias:
        weight = weight / weight.sum(axis=1, keepdims=True)
    matrix = np.zeros((len(places), size))
    np.add.at(matrix, (np.arange(len(places))[:, None], np.clip(index, 0, size - 1)), weight)
    return matrix


def interpolated(x: Array, axis: int, matrix: np.ndarray) -> Array:
    """``matrix [out, in]`` times one axis of x."""
    return jnp.moveaxis(jnp.tensordot(x, jnp.asarray(matrix, x.dtype), axes=((axis,), (1,))), -1, axis)


def _resized_axis(
    how: Resizing, x: Array, axis: int, count: int, scale: float, part: tuple[float, float] | None
) -> tuple[Array, np.ndarray]:
    """x resized along one axis, and which output elements lie outside the input (for tf_crop_and_resize)."""
    size = x.shape[axis]
    simple = how.mode == "nearest" and how.nearest == "pytorch"
    places = source_positions("asymmetric" if simple else how.coordinates, scale, size, count, part)
    outside = (places < 0) | (places > size - 1)
    if how.mode == "nearest":
        index = np.clip(rounded_positions(places, how.nearest), 0, size - 1)
        return jnp.take(x, index.astype(np.int32), axis=axis), outside
    return interpolated(x, axis, interpolation_matrix(places, size, how, scale)), outside


def resized(
    x: Array,
    how: Resizing,
    axes: Sequence[int],
    counts: Sequence[int],
    scales: Sequence[float],
    part: Sequence[float] | None = None,
) -> Array:
    """x with ``counts`` elements along each of ``axes``; halves and integers are interpolated in float32, rounded once.

    ``part``: where the part of the image that is resized begins along each axis, and then where it ends.
    """
    dtype, x = x.dtype, widen(x)
    rounds = how.mode != "nearest" and not is_float(x)
    if rounds:
        x = x.astype(jnp.float32)
    masks = []
    for k, axis in enumerate(axes):
        span = None if part is None else (float(part[k]), float(part[k + len(axes)]))
        if counts[k] == x.shape[axis] and scales[k] == 1.0 and span is None:
            continue
        x, outside = _resized_axis(how, x, axis, counts[k], scales[k], span)
        masks.append(outside.reshape([-1 if a == axis else 1 for a in range(x.ndim)]))
    if how.coordinates == "tf_crop_and_resize":
        for mask in masks:
            x = jnp.where(mask, np.asarray(how.extrapolation, x.dtype), x)
    if rounds:
        x = jnp.clip(jnp.round(x), np.iinfo(dtype).min, np.iinfo(dtype).max)
    return x.astype(dtype)
