"""Matrix products, convolutions, and normalisation over a batch."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.compiler.model_collectives import Combination, all_reduce
from podrun.core.errors import UnimplementedError
from podrun.numerics.convolution import correlate
from podrun.numerics.windows import Window
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.ipu import neighbour_groups
from podrun.tensorflow.operators.table import Array, computes


def _product(a: Array, b: Array) -> Array:
    if a.dtype == jnp.float16:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)
    return jnp.matmul(a, b)


@computes("MatMul", attributes="transpose_a transpose_b")
def _matmul(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    return _product(a.T if node["transpose_a"] else a, b.T if node["transpose_b"] else b)


@computes("BatchMatMulV2", "BatchMatMul", "BatchMatMulV3", attributes="adj_x adj_y")
def _batch_matmul(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    return _product(
        jnp.swapaxes(a, -1, -2) if node["adj_x"] else a, jnp.swapaxes(b, -1, -2) if node["adj_y"] else b
    )


@computes("Einsum", attributes="equation")
def _einsum(ctx: Context, node: Node, *inputs: Array) -> Array:
    wide = jnp.float32 if inputs[0].dtype == jnp.float16 else None
    return jnp.einsum(node["equation"], *inputs, preferred_element_type=wide).astype(inputs[0].dtype)


_CONV = "strides padding explicit_paddings data_format dilations"


def _spatial(values: Sequence[int], layout: str) -> tuple[int, ...]:
    return tuple(values[2:4]) if layout == "NCHW" else tuple(values[1:3])


def _padding(node: Node, layout: str) -> str | list[tuple[int, int]]:
    """The name of a padding, or what stands before and after each spatial axis."""
    if node["padding"] != "EXPLICIT":
        return str(node["padding"])
    pads = node["explicit_paddings"]
    first = 4 if layout == "NCHW" else 2
    return [(pads[first], pads[first + 1]), (pads[first + 2], pads[first + 3])]


@computes("Conv2D", attributes=_CONV)
def _conv(ctx: Context, node: Node, x: Array, w: Array) -> Array:
    layout = node.get("data_format", "NHWC")
    return _correlation(ctx, x, w, node, layout, x.shape[1 if layout == "NCHW" else 3] // w.shape[2])


def _correlation(ctx: Context, x: Array, w: Array, node: Node, layout: str, groups: int) -> Array:
    """Halves are computed in float32. Where a convolution stays one, its axes stay in TensorFlow's order: that of the
    library's images, and a kernel is read as it lies. Otherwise channels come first, as `correlate` takes them.
    """
    half = x.dtype == jnp.float16
    image, kernel = [v.astype(jnp.float32) for v in (x, w)] if half else [x, w]
    window = _window(node, layout, _spatial(image.shape, layout), kernel.shape[:2])
    if groups == 1 or ctx.grouped:
        y = lax.conv_general_dilated(
            image, kernel, window.strides, window.pads, rhs_dilation=window.dilations,
            dimension_numbers=(layout, "HWIO", layout), feature_group_count=groups,
        )  # fmt: skip
        return y.astype(x.dtype)
    kernel = jnp.transpose(kernel, (3, 2, 0, 1))
    if layout == "NCHW":
        return correlate(image, kernel, groups, window).astype(x.dtype)
    y = correlate(jnp.transpose(image, (0, 3, 1, 2)), kernel, groups, window)
    return jnp.transpose(y, (0, 2, 3, 1)).astype(x.dtype)


def _window(node: Node, layout: str, sizes: Sequence[int], kernel: Sequence[int]) -> Window:
    """The window of a convolution over images of spatial ``sizes``."""
    strides = _spatial(node["strides"], layout)
    dilations = _spatial(node.get("dilations", (1, 1, 1, 1)), layout)
    pads = _padding(node, layout)
    if isinstance(pads, str):
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        pads = lax.padtype_to_pads(sizes, reach, strides, pads)
    ends = tuple((int(before), int(after)) for before, after in pads)
    return Window(tuple(kernel), strides, dilations, ends, (0, 0))


@computes("DepthwiseConv2dNative", attributes=_CONV)
def _depthwise(ctx: Context, node: Node, x: Array, w: Array) -> Array:
    layout = node.get("data_format", "NHWC")
    high, wide, channels, multiplier = w.shape
    return _correlation(ctx, x, w.reshape(high, wide, 1, channels * multiplier), node, layout, channels)


@computes("Conv2DBackpropInput", attributes=_CONV)
def _transposed(ctx: Context, node: Node, sizes: Array, w: Array, y: Array) -> Array:
    shape = tuple(int(v) for v in np.atleast_1d(ctx.constant(0)))
    layout = node.get("data_format", "NHWC")
    groups = shape[1 if layout == "NCHW" else 3] // w.shape[2]
    zeros = jnp.zeros(shape, y.dtype)
    return jax.vjp(lambda x: _correlation(ctx, x, w, node, layout, groups), zeros)[1](y)[0]


@computes("Conv3D", attributes="strides padding data_format dilations")
def _conv3(ctx: Context, node: Node, x: Array, w: Array) -> Array:
    if node["data_format"] != "NDHWC":
        raise UnimplementedError(f"{node.describe()}: only NDHWC is implemented.")
    return lax.conv_general_dilated(
        x, w, node["strides"][1:4], node["padding"], rhs_dilation=node["dilations"][1:4],
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"), feature_group_count=x.shape[-1] // w.shape[3],
    )  # fmt: skip


def around_channels(node: Node, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of a node's inputs besides the channels, and the shape in which a row of channels meets the inputs."""
    place = 1 if node["data_format"].startswith("NC") else rank - 1
    axes = tuple(axis for axis in range(rank) if axis != place)
    return axes, tuple(-1 if axis == place else 1 for axis in range(rank))


