"""Reductions by segment, sequences turned around, windows and blocks of images, pooling in three dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.numerics.precision import is_float
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import Array, computes


def _reduced(kind: str, x: Array, ids: Array, count: int) -> Array:
    """``[count, ...]``: rows with equal ids reduced. Segments without rows are 0, of Max and Min the extreme value."""
    lead = np.ndim(ids)
    rows, flat = x.reshape(-1, *x.shape[lead:]), jnp.asarray(ids).reshape(-1)
    wide = rows.astype(jnp.float32) if rows.dtype == jnp.float16 else rows
    if kind == "Prod":  # Products of rows, whose gradient is known where rows repeat.
        own = (flat[None] == jnp.arange(count)[:, None]).reshape(count, len(flat), *[1] * (wide.ndim - 1))
        return jnp.prod(jnp.where(own, wide[None], jnp.ones((), wide.dtype)), 1).astype(x.dtype)
    functions = {
        "Sum": jax.ops.segment_sum,
        "Max": jax.ops.segment_max,
        "Min": jax.ops.segment_min,
    }
    return functions[kind](wide, flat, count).astype(x.dtype)


@computes("UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def _unsorted(ctx: Context, node: Node, x: Array, ids: Array, count: Array) -> Array:
    """Ids below 0 count for nothing; segments without rows have the extreme value of the type."""
    kind, size = node.op_type.removeprefix("UnsortedSegment"), int(ctx.constant(2))
    kept = jnp.where(jnp.asarray(ids) < 0, size, ids)
    result = _reduced(kind, x, kept, size + 1)[:size]
    return result if kind == "Prod" else _within_type(result)


def _within_type(x: Array) -> Array:
    """Infinities as the extreme values of the type, which TensorFlow has for segments without rows."""
    limits: np.finfo | np.iinfo = np.finfo(x.dtype) if np.dtype(x.dtype).kind == "f" else np.iinfo(x.dtype)
    return jnp.clip(x, jnp.asarray(limits.min, x.dtype), jnp.asarray(limits.max, x.dtype))


@computes(
    *(f"Segment{kind}{version}" for kind in ("Max", "Min", "Prod") for version in ("", "V2")),
    "SegmentSum",
    "SegmentMean",
)
def _sorted(ctx: Context, node: Node, x: Array, ids: Array, *counts: Array) -> Array:
    """As many segments as the program says, or as the ids do, which must be known then. Empty ones are 0, of Prod 1, of
    the second versions of Max and Min the extreme value of the type."""
    kind = node.op_type.removeprefix("Segment").removesuffix("V2")
    count = int(ctx.constant(2)) if counts else int(np.max(ctx.constant(1))) + 1
    rows = jax.ops.segment_sum(jnp.ones(x.shape[0], jnp.int32), jnp.asarray(ids), count)
    shape = (count,) + (1,) * (x.ndim - 1)
    if kind in ("Max", "Min") and counts:
        return _within_type(_reduced(kind, x, ids, count))
    if kind in ("Max", "Min"):
        return jnp.where(rows.reshape(shape) > 0, _reduced(kind, x, ids, count), jnp.zeros((), x.dtype))
    if kind != "Mean":
        return _reduced(kind, x, ids, count)
    total, several = _reduced("Sum", x, ids, count), jnp.maximum(rows, 1).reshape(shape).astype(x.dtype)
    return total / several if is_float(x) else lax.div(*jnp.broadcast_arrays(total, several))


@computes("Roll")
def _roll(ctx: Context, node: Node, x: Array, shift: Array, axis: Array) -> Array:
    shifts, axes = np.atleast_1d(ctx.constant(1)), np.atleast_1d(ctx.constant(2))
    return jnp.roll(x, tuple(int(s) for s in shifts), tuple(int(a) for a in axes))


@computes("ReverseSequence", attributes="seq_dim batch_dim")
def _reverse_sequence(ctx: Context, node: Node, x: Array, lengths: Array) -> Array:
    along, batch = node["seq_dim"], node["batch_dim"]
    moved = jnp.moveaxis(x, (batch, along), (0, 1))
    place = jnp.arange(moved.shape[1])[None]
    count = jnp.asarray(lengths)[:, None]
    source = jnp.where(place < count, count - 1 - place, place)
    turned = jax.vmap(lambda row, at: row[at])(moved, source)
    return jnp.moveaxis(turned, (0, 1), (batch, along))


@computes("LinSpace")
def _linspace(ctx: Context, node: Node, start: Array, stop: Array, count: Array) -> Array:
    return jnp.linspace(start, stop, int(ctx.constant(2)), dtype=jnp.asarray(start).dtype)


@computes("Bincount")
def _bincount(ctx: Context, node: Node, values: Array, size: Array, weights: Array) -> Array:
    count = int(ctx.constant(1))
    ones = jnp.ones(values.size, jnp.int32) if not weights.size else weights.reshape(-1)
    flat = jnp.where(values.reshape(-1) < count, values.reshape(-1), count)
    return jax.ops.segment_sum(ones, flat, count + 1)[:count]


@computes("DenseBincount", attributes="binary_output")
def _dense_bincount(ctx: Context, node: Node, values: Array, size: Array, weights: Array) -> Array:
    count = int(ctx.constant(1))

    def one(row: Array, own: Array) -> Array:
        total = jax.ops.segment_sum(own, jnp.where(row < count, row, count), count + 1)[:count]
        return jnp.minimum(total, 1) if node["binary_output"] else total

    ones = jnp.ones(values.shape, weights.dtype) if not weights.size else weights
    return jax.vmap(one)(values, ones) if values.ndim == 2 else one(values, ones)


@computes("SpaceToBatchND")
def _space_to_batch(ctx: Context, node: Node, x: Array, blocks: Array, paddings: Array) -> Array:
    sizes, pads = [int(b) for b in ctx.constant(1)], np.asarray(ctx.constant(2))
    count = len(sizes)
    x = jnp.pad(x, [(0, 0), *((int(a), int(b)) for a, b in pads), *[(0, 0)] * (x.ndim - 1 - count)])
    batch, rest = x.shape[0], x.shape[1 + count :]
    outer = [x.shape[1 + i] // sizes[i] for i in range(count)]
    split = x.reshape(batch, *(d for pair in zip(outer, sizes, strict=True) for d in pair), *rest)
    inner = [2 + 2 * i for i in range(count)]
    order = [*inner, 0, *(i - 1 for i in inner), *range(1 + 2 * count, split.ndim)]
    return split.transpose(order).reshape(batch * int(np.prod(sizes)), *outer, *rest)


@computes("BatchToSpaceND")
def _batch_to_space(ctx: Context, node: Node, x: Array, blocks: Array, crops: Array) -> Array:
    sizes, cut = [int(b) for b in ctx.constant(1)], np.asarray(ctx.constant(2))
    count = len(sizes)
    batch, rest = x.shape[0] // int(np.prod(sizes)), x.shape[1 + count :]
    split = x.reshape(*sizes, batch, *x.shape[1 : 1 + count], *rest)
    order = [count, *(d for i in range(count) for d in (count + 1 + i, i)), *range(2 * count + 1, split.ndim)]
    joined = split.transpose(order).reshape(batch, *(x.shape[1 + i] * sizes[i] for i in range(count)), *rest)
    spans = [slice(int(a), joined.shape[1 + i] - int(b)) for i, (a, b) in enumerate(cut)]
    return joined[(slice(None), *spans)]


@computes("ExtractImagePatches", attributes="ksizes strides rates padding")
def _patches(ctx: Context, node: Node, x: Array) -> Array:
    """``[batch, rows, columns, high * wide * channels]``: the values of each window, by row, column and channel."""
    high, wide = node["ksizes"][1:3]
    channels = x.shape[-1]
    patches = lax.conv_general_dilated_patches(
        x, (high, wide), node["strides"][1:3], node["padding"], rhs_dilation=node["rates"][1:3],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    split = patches.reshape(*patches.shape[:3], channels, high * wide)
    return jnp.swapaxes(split, -1, -2).reshape(patches.shape)


@computes("MaxPool3D", "AvgPool3D", attributes="ksize strides padding data_format")
def _pool3(ctx: Context, node: Node, x: Array) -> Array:
    window, strides = tuple(node["ksize"]), tuple(node["strides"])  # In the order of the data.
    if node.op_type == "MaxPool3D":
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, node["padding"])
    total = lax.reduce_window(x.astype(jnp.float32), 0.0, lax.add, window, strides, node["padding"])
    ones = jnp.ones(x.shape, jnp.float32)
    count = lax.reduce_window(ones, 0.0, lax.add, window, strides, node["padding"])
    return (total / count).astype(x.dtype)


@computes("CumulativeLogsumexp", attributes="exclusive reverse")
def _log_cumulative(ctx: Context, node: Node, x: Array, axis: Array) -> Array:
    along = int(ctx.constant(1))
    if node["reverse"]:
        x = jnp.flip(x, along)
    total = lax.associative_scan(jnp.logaddexp, x, axis=along)
    if node["exclusive"]:
        first = jnp.full_like(lax.slice_in_dim(total, 0, 1, axis=along), -jnp.inf)
        total = jnp.concatenate([first, lax.slice_in_dim(total, 0, x.shape[along] - 1, axis=along)], along)
    return jnp.flip(total, along) if node["reverse"] else total


@computes("Conv3DBackpropInputV2", attributes="strides padding data_format dilations")
def _transposed3(ctx: Context, node: Node, sizes: Array, w: Array, y: Array) -> Array:
    shape = tuple(int(v) for v in ctx.constant(0))

    def forward(x: Array) -> Array:
        return lax.conv_general_dilated(
            x, w, node["strides"][1:4], node["padding"], rhs_dilation=node["dilations"][1:4],
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        )  # fmt: skip

    return jax.vjp(forward, jnp.zeros(shape, y.dtype))[1](y)[0]
