"""Reductions over axes, and running sums and products along one. Halves are accumulated in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.onnx_models.ops.common import (
    Array,
    absolute,
    axes_in,
    axis_in,
    index_dtype,
    ints,
    is_float,
    rounds_once,
    with_gradient,
)
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, Context, Node, operator


def _axes(ctx: Context, node: Node, x: Array) -> tuple[int, ...] | None:
    """The axes to reduce (attribute, or input from opset 18 on, 13 for ReduceSum); None means: nothing to
    do.
    """
    if "axes" in node.attributes:
        given = ints(node["axes"])
        if not given and ctx.sdk is not None:
            return None  # The SDK takes an empty list at its word.
    elif len(node.inputs) > 1 and node.inputs[1]:
        given = ints(ctx.constant(1))
    else:
        given = ()
    if not given:
        return None if node.get("noop_with_empty_axes", 0) else tuple(range(x.ndim))
    return axes_in(given, x.ndim)


def _register(
    name: str, since: tuple[int, ...], meaning: str, reduce: Callable[..., Array], folds: bool
) -> None:
    def apply(ctx: Context, node: Node, x: Array, axes: Array = None) -> Array:
        over = _axes(ctx, node, x)
        over = () if over is None else over
        result = reduce(ctx.xp, x, over, bool(node.get("keepdims", 1))).astype(x.dtype)
        if name in ("ReduceMax", "ReduceMin") and ctx.training and is_float(x):
            return to_equals(x, result, over)
        return result

    apply.__doc__ = f"{meaning} over ``axes`` (all by default), kept as 1 with ``keepdims`` (ONNX {name})."
    apply.__name__ = name.lower()
    operator(ONNX, name, since, folds=folds)(rounds_once(apply))


def to_equals(x: Array, result: Array, axes: tuple[int, ...]) -> Array:
    """A maximum or minimum whose gradient goes whole to each of the elements that equal it (PopART ReduceMaxGrad)."""
    wide = result.reshape([1 if a in axes else d for a, d in enumerate(x.shape)])
    carrier = jnp.sum(jnp.where(x == wide, x, jnp.zeros((), x.dtype)), axis=axes)
    return with_gradient(result, carrier.reshape(result.shape))


def _max(xp: object, x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    if x.dtype == bool:
        return jnp.any(x, axis=axes, keepdims=keep)
    lowest = -np.inf if is_float(x) else np.iinfo(x.dtype).min
    return jnp.max(x, axis=axes, keepdims=keep, initial=np.asarray(lowest, x.dtype))


def _min(xp: object, x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    if x.dtype == bool:
        return jnp.all(x, axis=axes, keepdims=keep)
    greatest = np.inf if is_float(x) else np.iinfo(x.dtype).max
    return jnp.min(x, axis=axes, keepdims=keep, initial=np.asarray(greatest, x.dtype))


def _l2(xp: object, x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    wide = x if is_float(x) else x.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(wide * wide, axis=axes, keepdims=keep))


def _log_sum(xp: object, x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    wide = x if is_float(x) else x.astype(jnp.float32)
    return jnp.log(jnp.sum(wide, axis=axes, keepdims=keep))


def _log_sum_exp(xp: object, x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    wide = x if is_float(x) else x.astype(jnp.float32)
    return jax.scipy.special.logsumexp(wide, axis=axes, keepdims=keep)


def _mean(xp: object, x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    if is_float(x):
        return jnp.mean(x, axis=axes, keepdims=keep)
    count = int(np.prod([x.shape[a] for a in axes], dtype=np.int64))
    return jnp.trunc(jnp.sum(x, axis=axes, keepdims=keep) / count)


_OLD = (1, 11, 13, 18)
for _name, _since, _meaning, _reduce, _folds in (
    ("ReduceSum", (1, 11, 13), "Sum", lambda xp, x, a, k: xp.sum(x, axis=a, keepdims=k, dtype=x.dtype), True),
    ("ReduceMean", _OLD, "Mean", _mean, False),
    ("ReduceProd", _OLD, "Product", lambda xp, x, a, k: xp.prod(x, axis=a, keepdims=k, dtype=x.dtype), True),
    ("ReduceMax", (1, 11, 12, 13, 18, 20), "Maximum", _max, False),
    ("ReduceMin", (1, 11, 12, 13, 18, 20), "Minimum", _min, False),
    (
        "ReduceL1",
        _OLD,
        "Sum of absolute values",
        lambda xp, x, a, k: jnp.sum(absolute(x) if is_float(x) else jnp.abs(x), axis=a, keepdims=k),
        False,
    ),
    ("ReduceL2", _OLD, "Square root of the sum of squares", _l2, False),
    ("ReduceLogSum", (*_OLD, 28), "Logarithm of the sum", _log_sum, False),
    ("ReduceLogSumExp", (*_OLD, 28), "Logarithm of the sum of exponentials", _log_sum_exp, False),
    (
        "ReduceSumSquare",
        _OLD,
        "Sum of squares",
        lambda xp, x, a, k: jnp.sum(x * x, axis=a, keepdims=k),
        False,
    ),
):
    _register(_name, _since, _meaning, _reduce, _folds)


@operator(GRAPHCORE, "ReduceMedian")
def reduce_median(ctx: Context, node: Node, x: Array) -> tuple[Array, Array]:
    """Lower median over ``axes`` and its index in the reduced part flattened (PopART ReduceMedian, as
    torch.median).
    """
    axes = tuple(range(x.ndim)) if "axes" not in node.attributes else axes_in(ints(node["axes"]), x.ndim)
    keep = bool(node.get("keepdims", 1))
    kept = [a for a in range(x.ndim) if a not in axes]
    flat = jnp.transpose(x, (*kept, *axes)).reshape(*(x.shape[a] for a in kept), -1)
    order = jnp.argsort(flat, axis=-1, stable=True)
    index = order[..., (flat.shape[-1] - 1) // 2]
    value = jnp.take_along_axis(flat, index[..., None], axis=-1)[..., 0]
    if keep:
        shape = tuple(1 if a in axes else d for a, d in enumerate(x.shape))
        value, index = value.reshape(shape), index.reshape(shape)
    return value, index.astype(index_dtype(ctx))


def _arg(name: str, find: Callable[..., Array], what: str) -> None:
    def apply(ctx: Context, node: Node, x: Array) -> Array:
        axis = axis_in(node.get("axis", 0), x.ndim)
        if node.get("select_last_index", 0):
            found = x.shape[axis] - 1 - find(jnp.flip(x, axis), axis=axis)
        else:
            found = find(x, axis=axis)
        found = jnp.expand_dims(found, axis) if node.get("keepdims", 1) else found
        return found.astype(index_dtype(ctx))

    apply.__doc__ = f"Index of the {what} along ``axis``, the first (or last) of equals (ONNX {name})."
    apply.__name__ = name.lower()
    operator(ONNX, name, since=(1, 11, 12, 13))(apply)


_arg("ArgMax", jnp.argmax, "greatest")
_arg("ArgMin", jnp.argmin, "least")


def _cumulate(ctx: Context, node: Node, x: Array, run: Callable[..., Any], start: int) -> Array:
    axis = axis_in(int(ctx.constant(1).reshape(())), x.ndim)
    reverse = bool(node.get("reverse", 0))
    if node.get("exclusive", 0):
        config = [(0, 0, 0)] * x.ndim
        config[axis] = (-1, 1, 0) if reverse else (1, -1, 0)
        x = lax.pad(x, np.asarray(start, x.dtype), config)
    return run(x, axis=axis, reverse=reverse)


@operator(ONNX, "CumSum", since=(11, 14))
@rounds_once
def cum_sum(ctx: Context, node: Node, x: Array, axis: Array) -> Array:
    """Running sum along an axis, ``exclusive`` of the element itself or not, from the end with
    ``reverse``.
    """
    return _cumulate(ctx, node, x, lax.cumsum, 0)


@operator(ONNX, "CumProd", since=(26,))
@rounds_once
def cum_prod(ctx: Context, node: Node, x: Array, axis: Array) -> Array:
    """Running product along an axis (ONNX CumProd), with the options of CumSum."""
    return _cumulate(ctx, node, x, lax.cumprod, 1)
