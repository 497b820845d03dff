"""Resizing and sampling of images (ONNX), computed by `podrun.numerics.interpolation` and its neighbour `sampling`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch
from podrun.numerics.interpolation import Resizing, resized
from podrun.numerics.precision import rounds_once
from podrun.numerics.sampling import (
    affine_positions,
    maximum_of_regions,
    region_pooled,
    region_positions,
    sampled,
)
from podrun.onnx_models.ops.common import Array, axis_in, ints
from podrun.onnx_models.ops.registry import ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context

LINEAR = {"bilinear": "linear", "bicubic": "cubic"}
"""Former names of modes."""


def _resizing(node: Node) -> Resizing:
    return Resizing(
        mode=node.get("mode", "nearest"),
        coordinates=node.get("coordinate_transformation_mode", "half_pixel"),
        nearest=node.get("nearest_mode", "round_prefer_floor"),
        antialias=bool(node.get("antialias", 0)),
        cubic=node.get("cubic_coeff_a", -0.75),
        exclude_outside=bool(node.get("exclude_outside", 0)),
        extrapolation=node.get("extrapolation_value", 0.0),
    )


@operator(ONNX, "Resize", since=(10,))
@operator(ONNX, "Upsample", since=(9, 10))
def resize_10(ctx: Context, node: Node, x: Array, scales: Array) -> Array:
    """x resized by scales, nearest or linear, with asymmetric coordinates rounded down (ONNX Resize 10, Upsample 9)."""
    return _scaled(node, x, [float(s) for s in ctx.constant(1)])


@operator(ONNX, "Upsample", since=(1, 7))
def upsample(ctx: Context, node: Node, x: Array) -> Array:
    """x resized by the attribute ``scales`` (ONNX Upsample 7)."""
    if "scales" in node.attributes:
        return _scaled(node, x, [float(s) for s in node["scales"]])
    return _scaled(node, x, [1.0, 1.0, float(node["height_scale"]), float(node["width_scale"])])


def _scaled(node: Node, x: Array, scales: list[float]) -> Array:
    mode = node.get("mode", "nearest")
    mode = "linear" if mode == "bilinear" else mode
    how = Resizing(mode=mode, coordinates="asymmetric", nearest="floor")
    if node.get("nearest_mode", "pytorch") != "pytorch":  # The SDK takes opset 11's attributes earlier, too.
        coordinates = node.get("coordinate_transformation_mode", "half_pixel")
        how = Resizing(mode=mode, coordinates=coordinates, nearest=node["nearest_mode"])
    counts = [int(np.floor(n * s)) for n, s in zip(x.shape, scales, strict=True)]
    return resized(x, how, tuple(range(x.ndim)), counts, scales)


@operator(ONNX, "Resize", since=(11, 13, 18, 19))
def resize(
    ctx: Context, node: Node, x: Array, roi: Array = None, scales: Array = None, sizes: Array = None
) -> Array:
    """x resized by scales or to sizes along ``axes``: nearest, linear or cubic (ONNX Resize)."""
    axes = tuple(axis_in(a, x.ndim) for a in ints(node.get("axes") or range(x.ndim)))
    scaling = ctx.constant(2) if scales is not None else np.zeros(0)
    if scaling.size:
        by = [float(np.float32(s)) for s in scaling.reshape(-1)]
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
        crop = [float(v) for v in ctx.constant(1).reshape(-1)]
    return resized(x, _resizing(node), axes, counts, by, crop)


@operator(ONNX, "GridSample", since=(16, 20, 22))
@rounds_once
def grid_sample(ctx: Context, node: Node, x: Array, grid: Array) -> Array:
    """``[N, C, *in]`` at normalised positions ``[N, *out, rank]``: nearest, linear or cubic (ONNX GridSample)."""
    mode = LINEAR.get(node.get("mode", "linear"), node.get("mode", "linear"))
    padding, align = node.get("padding_mode", "zeros"), bool(node.get("align_corners", 0))
    return sampled(x, grid.astype(x.dtype), mode, padding, align)


@operator(ONNX, "AffineGrid", since=(20,))
@rounds_once
def affine_grid(ctx: Context, node: Node, theta: Array, size: Array) -> Array:
    """Normalised positions moved by affine maps ``[N, rank, rank + 1]``: ``[N, *out, rank]`` (ONNX AffineGrid)."""
    spatial = ints(ctx.constant(1))[2:]
    align = bool(node.get("align_corners", 0))
    return affine_positions(theta, spatial, align)


@operator(ONNX, "RoiAlign", since=(10, 16, 22))
@rounds_once
def roi_align(ctx: Context, node: Node, x: Array, rois: Array, batch: Array) -> Array:
    """Regions ``[R, 4]`` of images ``[N, C, H, W]`` sampled and pooled to ``[R, C, oh, ow]`` (ONNX RoiAlign).

    With ``sampling_ratio`` 0 the number of samples depends on each region, so regions must be known while tracing.
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
        y, across = (region_positions(starts[a], sizes[a], bins[a], samples[a]) for a in (0, 1))
        return region_pooled(image, y, across, mode)

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
    """The maximum over each cell of a grid laid on each region (batch, x1, y1, x2, y2) (ONNX MaxRoiPool, as Caffe)."""
    rows, columns = ints(node["pooled_shape"])
    return maximum_of_regions(x, rois, (rows, columns), node.get("spatial_scale", 1.0))
