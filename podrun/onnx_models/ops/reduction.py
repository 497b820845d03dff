"""Reductions over axes, running sums and products along one, sorting and selection.

Halves are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.core.errors import InputMismatch
from podrun.numerics.gradients import absolute, to_equals
from podrun.numerics.precision import is_float, rounds_once
from podrun.onnx_models.ops.common import Array, axes_in, axis_in, index_dtype, ints
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


def _axes(ctx: Context, node: Node, x: Array) -> tuple[int, ...] | None:
    """The axes to reduce (attribute, or input from opset 18 on, 13 for ReduceSum); None means: nothing to do."""
    if "axes" in node.attributes:
        stated = ints(node["axes"])
        if not stated and ctx.sdk is not None:
            return None  # The SDK takes an empty list at its word.
    elif len(node.inputs) > 1 and node.inputs[1]:
        stated = ints(ctx.constant(1))
    else:
        stated = ()
    if not stated:
        return None if node.get("noop_with_empty_axes", 0) else tuple(range(x.ndim))
    return axes_in(stated, x.ndim)


def _register(
    name: str, since: tuple[int, ...], meaning: str, reduce: Callable[..., Array], folds: bool
) -> None:
    def apply(ctx: Context, node: Node, x: Array, axes: Array = None) -> Array:
        reduced_axes = _axes(ctx, node, x)
        reduced_axes = () if reduced_axes is None else reduced_axes
        result = reduce(ctx.xp, x, reduced_axes, bool(node.get("keepdims", 1))).astype(x.dtype)
        if name in ("ReduceMax", "ReduceMin") and ctx.training and is_float(x):
            return to_equals(x, result, reduced_axes)
        return result

    apply.__doc__ = f"{meaning} over ``axes`` (all by default), kept as 1 with ``keepdims`` (ONNX {name})."
    apply.__name__ = name.lower()
    operator(ONNX, name, since, folds=folds)(rounds_once(apply))


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
        lambda xp, x, a, k: jnp.sum(absolute(x), axis=a, keepdims=k),
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
    """Lower median over ``axes`` and its index in the reduced part flattened (PopART ReduceMedian, as torch.median)."""
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
            places = x.shape[axis] - 1 - find(jnp.flip(x, axis), axis=axis)
        else:
            places = find(x, axis=axis)
        places = jnp.expand_dims(places, axis) if node.get("keepdims", 1) else places
        return places.astype(index_dtype(ctx))

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
    """Running sum along an axis, ``exclusive`` of the element itself or not, from the end with ``reverse``."""
    return _cumulate(ctx, node, x, lax.cumsum, 0)


@operator(ONNX, "CumProd", since=(26,))
@rounds_once
def cum_prod(ctx: Context, node: Node, x: Array, axis: Array) -> Array:
    """Running product along an axis (ONNX CumProd), with the options of CumSum."""
    return _cumulate(ctx, node, x, lax.cumprod, 1)


def _top(ctx: Context, x: Array, k: int, axis: int, largest: bool) -> tuple[Array, Array]:
    """The k greatest (least) along an axis, in order, the first of equals first; and their indices."""
    if not 0 <= k <= x.shape[axis]:
        raise InputMismatch(f"k is {k}, but axis {axis} has {x.shape[axis]} elements")
    moved = jnp.moveaxis(x, axis, -1)
    if is_float(x):
        # To top_k -0 is less than 0; as values they are equal, and the first of equals comes first.
        ranked = jnp.where(moved == 0, jnp.zeros((), x.dtype), moved)
        _, order = jax.lax.top_k(ranked if largest else -ranked, k)
    else:
        order = jnp.argsort(moved, axis=-1, stable=True, descending=largest)[..., :k]
    values = jnp.take_along_axis(moved, order, axis=-1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(order, -1, axis).astype(index_dtype(ctx))


@operator(ONNX, "TopK", since=(1,))
def top_k_attribute(ctx: Context, node: Node, x: Array) -> tuple[Array, Array]:
    """The ``k`` greatest along ``axis`` and their indices (ONNX TopK before 10)."""
    return _top(ctx, x, node["k"], axis_in(node.get("axis", -1), x.ndim), True)


@operator(ONNX, "TopK", since=(10, 11, 24))
def top_k(ctx: Context, node: Node, x: Array, k: Array) -> tuple[Array, Array]:
    """The k greatest (or least, ``largest=0``) along ``axis`` in order, and their indices (ONNX TopK)."""
    count = int(ctx.constant(1).reshape(()))
    return _top(ctx, x, count, axis_in(node.get("axis", -1), x.ndim), bool(node.get("largest", 1)))


@operator(GRAPHCORE, "Sort")
def graphcore_sort(ctx: Context, node: Node, x: Array) -> tuple[Array, Array]:
    """x sorted along ``axis``, and where each came from (PopART Sort); ``descending``; always stable here."""
    axis = axis_in(node.get("axis", -1), x.ndim)
    order = jnp.argsort(x, axis=axis, stable=True, descending=bool(node.get("descending", 0)))
    return jnp.take_along_axis(x, order, axis=axis), order.astype(index_dtype(ctx))


@operator(GRAPHCORE, "Bucketize")
def graphcore_bucketize(ctx: Context, node: Node, x: Array, boundaries: Array) -> Array:
    """The bucket each element falls into between ascending boundaries; ``right``: which end is closed."""
    side = "right" if node.get("right", 0) else "left"
    return jnp.searchsorted(boundaries, x, side=side).astype(jnp.int32)


@operator(ONNX, "Unique", since=(11, 28))
def unique(ctx: Context, node: Node, x: Array) -> tuple[Array, ...]:
    """Distinct elements (or slices along ``axis``), first places, places in them, counts (ONNX Unique).

    x must be known while tracing, since it decides the shape.
    """
    value = ctx.constant(0)
    axis = node.get("axis")
    value = value.reshape(-1) if axis is None else value
    axis = 0 if axis is None else axis_in(axis, value.ndim)
    values, first, inverse, counts = np.unique(
        value, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = np.asarray(inverse).reshape(-1)
    if not node.get("sorted", 1):
        order = np.argsort(first, kind="stable")
        values, first, counts = np.take(values, order, axis=axis), first[order], counts[order]
        inverse = np.argsort(order, kind="stable")[inverse]
    dtype = index_dtype(ctx)
    return (
        jnp.asarray(values),
        *(jnp.asarray(np.asarray(part, dtype)) for part in (first, inverse, counts)),
    )


@operator(ONNX, "NonMaxSuppression", since=(10, 11))
def non_max_suppression(
    ctx: Context,
    node: Node,
    boxes: Array,
    scores: Array,
    most: Array = None,
    overlap: Array = None,
    least_score: Array = None,
) -> Array:
    """Boxes kept when those overlapping a better one are dropped: rows (batch, class, box) (ONNX NonMaxSuppression).

    All inputs must be known while tracing, since they decide how many rows there are.
    """
    values = [
        None if t is None else ctx.constant(i)
        for i, t in enumerate((boxes, scores, most, overlap, least_score))
    ]
    all_boxes, all_scores = np.asarray(values[0]), np.asarray(values[1])
    limit = 0 if values[2] is None else int(values[2].reshape(()))
    iou = 0.0 if values[3] is None else float(values[3].reshape(()))
    threshold = None if values[4] is None else float(values[4].reshape(()))
    corners = _corners(all_boxes, bool(node.get("center_point_box", 0)))
    rows: list[tuple[int, int, int]] = []
    for batch in range(all_scores.shape[0]):
        for kind in range(all_scores.shape[1]):
            kept = _suppress(corners[batch], all_scores[batch, kind], limit, iou, threshold)
            rows += [(batch, kind, box) for box in kept]
    return jnp.asarray(np.asarray(rows, index_dtype(ctx)).reshape(-1, 3))


def _corners(boxes: np.ndarray, centered: bool) -> np.ndarray:
    """Boxes as (low y, low x, high y, high x)."""
    if centered:
        x, y, w, h = np.moveaxis(boxes, -1, 0)
        return np.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], axis=-1)
    a, b = boxes[..., :2], boxes[..., 2:]
    return np.concatenate([np.minimum(a, b), np.maximum(a, b)], axis=-1)


def _suppress(
    boxes: np.ndarray, scores: np.ndarray, limit: int, iou: float, threshold: float | None
) -> list[int]:
    kept: list[int] = []
    for candidate in np.argsort(-scores, kind="stable"):
        if len(kept) >= limit or (threshold is not None and scores[candidate] <= threshold):
            break
        if all(_overlap(boxes[candidate], boxes[k]) <= iou for k in kept):
            kept.append(int(candidate))
    return kept


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Intersection over union of two boxes."""
    sides = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    if (sides <= 0).any():
        return 0.0
    common = float(sides.prod())
    union = float((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod()) - common
    return common / union if union > 0 else 0.0
