"""Layers that regularise: normalisation over batches, layers and groups of channels, and dropout. Norms are computed in
the type of the input (callers widen halves).

Arrays with channels are ``[N, C, *spatial]``. Deviations are the biased ones; ``epsilon`` is added to the variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.core.errors import InputMismatch
from podrun.numerics.convolution import along_channels


def standardised(
    x: Array, axes: tuple[int, ...], epsilon: float, *, own_mean: bool = False
) -> tuple[Array, Array, Array]:
    """x less its mean over its standard deviation; mean and variance, kept as 1 over ``axes``.

    ``own_mean``: the variance takes a mean of its own (``jnp.var``), as PopTorch's front end always did: the gradients
    of both ways differ in bits.
    """
    mean = jnp.mean(x, axis=axes, keepdims=True)
    variance = (
        jnp.var(x, axes, keepdims=True)
        if own_mean
        else jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)
    )
    return (x - mean) * inverse_deviation(variance, epsilon), mean, variance


def inverse_deviation(variance: Array, epsilon: float) -> Array:
    """1 over the standard deviation."""
    return lax.rsqrt(variance + np.asarray(epsilon, variance.dtype))


def rescaled(x: Array, scale: Array | None, bias: Array | None) -> Array:
    """``x * scale + bias``, for the one or the other that there is."""
    x = x if scale is None else x * scale
    return x if bias is None else x + bias


def normalised_channels(
    x: Array, mean: Array, variance: Array, scale: Array, bias: Array, epsilon: float
) -> Array:
    """Each channel by given statistics, whose deviation and scale become one factor first."""
    factor = (scale * inverse_deviation(variance, epsilon)).astype(x.dtype)
    centred = x - along_channels(mean, x.ndim).astype(x.dtype)
    return centred * along_channels(factor, x.ndim) + along_channels(bias, x.ndim).astype(x.dtype)


def running(before: Array, measured: Array, kept: float) -> Array:
    """A running statistic: ``before * kept + measured * (1 - kept)``; no gradient flows into it from the batch."""
    weight = np.asarray(kept, np.float32).astype(before.dtype)
    return before * weight + lax.stop_gradient(measured).astype(before.dtype) * (1 - weight)


def standardised_groups(
    x: Array, groups: int, epsilon: float, *, strided: bool = False, own_mean: bool = False
) -> tuple[Array, ...]:
    """`standardised` within each of ``groups`` of channels: x of its shape, mean and variance ``[N, groups, 1]``.

    Group g has neighbouring channels, or, ``strided``, channels ``g, g + groups, ...`` (PopART's option). Raises
    InputMismatch if channels do not make groups.
    """
    if x.shape[1] % groups:
        raise InputMismatch(f"{x.shape[1]} channels do not make {groups} groups")
    dealt = _dealt(x, groups) if strided else x
    parts = dealt.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    y, mean, variance = standardised(parts, (2,), epsilon, own_mean=own_mean)
    y = y.reshape(x.shape)
    return (_dealt(y, x.shape[1] // groups) if strided else y), mean, variance


def _dealt(x: Array, groups: int) -> Array:
    """Channels 0, ``groups``, 2 ``groups`` ... first, then 1, ``groups`` + 1 ...; undone by the number of each."""
    parts = x.reshape(x.shape[0], x.shape[1] // groups, groups, *x.shape[2:])
    return jnp.swapaxes(parts, 1, 2).reshape(x.shape)


def over_root_mean_square(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array]:
    """x over the root of its mean square; and 1 over that root, kept as 1 over ``axes``."""
    square = jnp.mean(jnp.square(x), axis=axes, keepdims=True)
    inverse = inverse_deviation(square, epsilon)
    return x * inverse, inverse


def dropped(
    key: Array, x: Array, rate: float, shape: Sequence[int], *, below: bool = False
) -> tuple[Array, Array]:
    """x with elements set to 0 with probability ``rate`` and the others scaled by ``1 / (1 - rate)``, in x's type; and
    the mask of those that are kept, of ``shape``, which broadcasts to x's.

    ``key`` is the front end's: one for each operator, replica, micro-batch and seed. An element is kept if its number
    in [0, 1) is at least the rate, or, ``below``, if it is below 1 - rate. Both are as probable; with one key they keep
    other elements and round the scale in another place. Recorded results depend on it: PopART's and ONNX's front ends
    take the first rule, PopTorch's the second.
    """
    if below:
        if rate >= 1:
            return jnp.zeros_like(x), jnp.zeros(tuple(shape), bool)
        kept = jax.random.bernoulli(key, 1 - rate, tuple(shape))
        return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype), kept
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    threshold = jnp.asarray(rate, jnp.float32)
    kept = jax.random.uniform(key, tuple(shape), jnp.float32) >= threshold
    scale = jnp.where(threshold < 1, 1 / (1 - jnp.where(threshold < 1, threshold, 0)), 0).astype(wide.dtype)
    return jnp.where(kept, wide * scale, jnp.zeros((), wide.dtype)).astype(x.dtype), kept
