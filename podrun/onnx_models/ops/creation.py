"""Operators that make tensors: from attributes and shapes, and at random.

Every random number comes from the node's own key, so a seed gives the same numbers on every machine. Values are not
those of torch, NumPy or an IPU. The attribute ``seed`` is refused, as PopART does: the session's seed decides.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch, UnsupportedError
from podrun.numerics.norms import dropped
from podrun.onnx_models.ops.common import Array, fold_module, index_dtype, ints, onnx_dtype
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.device_types import device_dtype
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


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
def onnx_shape(ctx: Context, node: Node, x: Array) -> Array:
    """The shape, from axis ``start`` up to ``end``, as int64 (ONNX Shape). Always known while tracing."""
    start, end = node.get("start", 0), node.get("end")
    return np.asarray(x.shape[start:end], np.int64)


@operator(ONNX, "Size", since=(1, 13, 19, 21, 23, 24, 25), folds=True)
def onnx_size(ctx: Context, node: Node, x: Array) -> Array:
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
        raise InputMismatch(f"from {first} to {last} by {step} are {count} elements, more than {MOST_RANGE}")
    if wide is object:
        return np.asarray(int(first) + np.arange(count, dtype=np.int64) * int(step)).astype(first.dtype)
    return (first + np.arange(count).astype(first.dtype) * step).astype(first.dtype)


@operator(ONNX, "EyeLike", since=(9, 22))
def eye_like(ctx: Context, node: Node, x: Array) -> Array:
    """Ones on diagonal ``k`` of a zero matrix of x's shape, of ``dtype`` or x's (ONNX EyeLike)."""
    if x.ndim != 2:
        raise InputMismatch(f"input has rank {x.ndim}, not 2")
    dtype = onnx_dtype(node["dtype"], ctx) if "dtype" in node.attributes else x.dtype
    return ctx.xp.eye(*x.shape, k=node.get("k", 0), dtype=dtype)


@operator(ONNX, "Identity", since=(1, 13, 14, 16, 19, 21, 23, 24, 25), folds=True)
def onnx_identity(ctx: Context, node: Node, x: Array) -> tuple[Array]:
    """x itself; also of sequences and optionals (ONNX Identity)."""
    return (x,)


@operator(ONNX, "NonZero", since=(9, 13))
def nonzero(ctx: Context, node: Node, x: Array) -> Array:
    """Indices of the elements that are not zero, ``[rank, count]``; the count must be known while tracing."""
    value = ctx.constant(0)
    return ctx.xp.asarray(np.stack(np.nonzero(np.atleast_1d(value))).astype(index_dtype(ctx)))


def _key(ctx: Context, node: Node) -> Any:
    if "seed" in node.attributes:
        raise UnsupportedError(
            f"{node.describe()}: Optional seed attribute is not supported. Use session::setRandomSeed instead.",
            hint="Leave it out, and set the seed with session.setRandomSeed (or run(..., seed=...) of the backend).",
        )
    return ctx.key()


def _dtype(ctx: Context, node: Node, like: Array = None) -> np.dtype[Any]:
    if "dtype" in node.attributes and (like is None or node["dtype"]):
        return onnx_dtype(node["dtype"], ctx)
    return np.dtype(np.float32) if like is None else np.dtype(like.dtype)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def _normal(ctx: Context, node: Node, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    numbers = jax.random.normal(_key(ctx, node), shape, _wide(dtype))
    return (numbers * node.get("scale", 1.0) + node.get("mean", 0.0)).astype(dtype)


def _uniform(ctx: Context, node: Node, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    low, high = node.get("low", 0.0), node.get("high", 1.0)
    return jax.random.uniform(_key(ctx, node), shape, _wide(dtype), low, high).astype(dtype)


@operator(ONNX, "RandomNormal", since=(1, 22))
def random_normal(ctx: Context, node: Node) -> Array:
    """Normal numbers of ``mean`` and deviation ``scale`` in ``shape`` (ONNX RandomNormal)."""
    return _normal(ctx, node, ints(node["shape"]), _dtype(ctx, node))


@operator(ONNX, "RandomNormalLike", since=(1, 22))
def random_normal_like(ctx: Context, node: Node, x: Array) -> Array:
    """Normal numbers in the shape (and, without ``dtype``, type) of x (ONNX RandomNormalLike)."""
    return _normal(ctx, node, x.shape, _dtype(ctx, node, x))


@operator(ONNX, "RandomUniform", since=(1, 22))
def random_uniform(ctx: Context, node: Node) -> Array:
    """Uniform numbers from ``low`` up to ``high`` in ``shape`` (ONNX RandomUniform)."""
    return _uniform(ctx, node, ints(node["shape"]), _dtype(ctx, node))


@operator(ONNX, "RandomUniformLike", since=(1, 22))
def random_uniform_like(ctx: Context, node: Node, x: Array) -> Array:
    """Uniform numbers in the shape (and, without ``dtype``, type) of x (ONNX RandomUniformLike)."""
    return _uniform(ctx, node, x.shape, _dtype(ctx, node, x))


@operator(ONNX, "Bernoulli", since=(15, 22))
def onnx_bernoulli(ctx: Context, node: Node, p: Array) -> Array:
    """1 with the probability in each element, else 0 (ONNX Bernoulli)."""
    drawn = jax.random.uniform(_key(ctx, node), p.shape, jnp.float32) < p.astype(jnp.float32)
    return drawn.astype(_dtype(ctx, node, p))


@operator(ONNX, "Multinomial", since=(7, 22))
def onnx_multinomial(ctx: Context, node: Node, logits: Array) -> Array:
    """``sample_size`` classes drawn for each row of unnormalised log-probabilities (ONNX Multinomial)."""
    count = node.get("sample_size", 1)
    drawn = jax.random.categorical(
        _key(ctx, node), logits.astype(jnp.float32), axis=-1, shape=(count, logits.shape[0])
    )
    return drawn.T.astype(_dtype(ctx, node))


def _drop(
    ctx: Context, node: Node, x: Array, ratio: float, mask_shape: tuple[int, ...]
) -> tuple[Array, Array]:
    y, kept = dropped(_key(ctx, node), x, ratio, mask_shape)
    return y, jnp.broadcast_to(kept, x.shape)


def _ratio(node: Node) -> float:
    ratio = float(node.get("ratio", 0.5))
    if not 0 <= ratio < 1:
        raise InputMismatch(f"ratio {ratio} is outside [0, 1)")
    return ratio


@operator(ONNX, "Dropout", since=(1, 6, 7, 10))
def onnx_dropout(ctx: Context, node: Node, x: Array) -> tuple[Array, Array]:
    """In training, elements dropped with probability ``ratio``; in inference x itself (ONNX Dropout before 12)."""
    ratio = _ratio(node)
    training = ctx.training and not node.get("is_test", 0)
    if not training or ratio == 0:
        mask = jnp.ones(x.shape, bool if node.opset >= 10 else x.dtype)
        return x, mask
    y, mask = _drop(ctx, node, x, ratio, x.shape)
    return y, mask if node.opset >= 10 else mask.astype(x.dtype)


@operator(ONNX, "Dropout", since=(12, 13, 22))
def dropout_inputs(
    ctx: Context, node: Node, x: Array, ratio: Array = None, training: Array = None
) -> tuple[Array, Array]:
    """`onnx_dropout` whose ratio and training mode are inputs, both known while tracing (ONNX Dropout 12)."""
    wanted = ctx.training if training is None else bool(ctx.constant(2).reshape(()))
    rate = 0.5 if ratio is None else float(ctx.constant(1).reshape(()))
    if not wanted or rate == 0:
        return x, jnp.ones(x.shape, bool)
    return _drop(ctx, node, x, rate, x.shape)


@operator(GRAPHCORE, "ShapedDropout")
def shaped_dropout(ctx: Context, node: Node, x: Array) -> Array:
    """Dropout whose mask has ``shape`` and is broadcast over x (PopART ShapedDropout)."""
    ratio = _ratio(node)
    shape = ints(node["shape"])
    if np.broadcast_shapes(shape, x.shape) != x.shape:
        raise InputMismatch(f"shape {shape} does not broadcast to {x.shape}")
    if not ctx.training or ratio == 0:
        return x
    return _drop(ctx, node, x, ratio, shape)[0]
