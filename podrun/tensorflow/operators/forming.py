"""Operations on shapes: reshape, transpose, pad, slice, split, join. Sizes are known when the program is compiled."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType

import jax.numpy as jnp
import numpy as np

from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import Array, computes


def _ints(ctx: Context, index: int) -> list[int]:
    return [int(v) for v in np.atleast_1d(ctx.constant(index))]


@computes("Reshape", folds=True)
def _reshape(ctx: Context, node: Node, x: Array, shape: Array) -> Array:
    return ctx.xp.reshape(x, tuple(_ints(ctx, 1)) if np.size(ctx.constant(1)) else ())


@computes("Shape", attributes="output", folds=True)
def _shape(ctx: Context, node: Node, x: Array) -> Array:
    return np.asarray(np.shape(x), node["output"])


@computes("ShapeN", attributes="output", folds=True)
def _shapes(ctx: Context, node: Node, *inputs: Array) -> tuple[Array, ...]:
    return tuple(np.asarray(np.shape(x), node["output"]) for x in inputs)


@computes("Size", attributes="output", folds=True)
def _size(ctx: Context, node: Node, x: Array) -> Array:
    return np.asarray(int(np.prod(np.shape(x))), node["output"])


@computes("Rank", folds=True)
def _rank(ctx: Context, node: Node, x: Array) -> Array:
    return np.asarray(np.ndim(x), np.int32)


@computes("Fill", folds=True)
def _fill(ctx: Context, node: Node, shape: Array, value: Array) -> Array:
    sizes = tuple(_ints(ctx, 0)) if np.size(ctx.constant(0)) else ()
    return ctx.xp.full(sizes, value, dtype=np.asarray(value).dtype if ctx.xp is np else value.dtype)


@computes("Range", attributes="output", folds=True)
def _range(ctx: Context, node: Node, start: Array, limit: Array, delta: Array) -> Array:
    return np.arange(*(np.asarray(ctx.constant(i)).item() for i in range(3)), dtype=node["output"])


@computes("Tile", folds=True)
def _tile(ctx: Context, node: Node, x: Array, multiples: Array) -> Array:
    return ctx.xp.tile(x, tuple(_ints(ctx, 1)) if np.size(ctx.constant(1)) else ())


@computes("BroadcastTo")
def _broadcast(ctx: Context, node: Node, x: Array, shape: Array) -> Array:
    return jnp.broadcast_to(x, tuple(_ints(ctx, 1)))


@computes("BroadcastArgs", folds=True)
def _broadcast_sizes(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    return np.asarray(np.broadcast_shapes(tuple(_ints(ctx, 0)), tuple(_ints(ctx, 1))), np.int32)


@computes("ExpandDims", folds=True)
def _expand(ctx: Context, node: Node, x: Array, axis: Array) -> Array:
    return ctx.xp.expand_dims(x, int(np.asarray(ctx.constant(1)).item()))


@computes("Squeeze", attributes="squeeze_dims", folds=True)
def _squeeze(ctx: Context, node: Node, x: Array) -> Array:
    return ctx.xp.squeeze(x, tuple(node["squeeze_dims"]) or None)


@computes("Transpose", folds=True)
def _transpose(ctx: Context, node: Node, x: Array, axes: Array) -> Array:
    return ctx.xp.transpose(x, tuple(_ints(ctx, 1)) if x.ndim else ())


@computes("ConcatV2", folds=True)
def _concat(ctx: Context, node: Node, *inputs: Array) -> Array:
    axis = int(np.asarray(ctx.constant(len(inputs) - 1)).item())
    return ctx.xp.concatenate(inputs[:-1], axis)


@computes("Pack", attributes="axis", folds=True)
def _pack(ctx: Context, node: Node, *inputs: Array) -> Array:
    return ctx.xp.stack(inputs, node["axis"])


@computes("Unpack", attributes="axis num", folds=True)
def _unpack(ctx: Context, node: Node, x: Array) -> tuple[Array, ...]:
    return tuple(ctx.xp.moveaxis(x, node["axis"], 0)[i] for i in range(node["num"]))


@computes("Split", attributes="num_split")
def _split(ctx: Context, node: Node, axis: Array, x: Array) -> tuple[Array, ...]:
    return tuple(jnp.split(x, node["num_split"], int(np.asarray(ctx.constant(0)).item())))


@computes("SplitV", attributes="num_split")
def _split_sizes(ctx: Context, node: Node, x: Array, sizes: Array, axis: Array) -> tuple[Array, ...]:
    axis = int(np.asarray(ctx.constant(2)).item())
    lengths = _ints(ctx, 1)
    rest = x.shape[axis] - sum(n for n in lengths if n >= 0)
    lengths = [rest if n < 0 else n for n in lengths]
    return tuple(jnp.split(x, list(np.cumsum(lengths)[:-1]), axis))


@computes("Pad", "PadV2", "MirrorPad", attributes="mode")
def _pad(ctx: Context, node: Node, x: Array, paddings: Array, value: Array | None = None) -> Array:
    widths = [tuple(int(v) for v in row) for row in np.asarray(ctx.constant(1)).reshape(-1, 2)]
    if node.op_type == "MirrorPad":
        return jnp.pad(x, widths, mode=str(node["mode"]).lower())
    return jnp.pad(x, widths, constant_values=0 if value is None else value)


@computes("Slice", folds=True)
def _slice(ctx: Context, node: Node, x: Array, begin: Array, size: Array) -> Array:
    sizes = _ints(ctx, 2)
    first = ctx.known(1)
    if first is None:
        import jax

        lengths = [d if n < 0 else n for d, n in zip(x.shape, sizes, strict=True)]
        return jax.lax.dynamic_slice(x, [begin[i] for i in range(x.ndim)], lengths)
    starts = [int(v) for v in np.atleast_1d(first)]
    return x[tuple(slice(b, None if n < 0 else b + n) for b, n in zip(starts, sizes, strict=True))]


_MASKS = "begin_mask end_mask ellipsis_mask new_axis_mask shrink_axis_mask"


@computes("StridedSlice", attributes=_MASKS, folds=True)
def _strided(ctx: Context, node: Node, x: Array, begin: Array, end: Array, strides: Array) -> Array:
    ends, steps, first = _ints(ctx, 2) if ctx.known(2) is not None else None, _ints(ctx, 3), ctx.known(1)
    count = len(steps)

    def masked(mask: str, i: int) -> bool:
        return bool(node[mask] >> i & 1)

    if first is None or ends is None:
        return _one_element(ctx, node, x, begin, count, masked)
    starts = [int(v) for v in np.atleast_1d(first)]
    index: list[int | slice | EllipsisType | None] = []
    for i in range(count):
        if masked("ellipsis_mask", i):
            index.append(Ellipsis)
        elif masked("new_axis_mask", i):
            index.append(None)
        elif masked("shrink_axis_mask", i):
            index.append(starts[i])
        else:
            low = None if masked("begin_mask", i) else starts[i]
            high = None if masked("end_mask", i) else ends[i]
            index.append(slice(low, high, steps[i]))
    return x[tuple(index)]


def _one_element(
    ctx: Context, node: Node, x: Array, begin: Array, count: int, masked: Callable[[str, int], bool]
) -> Array:
    """A slice whose beginning is computed: ``x[i]``, along axes that shrink."""
    index: list[int | slice | EllipsisType | None] = []
    for i in range(count):
        if masked("shrink_axis_mask", i):
            index.append(begin[i])
        elif masked("begin_mask", i) and masked("end_mask", i):
            index.append(slice(None))
        else:
            ctx.constant(1)
    return x[tuple(index)]


@computes("ReverseV2")
def _reverse(ctx: Context, node: Node, x: Array, axes: Array) -> Array:
    return jnp.flip(x, tuple(_ints(ctx, 1)) if np.size(ctx.constant(1)) else ())


@computes("SpaceToDepth", "DepthToSpace", attributes="block_size data_format")
def _blocks(ctx: Context, node: Node, x: Array) -> Array:
    if node.get("data_format", "NHWC") == "NCHW":
        return jnp.moveaxis(_moved_blocks(node, jnp.moveaxis(x, 1, -1)), -1, 1)
    return _moved_blocks(node, x)


def _moved_blocks(node: Node, x: Array) -> Array:
    size = node["block_size"]
    batch, high, wide, channels = x.shape
    if node.op_type == "SpaceToDepth":
        x = x.reshape(batch, high // size, size, wide // size, size, channels).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(batch, high // size, wide // size, size * size * channels)
    rest = channels // (size * size)
    x = x.reshape(batch, high, wide, size, size, rest).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(batch, high * size, wide * size, rest)


@computes("MatrixBandPart")
def _band(ctx: Context, node: Node, x: Array, low: Array, high: Array) -> Array:
    below, above = (int(np.asarray(ctx.constant(i)).item()) for i in (1, 2))
    rows, columns = np.indices(x.shape[-2:])
    keep = ((below < 0) | (rows - columns <= below)) & ((above < 0) | (columns - rows <= above))
    return jnp.where(keep, x, jnp.zeros((), x.dtype))


@computes("InvertPermutation", folds=True)
def _inverse(ctx: Context, node: Node, x: Array) -> Array:
    return np.argsort(np.asarray(ctx.constant(0))).astype(np.int32)


@computes("Bitcast", attributes="type output")
def _bitcast(ctx: Context, node: Node, x: Array) -> Array:
    import jax

    return jax.lax.bitcast_convert_type(x, node["output"])
