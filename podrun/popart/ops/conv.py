"""Convolution.

XLA on CPUs is slow where groups are many, and slowest in their weight gradients (design, 3.1). So:

* one group, or any number where the library computes it and nothing is differentiated (``ctx.grouped``): a
  plain convolution; `podrun.device.xla.rewrite` finds the library when it is compiled;
* depthwise (one input channel a group): a sum over kernel positions of shifted products;
* two groups: two convolutions; more: shifted patches of all kernel positions stacked, then one batched
matrix product.

All differentiate and batch by JAX's own rules: under ``vmap`` with unbatched weights the batch folds into N.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from podrun.popart.ops.common import Array, is_half, same_dtype, widen
from podrun.popart.ops.registry import ONNX, Context, Node, operator
from podrun.popart.ops.windows import Window, padded, shifted, window_of


@operator(ONNX, "Conv", since=(1, 11, 22))
def conv(ctx: Context, node: Node, x: Array, w: Array, bias: Array = None) -> Array:
    """Convolution (correlation) of ``[N, C, *in]`` with ``[M, C/group, *kernel]`` to ``[N, M, *out]``
    (ONNX Conv).
    """
    same_dtype(*(t for t in (x, w, bias) if t is not None))
    return convolve(node, x, w, bias, ctx.grouped)


def convolve(node: Node, x: Array, w: Array, bias: Array = None, grouped: bool = False) -> Array:
    """The convolution that a node's attributes describe, in float32 for halves and rounded once.

    ``grouped``: as one, however many groups there are.
    """
    groups = node.get("group", 1)
    if x.ndim != w.ndim or x.ndim < 3:
        raise ValueError(f"input and weights must have one rank of at least 3, not {x.ndim} and {w.ndim}")
    if x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ValueError(f"{groups} groups do not fit {x.shape[1]} channels and weights {w.shape}")
    kernel = node.get("kernel_shape")
    if kernel and tuple(kernel) != w.shape[2:]:
        raise ValueError(f"kernel_shape {tuple(kernel)} is not that of the weights, {w.shape[2:]}")
    window = window_of(node, x.shape[2:], w.shape[2:])
    dtype = x.dtype
    half = is_half(x)
    if half and node.get("__partials_type") == "HALF":
        y = _grouped(x, w, groups, window, half=True)
    else:
        y = correlate(widen(x), widen(w), groups, window, grouped and x.ndim == 4)
    if bias is not None:
        y = y + widen(bias).reshape((1, -1) + (1,) * (x.ndim - 2)).astype(y.dtype)
    return y.astype(dtype)


def correlate(x: Array, w: Array, groups: int, window: Window, grouped: bool = False) -> Array:
    """``[N, C, *in]`` with ``[M, C/groups, *kernel]``, the formulation picked by the number of groups."""
    if groups == 1 or grouped:
        return lax.conv_general_dilated(
            x,
            w,
            window.strides,
            window.pads,
            rhs_dilation=window.dilations,
            dimension_numbers=_layout(x.ndim),
            feature_group_count=groups,
        )
    if w.shape[1] == 1:
        return _depthwise(x, w, groups, window)
    if groups == 2:
        parts = zip(jnp.split(x, 2, axis=1), jnp.split(w, 2, axis=0), strict=True)
        return jnp.concatenate([correlate(a, b, 1, window) for a, b in parts], axis=1)
    return _grouped(x, w, groups, window)


def _layout(rank: int) -> lax.ConvDimensionNumbers:
    order = tuple(range(rank))
    return lax.ConvDimensionNumbers(order, order, order)


def _depthwise(x: Array, w: Array, groups: int, window: Window) -> Array:
    """Sum over kernel positions of shifted input times one weight per channel; ``M/groups`` outputs per
    channel.
    """
    x = padded(x, window, jnp.zeros((), x.dtype))
    multiplier = w.shape[0] // groups
    if multiplier > 1:
        x = jnp.repeat(x, multiplier, axis=1)
    total: Any = None
    for position in window.positions():
        weights = w[(slice(None), 0, *position)].reshape((1, -1) + (1,) * (x.ndim - 2))
        term = shifted(x, window, position) * weights
        total = term if total is None else total + term
    return total


def _grouped(x: Array, w: Array, groups: int, window: Window, half: bool = False) -> Array:
    """Patches ``[N, groups, C/groups * positions, out]`` times weights ``[groups, M/groups, C/groups *
    positions]``.
    """
    x = padded(x, window, jnp.zeros((), x.dtype))
    patches = jnp.stack([shifted(x, window, position) for position in window.positions()], axis=2)
    batch, channels, count, *out = patches.shape
    each = channels // groups * count
    patches = patches.reshape(batch, groups, each, math.prod(out))
    weights = w.reshape(groups, w.shape[0] // groups, each)
    if half:
        from podrun.popart.ops.matmul import half_partials

        y = half_partials(weights[None], patches)
    else:
        one = batch == 1  # no axis to fold: the product as it stands, without transposes
        y = jnp.matmul(weights[None], patches) if one else jnp.einsum("gmk,ngko->ngmo", weights, patches)
    return y.reshape(batch, w.shape[0], *out)
