"""Images in another size: pooling by maxima and averages, and interpolation (nearest, linear, cubic), by dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.poptorch.operators.table import Array, Call, aten, axis, spread, widened, with_gradient_of


def _window(
    call: Call, sizes: tuple[int, ...], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> Any:
    from podrun.onnx_models.ops.pooling import Window

    count = len(sizes)
    kernel, padding, dilation = spread(kernel, count), spread(padding, count), spread(dilation, count)
    stride = spread(stride, count) if stride else kernel
    outs = call.shape[-count:]
    extra = tuple(
        max(0, (out - 1) * s + d * (k - 1) + 1 - n - 2 * p)
        for out, s, d, k, n, p in zip(outs, stride, dilation, kernel, sizes, padding, strict=True)
    )
    return Window(
        kernel=kernel,
        strides=stride,
        dilations=dilation,
        pads=tuple((p, p) for p in padding),
        extra=extra if ceil else (0,) * count,
    )


def _batched(x: Array, count: int) -> Array:
    return x if x.ndim == count + 2 else x[None]


def _max_pool(count: int) -> Callable[..., Array]:
    def pool(
        call: Call,
        x: Array,
        kernel: Any,
        stride: Any = (),
        padding: Any = (0,),
        dilation: Any = (1,),
        ceil_mode: bool = False,
    ) -> Array:
        from podrun.onnx_models.ops.pooling import maximum_of_windows

        image = _batched(x, count)
        window = _window(call, image.shape[2:], kernel, stride, padding, dilation, ceil_mode)
        return maximum_of_windows(image, window).reshape(call.shape)

    return pool


def _max_pool_with_indices(count: int) -> Callable[..., tuple[Array, Array]]:
    def pool(
        call: Call,
        x: Array,
        kernel: Any,
        stride: Any = (),
        padding: Any = (0,),
        dilation: Any = (1,),
        ceil_mode: bool = False,
    ) -> tuple[Array, Array]:
        from podrun.onnx_models.ops.pooling import padded, shifted

        image = _batched(x, count)
        window = _window(call, image.shape[2:], kernel, stride, padding, dilation, ceil_mode)
        places = np.arange(math.prod(image.shape[2:]), dtype=np.int32).reshape(1, 1, *image.shape[2:])
        lowest = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).min
        wide = padded(image, window, np.asarray(lowest, x.dtype))
        wide_places = padded(jnp.asarray(places), window, np.asarray(-1, np.int32))
        values: Array = None
        where: Array = None
        for position in window.positions():
            value, place = shifted(wide, window, position), shifted(wide_places, window, position)
            place = jnp.broadcast_to(place, value.shape)
            if values is None:
                values, where = value, place
                continue
            better = (value > values) | ((where < 0) & (place >= 0))
            values, where = jnp.where(better, value, values), jnp.where(better, place, where)
        return values.reshape(call.shape), where.reshape(call.shape)

    return pool


def _average_pool(count: int) -> Callable[..., Array]:
    def pool(
        call: Call,
        x: Array,
        kernel: Any,
        stride: Any = (),
        padding: Any = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        from podrun.onnx_models.ops.pooling import sum_of_windows

        image = widened(_batched(x, count))
        window = _window(call, image.shape[2:], kernel, stride, padding, (1,), ceil_mode)
        sums = sum_of_windows(image, window).reshape(call.shape)
        return sums / (divisor_override or _counts(image.shape[2:], window, count_include_pad))

    return pool


def _counts(sizes: tuple[int, ...], window: Any, with_pads: bool) -> Array:
    """Number of elements that each window averages. Padding counts if requested; elements that ceil_mode adds
    never do.
    """
    made = np.ones((), np.float32)
    outs = window.output(sizes)
    for n, k, s, (before, after), out in zip(
        sizes, window.kernel, window.strides, window.pads, outs, strict=True
    ):
        starts = np.arange(out) * s - before
        low, high = (-before, n + after) if with_pads else (0, n)
        inside = np.minimum(starts + k, high) - np.maximum(starts, low)
        made = made[..., None] * np.maximum(inside, 1).astype(np.float32)
    return jnp.asarray(made)


def _adaptive_average(count: int) -> Callable[..., Array]:
    def pool(call: Call, x: Array, size: Any) -> Array:
        """Means over parts of the image that may overlap by one element."""
        made = widened(x)
        for place, out in enumerate(call.shape[-count:]):
            where = x.ndim - count + place
            made = jnp.stack([jnp.mean(part, where) for part in _parts(made, where, out)], where)
        return made

    return pool


def _adaptive_maximum(count: int) -> Callable[..., Any]:
    def pool(call: Call, x: Array, size: Any) -> tuple[Array, Array]:
        """Maxima over parts of the image, and where in the image they are."""
        sizes = x.shape[-count:]
        places = jnp.broadcast_to(jnp.arange(math.prod(sizes), dtype=jnp.int32).reshape(sizes), x.shape)
        values = x
        for index, out in enumerate(call.shape[-count:]):
            where = x.ndim - count + index
            made = []
            for part, part_places in zip(_parts(values, where, out), _parts(places, where, out), strict=True):
                best = jnp.argmax(part, where, keepdims=True)
                made.append(tuple(jnp.take_along_axis(each, best, where) for each in (part, part_places)))
            values, places = (jnp.concatenate([m[i] for m in made], where) for i in range(2))
        return values, places

    return pool


def _parts(x: Array, where: int, out: int) -> list[Array]:
    size = x.shape[where]
    return [lax.slice_in_dim(x, (i * size) // out, -(-((i + 1) * size) // out), 1, where) for i in range(out)]


@aten("max_unpool2d", "max_unpool3d", kind="MaxUnpool")
def max_unpool(call: Call, x: Array, places: Array, *rest: object) -> Array:
    """x put where its maxima were found, zeros elsewhere. Where two have one place the last one stays; the gradient
    goes to both, as torch's does."""
    count = len(call.shape) - (2 if call.shape[:2] == x.shape[:2] and x.ndim > 3 else 1)
    lead = x.shape[: x.ndim - count]
    flat, where = x.reshape(math.prod(lead), -1), places.reshape(math.prod(lead), -1)
    empty = jnp.zeros((math.prod(lead), math.prod(call.shape[x.ndim - count :])), x.dtype)
    rows = jnp.arange(math.prod(lead))[:, None]
    made = with_gradient_of(
        empty.at[rows, where].add(flat), empty.at[rows, where].set(lax.stop_gradient(flat))
    )
    return made.reshape(call.shape)


