"""Operators that move elements without changing them: reshape, transpose, concatenate, split, pad, ..."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.core.errors import InputMismatch
from podrun.onnx_models.ops.common import Array, axes_in, axis_in, fold_module, ints, same_dtype
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.onnx_models.ops.sdk import expanded, reshaped, tiled
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


def _reshaped(x: Array, target: tuple[int, ...], allow_zero: bool) -> Array:
    if target.count(-1) > 1:
        raise InputMismatch(f"shape {target} has more than one -1")
    if not allow_zero:
        if any(d == 0 and i >= x.ndim for i, d in enumerate(target)):
            raise InputMismatch(f"shape {target} copies a dimension that input {x.shape} has not")
        target = tuple(x.shape[i] if d == 0 else d for i, d in enumerate(target))
    if -1 in target:
        rest = int(np.prod([d for d in target if d != -1], dtype=np.int64))
        if rest == 0 or x.size % rest:
            raise InputMismatch(f"{x.shape} cannot be reshaped to {target}")
        target = tuple(x.size // rest if d == -1 else d for d in target)
    return x.reshape(target)


@operator(ONNX, "Reshape", since=(1,), folds=True)
@operator(GRAPHCORE, "Reshape")
def reshape_attribute(ctx: Context, node: Node, x: Array) -> Array:
    """x in the attribute ``shape`` (ONNX Reshape 1, PopART Reshape)."""
    return _reshaped(x, ints(node["shape"]), False)


@operator(ONNX, "Reshape", since=(5, 13, 14, 19, 21, 23, 24, 25), folds=True)
def onnx_reshape(ctx: Context, node: Node, x: Array, shape: Array) -> Array:
    """x in another shape: 0 copies a dimension (unless ``allowzero``), one -1 is worked out (ONNX Reshape)."""
    target = ints(ctx.constant(1))
    if ctx.sdk is not None:
        reshaped(node, target)
    return _reshaped(x, target, bool(node.get("allowzero", 0)))


@operator(ONNX, "Flatten", since=(1, 9, 11, 13, 21, 23, 24, 25), folds=True)
def onnx_flatten(ctx: Context, node: Node, x: Array) -> Array:
    """A matrix: dimensions before ``axis`` become rows, the others columns (ONNX Flatten)."""
    axis = node.get("axis", 1)
    if not -x.ndim <= axis <= x.ndim:
        raise InputMismatch(f"axis {axis} is outside [-{x.ndim}, {x.ndim}]")
    axis = axis + x.ndim if axis < 0 else axis
    rows = int(np.prod(x.shape[:axis], dtype=np.int64))
    columns = int(np.prod(x.shape[axis:], dtype=np.int64))
    return x.reshape((rows, columns))


@operator(ONNX, "Transpose", since=(1, 13, 21, 23, 24, 25), folds=True)
def onnx_transpose(ctx: Context, node: Node, x: Array) -> Array:
    """Axes in the order ``perm``, by default reversed (ONNX Transpose)."""
    perm = node.get("perm") or tuple(reversed(range(x.ndim)))
    return ctx.xp.transpose(x, perm)


def _axes(ctx: Context, node: Node, index: int) -> tuple[int, ...] | None:
    """Axes from the attribute or, from opset 13 (18) on, from input ``index``; None if left out."""
    if "axes" in node.attributes:
        return ints(node["axes"])
    if len(node.inputs) > index and node.inputs[index]:
        return ints(ctx.constant(index))
    return None


@operator(ONNX, "Squeeze", since=(1, 11, 13, 21, 23, 24, 25), folds=True)
def squeeze(ctx: Context, node: Node, x: Array, axes: Array = None) -> Array:
    """x without the given axes of size 1, by default without all such (ONNX Squeeze)."""
    stated = _axes(ctx, node, 1)
    if stated is None or (stated == () and node.opset < 13):
        stated = tuple(i for i, d in enumerate(x.shape) if d == 1)
    return ctx.xp.squeeze(x, axes_in(stated, x.ndim))


@operator(ONNX, "Unsqueeze", since=(1, 11, 13, 21, 23, 24, 25), folds=True)
def unsqueeze(ctx: Context, node: Node, x: Array, axes: Array = None) -> Array:
    """x with axes of size 1 put in at the given places of the result (ONNX Unsqueeze)."""
    stated = _axes(ctx, node, 1)
    if stated is None:
        raise InputMismatch("axes are missing")
    return ctx.xp.expand_dims(x, axes_in(stated, x.ndim + len(stated)))


@operator(ONNX, "Concat", since=(1, 4, 11, 13), folds=True)
def concat(ctx: Context, node: Node, *inputs: Array) -> Array:
    """Inputs one after the other along ``axis`` (ONNX Concat)."""
    same_dtype(*inputs)
    axis = axis_in(node.get("axis", 1), inputs[0].ndim)
    return ctx.xp.concatenate(inputs, axis=axis)


@operator(ONNX, "Expand", since=(8, 13), folds=True)
def onnx_expand(ctx: Context, node: Node, x: Array, shape: Array) -> Array:
    """x broadcast together with the given shape, both ways (ONNX Expand)."""
    wanted = ints(ctx.constant(1))
    if ctx.sdk is not None:
        expanded(node, x.shape, wanted)
    target = np.broadcast_shapes(x.shape, wanted)
    return fold_module(ctx, target).broadcast_to(x, target)


@operator(ONNX, "Tile", since=(6, 13), folds=True)
def tile(ctx: Context, node: Node, x: Array, repeats: Array) -> Array:
    """x repeated along each axis (ONNX Tile)."""
    counts = ints(ctx.constant(1))
    if ctx.sdk is not None:
        tiled(node, counts, x.ndim)
    if len(counts) != x.ndim:
        raise InputMismatch(f"repeats has {len(counts)} elements for an input of rank {x.ndim}")
    target = [d * c for d, c in zip(x.shape, counts, strict=True)]
    return fold_module(ctx, target).tile(x, counts)


def split_sizes(total: int, parts: int) -> list[int]:
    """``parts`` sizes as equal as ONNX makes them: all alike except the last, which may be smaller."""
    chunk = -(-total // parts)
    return [min(chunk, max(total - chunk * i, 0)) for i in range(parts)]


@operator(ONNX, "Split", since=(1, 2, 11, 13, 18), folds=True)
def onnx_split(ctx: Context, node: Node, x: Array, sizes: Array = None) -> tuple[Array, ...]:
    """x cut along ``axis`` into the sizes given, or into equal parts (ONNX Split)."""
    axis = axis_in(node.get("axis", 0), x.ndim)
    if node.get("split"):
        parts = list(ints(node["split"]))
    elif len(node.inputs) > 1 and node.inputs[1]:
        parts = list(ints(ctx.constant(1)))
    else:
        count = node.get("num_outputs", len(node.outputs))
        parts = split_sizes(x.shape[axis], count)
        if node.opset < 18 and len(set(parts)) > 1:
            raise InputMismatch(f"dimension {x.shape[axis]} does not split into {count} equal parts")
    if sum(parts) != x.shape[axis] or min(parts, default=0) < 0:
        raise InputMismatch(f"split sizes {parts} do not add up to dimension {x.shape[axis]} of axis {axis}")
    edges = np.cumsum([0, *parts])
    before = (slice(None),) * axis
    return tuple(x[(*before, slice(int(a), int(b)))] for a, b in itertools.pairwise(edges))


def _sliced(
    x: Array, starts: tuple[int, ...], ends: tuple[int, ...], axes: tuple[int, ...], steps: tuple[int, ...]
) -> Array:
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise InputMismatch(
            f"starts, ends, axes and steps have {len(starts)}, {len(ends)}, {len(axes)}, {len(steps)} elements"
        )
    cuts = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step == 0:
            raise InputMismatch("a step is 0")
        size = x.shape[axis]
        first = min(max(start + size if start < 0 else start, 0), size - 1 if step < 0 else size)
        last = end + size if end < 0 else end
        last = min(max(last, -1 if step < 0 else 0), size)
        cuts[axis] = slice(first, None if last < 0 else last, step)
    return x[tuple(cuts)]


@operator(ONNX, "Slice", since=(1,), folds=True)
@operator(GRAPHCORE, "Slice")
def slice_attributes(ctx: Context, node: Node, x: Array) -> Array:
    """The part of x from ``starts`` up to ``ends`` along ``axes`` (ONNX Slice before 10, PopART Slice)."""
    starts, ends = ints(node["starts"]), ints(node["ends"])
    axes = tuple(axis_in(a, x.ndim) for a in ints(node.get("axes") or range(len(starts))))
    return _sliced(x, starts, ends, axes, (1,) * len(starts))


@operator(ONNX, "Slice", since=(10, 11, 13), folds=True)
def slice_inputs(
    ctx: Context, node: Node, x: Array, starts: Array, ends: Array, axes: Array = None, steps: Array = None
) -> Array:
    """The part of x from starts up to ends along axes in steps, negative ones backward (ONNX Slice)."""
    first, last = ints(ctx.constant(1)), ints(ctx.constant(2))
    along = ints(ctx.constant(3)) if axes is not None else tuple(range(len(first)))
    step_sizes = ints(ctx.constant(4)) if steps is not None else (1,) * len(first)
    return _sliced(x, first, last, tuple(axis_in(a, x.ndim) for a in along), step_sizes)


def _pads(ctx: Context, node: Node, rank: int) -> list[tuple[int, int]]:
    """(before, after) for every axis, from attribute or inputs."""
    flat = ints(node["pads"]) if "pads" in node.attributes else ints(ctx.constant(1))
    if "paddings" in node.attributes:
        flat = ints(node["paddings"])
    axes = tuple(range(rank))
    if len(node.inputs) > 3 and node.inputs[3]:
        axes = tuple(axis_in(a, rank) for a in ints(ctx.constant(3)))
    if len(flat) != 2 * len(axes):
        raise InputMismatch(f"pads has {len(flat)} elements for {len(axes)} axes")
    pads = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        pads[axis] = (flat[i], flat[i + len(axes)])
    return pads


@operator(ONNX, "Pad", since=(1, 2, 11, 13, 18, 19, 21, 23, 24, 25))
def pad(ctx: Context, node: Node, x: Array, *rest: Array) -> Array:
    """x with ``pads`` elements put before and after each axis: constant, reflect, edge or wrap (ONNX Pad).

    Negative pads cut off. From opset 11 on pads and the constant are inputs.
    """
    pads = _pads(ctx, node, x.ndim)
    cuts = tuple(
        slice(-b if b < 0 else 0, d + a if a < 0 else d) for (b, a), d in zip(pads, x.shape, strict=True)
    )
    x = x[cuts]
    grow = [(max(b, 0), max(a, 0)) for b, a in pads]
    mode = node.get("mode", "constant")
    if mode == "constant":
        value = rest[1] if len(rest) > 1 and rest[1] is not None else np.asarray(node.get("value", 0.0))
        fill = jnp.asarray(value).astype(x.dtype).reshape(())
        return lax.pad(x, fill, [(b, a, 0) for b, a in grow])
    if mode not in ("reflect", "edge", "wrap"):
        raise InputMismatch(f"mode '{mode}' is none of constant, reflect, edge, wrap")
    return jnp.pad(x, grow, mode=mode)


@operator(ONNX, "DepthToSpace", since=(1, 11, 13, 28))
@operator(GRAPHCORE, "DepthToSpace")
def depth_to_space(ctx: Context, node: Node, x: Array) -> Array:
    """``[N, C, H, W]`` to ``[N, C/b/b, H*b, W*b]``: blocks of channels become squares of pixels (ONNX,
    PopART DepthToSpace).
    """
    n, c, h, w = x.shape
    b = node["blocksize"]
    if c % (b * b):
        raise InputMismatch(f"{c} channels do not make blocks of {b} by {b}")
    if node.get("mode", "DCR") == "DCR":
        x = x.reshape(n, b, b, c // (b * b), h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        x = x.reshape(n, c // (b * b), b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(n, c // (b * b), h * b, w * b)


@operator(ONNX, "SpaceToDepth", since=(1, 13, 28))
def space_to_depth(ctx: Context, node: Node, x: Array) -> Array:
    """``[N, C, H, W]`` to ``[N, C*b*b, H/b, W/b]``: squares of pixels become channels (ONNX SpaceToDepth)."""
    n, c, h, w = x.shape
    b = node["blocksize"]
    if h % b or w % b:
        raise InputMismatch(f"{h} by {w} pixels do not split into squares of {b}")
    if node.get("mode", "DCR") == "CRD":
        x = x.reshape(n, c, h // b, b, w // b, b).transpose(0, 1, 3, 5, 2, 4)
    else:
        x = x.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4)
    return x.reshape(n, c * b * b, h // b, w // b)


@operator(ONNX, "Trilu", since=(14,))
def trilu(ctx: Context, node: Node, x: Array, k: Array = None) -> Array:
    """The upper (or lower) triangle of each matrix from diagonal k, zeros elsewhere (ONNX Trilu)."""
    rows, columns = x.shape[-2:]
    offset = jnp.arange(columns)[None, :] - jnp.arange(rows)[:, None]
    diagonal = 0 if k is None else k.reshape(())
    keep = offset >= diagonal if node.get("upper", 1) else offset <= diagonal
    return jnp.where(keep, x, jnp.zeros((), x.dtype))


@operator(ONNX, "CenterCropPad", since=(18,))
def center_crop_pad(ctx: Context, node: Node, x: Array, shape: Array) -> Array:
    """x cut or zero-padded about its center to the given shape along ``axes`` (ONNX CenterCropPad)."""
    target = ints(ctx.constant(1))
    axes = tuple(axis_in(a, x.ndim) for a in ints(node.get("axes") or range(x.ndim)))
    for axis, wanted in zip(axes, target, strict=True):
        size = x.shape[axis]
        if size >= wanted:
            start = (size - wanted) // 2
            x = lax.slice_in_dim(x, start, start + wanted, axis=axis)
        else:
            before = (wanted - size) // 2
            config = [(0, 0, 0)] * x.ndim
            config[axis] = (before, wanted - size - before, 0)
            x = lax.pad(x, jnp.zeros((), x.dtype), config)
    return x


@operator(GRAPHCORE, "Reverse")
def reverse(ctx: Context, node: Node, x: Array) -> Array:
    """x back to front along ``dimensions`` (PopART Reverse)."""
    return jnp.flip(x, axes_in(ints(node["dimensions"]), x.ndim))


@operator(GRAPHCORE, "Subsample")
def subsample(ctx: Context, node: Node, x: Array) -> Array:
    """Every ``strides[i]``-th element along axis i (PopART Subsample)."""
    strides = ints(node["strides"])
    if len(strides) != x.ndim or min(strides, default=1) < 1:
        raise InputMismatch(f"strides {strides} do not fit an input of rank {x.ndim}")
    return x[tuple(slice(None, None, s) for s in strides)]
