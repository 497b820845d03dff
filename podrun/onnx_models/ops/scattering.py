"""Scattering by index: writing, and reducing into places that several updates meet at."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.onnx_models.ops.common import Array, axis_in, is_float, same_dtype, with_gradient
from podrun.onnx_models.ops.indexing import from_front, grid, nd
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, Context, Node, operator


def combine(ctx: Context, x: Array, at: Any, updates: Array, reduction: str) -> Array:
    """x with updates put at (added to, multiplied into, ...) the places ``at``; ValueError for unknown reductions.

    The gradient of a greatest or least value goes whole to each update, and to the element of x, that equals it
    (PopART ScatterReduceGrad); that of a product is exact where factors are 0 too.
    """
    place = x.at[at]
    differentiated = ctx.training and is_float(x)
    match reduction:
        case "none":
            return place.set(updates)
        case "add":
            return place.add(updates)
        case "mul":
            if not differentiated:
                return place.multiply(updates)
            product = lax.stop_gradient(x).at[at].multiply(lax.stop_gradient(updates))
            return with_gradient(product, _product_carrier(x, at, updates))
        case "max" | "min":
            result = place.max(updates) if reduction == "max" else place.min(updates)
            return (
                with_gradient(result, _equals_carrier(x, at, updates, result)) if differentiated else result
            )
    raise ValueError(f"reduction '{reduction}' is none of none, add, mul, max, min")


def _equals_carrier(x: Array, at: Any, updates: Array, result: Array) -> Array:
    zero = jnp.zeros((), x.dtype)
    return jnp.where(x == result, x, zero).at[at].add(jnp.where(updates == result[at], updates, zero))


def _product_carrier(x: Array, at: Any, updates: Array) -> Array:
    """Each factor times the product of the others, which is 0 beside two zeros, and beside one for all but that."""
    fixed, factors = lax.stop_gradient(x), lax.stop_gradient(updates)
    one = jnp.ones((), x.dtype)
    zeros = (fixed == 0).astype(jnp.int32).at[at].add((factors == 0).astype(jnp.int32))
    others = jnp.where(fixed == 0, one, fixed).at[at].multiply(jnp.where(factors == 0, one, factors))

    def rest(factor: Array, others: Array, zeros: Array) -> Array:
        clear = zeros == (factor == 0)
        return jnp.where(clear, others / jnp.where(factor == 0, one, factor), jnp.zeros((), x.dtype))

    return (x * rest(fixed, others, zeros)).at[at].add(updates * rest(factors, others[at], zeros[at]))


@operator(ONNX, "Scatter", since=(9, 11))
@operator(ONNX, "ScatterElements", since=(11, 13, 16, 18))
def scatter_elements(ctx: Context, node: Node, x: Array, indices: Array, updates: Array) -> Array:
    """x with updates written (or reduced) where indices say along ``axis`` (ONNX ScatterElements)."""
    same_dtype(x, updates)
    axis = axis_in(node.get("axis", 0), x.ndim)
    at = grid(from_front(indices, x.shape[axis]), axis)
    return combine(ctx, x, at, updates, node.get("reduction", "none"))


@operator(ONNX, "ScatterND", since=(11, 13, 16, 18))
def scatternd(ctx: Context, node: Node, x: Array, indices: Array, updates: Array) -> Array:
    """x with slices of updates written (or reduced) at index tuples (ONNX ScatterND)."""
    same_dtype(x, updates)
    return combine(ctx, x, nd(indices, x.shape), updates, node.get("reduction", "none"))


# --- ai.graphcore
# -----------------------------------------------------------------------------------------------------

REDUCTIONS = {0: "add", 1: "max", 2: "min", 3: "mul", 4: "none"}
"""popart.ScatterReduction by value."""
_NAMES = {"sum": "add", "max": "max", "min": "min", "mul": "mul", "none": "none", "noreduction": "none"}


def _scatter_reduction(node: Node) -> str:
    given = node.get("reduction", 0)
    found = REDUCTIONS.get(given) if isinstance(given, int) else _NAMES.get(str(given).lower())
    if found is None:
        raise ValueError(f"reduction {given!r} is none of Sum, Max, Min, Mul, NoReduction")
    return found


def _identity(reduction: str, dtype: Any) -> Array:
    """What a place holds that nothing is scattered to, before it is zeroed."""
    if reduction in ("add", "none"):
        return np.zeros((), dtype)
    if reduction == "mul":
        return np.ones((), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf if reduction == "max" else np.inf, dtype)
    info = np.iinfo(dtype)
    return np.asarray(info.min if reduction == "max" else info.max, dtype)


def _scatter_reduce(
    ctx: Context, source: Array, index: Array, base: Array | None, size: int, axis: int, reduction: str
) -> Array:
    if index.ndim == 1 and source.ndim > 1:
        shape = [1] * source.ndim
        shape[axis] = -1
        index = index.reshape(shape)
    index = jnp.broadcast_to(index, source.shape)
    target = tuple(size if a == axis else d for a, d in enumerate(source.shape))
    at = grid(index, axis)
    if base is not None:
        return combine(ctx, base, at, source, reduction)
    start = jnp.full(target, _identity(reduction, source.dtype))
    result = combine(ctx, start, at, source, reduction)
    if reduction in ("max", "min"):
        touched = jnp.zeros(target, bool).at[at].set(True)
        result = jnp.where(touched, result, jnp.zeros((), source.dtype))
    return result


@operator(GRAPHCORE, "ScatterReduce")
def scatter_reduce(ctx: Context, node: Node, source: Array, index: Array, base: Array = None) -> Array:
    """Elements of source reduced into ``axis_size`` places along ``axis`` where index says (PopART
    ScatterReduce).

    Places that nothing goes to are 0, or what the optional third input holds. An index vector is broadcast.
    """
    axis = axis_in(node.get("axis", -1), source.ndim)
    return _scatter_reduce(ctx, source, index, base, node["axis_size"], axis, _scatter_reduction(node))


@operator(GRAPHCORE, "GroupedScatterReduce")
def grouped_scatter_reduce(
    ctx: Context, node: Node, source: Array, index: Array, base: Array = None
) -> Array:
    """`scatter_reduce` in each of ``group_size`` groups, which the leading axis of all inputs counts."""
    groups = node.get("group_size", 1)
    if source.shape[0] != groups:
        raise ValueError(f"the leading axis {source.shape[0]} is not group_size {groups}")
    axis = axis_in(node.get("axis", -1), source.ndim) - 1
    if axis < 0:
        raise ValueError("axis 0 counts the groups")
    size, how = node["axis_size"], _scatter_reduction(node)
    if base is None:
        return jax.vmap(lambda s, i: _scatter_reduce(ctx, s, i, None, size, axis, how))(source, index)
    return jax.vmap(lambda s, i, b: _scatter_reduce(ctx, s, i, b, size, axis, how))(source, index, base)
