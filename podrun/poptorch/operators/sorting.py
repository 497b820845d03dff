"""Sorting and the largest elements."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from podrun.poptorch.operators.table import Array, Call, aten, axis


def _sorted(x: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int32)
    order = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


@aten("sort.default", kind="TopK")
def sort(call: Call, x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """Elements in order, and where they were."""
    return _sorted(x, dim, descending)


@aten("sort.stable", kind="TopK")
def sort_stable(
    call: Call, x: Array, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Array, Array]:
    """Elements in order, equal ones as they were, and where they were."""
    return _sorted(x, dim, descending)


@aten("argsort.default", kind="TopK")
def places_in_order(call: Call, x: Array, dim: int = -1, descending: bool = False) -> Array:
    """Where the elements are, in order."""
    return _sorted(x, dim, descending)[1]


@aten("argsort.stable", kind="TopK")
def places_in_stable_order(
    call: Call, x: Array, stable: bool = True, dim: int = -1, descending: bool = False
) -> Array:
    """Where the elements are, in order, equal ones as they were."""
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
    value, place = (lax.index_in_dim(each, k - 1, where, keepdims=keepdim) for each in (values, places))
    return value, place


@aten("searchsorted.Tensor", "searchsorted.Scalar")
def search_sorted(
    call: Call, boundaries: Array, x: Array, out_int32: bool = False, right: bool = False, **keywords: object
) -> Array:
    """Where x would be put in so that the boundaries stay in order."""
    x = jnp.asarray(x)
    if boundaries.ndim == 1:
        return jnp.searchsorted(boundaries, x, side="right" if right else "left")
    below = boundaries[..., None, :] <= x[..., None] if right else boundaries[..., None, :] < x[..., None]
    return jnp.sum(below, -1)


@aten("bucketize.Tensor", "bucketize.Scalar")
def bucketize(call: Call, x: Array, boundaries: Array, out_int32: bool = False, right: bool = False) -> Array:
    """Which interval between boundaries x falls into."""
    return jnp.searchsorted(boundaries, jnp.asarray(x), side="right" if right else "left")
