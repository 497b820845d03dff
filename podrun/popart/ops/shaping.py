"""Operators that move elements without changing them: reshape, transpose, concatenate, split, pad, ..."""

from __future__ import annotations

import numpy as np

from podrun.popart.ops.common import Array, axes_in, axis_in, ints, same_dtype
from podrun.popart.ops.registry import GRAPHCORE, ONNX, Context, Node, operator


def _reshaped(x: Array, target: tuple[int, ...], allow_zero: bool) -> Array:
    if target.count(-1) > 1:
        raise ValueError(f"shape {target} has more than one -1")
    if not allow_zero:
        if any(d == 0 and i >= x.ndim for i, d in enumerate(target)):
            raise ValueError(f"shape {target} copies a dimension that input {x.shape} has not")
        target = tuple(x.shape[i] if d == 0 else d for i, d in enumerate(target))
    if -1 in target:
        rest = int(np.prod([d for d in target if d != -1], dtype=np.int64))
        if rest == 0 or x.size % rest:
            raise ValueError(f"{x.shape} cannot be reshaped to {target}")
        target = tuple(x.size // rest if d == -1 else d for d in target)
    return x.reshape(target)


@operator(ONNX, "Reshape", since=(1,), folds=True)
def reshape_attribute(ctx: Context, node: Node, x: Array) -> Array:
    """x in the attribute ``shape`` (ONNX Reshape 1)."""
    return _reshaped(x, ints(node["shape"]), False)


@operator(ONNX, "Reshape", since=(5, 13, 14, 19, 21, 23, 24, 25), folds=True)
def reshape(ctx: Context, node: Node, x: Array, shape: Array) -> Array:
    """x in another shape: 0 copies a dimension (unless ``allowzero``), one -1 is worked out (ONNX Reshape)."""
    return _reshaped(x, ints(ctx.constant(1)), bool(node.get("allowzero", 0)))


@operator(GRAPHCORE, "Reshape")
def graphcore_reshape(ctx: Context, node: Node, x: Array) -> Array:
    """x in the attribute ``shape`` (PopART Reshape)."""
    return _reshaped(x, ints(node["shape"]), False)


@operator(ONNX, "Flatten", since=(1, 9, 11, 13, 21, 23, 24, 25), folds=True)
def flatten(ctx: Context, node: Node, x: Array) -> Array:
    """A matrix: dimensions before ``axis`` become rows, the others columns (ONNX Flatten)."""
    axis = node.get("axis", 1)
    if not -x.ndim <= axis <= x.ndim:
        raise ValueError(f"axis {axis} is outside [-{x.ndim}, {x.ndim}]")
    axis = axis + x.ndim if axis < 0 else axis
    rows = int(np.prod(x.shape[:axis], dtype=np.int64))
    columns = int(np.prod(x.shape[axis:], dtype=np.int64))
    return x.reshape((rows, columns))


@operator(ONNX, "Transpose", since=(1, 13, 21, 23, 24, 25), folds=True)
def transpose(ctx: Context, node: Node, x: Array) -> Array:
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
    given = _axes(ctx, node, 1)
    if given is None or (given == () and node.opset < 13):
        given = tuple(i for i, d in enumerate(x.shape) if d == 1)
    return ctx.xp.squeeze(x, axes_in(given, x.ndim))


@operator(ONNX, "Unsqueeze", since=(1, 11, 13, 21, 23, 24, 25), folds=True)
def unsqueeze(ctx: Context, node: Node, x: Array, axes: Array = None) -> Array:
    """x with axes of size 1 put in at the given places of the result (ONNX Unsqueeze)."""
    given = _axes(ctx, node, 1)
    if given is None:
        raise ValueError("axes are missing")
    return ctx.xp.expand_dims(x, axes_in(given, x.ndim + len(given)))


@operator(ONNX, "Concat", since=(1, 4, 11, 13), folds=True)
def concat(ctx: Context, node: Node, *inputs: Array) -> Array:
    """Inputs one after the other along ``axis`` (ONNX Concat)."""
    same_dtype(*inputs)
    axis = axis_in(node.get("axis", 1), inputs[0].ndim)
    return ctx.xp.concatenate(inputs, axis=axis)


@operator(ONNX, "Expand", since=(8, 13), folds=True)
def expand(ctx: Context, node: Node, x: Array, shape: Array) -> Array:
    """x broadcast together with the given shape, both ways (ONNX Expand)."""
    target = np.broadcast_shapes(x.shape, ints(ctx.constant(1)))
    return ctx.xp.broadcast_to(x, target)


@operator(ONNX, "Tile", since=(6, 13), folds=True)
def tile(ctx: Context, node: Node, x: Array, repeats: Array) -> Array:
    """x repeated along each axis (ONNX Tile)."""
    counts = ints(ctx.constant(1))
    if len(counts) != x.ndim:
        raise ValueError(f"repeats has {len(counts)} elements for an input of rank {x.ndim}")
    return ctx.xp.tile(x, counts)


def split_sizes(total: int, parts: int) -> list[int]:
    """``parts`` sizes as equal as ONNX makes them: all alike but the last, which may be smaller."""
    chunk = -(-total // parts)
    sizes = [min(chunk, max(total - chunk * i, 0)) for i in range(parts)]
    return sizes


@operator(ONNX, "Split", since=(1, 2, 11, 13, 18), folds=True)
def split(ctx: Context, node: Node, x: Array, sizes: Array = None) -> tuple[Array, ...]:
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
            raise ValueError(f"dimension {x.shape[axis]} does not split into {count} equal parts")
    if sum(parts) != x.shape[axis] or min(parts, default=0) < 0:
        raise ValueError(f"split sizes {parts} do not add up to dimension {x.shape[axis]} of axis {axis}")
    edges = np.cumsum([0, *parts])
    before = (slice(None),) * axis
    return tuple(x[(*before, slice(int(a), int(b)))] for a, b in zip(edges[:-1], edges[1:], strict=True))
