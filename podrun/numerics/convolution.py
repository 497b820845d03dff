"""Convolution: plain, grouped, transposed, deformable; columns of windows and the images they come from.

XLA on CPUs is slow where groups are many, and slowest in their weight gradients (docs/decisions.md, 1). So:

* one group, or any number where the library computes it and nothing is differentiated (``grouped``): a plain
  convolution; `podrun.device.xla.rewrite` finds the library when it is compiled;
* depthwise (one input channel a group): a sum over kernel positions of shifted products;
* two groups: two convolutions; more: shifted patches of all kernel positions stacked, then one batched matrix product.

All differentiate and batch by JAX's own rules: under ``vmap`` with unbatched weights the batch folds into N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.core.errors import InputMismatch, present
from podrun.numerics.precision import half_partials, is_half, widen
from podrun.numerics.windows import Window, padded, shifted, slices


def convolved(
    x: Array,
    w: Array,
    bias: Array | None,
    groups: int,
    window: Window,
    *,
    half_sums: bool = False,
    grouped: bool = False,
) -> Array:
    """Convolution (correlation) of ``[N, C, *in]`` with ``[M, C / groups, *kernel]`` to ``[N, M, *out]``.

    Halves are computed in float32 and rounded once, or, with ``half_sums``, with partial sums that are halves
    (`half_partials`). ``grouped``: as one convolution, however many groups there are. Raises InputMismatch if channels
    do not fit.
    """
    if x.ndim != w.ndim or x.ndim < 3:
        raise InputMismatch(f"input and weights must have one rank of at least 3, not {x.ndim} and {w.ndim}")
    if x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise InputMismatch(f"{groups} groups do not fit {x.shape[1]} channels and weights {w.shape}")
    if is_half(x) and half_sums:
        y = _grouped(x, w, groups, window, half=True)
    else:
        y = correlate(widen(x), widen(w), groups, window, grouped and x.ndim == 4)
    if bias is not None:
        y = y + along_channels(widen(bias), x.ndim).astype(y.dtype)
    return y.astype(x.dtype)


def along_channels(v: Array, rank: int) -> Array:
    """A value for each channel, in a shape that broadcasts over ``[N, C, *spatial]`` of ``rank`` axes."""
    return v.reshape((1, -1) + (1,) * (rank - 2))


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
    """Sum over kernel positions of shifted input times one weight per channel; ``M/groups`` outputs per channel."""
    x = padded(x, window, jnp.zeros((), x.dtype))
    multiplier = w.shape[0] // groups
    if multiplier > 1:
        x = jnp.repeat(x, multiplier, axis=1)
    total: Array | None = None
    for position in window.positions():
        weights = w[(slice(None), 0, *position)].reshape((1, -1) + (1,) * (x.ndim - 2))
        term = shifted(x, window, position) * weights
        total = term if total is None else total + term
    return present(total, "a window has at least one position")


def _grouped(x: Array, w: Array, groups: int, window: Window, half: bool = False) -> Array:
    """Patches ``[N, groups, C/groups * positions, out]`` times weights ``[groups, M/groups, C/groups * positions]``."""
    x = padded(x, window, jnp.zeros((), x.dtype))
    patches = jnp.stack([shifted(x, window, position) for position in window.positions()], axis=2)
    batch, channels, count, *out = patches.shape
    per_group = channels // groups * count
    patches = patches.reshape(batch, groups, per_group, math.prod(out))
    weights = w.reshape(groups, w.shape[0] // groups, per_group)
    if half:
        y = half_partials(weights[None], patches)
    else:
        one = batch == 1  # no axis to fold: the product as it stands, without transposes
        y = jnp.matmul(weights[None], patches) if one else jnp.einsum("gmk,ngko->ngmo", weights, patches)
    return y.reshape(batch, w.shape[0], *out)


def transposed(
    x: Array,
    w: Array,
    groups: int,
    window: Window,
    added: Sequence[int],
    *,
    one_by_one: bool,
) -> Array:
    """The transpose of a convolution over ``window``: ``[N, C, *in]`` with ``[C, M / groups, *kernel]``.

    ``window.pads`` is cut from the full result and ``added`` behind each of its axes. ``one_by_one``: a convolution for
    each group, as PopART's front end has always had it; else one in groups, as PopTorch's has: XLA adds up in another
    order there. Raises InputMismatch if channels do not fit.
    """
    if x.shape[1] != w.shape[0]:
        raise InputMismatch(f"{x.shape[1]} channels do not fit weights {w.shape}")
    pads = [
        (e - 1 - before, e - 1 - after + more)
        for e, (before, after), more in zip(window.extents(), window.pads, added, strict=True)
    ]
    turned = jnp.flip(w, tuple(range(2, w.ndim)))
    turned = jnp.swapaxes(turned.reshape(groups, w.shape[0] // groups, *w.shape[1:]), 1, 2)

    def run(part: Array, weights: Array, groups: int) -> Array:
        return lax.conv_general_dilated(
            part,
            weights,
            (1,) * (x.ndim - 2),
            pads,
            lhs_dilation=window.strides,
            rhs_dilation=window.dilations,
            dimension_numbers=_layout(x.ndim),
            feature_group_count=groups,
        )

    if groups == 1 or not one_by_one:
        return run(x, turned.reshape(groups * w.shape[1], -1, *w.shape[2:]), groups)
    parts = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return jnp.concatenate([run(parts[:, g], turned[g], 1) for g in range(groups)], axis=1)


def columns_of(x: Array, window: Window) -> Array:
    """Every window of an image ``[N, C, *in]`` as a column: ``[N, C * window, places]``."""
    patches = lax.conv_general_dilated_patches(
        x, window.kernel, window.strides, window.pads, rhs_dilation=window.dilations
    )
    return patches.reshape(*patches.shape[:2], -1)


def image_of(columns: Array, sizes: Sequence[int], window: Window) -> Array:
    """Columns ``[N, C * window, places]`` added back to where they came from in images ``[N, C, *sizes]``."""
    out = window.output(sizes)
    taps = math.prod(window.kernel)
    parts = columns.reshape(columns.shape[0], columns.shape[1] // taps, taps, *out)
    wide = tuple(n + before + after for n, (before, after) in zip(sizes, window.pads, strict=True))
    total = jnp.zeros((*parts.shape[:2], *wide), columns.dtype)
    for k, position in enumerate(window.positions()):
        total = total.at[(slice(None), slice(None), *slices(window, position, out))].add(parts[:, :, k])
    inner = tuple(slice(before, before + n) for n, (before, _) in zip(sizes, window.pads, strict=True))
    return total[(slice(None), slice(None), *inner)]


def bilinear(image: Array, position: tuple[Array, ...]) -> Array:
    """``image [C, *spatial]`` at fractional positions, linear along each axis, 0 outside: ``[C,
    *positions]``.
    """
    total: Array | int = 0
    floors = [jnp.floor(p) for p in position]
    for corner in np.ndindex(*(2,) * len(position)):
        weight: Array | int = 1
        inside: Array | bool = True
        index = []
        for side, p, low, size in zip(corner, position, floors, image.shape[1:], strict=True):
            at = low + side
            weight = weight * (1 - jnp.abs(p - at))
            inside = inside & (at >= 0) & (at <= size - 1)
            index.append(jnp.clip(at, 0, size - 1).astype(jnp.int32))
        total = total + jnp.where(inside, weight, 0) * image[(slice(None), *index)]
    return jnp.asarray(total)


def deformed(
    x: Array, w: Array, offset: Array, mask: Array | None, window: Window, groups: tuple[int, int]
) -> Array:
    """Convolution whose sampling positions are moved by ``offset`` and weighted by ``mask``.

    ``groups``: of the weights, and of the offsets. ``offset [N, groups * positions * rank, *out]``, ``mask [N, groups *
    positions, *out]``. Source: Dai et al., Deformable Convolutional Networks, 2017; ONNX DeformConv.
    """
    weight_groups, offset_groups = groups
    rank, out = x.ndim - 2, window.output(x.shape[2:])
    count = int(np.prod(window.kernel))
    offset = offset.reshape(x.shape[0], offset_groups, count, rank, *out)
    base = np.meshgrid(
        *(np.arange(o) * s - b for o, s, (b, _) in zip(out, window.strides, window.pads, strict=True)),
        indexing="ij",
    )
    steps = np.asarray(list(window.positions())) * np.asarray(window.dilations)

    def sample(image: Array, moved: Array) -> Array:
        places = tuple(
            jnp.asarray(base[a][None] + steps[:, a].reshape((-1,) + (1,) * rank), x.dtype) + moved[:, a]
            for a in range(rank)
        )
        return bilinear(image, places)

    parts = x.reshape(x.shape[0], offset_groups, x.shape[1] // offset_groups, *x.shape[2:])
    patches = jax.vmap(jax.vmap(sample))(parts, offset)
    if mask is not None:
        patches = patches * mask.reshape(x.shape[0], offset_groups, count, *out)[:, :, None]
    per_group = x.shape[1] // weight_groups * count
    patches = patches.reshape(x.shape[0], weight_groups, per_group, int(np.prod(out)))
    weights = w.reshape(weight_groups, w.shape[0] // weight_groups, per_group)
    return jnp.einsum("gmk,ngko->ngmo", weights, patches).reshape(x.shape[0], w.shape[0], *out)