for _count in (1, 2, 3):
    aten(f"max_pool{_count}d", kind="MaxPool")(_max_pool(_count))
    aten(f"max_pool{_count}d_with_indices", kind="MaxPool")(_max_pool_with_indices(_count))
    aten(f"avg_pool{_count}d", kind="AveragePool")(_average_pool(_count))
    aten(f"_adaptive_avg_pool{_count}d", f"adaptive_avg_pool{_count}d", kind="AveragePool")(
        _adaptive_average(_count)
    )
    aten(f"adaptive_max_pool{_count}d", kind="MaxPool")(_adaptive_maximum(_count))


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


@aten("grid_sampler_3d", kind="Resize")
def sample_volume(
    call: Call, x: Array, grid: Array, interpolation: int, padding: int, align_corners: bool
) -> Array:
    """Volumes ``[N, C, D, H, W]`` at places ``[N, d, h, w, 3]`` (x, y, z from -1 to 1): between the eight neighbours,
    or the nearest one (``interpolation`` 1). ``padding`` outside: zeros, the border, or reflection."""
    volume, sizes = widened(x), x.shape[:1:-1]
    places = [_place(widened(grid)[..., i], size, padding, align_corners) for i, size in enumerate(sizes)]
    if interpolation == 1:
        return _voxels(volume, [jnp.round(p) for p in places])
    lower = [jnp.floor(p) for p in places]
    total: Any = 0.0
    for corner in np.ndindex(2, 2, 2):
        weight: Any = 1.0
        for place, low, up in zip(places, lower, corner, strict=True):
            weight = weight * (place - low if up else 1.0 - (place - low))
        total = (
            total
            + _voxels(volume, [low + up for low, up in zip(lower, corner, strict=True)]) * weight[:, None]
        )
    return total


def _place(position: Array, size: int, padding: int, align_corners: bool) -> Array:
    """A position from -1 to 1 as an index of a dimension, by torch's rules for what lies outside."""
    found = (position + 1) / 2 * (size - 1) if align_corners else ((position + 1) * size - 1) / 2
    if padding == 2:
        low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
        if span == 0:
            return jnp.zeros_like(found)
        away = jnp.abs(found - low)
        turns, extra = jnp.floor(away / span), jnp.mod(away, span)
        found = jnp.where(jnp.mod(turns, 2) == 0, extra + low, span - extra + low)
    return jnp.clip(found, 0, size - 1) if padding else found


def _voxels(volume: Array, index: list[Array]) -> Array:
    """Elements ``[N, C, ...]`` at indices of the last three dimensions, last one first; 0 outside."""
    sizes = volume.shape[:1:-1]
    inside: Any = True
    for each, size in zip(index, sizes, strict=True):
        inside = inside & (each >= 0) & (each < size)
    w, h, d = (jnp.clip(each, 0, size - 1).astype(jnp.int32) for each, size in zip(index, sizes, strict=True))
    n = jnp.arange(volume.shape[0]).reshape(-1, 1, 1, 1)
    return jnp.where(inside[:, None], jnp.moveaxis(volume[n, :, d, h, w], -1, 1), 0)
