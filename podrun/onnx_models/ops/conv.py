"""Convolution: plain, grouped, transposed, deformable, causal with state, and folding columns into images.

XLA on CPUs is slow where groups are many, and slowest in their weight gradients (docs/decisions.md, 1). So:

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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.onnx_models.ops.common import Array, ints, is_half, rounds_once, same_dtype, widen
from podrun.onnx_models.ops.pooling import Window, padded, shifted, window_of
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context, InputMismatch


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
        raise InputMismatch(f"input and weights must have one rank of at least 3, not {x.ndim} and {w.ndim}")
    if x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise InputMismatch(f"{groups} groups do not fit {x.shape[1]} channels and weights {w.shape}")
    kernel = node.get("kernel_shape")
    if kernel and tuple(kernel) != w.shape[2:]:
        raise InputMismatch(f"kernel_shape {tuple(kernel)} is not that of the weights, {w.shape[2:]}")
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
        from podrun.onnx_models.ops.matmul import half_partials

        y = half_partials(weights[None], patches)
    else:
        one = batch == 1  # no axis to fold: the product as it stands, without transposes
        y = jnp.matmul(weights[None], patches) if one else jnp.einsum("gmk,ngko->ngmo", weights, patches)
    return y.reshape(batch, w.shape[0], *out)


def _transposed_pads(
    node: Node,
    sizes: tuple[int, ...],
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    extra: tuple[int, ...],
    former: bool,
) -> tuple[tuple[int, int], ...]:
    """What is cut from the full transposed convolution (ONNX ConvTranspose: pads, output_shape, auto_pad)."""
    rank = len(sizes)
    wanted = node.get("output_shape")
    mode = node.get("auto_pad", "NOTSET")
    full = tuple((n - 1) * s + e + x for n, s, e, x in zip(sizes, strides, extents, extra, strict=True))
    if wanted or mode in ("SAME_UPPER", "SAME_LOWER"):
        target = ints(wanted)[-rank:] if wanted else tuple(n * s for n, s in zip(sizes, strides, strict=True))
        cuts = []
        for have, want in zip(full, target, strict=True):
            total = have - want
            small, large = total // 2, total - total // 2
            # Before opset 11 ONNX had it the other way round, and the SDK has it so for opset 11 too.
            cuts.append((small, large) if (mode == "SAME_UPPER") != former else (large, small))
        return tuple(cuts)
    pads = ints(node.get("pads") or (0,) * 2 * rank) if mode == "NOTSET" else (0,) * 2 * rank
    return tuple(zip(pads[:rank], pads[rank:], strict=True))


@operator(ONNX, "ConvTranspose", since=(1, 11, 22))
@rounds_once
def conv_transpose(ctx: Context, node: Node, x: Array, w: Array, bias: Array = None) -> Array:
    """The transpose of convolution: ``[N, C, *in]`` with ``[C, M/group, *kernel]`` (ONNX ConvTranspose)."""
    same_dtype(x, w)
    rank, groups = x.ndim - 2, node.get("group", 1)
    kernel = w.shape[2:]
    if x.shape[1] != w.shape[0]:
        raise InputMismatch(f"{x.shape[1]} channels do not fit weights {w.shape}")
    strides = ints(node.get("strides") or (1,) * rank)
    dilations = ints(node.get("dilations") or (1,) * rank)
    extra = ints(node.get("output_padding") or (0,) * rank)
    extents = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    cuts = _transposed_pads(node, x.shape[2:], extents, strides, extra, ctx.sdk is not None)
    pads = [(e - 1 - b, e - 1 - a + o) for e, (b, a), o in zip(extents, cuts, extra, strict=True)]
    flipped = jnp.flip(w, tuple(range(2, w.ndim)))
    flipped = flipped.reshape(groups, w.shape[0] // groups, w.shape[1], *kernel)
    flipped = jnp.swapaxes(flipped, 1, 2)
    order = tuple(range(x.ndim))
    layout = lax.ConvDimensionNumbers(order, order, order)

    def one(part: Array, weights: Array) -> Array:
        return lax.conv_general_dilated(
            part,
            weights,
            (1,) * rank,
            pads,
            lhs_dilation=strides,
            rhs_dilation=dilations,
            dimension_numbers=layout,
        )

    if groups == 1:
        y = one(x, flipped[0])
    else:
        parts = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
        y = jnp.concatenate([one(parts[:, g], flipped[g]) for g in range(groups)], axis=1)
    return y if bias is None else y + bias.reshape((1, -1) + (1,) * rank)


@operator(GRAPHCORE, "MultiConv")
def multi_conv(ctx: Context, node: Node, *inputs: Array) -> tuple[Array, ...]:
    """Several convolutions at once: (x, w) or (x, w, bias) after one another; attributes one list per
    convolution.

    PopART flattens the lists of ``strides``, ``dilations`` and ``pads``, and keeps lengths by the inputs'
    ranks.
    """
    groups = _triples(node, inputs)
    at = {"strides": 0, "dilations": 0, "pads": 0}
    results = []
    for x, w, b in groups:
        rank = x.ndim - 2
        attributes: dict[str, Any] = {"group": x.shape[1] // w.shape[1]}
        for name, length in (("strides", rank), ("dilations", rank), ("pads", 2 * rank)):
            flat = _flat(node.get(name) or ())
            if flat:
                attributes[name] = flat[at[name] : at[name] + length]
                at[name] += length
        part = Node(node.op_type, node.domain, node.name, node.inputs, node.outputs, attributes, node.opset)
        results.append(convolve(part, x, w, b))
    return tuple(results)


def _flat(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for item in values for v in (item if isinstance(item, (tuple, list)) else (item,)))


def _triples(node: Node, inputs: tuple[Array, ...]) -> list[tuple[Array, Array, Array | None]]:
    """Data, weights and bias of each: by the attribute ``counts``, else a vector behind weights is a bias."""
    triples: list[tuple[Array, Array, Array | None]] = []
    rest, counts = list(inputs), list(node.get("counts") or ())
    while rest:
        x, w = rest.pop(0), rest.pop(0)
        biased = counts.pop(0) == 3 if counts else bool(rest) and rest[0] is not None and rest[0].ndim == 1
        triples.append((x, w, rest.pop(0) if biased else None))
    return triples


@operator(ONNX, "CausalConvWithState", since=(27,))
def causal_conv_with_state(
    ctx: Context, node: Node, x: Array, w: Array, bias: Array = None, past: Array = None
) -> tuple[Array, Array]:
    """Depthwise convolution over past and present only; also the last k - 1 positions (ONNX
    CausalConvWithState).
    """
    width = w.shape[-1]
    before = jnp.zeros((*x.shape[:2], width - 1), x.dtype) if past is None else past
    line = jnp.concatenate([before, x], axis=2)
    attributes = {"group": x.shape[1]}
    part = Node("Conv", ONNX, node.name, node.inputs, node.outputs, attributes, node.opset)
    y = convolve(part, line, w, bias)
    if node.get("activation", "none") in ("silu", "swish"):
        wide = y.astype(jnp.float32) if y.dtype.itemsize < 4 else y
        y = (wide * jax.nn.sigmoid(wide)).astype(y.dtype)
    return y, line[..., line.shape[2] - (width - 1) :]


def bilinear(image: Array, position: tuple[Array, ...]) -> Array:
    """``image [C, *spatial]`` at fractional positions, linear along each axis, 0 outside: ``[C,
    *positions]``.
    """
    total: Any = 0
    floors = [jnp.floor(p) for p in position]
    for corner in np.ndindex(*(2,) * len(position)):
        weight: Any = 1
        inside: Any = True
        index = []
        for side, p, low, size in zip(corner, position, floors, image.shape[1:], strict=True):
            at = low + side
            weight = weight * (1 - jnp.abs(p - at))
            inside = inside & (at >= 0) & (at <= size - 1)
            index.append(jnp.clip(at, 0, size - 1).astype(jnp.int32))
        total = total + jnp.where(inside, weight, 0) * image[(slice(None), *index)]
    return total


@operator(ONNX, "DeformConv", since=(19, 22))
@rounds_once
def deform_conv(
    ctx: Context, node: Node, x: Array, w: Array, offset: Array, bias: Array = None, mask: Array = None
) -> Array:
    """Convolution whose sampling positions are moved by ``offset`` and weighted by ``mask`` (ONNX
    DeformConv).
    """
    window = window_of(node, x.shape[2:], w.shape[2:])
    groups, offset_groups = node.get("group", 1), node.get("offset_group", 1)
    rank, out = x.ndim - 2, window.output(x.shape[2:])
    count = int(np.prod(window.kernel))
    offset = offset.reshape(x.shape[0], offset_groups, count, rank, *out)
    weights = None if mask is None else mask.reshape(x.shape[0], offset_groups, count, *out)
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
    if weights is not None:
        patches = patches * weights[:, :, None]
    each = x.shape[1] // groups * count
    patches = patches.reshape(x.shape[0], groups, each, int(np.prod(out)))
    y = jnp.einsum("gmk,ngko->ngmo", w.reshape(groups, w.shape[0] // groups, each), patches)
    y = y.reshape(x.shape[0], w.shape[0], *out)
    return y if bias is None else y + bias.reshape((1, -1) + (1,) * rank)


@operator(ONNX, "Col2Im", since=(18,))
def col2im(ctx: Context, node: Node, x: Array, image_shape: Array, block_shape: Array) -> Array:
    """Columns ``[N, C * block, L]`` summed back to where they came from in an image (ONNX Col2Im)."""
    image, block = ints(ctx.constant(1)), ints(ctx.constant(2))
    attributes = {k: v for k, v in node.attributes.items() if k in ("dilations", "pads", "strides")}
    part = Node("Col2Im", ONNX, node.name, node.inputs, node.outputs, attributes, node.opset)
    window = window_of(part, image, block)
    out = window.output(image)
    taps = int(np.prod(block))
    columns = x.reshape(x.shape[0], x.shape[1] // taps, taps, *out)
    wide = tuple(n + b + a for n, (b, a) in zip(image, window.pads, strict=True))
    total = jnp.zeros((*columns.shape[:2], *wide), x.dtype)
    for k, position in enumerate(window.positions()):
        cut = tuple(
            slice(p * d, p * d + (c - 1) * s + 1, s)
            for p, d, c, s in zip(position, window.dilations, out, window.strides, strict=True)
        )
        total = total.at[(slice(None), slice(None), *cut)].add(columns[:, :, k])
    inner = tuple(slice(b, b + n) for n, (b, _) in zip(image, window.pads, strict=True))
    return total[(slice(None), slice(None), *inner)]
