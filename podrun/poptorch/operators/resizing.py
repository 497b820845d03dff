"""Images in another size: nearest, linear and cubic interpolation, each dimension on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from podrun.poptorch.operators.table import Array, Call, aten, axis, widened


def _scale(size: int, out: int, align: bool, given: float | None) -> float:
    if align:
        return (size - 1) / (out - 1) if out > 1 else 0.0
    return 1 / given if given else size / out


def _resized(x: Array, where: int, matrix: np.ndarray) -> Array:
    """``matrix [out, in]`` times one dimension of x."""
    return jnp.moveaxis(jnp.tensordot(x, jnp.asarray(matrix, x.dtype), ((where,), (1,))), -1, where)


def _linear_matrix(size: int, out: int, align: bool, scale: float | None) -> np.ndarray:
    step = _scale(size, out, align, scale)
    places = np.arange(out) * step if align else np.maximum((np.arange(out) + 0.5) * step - 0.5, 0)
    low = np.minimum(np.floor(places).astype(int), size - 1)
    high, weight = np.minimum(low + 1, size - 1), places - low
    matrix = np.zeros((out, size))
    np.add.at(matrix, (np.arange(out), low), 1 - weight)
    np.add.at(matrix, (np.arange(out), high), weight)
    return matrix


CUBIC = -0.75
"""The free parameter of torch's cubic kernel."""


def _cubic_matrix(size: int, out: int, align: bool, scale: float | None) -> np.ndarray:
    step = _scale(size, out, align, scale)
    places = np.arange(out) * step if align else (np.arange(out) + 0.5) * step - 0.5
    low = np.floor(places).astype(int)
    matrix = np.zeros((out, size))
    for offset in range(-1, 3):
        distance = np.abs(places - (low + offset))
        near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
        far = ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
        weight = np.where(distance <= 1, near, np.where(distance < 2, far, 0))
        np.add.at(matrix, (np.arange(out), np.clip(low + offset, 0, size - 1)), weight)
    return matrix


def _nearest(x: Array, where: int, out: int, scale: float | None, exact: bool) -> Array:
    size = x.shape[where]
    step = _scale(size, out, False, scale)
    places = np.floor((np.arange(out) + (0.5 if exact else 0.0)) * np.float32(step)).astype(np.int32)
    return jnp.take(x, np.minimum(places, size - 1), axis=where)


def _scales(scales: tuple[Any, ...], count: int) -> tuple[float | None, ...]:
    """One scale a dimension; ``upsample`` overloads give a list or one argument each."""
    if len(scales) == 1 and isinstance(scales[0], (tuple, list)):
        scales = tuple(scales[0])
    found = tuple(scales[:count])
    return found + (None,) * (count - len(found))


def _nearest_resize(count: int, exact: bool) -> Callable[..., Array]:
    def resize(call: Call, x: Array, size: Any, *scales: Any, **keywords: Any) -> Array:
        for place, (out, scale) in enumerate(
            zip(call.shape[-count:], _scales(scales or tuple(keywords.values()), count), strict=True)
        ):
            x = _nearest(x, x.ndim - count + place, out, scale, exact)
        return x

    return resize


def _smooth_resize(count: int, matrix: Callable[..., np.ndarray]) -> Callable[..., Array]:
    def resize(call: Call, x: Array, size: Any, align: bool = False, *scales: Any, **keywords: Any) -> Array:
        x = widened(x)
        for place, (out, scale) in enumerate(
            zip(call.shape[-count:], _scales(scales or tuple(keywords.values()), count), strict=True)
        ):
            where = axis(x.ndim - count + place, x.ndim)
            x = _resized(x, where, matrix(x.shape[where], out, bool(align), scale))
        return x

    return resize


for _count in (1, 2, 3):
    aten(f"upsample_nearest{_count}d", kind="Resize")(_nearest_resize(_count, False))
    aten(f"_upsample_nearest_exact{_count}d", kind="Resize")(_nearest_resize(_count, True))
for _name, _count in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3)):
    aten(f"upsample_{_name}", kind="Resize")(_smooth_resize(_count, _linear_matrix))
aten("upsample_bicubic2d", kind="Resize")(_smooth_resize(2, _cubic_matrix))
