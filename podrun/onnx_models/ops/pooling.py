"""Pooling, and the sliding windows over spatial axes that it shares with convolution: padding rules and shifted views.

Max-pooling has a gradient of its own: XLA's derived one is many times slower on CPUs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.core.errors import UnsupportedError
from podrun.onnx_models.ops.common import Array, index_dtype, ints, is_float, rounds_once
from podrun.onnx_models.ops.reduction import to_equals
from podrun.onnx_models.ops.registry import ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context, InputMismatch


@dataclass(frozen=True, slots=True)
class Window:
    """Kernel, strides, dilations and padding over the spatial axes; ``pads`` are (before, after) for each
    axis.

    ``extra`` is what ``ceil_mode`` adds after each axis beyond the padding: windows there see no real
    elements of it.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    extra: tuple[int, ...]

    def extents(self) -> tuple[int, ...]:
        """The extent of each window, dilation included."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def output(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Number of windows along each axis of an input of the given spatial sizes."""
        return tuple(
            (n + before + after + extra - extent) // stride + 1
            for n, (before, after), extra, extent, stride in zip(
                sizes, self.pads, self.extra, self.extents(), self.strides, strict=True
            )
        )

    def positions(self) -> Iterator[tuple[int, ...]]:
        """Every kernel position, the last axis fastest."""
        return itertools.product(*(range(k) for k in self.kernel))


