"""Gradients that are not the derivative JAX takes: at corners, at ties, and past values that were replaced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.numerics.precision import is_float

ArrayIndex = Array | np.ndarray | tuple[Array | np.ndarray | slice | int, ...]
"""Places in an array, as ``x.at[...]`` takes them."""


@jax.custom_jvp
def with_gradient(value: Array, carrier: Array) -> Array:
    """``value``, whose gradient goes to ``carrier`` (of the same shape and type), whatever value that has."""
    return value


@with_gradient.defjvp
def _with_gradient_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return with_gradient(*primals), tangents[1]


def absolute(x: Array) -> Array:
    """abs(x), whose gradient at 0 is 0, as PopART's and torch's are (JAX's own is 1). Integers have none."""
    return _absolute(x) if is_float(x) else jnp.abs(x)


@jax.custom_jvp
def _absolute(x: Array) -> Array:
    return jnp.abs(x)


_absolute.defjvp(lambda x, tangent: (jnp.abs(x[0]), jnp.sign(x[0]) * tangent[0]))


def to_equals(x: Array, result: Array, axes: tuple[int, ...]) -> Array:
    """``result``, an extreme of x over ``axes``, whose gradient goes whole to each of the elements that equal it.

    Source: PopART's ReduceMaxGrad and ReduceMinGrad; JAX and torch divide the gradient by the number of equals.
    """
    wide = result.reshape([1 if a in axes else d for a, d in enumerate(x.shape)])
    carrier = jnp.sum(jnp.where(x == wide, x, jnp.zeros((), x.dtype)), axis=axes)
    return with_gradient(result, carrier.reshape(result.shape))


def equals_carrier(x: Array, at: ArrayIndex, updates: Array, result: Array) -> Array:
    """What carries the gradient of ``result``, an extreme of x and of the updates at ``at``: whole to all that equal it
    (PopART's ScatterReduceGrad).
    """
    zero = jnp.zeros((), x.dtype)
    return jnp.where(x == result, x, zero).at[at].add(jnp.where(updates == result[at], updates, zero))


def product_carrier(x: Array, at: ArrayIndex, updates: Array) -> Array:
    """What carries the gradient of x with the elements ``at`` multiplied by updates.

    Each factor times the product of the others, which is 0 beside two zeros, and beside one for all but that.
    """
    fixed, factors = lax.stop_gradient(x), lax.stop_gradient(updates)
    one = jnp.ones((), x.dtype)
    zeros = (fixed == 0).astype(jnp.int32).at[at].add((factors == 0).astype(jnp.int32))
    others = jnp.where(fixed == 0, one, fixed).at[at].multiply(jnp.where(factors == 0, one, factors))

    def rest(factor: Array, others: Array, zeros: Array) -> Array:
        clear = zeros == (factor == 0)
        return jnp.where(clear, others / jnp.where(factor == 0, one, factor), jnp.zeros((), x.dtype))

    return (x * rest(fixed, others, zeros)).at[at].add(updates * rest(factors, others[at], zeros[at]))
