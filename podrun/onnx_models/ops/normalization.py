"""Normalisation. Statistics and results of halves are computed in float32 and rounded once."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.numerics.convolution import along_channels
from podrun.numerics.norms import (
    inverse_deviation,
    normalised_channels,
    over_root_mean_square,
    rescaled,
    running,
    standardised,
    standardised_groups,
)
from podrun.numerics.precision import rounds_once, widen
from podrun.onnx_models.ops.common import Array, axis_in, ints
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


def _batch_training(
    node: Node, ctx: Context, x: Array, scale: Array, bias: Array, mean: Array, var: Array
) -> tuple[Array, ...]:
    """Normalise by the batch; running statistics are old * momentum + batch * (1 - momentum), variance biased."""
    rank = x.ndim
    y, *measured = standardised(widen(x), (0, *range(2, rank)), node.get("epsilon", 1e-5))
    y = rescaled(y, along_channels(widen(scale), rank), along_channels(widen(bias), rank))
    batch_mean, batch_var = (moment.reshape(-1) for moment in measured)
    momentum = node.get("momentum", 0.9)
    running_mean = running(widen(mean), batch_mean, momentum)
    running_var = running(widen(var), batch_var, momentum)
    ctx.state_update(3, 1)
    ctx.state_update(4, 2)
    saved = (batch_mean.astype(mean.dtype), batch_var.astype(var.dtype))
    return (y.astype(x.dtype), running_mean.astype(mean.dtype), running_var.astype(var.dtype), *saved)


def _batch_inference(node: Node, x: Array, scale: Array, bias: Array, mean: Array, var: Array) -> Array:
    mean, var, scale, bias = (widen(array) for array in (mean, var, scale, bias))
    return normalised_channels(widen(x), mean, var, scale, bias, node.get("epsilon", 1e-5)).astype(x.dtype)


@operator(ONNX, "BatchNormalization", since=(1, 6, 7, 9))
@operator(GRAPHCORE, "BatchNormalization")
def batch_normalization(
    ctx: Context, node: Node, x: Array, scale: Array, bias: Array, mean: Array, var: Array
) -> Array | tuple[Array, ...]:
    """Normalise each channel of ``[N, C, ...]`` (ONNX BatchNormalization before 14; PopART's has the same form).

    Five outputs mean training: by the batch's statistics, the second and third outputs are the running
    statistics, which replace the inputs; one output means inference, by the given statistics. ``spatial`` 0 (until
    opset 8): each element of a sample has statistics of its own, scale and the others the shape of a sample.
    """
    if node.opset < 9 and node.get("spatial", 1) == 0 and node.domain == ONNX:
        flat = [value.reshape(-1) for value in (scale, bias, mean, var)]
        alike = dataclasses.replace(node, attributes={**node.attributes, "spatial": 1})
        result = batch_normalization(ctx, alike, x.reshape(x.shape[0], -1), *flat)
        results = result if isinstance(result, tuple) else (result,)
        shaped = (results[0].reshape(x.shape), *(value.reshape(scale.shape) for value in results[1:]))
        return shaped if isinstance(result, tuple) else shaped[0]
    if len([o for o in node.outputs if o]) > 1:
        return _batch_training(node, ctx, x, scale, bias, mean, var)
    return _batch_inference(node, x, scale, bias, mean, var)


@operator(ONNX, "BatchNormalization", since=(14, 15))
def batch_normalization_mode(
    ctx: Context, node: Node, x: Array, scale: Array, bias: Array, mean: Array, var: Array
) -> Array | tuple[Array, ...]:
    """Normalise each channel; ``training_mode`` says by which statistics (ONNX BatchNormalization 14)."""
    if node.get("training_mode", 0):
        return _batch_training(node, ctx, x, scale, bias, mean, var)[:3]
    return _batch_inference(node, x, scale, bias, mean, var)


@operator(ONNX, "InstanceNormalization", since=(1, 6, 22))
@rounds_once
def instance_normalization(ctx: Context, node: Node, x: Array, scale: Array, bias: Array) -> Array:
    """Normalise each channel of each instance over its spatial axes (ONNX InstanceNormalization)."""
    y, _, _ = standardised(x, tuple(range(2, x.ndim)), node.get("epsilon", 1e-5))
    return rescaled(y, along_channels(scale, x.ndim), along_channels(bias, x.ndim))


@operator(ONNX, "GroupNormalization", since=(18, 21))
@rounds_once
def group_normalization(ctx: Context, node: Node, x: Array, scale: Array, bias: Array) -> Array:
    """Normalise groups of channels; scale and bias per group (18) or per channel (21) (ONNX GroupNormalization)."""
    groups = node["num_groups"]
    y, _, _ = standardised_groups(x, groups, node.get("epsilon", 1e-5))
    if node.opset < 21:
        scale, bias = (jnp.repeat(v, x.shape[1] // groups) for v in (scale, bias))
    return rescaled(y, along_channels(scale, x.ndim), along_channels(bias, x.ndim))


@operator(GRAPHCORE, "GroupNormalization")
@rounds_once
def graphcore_group_normalization(
    ctx: Context, node: Node, x: Array, scale: Array, bias: Array
) -> tuple[Array, ...]:
    """Normalise groups of channels, scale and bias per channel; also mean and inverse deviation, in x's
    type (PopART GroupNorm). Groups are of neighbours, or strided if the session says so.
    """
    epsilon, groups = node.get("epsilon", 1e-5), node["num_groups"]
    strided = ctx.sdk is not None and ctx.sdk.strided_groups
    y, mean, variance = standardised_groups(x, groups, epsilon, strided=strided)
    y = rescaled(y, along_channels(scale, x.ndim), along_channels(bias, x.ndim))
    deviation = inverse_deviation(variance, epsilon)
    return y, mean.reshape(-1), deviation.reshape(-1)


@operator(ONNX, "LayerNormalization", since=(17,))
def layer_normalization(
    ctx: Context, node: Node, x: Array, scale: Array, bias: Array = None
) -> tuple[Array, ...]:
    """Normalise over the axes from ``axis`` on; also mean and inverse deviation (ONNX LayerNormalization)."""
    axis = axis_in(node.get("axis", -1), x.ndim)
    axes = tuple(range(axis, x.ndim))
    epsilon = node.get("epsilon", 1e-5)
    wide = widen(x)
    y, mean, variance = standardised(wide, axes, epsilon)
    y = rescaled(y, widen(scale), widen(bias))
    return y.astype(x.dtype), mean, inverse_deviation(variance, epsilon)


@operator(ONNX, "RMSNormalization", since=(23,))
def rms_normalization(ctx: Context, node: Node, x: Array, scale: Array) -> Array:
    """x over the root of its mean square over the axes from ``axis`` on, times scale (ONNX RMSNormalization)."""
    axis = axis_in(node.get("axis", -1), x.ndim)
    y, _ = over_root_mean_square(widen(x), tuple(range(axis, x.ndim)), node.get("epsilon", 1e-5))
    return (y * widen(scale)).astype(scale.dtype)


@operator(ONNX, "LpNormalization", since=(1, 22))
@rounds_once
def lp_normalization(ctx: Context, node: Node, x: Array) -> Array:
    """x over its ``p``-norm (1 or 2) along ``axis``; 0 where the norm is 0 (ONNX LpNormalization)."""
    axis = axis_in(node.get("axis", -1), x.ndim)
    if node.get("p", 2) == 1:
        norm = jnp.sum(jnp.abs(x), axis=axis, keepdims=True)
    else:
        square = jnp.sum(x * x, axis=axis, keepdims=True)
        norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
    return jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1), jnp.zeros((), x.dtype))


@operator(ONNX, "MeanVarianceNormalization", since=(9, 13))
@rounds_once
def mean_variance_normalization(ctx: Context, node: Node, x: Array) -> Array:
    """x less its mean over its standard deviation over ``axes`` (ONNX MeanVarianceNormalization)."""
    axes = ints(node.get("axes") or (0, 2, 3))
    mean = jnp.mean(x, axis=axes, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(x * x, axis=axes, keepdims=True) - mean * mean)
    return (x - mean) / (deviation + np.asarray(1e-9, x.dtype))


@operator(ONNX, "LRN", since=(1, 13))
@rounds_once
def lrn(ctx: Context, node: Node, x: Array) -> Array:
    """x over (bias + alpha / size * sum of squares over ``size`` neighbouring channels) ** beta (ONNX LRN)."""
    size = node["size"]
    before = (size - 1) // 2
    config = [(0, 0, 0)] * x.ndim
    config[1] = (before, size - 1 - before, 0)
    squares = lax.pad(x * x, np.zeros((), x.dtype), config)
    total = sum(lax.slice_in_dim(squares, i, i + x.shape[1], axis=1) for i in range(size))
    alpha = np.asarray(node.get("alpha", 1e-4) / size, x.dtype)
    base = np.asarray(node.get("bias", 1.0), x.dtype) + alpha * total
    beta = node.get("beta", 0.75)
    if beta == 0.75:  # the usual one; a power takes twenty times as long as two roots
        root = lax.rsqrt(base)
        return x * (root * jnp.sqrt(root))
    return x * jnp.power(base, np.asarray(-beta, x.dtype))
