"""Operators that make tensors from attributes and shapes."""

from __future__ import annotations

import numpy as np

from podrun.core.errors import UnsupportedError
from podrun.onnx_models.ops.common import Array, device_dtype, fold_module, index_dtype, ints, onnx_dtype
from podrun.onnx_models.ops.registry import ONNX, Context, Node, operator


@operator(ONNX, "Constant", since=(1, 9, 11, 12, 13, 19, 21, 23, 24, 25), folds=True)
def constant(ctx: Context, node: Node) -> Array:
    """The tensor in the attributes (ONNX Constant)."""
    for name, dtype in (
        ("value", None),
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if name in node.attributes:
            return np.asarray(node[name], dtype)
    if "sparse_value" in node.attributes:
        return node["sparse_value"]
    raise UnsupportedError(f"strings are not computed on IPUs: {node.describe()}")


@operator(ONNX, "ConstantOfShape", since=(9, 20, 21, 23, 24, 25), folds=True)
def constant_of_shape(ctx: Context, node: Node, shape: Array) -> Array:
    """A tensor of the given shape filled with the one element of ``value``, float32 0 by default."""
    value = np.asarray(node.get("value", np.zeros(1, np.float32))).reshape(())
    target = ints(ctx.constant(0))
    xp = fold_module(ctx, target)
    dtype = value.dtype if xp is np else device_dtype(value.dtype, ctx.x64)
    return xp.full(target, value, dtype)


@operator(ONNX, "Shape", since=(1, 13, 15, 19, 21, 23, 24, 25), folds=True)
def shape(ctx: Context, node: Node, x: Array) -> Array:
    """The shape, from axis ``start`` up to ``end``, as int64 (ONNX Shape). Always known while tracing."""
    start, end = node.get("start", 0), node.get("end")
    return np.asarray(x.shape[start:end], np.int64)


@operator(ONNX, "Size", since=(1, 13, 19, 21, 23, 24, 25), folds=True)
def size(ctx: Context, node: Node, x: Array) -> Array:
    """The number of elements as an int64 scalar (ONNX Size). Always known while tracing."""
    return np.asarray(int(np.prod(x.shape, dtype=np.int64)), np.int64)


MOST_RANGE = 1 << 28
"""Elements of the longest Range."""


@operator(ONNX, "Range", since=(11, 27), folds=True)
def range_(ctx: Context, node: Node, start: Array, limit: Array, delta: Array) -> Array:
    """start, start + delta, ... below limit (ONNX Range); all three must be known while tracing."""
    first, last, step = (ctx.constant(i).reshape(()) for i in range(3))
    wide = np.float64 if np.issubdtype(first.dtype, np.floating) else object
    count = max(
        int(np.ceil((last.astype(np.float64) - first.astype(np.float64)) / step.astype(np.float64))), 0
    )
    if count > MOST_RANGE:
        raise ValueError(f"from {first} to {last} by {step} are {count} elements, more than {MOST_RANGE}")
    if wide is object:
        return np.asarray(int(first) + np.arange(count, dtype=np.int64) * int(step)).astype(first.dtype)
    return (first + np.arange(count).astype(first.dtype) * step).astype(first.dtype)


@operator(ONNX, "EyeLike", since=(9, 22))
def eye_like(ctx: Context, node: Node, x: Array) -> Array:
    """Ones on diagonal ``k`` of a zero matrix of x's shape, of ``dtype`` or x's (ONNX EyeLike)."""
    if x.ndim != 2:
        raise ValueError(f"input has rank {x.ndim}, not 2")
    dtype = onnx_dtype(node["dtype"], ctx) if "dtype" in node.attributes else x.dtype
    return ctx.xp.eye(*x.shape, k=node.get("k", 0), dtype=dtype)


@operator(ONNX, "Identity", since=(1, 13, 14, 16, 19, 21, 23, 24, 25), folds=True)
def identity(ctx: Context, node: Node, x: Array) -> tuple[Array]:
    """x itself; also of sequences and optionals (ONNX Identity)."""
    return (x,)


@operator(ONNX, "NonZero", since=(9, 13))
def nonzero(ctx: Context, node: Node, x: Array) -> Array:
    """Indices of the elements that are not zero, ``[rank, count]``; the count must be known while tracing."""
    value = ctx.constant(0)
    return ctx.xp.asarray(np.stack(np.nonzero(np.atleast_1d(value))).astype(index_dtype(ctx)))
