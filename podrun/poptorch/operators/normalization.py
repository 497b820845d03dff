"""Normalisation over batches, layers and groups, in float32."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.core.errors import present
from podrun.numerics.convolution import along_channels
from podrun.numerics.norms import (
    inverse_deviation,
    over_root_mean_square,
    rescaled,
    standardised,
    standardised_groups,
)
from podrun.numerics.precision import widen
from podrun.poptorch.operators.table import Call, Sizes, aten


def _along_channels(values: Array | None, rank: int) -> Array | None:
    return None if values is None else along_channels(widen(values), rank)


@aten("batch_norm", kind="BatchNormalization")
def batch_norm(
    call: Call,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    mean: Array | None,
    variance: Array | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> Array | tuple[Array, ...]:
    """Normalise each channel of ``[N, C, ...]``; in training also the new running statistics.

    The running variance takes the unbiased variance of the micro-batch, as torch's does.
    """
    wide: Array = widen(x)
    if training or mean is None or variance is None:
        others = tuple(i for i in range(x.ndim) if i != 1)
        now, spread = jnp.mean(wide, others), jnp.var(wide, others)
    else:
        now, spread = widen(mean), widen(variance)
    centred = wide - along_channels(now, x.ndim)
    scaled = centred * along_channels(inverse_deviation(spread, epsilon), x.ndim)
    normalised: Array = rescaled(scaled, _along_channels(weight, x.ndim), _along_channels(bias, x.ndim))
    if len(call.results) == 1:
        return normalised
    count = x.size // x.shape[1]
    unbiased = spread * (count / max(count - 1, 1))
    updated = [
        lax.stop_gradient(
            (1 - momentum) * widen(present(before, "who updates statistics has them")) + momentum * measured
        )
        for before, measured in ((mean, now), (variance, unbiased))
    ]
    return normalised, *updated


@aten("native_layer_norm", kind="LayerNormalization")
def layer_norm_with_statistics(
    call: Call, x: Array, shape: Sizes, weight: Array | None, bias: Array | None, epsilon: float
) -> tuple[Array, Array, Array]:
    """Normalise over the last dimensions, whose sizes are ``shape``."""
    where = tuple(range(x.ndim - len(shape), x.ndim))
    normalised, mean, variance = standardised(widen(x), where, epsilon, own_mean=True)
    return rescaled(normalised, widen(weight), widen(bias)), mean, inverse_deviation(variance, epsilon)


@aten("layer_norm", kind="LayerNormalization")
def layer_norm(
    call: Call,
    x: Array,
    shape: Sizes,
    weight: Array | None = None,
    bias: Array | None = None,
    epsilon: float = 1e-5,
    *rest: object,
) -> Array:
    """Normalise over the last dimensions, whose sizes are ``shape``."""
    return layer_norm_with_statistics(call, x, shape, weight, bias, epsilon)[0]


@aten("rms_norm", "_fused_rms_norm", kind="LayerNormalization")
def rms_norm(
    call: Call, x: Array, shape: Sizes, weight: Array | None = None, epsilon: float | None = None
) -> Array | tuple[Array, ...]:
    """x over the root of its mean square, over the last dimensions."""
    where = tuple(range(x.ndim - len(shape), x.ndim))
    epsilon = float(np.finfo(x.dtype).eps) if epsilon is None else epsilon
    normalised, scale = over_root_mean_square(widen(x), where, epsilon)
    normalised = rescaled(normalised, widen(weight), None)
    return normalised if len(call.results) == 1 else (normalised, scale)


@aten("native_group_norm", kind="GroupNormalization")
def group_norm_with_statistics(
    call: Call,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    batch: int,
    channels: int,
    positions: int,
    groups: int,
    epsilon: float,
) -> tuple[Array, Array, Array]:
    """Normalise groups of channels of each sample."""
    normalised, mean, variance = standardised_groups(widen(x), groups, epsilon, own_mean=True)
    normalised = rescaled(normalised, _along_channels(weight, x.ndim), _along_channels(bias, x.ndim))
    return normalised, mean[..., 0], inverse_deviation(variance, epsilon)[..., 0]


@aten("group_norm", kind="GroupNormalization")
def group_norm(
    call: Call,
    x: Array,
    groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    epsilon: float = 1e-5,
    *rest: object,
) -> Array:
    """Normalise groups of channels of each sample."""
    batch, channels = x.shape[:2]
    return group_norm_with_statistics(
        call, x, weight, bias, batch, channels, math.prod(x.shape[2:]), groups, epsilon
    )[0]


@aten("_weight_norm_interface", "_weight_norm")
def weight_norm(call: Call, direction: Array, size: Array, dim: int = 0) -> Array | tuple[Array, ...]:
    """``size * direction / |direction|``, the norm taken over all dimensions but one."""
    others = tuple(i for i in range(direction.ndim) if i != dim % direction.ndim)
    norm = jnp.sqrt(jnp.sum(jnp.square(widen(direction)), others, keepdims=True))
    scaled = direction * (size / norm)
    return scaled if len(call.results) == 1 else (scaled, norm)