@computes("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3",
          attributes="epsilon is_training data_format exponential_avg_factor replicas")  # fmt: skip
def _batch_norm(
    ctx: Context, node: Node, x: Array, scale: Array, offset: Array, mean: Array, variance: Array
) -> tuple[Array, ...]:
    """Statistics in float32, in training over the batches of ``replicas`` neighbours; the running variance is the
    unbiased one. No gradient passes through the statistics that are results.
    """
    axes, shape = around_channels(node, x.ndim)
    wide = x.astype(jnp.float32)
    if not node["is_training"]:
        y = (wide - mean.reshape(shape)) * (lax.rsqrt(variance + node["epsilon"]) * scale).reshape(
            shape
        ) + offset.reshape(shape)
        return y.astype(x.dtype), mean, variance, mean, variance, jnp.zeros((), jnp.float32)
    replicas = node.get("replicas", 1)

    def over_replicas(mean: Array) -> Array:
        return mean if replicas == 1 else all_reduce(mean, Combination.MEAN, neighbour_groups(ctx, replicas))

    batch_mean = over_replicas(wide.mean(axes))
    batch_variance = over_replicas(jnp.square(wide - batch_mean.reshape(shape)).mean(axes))
    factor = lax.rsqrt(batch_variance + node["epsilon"]) * scale
    y = (wide - batch_mean.reshape(shape)) * factor.reshape(shape) + offset.reshape(shape)
    count = replicas * x.size // batch_mean.size
    unbiased = batch_variance * (count / max(count - 1, 1))
    moving = node.get("exponential_avg_factor", 1.0)
    results = (batch_mean, unbiased)
    if moving != 1.0:
        results = (mean * (1 - moving) + batch_mean * moving, variance * (1 - moving) + unbiased * moving)
    others = (lax.stop_gradient(v) for v in (*results, batch_mean, batch_variance))
    return y.astype(x.dtype), *others, jnp.zeros((), jnp.float32)
