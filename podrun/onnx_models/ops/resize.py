"""Resizing and sampling of images.

Resize is separable: along each axis it is a matrix of weights, worked out in NumPy while tracing (or, for the nearest
mode, a gather), so it differentiates and batches as a matrix product does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch
from podrun.numerics.precision import rounds_once, widen
from podrun.onnx_models.ops.common import Array, axis_in, ints
from podrun.onnx_models.ops.registry import ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


def _source(node: Node, scale: float, size: int, count: int, roi: tuple[float, float] | None) -> np.ndarray:
    """The position in the input of each output element (ONNX Resize: coordinate_transformation_mode)."""
    y = np.arange(count, dtype=np.float64)
    exact = scale * size
    mode = node.get("coordinate_transformation_mode", "half_pixel")
    if node.get("mode", "nearest") == "nearest" and node.get("nearest_mode") == "pytorch":
        mode = "asymmetric"
    match mode:
        case "align_corners":
            return np.zeros(count) if exact == 1 else y * (size - 1) / (exact - 1)
        case "asymmetric":
            return y / scale
        case "tf_crop_and_resize":
            start, end = roi if roi is not None else (0.0, 1.0)
            if exact == 1:
                return np.full(count, (end - start) * (size - 1) / 2 + start * (size - 1))
            return y * (end - start) * (size - 1) / (exact - 1) + start * (size - 1)
        case "pytorch_half_pixel":
            return np.full(count, -0.5) if exact == 1 else (y + 0.5) / scale - 0.5
        case "half_pixel":
            return (y + 0.5) / scale - 0.5
        case "tf_half_pixel_for_nn":
            return (y + 0.5) / scale
        case "half_pixel_symmetric":
            return size / 2 * (1 - count / exact) + (y + 0.5) / scale - 0.5
    raise InputMismatch(f"coordinate_transformation_mode '{mode}' is not known")


def _nearest(places: np.ndarray, mode: str) -> np.ndarray:
    match mode:
        case "round_prefer_floor":
            return np.asarray(np.ceil(places - 0.5))
        case "round_prefer_ceil":
            return np.asarray(np.floor(places + 0.5))
        case "floor":
            return np.asarray(np.floor(places))
        case "ceil":
            return np.asarray(np.ceil(places))
        case "pytorch":  # This mode is the SDK's own; coordinates are asymmetric then.
            return np.asarray(np.floor(places))
    raise InputMismatch(f"nearest_mode '{mode}' is not known")


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def _weights(node: Node, places: np.ndarray, scale: float, size: int) -> np.ndarray:
    """The matrix ``[out, in]`` of linear or cubic interpolation, outside indices clamped (or excluded) as
    ONNX says.
    """
    shrink = min(scale, 1.0) if node.get("antialias", 0) else 1.0
    cubic = node.get("mode", "nearest") == "cubic"
    reach = (2 if cubic else 1) / shrink
    low = np.floor(places - reach).astype(int)
    taps = int(np.ceil(2 * reach)) + 2
    index = low[:, None] + np.arange(taps)[None, :]
    distance = (index - places[:, None]) * shrink
    weight = (
        _cubic(distance, node.get("cubic_coeff_a", -0.75)) if cubic else np.clip(1 - np.abs(distance), 0, 1)
    )
    if node.get("exclude_outside", 0):
        weight = np.where((index < 0) | (index >= size), 0, weight)
    if node.get("exclude_outside", 0) or node.get("antialias", 0):
        weight = weight / weight.sum(axis=1, keepdims=True)
    matrix = np.zeros((len(places), size))
    np.add.at(matrix, (np.arange(len(places))[:, None], np.clip(index, 0, size - 1)), weight)
    return matrix


def _resize_axis(
    node: Node, x: Array, axis: int, count: int, scale: float, roi: tuple[float, float] | None
) -> tuple[Array, np.ndarray]:
    """x resized along one axis, and which output elements lie outside the input (for tf_crop_and_resize)."""
    size = x.shape[axis]
    places = _source(node, scale, size, count, roi)
    outside = (places < 0) | (places > size - 1)
    if node.get("mode", "nearest") == "nearest":
        index = np.clip(_nearest(places, node.get("nearest_mode", "round_prefer_floor")), 0, size - 1)
        return jnp.take(x, index.astype(np.int32), axis=axis), outside
    matrix = _weights(node, places, scale, size).astype(x.dtype)
    return jnp.moveaxis(jnp.tensordot(x, jnp.asarray(matrix), axes=((axis,), (1,))), -1, axis), outside


def _resize(
    node: Node, x: Array, axes: tuple[int, ...], counts: list[int], scales: list[float], roi: Any
) -> Array:
    """x resized along each axis; halves are computed in float32 and rounded once."""
    dtype, x = x.dtype, widen(x)
    interpolates = node.get("mode", "nearest") != "nearest"
    if interpolates and not jnp.issubdtype(dtype, jnp.floating):
        x = x.astype(jnp.float32)
    masks = []
    for k, axis in enumerate(axes):
        part = None if roi is None else (float(roi[k]), float(roi[k + len(axes)]))
        if counts[k] == x.shape[axis] and scales[k] == 1.0 and part is None:
            continue
        x, outside = _resize_axis(node, x, axis, counts[k], scales[k], part)
        shape = [1] * x.ndim
        shape[axis] = -1
        masks.append(outside.reshape(shape))
    if node.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        for mask in masks:
            x = jnp.where(mask, np.asarray(node.get("extrapolation_value", 0.0), x.dtype), x)
    if interpolates and not jnp.issubdtype(dtype, jnp.floating):
        info = np.iinfo(dtype)
        x = jnp.clip(jnp.round(x), info.min, info.max)
    return x.astype(dtype)


@operator(ONNX, "Resize", since=(10,))
@operator(ONNX, "Upsample", since=(9, 10))
def resize_10(ctx: Context, node: Node, x: Array, scales: Array) -> Array:
    """x resized by scales, nearest or linear, with asymmetric coordinates rounded down (ONNX Resize 10,
    Upsample 9).
    """
    return _scaled(node, x, [float(s) for s in ctx.constant(1)])


@operator(ONNX, "Upsample", since=(1, 7))
def upsample(ctx: Context, node: Node, x: Array) -> Array:
    """x resized by the attribute ``scales`` (ONNX Upsample 7)."""
    if "scales" in node.attributes:
        return _scaled(node, x, [float(s) for s in node["scales"]])
    return _scaled(node, x, [1.0, 1.0, float(node["height_scale"]), float(node["width_scale"])])


def _scaled(node: Node, x: Array, scales: list[float]) -> Array:
    mode = {"bilinear": "linear"}.get(node.get("mode", "nearest"), node.get("mode", "nearest"))
    fixed = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if node.get("nearest_mode", "pytorch") != "pytorch":  # The SDK takes opset 11's attributes earlier, too.
        names = ("coordinate_transformation_mode", "nearest_mode")
        fixed = {"mode": mode} | {name: node[name] for name in names if name in node.attributes}
    part = Node(node.op_type, node.domain, node.name, node.inputs, node.outputs, fixed, node.opset)
    counts = [int(np.floor(n * s)) for n, s in zip(x.shape, scales, strict=True)]
    return _resize(part, x, tuple(range(x.ndim)), counts, scales, None)


@operator(ONNX, "Resize", since=(11, 13, 18, 19))
def resize(
    ctx: Context, node: Node, x: Array, roi: Array = None, scales: Array = None, sizes: Array = None
) -> Array:
    """x resized by scales or to sizes along ``axes``: nearest, linear or cubic (ONNX Resize)."""
    axes = tuple(axis_in(a, x.ndim) for a in ints(node.get("axes") or range(x.ndim)))
    given = ctx.constant(2) if scales is not None else np.zeros(0)
    if given.size:
        by = [float(np.float32(s)) for s in given.reshape(-1)]
        counts = [int(np.floor(x.shape[a] * s)) for a, s in zip(axes, by, strict=True)]
    else:
        counts = list(ints(ctx.constant(3)))
        by = [c / x.shape[a] for a, c in zip(axes, counts, strict=True)]
        policy = node.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            one = min(by) if policy == "not_larger" else max(by)
            by = [one] * len(by)
            counts = [int(np.floor(one * x.shape[a] + 0.5)) for a in axes]
    crop = None
    if node.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        if roi is None:
            raise InputMismatch("tf_crop_and_resize needs roi")
        crop = ctx.constant(1).reshape(-1)
    return _resize(node, x, axes, counts, by, crop)


# --- sampling at positions found while running
# ------------------------------------------------------------------------


def _reflected(p: Array, low: float, high: float) -> Array:
    """Positions outside [low, high] mirrored back in, as often as need be."""
    span = high - low
    if span == 0:
        return jnp.full_like(p, low)
    away = jnp.abs(p - low) % (2 * span)
    return low + jnp.where(away > span, 2 * span - away, away)


def _pixel(image: Array, index: tuple[Array, ...], padding: str, align: bool) -> Array:
    """``image [C, *spatial]`` at whole positions, with the padding rule for those outside."""
    inside: Any = True
    places = []
    for at, size in zip(index, image.shape[1:], strict=True):
        if padding == "zeros":
            inside = inside & (at >= 0) & (at <= size - 1)
        elif padding == "reflection":
            at = _reflected(at, 0.0, size - 1.0) if align else _reflected(at, -0.5, size - 0.5)
        places.append(jnp.clip(at, 0, size - 1).astype(jnp.int32))
    values = image[(slice(None), *places)]
    return jnp.where(inside, values, jnp.zeros((), image.dtype)) if padding == "zeros" else values


def _cubic_weights(t: Array) -> list[Array]:
    a = -0.75
    near = [((a + 2) * d - (a + 3)) * d * d + 1 for d in (t, 1 - t)]
    far = [((a * d - 5 * a) * d + 8 * a) * d - 4 * a for d in (t + 1, 2 - t)]
    return [far[0], near[0], near[1], far[1]]


def _sample(image: Array, grid: Array, mode: str, padding: str, align: bool) -> Array:
    """``image [C, *spatial]`` at ``grid [*out, rank]`` of normalised positions, last axis first."""
    rank = image.ndim - 1
    places = []
    for a, size in enumerate(image.shape[1:]):
        g = grid[..., rank - 1 - a]
        p = (g + 1) / 2 * (size - 1) if align else ((g + 1) * size - 1) / 2
        if mode != "cubic" and padding == "border":
            p = jnp.clip(p, 0, size - 1)
        elif mode != "cubic" and padding == "reflection":
            p = _reflected(p, 0.0, size - 1.0) if align else _reflected(p, -0.5, size - 0.5)
        places.append(p)
    if mode == "nearest":
        return _pixel(image, tuple(jnp.round(p) for p in places), padding, align)
    floors = [jnp.floor(p) for p in places]
    if mode == "linear":
        weights = [[1 - (p - f), p - f] for p, f in zip(places, floors, strict=True)]
        first = 0
    else:
        weights = [_cubic_weights(p - f) for p, f in zip(places, floors, strict=True)]
        first = -1
    total: Any = 0
    for corner in np.ndindex(*(len(w) for w in weights)):
        weight: Any = 1
        for a, k in enumerate(corner):
            weight = weight * weights[a][k]
        index = tuple(f + (k + first) for f, k in zip(floors, corner, strict=True))
        total = total + weight * _pixel(image, index, padding, align)
    return total


@operator(ONNX, "GridSample", since=(16, 20, 22))
@rounds_once
def grid_sample(ctx: Context, node: Node, x: Array, grid: Array) -> Array:
    """``[N, C, *in]`` at normalised positions ``[N, *out, rank]``: nearest, linear or cubic (ONNX
    GridSample).
    """
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(
        node.get("mode", "linear"), node.get("mode", "linear")
    )
    if mode not in ("nearest", "linear", "cubic"):
        raise InputMismatch(f"mode '{mode}' is not known")
    padding, align = node.get("padding_mode", "zeros"), bool(node.get("align_corners", 0))
    return jax.vmap(lambda image, at: _sample(image, at, mode, padding, align))(x, grid.astype(x.dtype))


@operator(ONNX, "AffineGrid", since=(20,))
@rounds_once
def affine_grid(ctx: Context, node: Node, theta: Array, size: Array) -> Array:
    """Normalised positions moved by affine maps ``[N, rank, rank + 1]``: ``[N, *out, rank]`` (ONNX
    AffineGrid).
    """
    spatial = ints(ctx.constant(1))[2:]
    align = bool(node.get("align_corners", 0))
    lines = [np.linspace(-1, 1, n) if align and n > 1 else (np.arange(n) * 2 + 1) / n - 1 for n in spatial]
    mesh = np.meshgrid(*lines, indexing="ij")
    points = np.stack([*reversed(mesh), np.ones(spatial)], axis=-1).astype(theta.dtype)
    return jnp.einsum("nij,...j->n...i", theta, jnp.asarray(points))


def _align_points(start: Array, size: Array, bins: int, samples: int) -> Array:
    """Sampling positions along one axis of one region: ``[bins, samples]``."""
    step = size / bins
    inner = (jnp.arange(samples) + 0.5) / samples
    return start + (jnp.arange(bins)[:, None] + inner[None, :]) * step


def _roi_pick(image: Array, y: Array, x: Array, mode: str) -> Array:
    """Bilinear samples of ``[C, H, W]`` at rows ``[bh, sh]`` and columns ``[bw, sw]``, pooled to ``[C, bh,
    bw]``.
    """
    height, width = image.shape[1:]

    def sides(p: Array, size: int) -> tuple[Array, Array, Array, Array]:
        valid = (p >= -1.0) & (p <= size)
        p = jnp.clip(p, 0, None)
        low = jnp.clip(jnp.floor(p), 0, size - 1)
        high = jnp.clip(low + 1, 0, size - 1)
        away = jnp.where(low >= size - 1, 0.0, p - low)
        return low.astype(jnp.int32), high.astype(jnp.int32), away.astype(image.dtype), valid

    y0, y1, ly, vy = sides(y[:, :, None, None], height)
    x0, x1, lx, vx = sides(x[None, None, :, :], width)
    valid = (vy & vx).astype(image.dtype)
    terms = [
        w * image[:, a, b]
        for w, a, b in (
            ((1 - ly) * (1 - lx), y0, x0),
            ((1 - ly) * lx, y0, x1),
            (ly * (1 - lx), y1, x0),
            (ly * lx, y1, x1),
        )
    ]
    if mode == "max":
        best = jnp.maximum(jnp.maximum(terms[0], terms[1]), jnp.maximum(terms[2], terms[3])) * valid
        return jnp.max(best, axis=(2, 4))
    return jnp.mean((terms[0] + terms[1] + terms[2] + terms[3]) * valid, axis=(2, 4))


@operator(ONNX, "RoiAlign", since=(10, 16, 22))
@rounds_once
def roi_align(ctx: Context, node: Node, x: Array, rois: Array, batch: Array) -> Array:
    """Regions ``[R, 4]`` of images ``[N, C, H, W]`` sampled and pooled to ``[R, C, oh, ow]`` (ONNX RoiAlign).

    With ``sampling_ratio`` 0 the number of samples depends on each region, so regions must be known while
    tracing.
    """
    scale = node.get("spatial_scale", 1.0)
    bins = node.get("output_height", 1), node.get("output_width", 1)
    default = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    half = node.get("coordinate_transformation_mode", default) == "half_pixel" and node.opset >= 16
    ratio, mode = node.get("sampling_ratio", 0), node.get("mode", "avg")
    boxes = rois.astype(x.dtype) * scale - (0.5 if half else 0.0)

    def one(box: Array, image: Array, samples: tuple[int, int]) -> Array:
        starts, ends = (box[1], box[0]), (box[3], box[2])
        sizes = [e - s if half else jnp.maximum(e - s, 1.0) for s, e in zip(starts, ends, strict=True)]
        y, across = (_align_points(starts[a], sizes[a], bins[a], samples[a]) for a in (0, 1))
        return _roi_pick(image, y, across, mode)

    if ratio > 0:
        return jax.vmap(lambda box, b: one(box, x[b], (ratio, ratio)))(boxes, batch)
    fixed = ctx.constant(1).astype(np.float64) * scale - (0.5 if half else 0.0)
    results = []
    for k, box in enumerate(fixed):
        spans = (box[3] - box[1], box[2] - box[0])
        counts = tuple(
            max(int(np.ceil((s if half else max(s, 1.0)) / b)), 1) for s, b in zip(spans, bins, strict=True)
        )
        results.append(one(boxes[k], x[batch[k]], (counts[0], counts[1])))
    return jnp.stack(results)


@operator(ONNX, "MaxRoiPool", since=(1, 22))
def max_roi_pool(ctx: Context, node: Node, x: Array, rois: Array) -> Array:
    """The maximum over each cell of a grid laid on each region (batch, x1, y1, x2, y2) (ONNX MaxRoiPool,
    as Caffe).
    """
    height, width = x.shape[2:]
    rows, columns = ints(node["pooled_shape"])
    scale = node.get("spatial_scale", 1.0)

    def edges(first: Array, last: Array, bins: int, size: int) -> Array:
        start = jnp.round(first * scale)
        length = jnp.maximum(jnp.round(last * scale) - start + 1, 1)
        k = jnp.arange(bins)
        low = jnp.clip(jnp.floor(k * length / bins) + start, 0, size)
        high = jnp.clip(jnp.ceil((k + 1) * length / bins) + start, 0, size)
        at = jnp.arange(size)
        return (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])

    def one(roi: Array) -> Array:
        image = x[roi[0].astype(jnp.int32)]
        down = edges(roi[2], roi[4], rows, height)
        across = edges(roi[1], roi[3], columns, width)
        inside = down[:, None, :, None] & across[None, :, None, :]
        best = jnp.max(jnp.where(inside, image[:, None, None], -jnp.inf), axis=(3, 4))
        return jnp.where(jnp.any(inside, axis=(2, 3)), best, 0).astype(x.dtype)

    return jax.vmap(one)(rois)
