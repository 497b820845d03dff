"""Pooling (ONNX), computed by `podrun.numerics.pools`; and the windows that nodes describe."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.core.errors import InputMismatch, UnsupportedError
from podrun.numerics.gradients import to_equals
from podrun.numerics.pools import (
    average_of_windows,
    maximum_of_windows,
    maximum_with_places,
    norm_of_windows,
    norm_over,
    unpooled,
)
from podrun.numerics.precision import is_float, rounds_once
from podrun.numerics.windows import Window, fitted_window
from podrun.onnx_models.ops.common import Array, index_dtype, ints
from podrun.onnx_models.ops.registry import ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


def window_of(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> Window:
    """The window of a convolution or pooling node over an input of spatial ``sizes``; InputMismatch if its
    attributes do not fit.
    """
    mode = node.get("auto_pad", "NOTSET")
    padding = mode if mode in ("SAME_UPPER", "SAME_LOWER", "VALID") else ints(node.get("pads") or ())
    strides, dilations = (ints(node.get(name) or ()) for name in ("strides", "dilations"))
    return fitted_window(sizes, kernel, strides, dilations, padding, bool(node.get("ceil_mode", 0)))


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
    counted = jnp.asarray((base * places.size + places).astype(index_dtype(ctx)))
    return maximum_with_places(x, window, counted)


@operator(ONNX, "AveragePool", since=(1, 7, 10, 11, 19, 22))
@rounds_once
def average_pool(ctx: Context, node: Node, x: Array) -> Array:
    """Mean over windows of ``[N, C, *in]``; padding counts only with ``count_include_pad`` (ONNX AveragePool)."""
    window = window_of(node, x.shape[2:], ints(node["kernel_shape"]))
    return average_of_windows(x, window, bool(node.get("count_include_pad", 0)))


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
    """Maximum over all spatial axes, kept as 1; the gradient as MaxPool's (ONNX GlobalMaxPool)."""
    axes = _spatial(x)
    result = jnp.max(x, axis=axes, keepdims=True)
    return to_equals(x, result, axes) if ctx.training and is_float(x) else result


@operator(ONNX, "LpPool", since=(1, 2, 11, 18, 22))
@rounds_once
def lp_pool(ctx: Context, node: Node, x: Array) -> Array:
    """The ``p``-norm over windows (ONNX LpPool)."""
    return norm_of_windows(x, window_of(node, x.shape[2:], ints(node["kernel_shape"])), node.get("p", 2))


@operator(ONNX, "GlobalLpPool", since=(1, 2, 22))
@rounds_once
def global_lp_pool(ctx: Context, node: Node, x: Array) -> Array:
    """The ``p``-norm over all spatial axes, kept as 1 (ONNX GlobalLpPool)."""
    return norm_over(x, _spatial(x), node.get("p", 2))


@operator(ONNX, "MaxUnpool", since=(9, 11, 22))
def onnx_max_unpool(ctx: Context, node: Node, x: Array, indices: Array, shape: Array = None) -> Array:
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
    flat = unpooled(x.reshape(1, -1), indices.reshape(1, -1), int(np.prod(target)))
    dense = flat.reshape(target)
    if shape is None:
        return dense
    wanted = ints(ctx.constant(2))
    if len(wanted) != x.ndim or any(w < t for w, t in zip(wanted, target, strict=True)):
        raise UnsupportedError(f"{node.describe()} has output_shape {wanted} smaller than {target}")
    return lax.pad(
        dense, jnp.zeros((), x.dtype), [(0, w - t, 0) for w, t in zip(wanted, target, strict=True)]
    )
