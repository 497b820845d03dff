"""Sorting and selection."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from podrun.onnx_models.ops.common import Array, axis_in, index_dtype, is_float
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, Context, Node, operator


def _top(ctx: Context, x: Array, k: int, axis: int, largest: bool) -> tuple[Array, Array]:
    """The k greatest (least) along an axis, in order, the first of equals first; and their indices."""
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"k is {k}, but axis {axis} has {x.shape[axis]} elements")
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
def sort(ctx: Context, node: Node, x: Array) -> tuple[Array, Array]:
    """x sorted along ``axis``, and where each came from (PopART Sort); ``descending``; always stable here."""
    axis = axis_in(node.get("axis", -1), x.ndim)
    order = jnp.argsort(x, axis=axis, stable=True, descending=bool(node.get("descending", 0)))
    return jnp.take_along_axis(x, order, axis=axis), order.astype(index_dtype(ctx))


@operator(GRAPHCORE, "Bucketize")
def bucketize(ctx: Context, node: Node, x: Array, boundaries: Array) -> Array:
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
    made, first, inverse, counts = np.unique(
        value, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = np.asarray(inverse).reshape(-1)
    if not node.get("sorted", 1):
        order = np.argsort(first, kind="stable")
        made, first, counts = np.take(made, order, axis=axis), first[order], counts[order]
        inverse = np.argsort(order, kind="stable")[inverse]
    dtype = index_dtype(ctx)
    return (
        jnp.asarray(made),
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
    """Boxes kept when those overlapping a better one are dropped: rows (batch, class, box) (ONNX
    NonMaxSuppression).

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
