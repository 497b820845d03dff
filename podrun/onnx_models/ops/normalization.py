"""Normalisation. Statistics and results of halves are computed in float32 and rounded once."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.core.errors import InputMismatch
from podrun.numerics.precision import rounds_once, widen
from podrun.onnx_models.ops.common import Array, axis_in, ints
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


def _per_channel(v: Array, rank: int) -> Array:
    return v.reshape((1, -1) + (1,) * (rank - 2))


def _standardised(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array]:
    """x less its mean over its standard deviation; mean and biased variance kept as 1 over ``axes``."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + np.asarray(epsilon, x.dtype)), mean, variance


def _batch_training(
    node: Node, ctx: Any, x: Array, scale: Array, bias: Array, mean: Array, var: Array
) -> tuple[Array, ...]:
    """Normalise by the batch; running statistics are old * momentum + batch * (1 - momentum), variance
    biased.
    """
    rank = x.ndim
    axes = (0, *range(2, rank))
    y, batch_mean, batch_var = _standardised(widen(x), axes, node.get("epsilon", 1e-5))
    y = y * _per_channel(widen(scale), rank) + _per_channel(widen(bias), rank)
    momentum = np.asarray(node.get("momentum", 0.9), np.float32)
    batch_mean, batch_var = batch_mean.reshape(-1), batch_var.reshape(-1)
    wide_mean, wide_var = widen(mean), widen(var)
    momentum = momentum.astype(wide_mean.dtype)
    running_mean = wide_mean * momentum + lax.stop_gradient(batch_mean).astype(wide_mean.dtype) * (
        1 - momentum
    )
    running_var = wide_var * momentum + lax.stop_gradient(batch_var).astype(wide_var.dtype) * (1 - momentum)
    ctx.state_update(3, 1)
    ctx.state_update(4, 2)
    saved = (batch_mean.astype(mean.dtype), batch_var.astype(var.dtype))
    return (y.astype(x.dtype), running_mean.astype(mean.dtype), running_var.astype(var.dtype), *saved)


def _batch_inference(node: Node, x: Array, scale: Array, bias: Array, mean: Array, var: Array) -> Array:
    rank = x.ndim
    factor = widen(scale) * lax.rsqrt(widen(var) + np.asarray(node.get("epsilon", 1e-5), widen(var).dtype))
    wide = widen(x)
    factor = factor.astype(wide.dtype)
    y = (wide - _per_channel(widen(mean), rank).astype(wide.dtype)) * _per_channel(factor, rank)
    return (y + _per_channel(widen(bias), rank).astype(wide.dtype)).astype(x.dtype)


@operator(ONNX, "BatchNormalization", since=(1, 6, 7, 9))
@operator(GRAPHCORE, "BatchNormalization")
def batch_normalization(
    ctx: Context, node: Node, x: Array, scale: Array, bias: Array, mean: Array, var: Array
) -> Array | tuple[Array, ...]:
    """Normalise each channel of ``[N, C, ...]`` (ONNX BatchNormalization before 14; PopART's has the same
    form).

    Five outputs mean training: by the batch's statistics, the second and third outputs are the running
    statistics, which replace the inputs; one output means inference, by the given statistics. ``spatial`` 0 (until
    opset 8): each element of a sample has statistics of its own, scale and the others the shape of a sample.
    """
    if node.opset < 9 and node.get("spatial", 1) == 0 and node.domain == ONNX:
        flat = [value.reshape(-1) for value in (scale, bias, mean, var)]
        alike = dataclasses.replace(node, attributes={**node.attributes, "spatial": 1})
        found = batch_normalization(ctx, alike, x.reshape(x.shape[0], -1), *flat)
        results = found if isinstance(found, tuple) else (found,)
        shaped = (results[0].reshape(x.shape), *(value.reshape(scale.shape) for value in results[1:]))
        return shaped if isinstance(found, tuple) else shaped[0]
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
    y, _, _ = _standardised(x, tuple(range(2, x.ndim)), node.get("epsilon", 1e-5))
    return y * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim)


def _groups(x: Array, groups: int, epsilon: float) -> tuple[Array, Array, Array]:
    if x.shape[1] % groups:
        raise InputMismatch(f"{x.shape[1]} channels do not make {groups} groups")
    parts = x.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    y, mean, variance = _standardised(parts, (2,), epsilon)
    return y.reshape(x.shape), mean, variance


def _dealt(x: Array, groups: int) -> Array:
    """Channels 0, ``groups``, 2 ``groups`` ... first, then 1, ``groups`` + 1 ...; undone by the number of
    each.
    """
    if x.shape[1] % groups:
        raise InputMismatch(f"{x.shape[1]} channels do not make {groups} groups")
    return jnp.swapaxes(x.reshape(x.shape[0], x.shape[1] // groups, groups, *x.shape[2:]), 1, 2).reshape(
        x.shape
    )


@operator(ONNX, "GroupNormalization", since=(18, 21))
@rounds_once
def group_normalization(ctx: Context, node: Node, x: Array, scale: Array, bias: Array) -> Array:
    """Normalise groups of channels; scale and bias per group (18) or per channel (21) (ONNX
    GroupNormalization).
    """
    groups = node["num_groups"]
    y, _, _ = _groups(x, groups, node.get("epsilon", 1e-5))
    if node.opset < 21:
        scale, bias = (jnp.repeat(v, x.shape[1] // groups) for v in (scale, bias))
    return y * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim)


@operator(GRAPHCORE, "GroupNormalization")
@rounds_once
def graphcore_group_normalization(
    ctx: Context, node: Node, x: Array, scale: Array, bias: Array
) -> tuple[Array, ...]:
    """Normalise groups of channels, scale and bias per channel; also mean and inverse deviation, in x's
    type (PopART GroupNorm). Groups are of neighbours, or strided if the session says so.
    """
    epsilon, groups = node.get("epsilon", 1e-5), node["num_groups"]
    if ctx.sdk is not None and ctx.sdk.strided_groups:
        y, mean, variance = _groups(_dealt(x, groups), groups, epsilon)
        y = _dealt(y, x.shape[1] // groups)
    else:
        y, mean, variance = _groups(x, groups, epsilon)
    y = y * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim)
    deviation = lax.rsqrt(variance + np.asarray(epsilon, x.dtype))
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
    y, mean, variance = _standardised(wide, axes, epsilon)
    y = y * widen(scale)
    y = y if bias is None else y + widen(bias)
    return y.astype(x.dtype), mean, lax.rsqrt(variance + np.asarray(epsilon, wide.dtype))


@operator(ONNX, "RMSNormalization", since=(23,))
def rms_normalization(ctx: Context, node: Node, x: Array, scale: Array) -> Array:
    """x over the root of its mean square over the axes from ``axis`` on, times scale (ONNX
    RMSNormalization).
    """
    axis = axis_in(node.get("axis", -1), x.ndim)
    wide = widen(x)
    square = jnp.mean(jnp.square(wide), axis=tuple(range(axis, x.ndim)), keepdims=True)
    y = wide * lax.rsqrt(square + np.asarray(node.get("epsilon", 1e-5), wide.dtype))
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
    """x over (bias + alpha / size * sum of squares over ``size`` neighbouring channels) ** beta (ONNX
    LRN).
    """
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
