"""Pooling over windows, resizing of images, local normalisation."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.numerics.pools import first_maximum_of_windows
from podrun.numerics.windows import Window
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import Array, computes

_POOL = "ksize strides padding explicit_paddings data_format"


def _pads(node: Node) -> str | list[tuple[int, int]]:
    """The name of a padding, or what stands before and after each axis."""
    if node["padding"] != "EXPLICIT":
        return str(node["padding"])
    pads = node["explicit_paddings"]
    return list(zip(pads[::2], pads[1::2], strict=True))


def _maximum(
    x: Array, sizes: Sequence[int], strides: Sequence[int], padding: str | Sequence[tuple[int, int]]
) -> Array:
    """The maximum over windows along all axes. Two axes of size 1 in front stand for those of samples and channels."""
    pads = lax.padtype_to_pads(x.shape, sizes, strides, padding) if isinstance(padding, str) else padding
    ends = tuple((int(before), int(after)) for before, after in pads)
    window = Window(tuple(sizes), tuple(strides), (1,) * x.ndim, ends, (0,) * x.ndim)
    return first_maximum_of_windows(x[None, None], window)[0, 0]


@computes("MaxPool", attributes=_POOL)
def _max_pool(ctx: Context, node: Node, x: Array) -> Array:
    return _maximum(x, node["ksize"], node["strides"], _pads(node))


@computes("MaxPoolV2", attributes="padding data_format")
def _max_pool_sizes(ctx: Context, node: Node, x: Array, sizes: Array, strides: Array) -> Array:
    window, steps = ([int(v) for v in ctx.constant(i)] for i in (1, 2))
    return _maximum(x, window, steps, node["padding"])


@computes("AvgPool", attributes=_POOL)
def _average_pool(ctx: Context, node: Node, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    total = lax.reduce_window(wide, np.float32(0), lax.add, node["ksize"], node["strides"], _pads(node))
    ones = jnp.ones(
        (1, *x.shape[1:3], 1) if node["data_format"] == "NHWC" else (1, 1, *x.shape[2:4]), jnp.float32
    )
    count = lax.reduce_window(ones, np.float32(0), lax.add, node["ksize"], node["strides"], _pads(node))
    return (total / count).astype(x.dtype)


@computes("ResizeBilinear", "ResizeNearestNeighbor", attributes="align_corners half_pixel_centers")
def _resize(ctx: Context, node: Node, x: Array, size: Array) -> Array:
    high, wide = (int(v) for v in ctx.constant(1))
    rows = _matrix(node, x.shape[1], high)
    columns = _matrix(node, x.shape[2], wide)
    nearest = node.op_type == "ResizeNearestNeighbor"
    y = jnp.einsum("bhwc,Hh,Ww->bHWc", x.astype(jnp.float32), rows, columns)
    return y.astype(x.dtype) if nearest else y


def _matrix(node: Node, size: int, count: int) -> np.ndarray:
    """How the output's rows are made of the input's, ``[count, size]``."""
    align, half = node["align_corners"], node["half_pixel_centers"]
    scale = (size - 1) / (count - 1) if align and count > 1 else size / count
    places = np.arange(count, dtype=np.float64)
    nearest = node.op_type == "ResizeNearestNeighbor"
    at = (places + 0.5) * scale - (0 if nearest else 0.5) if half else places * scale
    matrix = np.zeros((count, size), np.float32)
    if nearest:
        low = np.floor(at + 0.5) if align else np.floor(at)
        matrix[np.arange(count), np.clip(low, 0, size - 1).astype(int)] = 1
        return matrix
    at = np.clip(at, 0, size - 1)
    low = np.floor(at).astype(int)
    part = (at - low).astype(np.float32)
    np.add.at(matrix, (np.arange(count), low), 1 - part)
    np.add.at(matrix, (np.arange(count), np.minimum(low + 1, size - 1)), part)
    return matrix


@computes("LRN", attributes="depth_radius bias alpha beta")
def _local_norm(ctx: Context, node: Node, x: Array) -> Array:
    radius = node["depth_radius"]
    window = (1, 1, 1, 2 * radius + 1)
    total = lax.reduce_window(x * x, np.array(0, x.dtype), lax.add, window, (1, 1, 1, 1), "SAME")
    return x / (node["bias"] + node["alpha"] * total) ** node["beta"]
