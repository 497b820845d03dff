"""Gradients of convolutions, pools and batch norms as operations of their own, which programs call by name. Those that
TensorFlow derives are cut out of programs before, and left to JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.compiler.model_collectives import Combination, all_reduce
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.contractions import around_channels
from podrun.tensorflow.operators.ipu import neighbour_groups
from podrun.tensorflow.operators.table import HANDLERS, Array, computes

_FORWARD = {
    "MaxPoolGrad": "MaxPool",
    "MaxPool3DGrad": "MaxPool3D",
    "AvgPoolGrad": "AvgPool",
    "AvgPool3DGrad": "AvgPool3D",
    "Conv2DBackpropFilter": "Conv2D",
    "DepthwiseConv2dNativeBackpropInput": "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropFilter": "DepthwiseConv2dNative",
    "Conv3DBackpropFilterV2": "Conv3D",
}
"""Gradient -> the operation whose it is."""
_CONVOLUTION = "strides padding explicit_paddings data_format dilations"
_POOL = "ksize strides padding explicit_paddings data_format"


def _forward(ctx: Context, node: Node) -> Callable[..., Array]:
    """The operation whose gradient a node is, as a function of its inputs."""
    kind = _FORWARD[node.op_type]
    plain = replace(node, op_type=kind)
    function = HANDLERS[kind].function
    return lambda *inputs: function(ctx, plain, *inputs)


def _sizes(ctx: Context, place: int) -> tuple[int, ...]:
    return tuple(int(v) for v in np.atleast_1d(ctx.constant(place)))


def _pulled_back(function: Callable[[Array], Array], at: Array, gradient: Array) -> Array:
    return jax.vjp(function, at)[1](gradient)[0]


@computes("MaxPoolGrad", "MaxPool3DGrad", attributes=_POOL)
def _of_maximum(ctx: Context, node: Node, x: Array, y: Array, gradient: Array) -> Array:
    return _pulled_back(_forward(ctx, node), x, gradient)


@computes("AvgPoolGrad", "AvgPool3DGrad", attributes=_POOL)
def _of_average(ctx: Context, node: Node, sizes: Array, gradient: Array) -> Array:
    return _pulled_back(_forward(ctx, node), jnp.zeros(_sizes(ctx, 0), gradient.dtype), gradient)


@computes("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter", "Conv3DBackpropFilterV2",
          attributes=_CONVOLUTION)  # fmt: skip
def _of_filter(ctx: Context, node: Node, x: Array, sizes: Array, gradient: Array) -> Array:
    forward = _forward(ctx, node)
    return _pulled_back(lambda w: forward(x, w), jnp.zeros(_sizes(ctx, 1), x.dtype), gradient)


@computes("DepthwiseConv2dNativeBackpropInput", attributes=_CONVOLUTION)
def _of_input(ctx: Context, node: Node, sizes: Array, w: Array, gradient: Array) -> Array:
    forward = _forward(ctx, node)
    return _pulled_back(lambda x: forward(x, w), jnp.zeros(_sizes(ctx, 0), w.dtype), gradient)


@computes("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3",
          attributes="epsilon is_training data_format replicas")  # fmt: skip
def _batch_norm_gradient(
    ctx: Context,
    node: Node,
    gradient: Array,
    x: Array,
    scale: Array,
    mean: Array,
    variance: Array,
    *rest: Array,
) -> tuple[Array, ...]:
    """Gradients of the inputs, the scale and the offset, with the statistics that are given. In training those of the
    inputs are taken over the batches of ``replicas`` neighbours.
    """
    axes, shape = around_channels(node, x.ndim)
    g, centred = gradient.astype(jnp.float32), x.astype(jnp.float32) - mean.reshape(shape)
    inverse = lax.rsqrt(variance + node["epsilon"])
    of_scale, of_offset = (g * centred).sum(axes) * inverse, g.sum(axes)
    inner = g
    if node["is_training"]:
        replicas, count = node.get("replicas", 1), x.size // mean.size

        def over_replicas(mean: Array) -> Array:
            return (
                mean if replicas == 1 else all_reduce(mean, Combination.MEAN, neighbour_groups(ctx, replicas))
            )

        slope = over_replicas(of_scale / count) * inverse
        inner = g - over_replicas(of_offset / count).reshape(shape) - centred * slope.reshape(shape)
    of_x = (inner * (scale * inverse).reshape(shape)).astype(x.dtype)
    nothing = jnp.zeros(0, jnp.float32)
    return of_x, of_scale, of_offset, nothing, nothing
