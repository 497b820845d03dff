"""Sorting: elements in order and their places, the largest ones, medians and modes, places in sorted boundaries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from podrun.poptorch.operators.table import Call, aten, aten_expressions, axis


@aten("mode", kind="TopK")
def most_frequent(call: Call, x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The most frequent element of a dimension, the least of those as frequent, and its last place."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    where = axis(dim, x.ndim)
    equal = jnp.expand_dims(x, where + 1) == jnp.expand_dims(x, where)
    often = jnp.sum(equal, where + 1)
    most = often == jnp.max(often, where, keepdims=True)
    least = jnp.min(jnp.where(most, x, _greatest(x)), where, keepdims=True)
    numbers = jax.lax.broadcasted_iota(jnp.int32, x.shape, where)
    place = jnp.max(jnp.where(x == least, numbers, 0), where, keepdims=True)
    value = jnp.take_along_axis(x, place, where)
    return (value, place) if keepdim else (jnp.squeeze(value, where), jnp.squeeze(place, where))


def _greatest(x: Array) -> float | int:
    return jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).max


@aten("median", "nanmedian", kind="TopK")
def median(
    call: Call, x: Array, dim: int | None = None, keepdim: bool = False
) -> Array | tuple[Array, Array]:
    """The lower median; with a dimension, its place as well."""
    if dim is None:
        flat = jnp.sort(x.reshape(-1))
        return flat[(flat.size - 1) // 2]
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    where = axis(dim, x.ndim)
    order = jnp.argsort(x, where, stable=True)
    place = jax.lax.index_in_dim(order, (x.shape[where] - 1) // 2, where)
    value = jnp.take_along_axis(x, place, where)
    return (value, place) if keepdim else (jnp.squeeze(value, where), jnp.squeeze(place, where))


def _sorted(x: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    order = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@aten("argsort.stable", kind="TopK")
def places_in_stable_order(
    call: Call, x: Array, stable: bool = True, dim: int = -1, descending: bool = False
) -> Array:
    """Places of the elements, in order, equal ones in their former order."""
    return _sorted(x, dim, descending)[1]


@aten("topk", kind="TopK")
def largest(
    call: Call, x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Array, Array]:
    """The k largest (or smallest) elements and their places, in order."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    values, places = _sorted(x, dim, largest)
    where = axis(dim, x.ndim)
    return lax.slice_in_dim(values, 0, k, 1, where), lax.slice_in_dim(places, 0, k, 1, where)


@aten("kthvalue", kind="TopK")
def kth_smallest(call: Call, x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The k-th smallest element and its place."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    values, places = _sorted(x, dim, False)
    where = axis(dim, x.ndim)
    value, place = (lax.index_in_dim(ordered, k - 1, where, keepdims=keepdim) for ordered in (values, places))
    return value, place


@aten("searchsorted.Tensor", "searchsorted.Scalar")
def search_sorted(
    call: Call, boundaries: Array, x: Array, out_int32: bool = False, right: bool = False, **keywords: object
) -> Array:
    """Where to insert x so that the boundaries stay in order."""
    x = jnp.asarray(x)
    if boundaries.ndim == 1:
        return jnp.searchsorted(boundaries, x, side="right" if right else "left")
    below = boundaries[..., None, :] <= x[..., None] if right else boundaries[..., None, :] < x[..., None]
    return jnp.sum(below, -1)


@aten("bucketize.Tensor", "bucketize.Scalar")
def bucketize(call: Call, x: Array, boundaries: Array, out_int32: bool = False, right: bool = False) -> Array:
    """The interval between boundaries into which x falls."""
    return jnp.searchsorted(boundaries, jnp.asarray(x), side="right" if right else "left")


aten_expressions(
    {
        "TopK": {
            "sort.default": lambda call, x, dim=-1, descending=False: _sorted(x, dim, descending),
            "sort.stable": lambda call, x, stable=None, dim=-1, descending=False: _sorted(x, dim, descending),
            "argsort.default": lambda call, x, dim=-1, descending=False: _sorted(x, dim, descending)[1],
        },
    }
)
