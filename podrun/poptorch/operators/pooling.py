"""Images in another size: pooling by maxima and averages, and interpolation (nearest, linear, cubic), by dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from podrun.numerics.interpolation import (
    Resizing,
    interpolated,
    interpolation_matrix,
    stepped_nearest,
    stepped_positions,
)
from podrun.numerics.pools import (
    adaptive_average,
    adaptive_maximum,
    average_of_windows,
    maximum_of_windows,
    maximum_with_places,
    unpooled,
)
from podrun.numerics.precision import widen
from podrun.numerics.sampling import sampled
from podrun.numerics.windows import Window, fitted_window
from podrun.poptorch.operators.table import AtenResult, Call, PerDimension, Sizes, aten, spread


def _window(
    sizes: tuple[int, ...],
    kernel: PerDimension,
    stride: PerDimension,
    padding: PerDimension,
    dilation: PerDimension,
    ceil: bool,
) -> Window:
    count = len(sizes)
    strides = spread(stride, count) if stride else spread(kernel, count)
    pads = spread(padding, count) * 2
    return fitted_window(sizes, spread(kernel, count), strides, spread(dilation, count), pads, ceil)


def _batched(x: Array, count: int) -> Array:
    return x if x.ndim == count + 2 else x[None]


def _max_pool(count: int, with_places: bool) -> Callable[..., AtenResult]:
    """The greatest elements of windows; ``with_places``: also where they stand, by number within a channel."""

    def pool(
        call: Call,
        x: Array,
        kernel: PerDimension,
        stride: PerDimension = (),
        padding: PerDimension = (0,),
        dilation: PerDimension = (1,),
        ceil_mode: bool = False,
    ) -> AtenResult:
        image = _batched(x, count)
        sizes = image.shape[2:]
        window = _window(sizes, kernel, stride, padding, dilation, ceil_mode)
        if not with_places:
            return jnp.reshape(maximum_of_windows(image, window), call.shape)
        numbers = jnp.asarray(np.arange(math.prod(sizes), dtype=np.int32).reshape(1, 1, *sizes))
        values, places = maximum_with_places(image, window, numbers)
        return values.reshape(call.shape), places.reshape(call.shape)

    return pool


def _average_pool(count: int) -> Callable[..., Array]:
    def pool(
        call: Call,
        x: Array,
        kernel: PerDimension,
        stride: PerDimension = (),
        padding: PerDimension = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        image = widen(_batched(x, count))
        window = _window(image.shape[2:], kernel, stride, padding, (1,), ceil_mode)
        means = average_of_windows(image, window, count_include_pad, divisor_override)
        return jnp.reshape(means, call.shape)

    return pool


def _adaptive_average(count: int) -> Callable[..., Array]:
    return lambda call, x, size: adaptive_average(widen(x), call.shape[-count:])


def _adaptive_maximum(count: int) -> Callable[..., tuple[Array, Array]]:
    return lambda call, x, size: adaptive_maximum(x, call.shape[-count:])


@aten("max_unpool2d", "max_unpool3d", kind="MaxUnpool")
def max_unpool(call: Call, x: Array, places: Array, *rest: object) -> Array:
    """x put where its maxima were found, zeros elsewhere."""
    count = len(call.shape) - (2 if call.shape[:2] == x.shape[:2] and x.ndim > 3 else 1)
    rows = math.prod(x.shape[: x.ndim - count])
    flat, where = x.reshape(rows, -1), places.reshape(rows, -1)
    return jnp.reshape(unpooled(flat, where, math.prod(call.shape[x.ndim - count :])), call.shape)


for _count in (1, 2, 3):
    aten(f"max_pool{_count}d", kind="MaxPool")(_max_pool(_count, False))
    aten(f"max_pool{_count}d_with_indices", kind="MaxPool")(_max_pool(_count, True))
    aten(f"avg_pool{_count}d", kind="AveragePool")(_average_pool(_count))
    aten(f"adaptive_avg_pool{_count}d", kind="AveragePool")(_adaptive_average(_count))
    aten(f"adaptive_max_pool{_count}d", kind="MaxPool")(_adaptive_maximum(_count))
for _count in (2, 3):
    aten(f"_adaptive_avg_pool{_count}d", kind="AveragePool")(_adaptive_average(_count))


Scale = float | Sequence[float] | None
"""Of a resizing: the overloads give one for all dimensions, one each, or none."""


def _scales(scales: tuple[Scale, ...], count: int) -> tuple[float | None, ...]:
    """One scale a dimension; ``upsample`` overloads give a list or one argument each."""
    inner = scales[0] if len(scales) == 1 and isinstance(scales[0], (tuple, list)) else scales
    known = tuple(inner[:count])
    return known + (None,) * (count - len(known))


def _nearest_resize(count: int, exact: bool) -> Callable[..., Array]:
    def resize(call: Call, x: Array, size: Sizes | None, *scales: Scale, **keywords: Scale) -> Array:
        for place, (out, scale) in enumerate(
            zip(call.shape[-count:], _scales(scales or tuple(keywords.values()), count), strict=True)
        ):
            where = x.ndim - count + place
            x = jnp.take(x, stepped_nearest(x.shape[where], out, exact, scale), axis=where)
        return x

    return resize


def _smooth_resize(count: int, how: Resizing) -> Callable[..., Array]:
    def resize(
        call: Call, x: Array, size: Sizes | None, align: bool = False, *scales: Scale, **keywords: Scale
    ) -> Array:
        x = widen(x)
        for place, (out, scale) in enumerate(
            zip(call.shape[-count:], _scales(scales or tuple(keywords.values()), count), strict=True)
        ):
            where = x.ndim - count + place
            places = stepped_positions(x.shape[where], out, bool(align), scale)
            if how.mode == "linear":
                places = np.maximum(places, 0)
            x = interpolated(x, where, interpolation_matrix(places, x.shape[where], how))
        return x

    return resize


for _count in (1, 2, 3):
    aten(f"upsample_nearest{_count}d", kind="Resize")(_nearest_resize(_count, False))
    aten(f"_upsample_nearest_exact{_count}d", kind="Resize")(_nearest_resize(_count, True))
for _name, _count in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3)):
    aten(f"upsample_{_name}", kind="Resize")(_smooth_resize(_count, Resizing(mode="linear")))
aten("upsample_bicubic2d", kind="Resize")(_smooth_resize(2, Resizing(mode="cubic")))


@aten("grid_sampler_3d", kind="Resize")
def sample_volume(
    call: Call, x: Array, grid: Array, interpolation: int, padding: int, align_corners: bool
) -> Array:
    """Volumes ``[N, C, D, H, W]`` at places ``[N, d, h, w, 3]`` (x, y, z from -1 to 1): between the eight neighbours,
    or the nearest one (``interpolation`` 1). ``padding`` outside: zeros, the border, or reflection.
    """
    mode, outside = ("linear", "nearest")[interpolation], ("zeros", "border", "reflection")[padding]
    return sampled(widen(x), widen(grid), mode, outside, align_corners)