def window_of(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> Window:
    """The window of a convolution or pooling node over an input of spatial ``sizes`` (ONNX: auto_pad,
    ceil_mode).

    Raises ValueError if attributes do not fit the number of spatial axes.
    """
    rank = len(sizes)

    def per_axis(name: str, default: int) -> tuple[int, ...]:
        given = ints(node.get(name) or (default,) * rank)
        if len(given) != rank:
            raise InputMismatch(f"{name} has {len(given)} elements for {rank} spatial axes")
        return given

    strides, dilations = per_axis("strides", 1), per_axis("dilations", 1)
    if len(kernel) != rank:
        raise InputMismatch(f"kernel_shape has {len(kernel)} elements for {rank} spatial axes")
    if min((*strides, *dilations, *kernel), default=1) < 1:
        raise InputMismatch("kernel_shape, strides and dilations must be at least 1")
    extents = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    mode = node.get("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        pads = tuple(
            _same(n, e, s, mode == "SAME_UPPER") for n, e, s in zip(sizes, extents, strides, strict=True)
        )
    elif mode == "VALID":
        pads = ((0, 0),) * rank
    else:
        given = ints(node.get("pads") or (0,) * 2 * rank)
        if len(given) != 2 * rank:
            raise InputMismatch(
                f"pads has {len(given)} elements; it must have {2 * rank}, twice the spatial axes"
            )
        pads = tuple(zip(given[:rank], given[rank:], strict=True))
    extra = (0,) * rank
    if node.get("ceil_mode", 0):
        extra = tuple(
            _ceil_extra(n, p, e, s) for n, p, e, s in zip(sizes, pads, extents, strides, strict=True)
        )
    window = Window(tuple(kernel), strides, dilations, pads, extra)
    if min(window.output(sizes), default=1) < 1:
        raise InputMismatch(f"a window of {extents} does not fit an input of {tuple(sizes)} padded by {pads}")
    return window


def _same(size: int, extent: int, stride: int, upper: bool) -> tuple[int, int]:
    """Padding so that there are ceil(size / stride) windows; the odd one goes after (upper) or before."""
    total = max((-(-size // stride) - 1) * stride + extent - size, 0)
    small, large = total // 2, total - total // 2
    return (small, large) if upper else (large, small)


def _ceil_extra(size: int, pads: tuple[int, int], extent: int, stride: int) -> int:
    """Padding to add for a last, partial window; none if the window would start in the padding after (ONNX,
    PyTorch).
    """
    span = size + sum(pads) - extent
    windows = -(-span // stride) + 1
    if (windows - 1) * stride >= size + pads[0]:
        windows -= 1
    return max((windows - 1) * stride - span, 0)


def shifted(x: Array, window: Window, position: Sequence[int]) -> Array:
    """The elements of padded ``x`` ``[N, C, *spatial]`` under kernel ``position`` of every window: ``[N,
    C, *out]``.
    """
    sizes = x.shape[2:]
    starts = [p * d for p, d in zip(position, window.dilations, strict=True)]
    counts = [(n - e) // s + 1 for n, e, s in zip(sizes, window.extents(), window.strides, strict=True)]
    stops = [a + (c - 1) * s + 1 for a, c, s in zip(starts, counts, window.strides, strict=True)]
    return lax.slice(x, (0, 0, *starts), (*x.shape[:2], *stops), (1, 1, *window.strides))


def reduced(x: Array, window: Window, combine: Callable[[Array, Array], Array]) -> Array:
    """Padded ``x`` ``[N, C, *spatial]`` with every window combined to one element, one axis after another."""
    for axis, kernel, dilation, stride in zip(
        range(2, x.ndim), window.kernel, window.dilations, window.strides, strict=True
    ):
        count = (x.shape[axis] - (kernel - 1) * dilation - 1) // stride + 1
        stops = ((count - 1) * stride + 1 + k * dilation for k in range(kernel))
        views = (
            lax.slice_in_dim(x, k * dilation, stop, stride, axis)
            for k, stop in zip(range(kernel), stops, strict=True)
        )
        x = functools.reduce(combine, views)
    return x


def padded(x: Array, window: Window, value: Array) -> Array:
    """x with the window's padding (and ceil_mode's extra) filled with ``value``; negative padding crops."""
    config = [(0, 0, 0), (0, 0, 0)]
    config += [
        (before, after + extra, 0) for (before, after), extra in zip(window.pads, window.extra, strict=True)
    ]
    return lax.pad(x, value, config)


def _lowest(dtype: Any) -> Array:
    """The identity of max for a type."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf, dtype)
    return np.asarray(np.iinfo(dtype).min, dtype)


def _window_max(x: Array, window: Window) -> Array:
    """Maximum of x ``[N, C, *in]`` padded with the lowest value."""
    return reduced(padded(x, window, _lowest(x.dtype)), window, jnp.maximum)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def maximum_of_windows(x: Array, window: Window) -> Array:
    """Max over each window: ``[N, C, *in] -> [N, C, *out]``. The gradient goes whole to each element that equals it.

    Source: PopART asks poplibs' poolInputGradient for the variant that is not scaled by the number of equals
    (graphcore/popart, willow/src/popx/op/maxpoolx.cpp).
    """
    return _window_max(x, window)


def _maximum_forward(x: Array, window: Window) -> tuple[Array, tuple[Array, Array]]:
    y = _window_max(x, window)
    return y, (x, y)


def _maximum_backward(window: Window, saved: tuple[Array, Array], gradient: Array) -> tuple[Array]:
    """The gradient, at each kernel position, of the elements there: that of the result if they equal the maximum, else
    0.
    """
    x, y = saved
    wide = padded(x, window, _lowest(x.dtype))
    total: Any = None
    for position in window.positions():
        hit = shifted(wide, window, position) == y
        term = _unshifted(
            jnp.where(hit, gradient, jnp.zeros((), gradient.dtype)), window, position, wide.shape
        )
        total = term if total is None else total + term
    back = [(0, 0, 0), (0, 0, 0)]
    back += [(-b, -(a + e), 0) for (b, a), e in zip(window.pads, window.extra, strict=True)]
    return (lax.pad(total, jnp.zeros((), total.dtype), back),)


def _unshifted(g: Array, window: Window, position: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The transpose of `shifted`: g put back at the elements of the padded input it came from."""
    config = [(0, 0, 0), (0, 0, 0)]
    for size, count, at, dilation, stride in zip(
        shape[2:], g.shape[2:], position, window.dilations, window.strides, strict=True
    ):
        start = at * dilation
        config.append((start, size - start - ((count - 1) * stride + 1), stride - 1))
    return lax.pad(g, jnp.zeros((), g.dtype), config)


maximum_of_windows.defvjp(_maximum_forward, _maximum_backward)


@operator(ONNX, "MaxPool", since=(1, 8, 10, 11, 12, 22))
def max_pool(ctx: Context, node: Node, x: Array) -> Array | tuple[Array, Array]:
    """Maximum over windows of ``[N, C, *in]``; the second output, if asked for, says where each came from
    (ONNX MaxPool).

    Indices count through the whole input, rows first, or columns first with ``storage_order``.
    """
    window = window_of(node, x.shape[2:], ints(node["kernel_shape"]))
    if len(node.outputs) < 2 or not node.outputs[1]:
        return maximum_of_windows(x, window)
    return _max_with_indices(ctx, node, x, window)


def _max_with_indices(ctx: Context, node: Node, x: Array, window: Window) -> tuple[Array, Array]:
    sizes = x.shape[2:]
    order = tuple(reversed(range(len(sizes)))) if node.get("storage_order", 0) else tuple(range(len(sizes)))
    places = np.arange(int(np.prod(sizes)), dtype=np.int64).reshape([sizes[i] for i in order])
    places = np.transpose(places, np.argsort(order))
    base = np.arange(x.shape[0] * x.shape[1], dtype=np.int64).reshape(x.shape[:2] + (1,) * len(sizes))
    indices = jnp.asarray((base * places.size + places).astype(index_dtype(ctx)))
    wide = padded(x, window, _lowest(x.dtype))
    wide_indices = padded(indices, window, np.asarray(-1, indices.dtype))
    best: Any = None
    where: Any = None
    for position in window.positions():
        value, index = shifted(wide, window, position), shifted(wide_indices, window, position)
        if best is None:
            best, where = value, index
            continue
        better = (value > best) | ((where < 0) & (index >= 0))
        best, where = jnp.where(better, value, best), jnp.where(better, index, where)
    return best, where


@operator(ONNX, "AveragePool", since=(1, 7, 10, 11, 19, 22))
@rounds_once
def average_pool(ctx: Context, node: Node, x: Array) -> Array:
    """Mean over windows of ``[N, C, *in]``; padding counts only with ``count_include_pad`` (ONNX
    AveragePool).
    """
    window = window_of(node, x.shape[2:], ints(node["kernel_shape"]))
    total = sum_of_windows(x, window)
    counted = np.ones((1, 1, *x.shape[2:]), np.float32)
    with_pads = bool(node.get("count_include_pad", 0))
    counts = _counts(counted, window, with_pads)
    return total / counts.astype(x.dtype)


def _counts(ones: np.ndarray, window: Window, with_pads: bool) -> np.ndarray:
    """How many elements each window averages, in NumPy: real ones, and padding if it counts (never
    ceil_mode's extra).
    """
    spatial = [(b, a) for b, a in window.pads]
    wide = np.pad(ones, [(0, 0), (0, 0), *spatial], constant_values=1.0 if with_pads else 0.0)
    wide = np.pad(wide, [(0, 0), (0, 0), *((0, e) for e in window.extra)])
    counts: Any = 0
    for position in window.positions():
        cut = tuple(
            slice(p * d, p * d + (c - 1) * s + 1, s)
            for p, d, c, s in zip(
                position, window.dilations, window.output(ones.shape[2:]), window.strides, strict=True
            )
        )
        counts = counts + wide[(slice(None), slice(None), *cut)]
    return np.asarray(np.maximum(counts, 1))


def sum_of_windows(x: Array, window: Window) -> Array:
    """Sum over each window."""
    return reduced(padded(x, window, jnp.zeros((), x.dtype)), window, jnp.add)


def _spatial(x: Array) -> tuple[int, ...]:
    """The axes behind samples and channels."""
    if x.ndim < 2:
        raise InputMismatch(f"an input of rank {x.ndim} has no axes of samples and channels")
    return tuple(range(2, x.ndim))


@operator(ONNX, "GlobalAveragePool", since=(1, 22))
@rounds_once
def global_average_pool(ctx: Context, node: Node, x: Array) -> Array:
    """Mean over all spatial axes, kept as 1 (ONNX GlobalAveragePool)."""
    return jnp.mean(x, axis=_spatial(x), keepdims=True)


@operator(ONNX, "GlobalMaxPool", since=(1, 22))
def global_max_pool(ctx: Context, node: Node, x: Array) -> Array:
    """Maximum over all spatial axes, kept as 1; the gradient as of `maximum_of_windows` (ONNX GlobalMaxPool)."""
    axes = _spatial(x)
    result = jnp.max(x, axis=axes, keepdims=True)
    return to_equals(x, result, axes) if ctx.training and is_float(x) else result


def _power_mean(x: Array, p: float, total: Any) -> Array:
    """The p-norm from a sum of p-th powers."""
    return jnp.power(total(jnp.power(jnp.abs(x), p)), 1.0 / p).astype(x.dtype)


@operator(ONNX, "LpPool", since=(1, 2, 11, 18, 22))
@rounds_once
def lp_pool(ctx: Context, node: Node, x: Array) -> Array:
    """The ``p``-norm over windows (ONNX LpPool)."""
    window = window_of(node, x.shape[2:], ints(node["kernel_shape"]))
    return _power_mean(x, node.get("p", 2), lambda t: sum_of_windows(t, window))


@operator(ONNX, "GlobalLpPool", since=(1, 2, 22))
@rounds_once
def global_lp_pool(ctx: Context, node: Node, x: Array) -> Array:
    """The ``p``-norm over all spatial axes, kept as 1 (ONNX GlobalLpPool)."""
    axes = _spatial(x)
    return _power_mean(x, node.get("p", 2), lambda t: jnp.sum(t, axis=axes, keepdims=True))


@operator(ONNX, "MaxUnpool", since=(9, 11, 22))
def max_unpool(ctx: Context, node: Node, x: Array, indices: Array, shape: Array = None) -> Array:
    """x scattered to where MaxPool's indices say, zeros elsewhere (ONNX MaxUnpool)."""
    rank = x.ndim - 2
    kernel = ints(node["kernel_shape"])
    strides = ints(node.get("strides") or (1,) * rank)
    pads = ints(node.get("pads") or (0,) * 2 * rank)
    natural = tuple(
        (n - 1) * s - (pads[i] + pads[i + rank]) + k
        for i, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
    )
    target = (*x.shape[:2], *natural)
    flat = jnp.zeros(int(np.prod(target)), x.dtype).at[indices.reshape(-1)].set(x.reshape(-1))
    made = flat.reshape(target)
    if shape is None:
        return made
    wanted = ints(ctx.constant(2))
    if len(wanted) != x.ndim or any(w < t for w, t in zip(wanted, target, strict=True)):
        raise UnsupportedError(f"{node.describe()} has output_shape {wanted} smaller than {target}")
    return lax.pad(made, jnp.zeros((), x.dtype), [(0, w - t, 0) for w, t in zip(wanted, target, strict=True)])
