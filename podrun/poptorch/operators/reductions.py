"""Sums, means, extremes and norms over axes, running ones too; histograms and reductions of segments."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from podrun.core.errors import InternalError
from podrun.numerics.gradients import absolute
from podrun.numerics.precision import widen
from podrun.poptorch.capture.graph import DTypeArgument
from podrun.poptorch.operators.table import Call, Dimensions, PythonNumber, aten, axes, axis, dtype_named


def _reduction(function: Callable[..., Array]) -> Callable[..., Array]:
    """A reduction that is called with dimensions or without, as torch's overloads are; halves are added up in
    float32.
    """

    def reduce(
        call: Call,
        x: Array,
        dim: Dimensions = None,
        keepdim: bool = False,
        dtype: DTypeArgument | None = None,
    ) -> Array:
        if dtype is not None:
            x = x.astype(dtype_named(dtype.name))
        elif jnp.issubdtype(call.dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(call.dtype)
        return function(widen(x), axis=axes(dim, x.ndim) if x.ndim else None, keepdims=keepdim and x.ndim > 0)

    return reduce


@aten("sum", kind="ReduceSum")
def total(
    call: Call, x: Array, dim: Dimensions = None, keepdim: bool = False, dtype: DTypeArgument | None = None
) -> Array:
    """The sum over dimensions; integers and booleans in the result's type."""
    floating = jnp.issubdtype(x.dtype, jnp.floating) and dtype is None
    x = widen(x) if floating else widen(x.astype(call.dtype))
    return jnp.sum(x, axis=axes(dim, x.ndim) if x.ndim else None, keepdims=keepdim and x.ndim > 0)


aten("mean", kind="ReduceMean")(_reduction(jnp.mean))
aten("amax", "max.default", kind="ReduceMax")(_reduction(jnp.max))
aten("amin", "min.default", kind="ReduceMin")(_reduction(jnp.min))
aten("logsumexp", kind="ReduceLogSumExp")(_reduction(jax.scipy.special.logsumexp))
aten("nansum", kind="ReduceSum")(_reduction(jnp.nansum))
aten("nanmean", kind="ReduceMean")(_reduction(jnp.nanmean))


@aten("prod", kind="ReduceProd")
def product_of_elements(
    call: Call, x: Array, dim: Dimensions = None, keepdim: bool = False, dtype: DTypeArgument | None = None
) -> Array:
    """The product over dimensions."""
    return _reduction(jnp.prod)(call, x.astype(call.dtype), dim, keepdim)


@aten("any", "any.dims", kind="ReduceMax")
def any_of(call: Call, x: Array, dim: Dimensions = None, keepdim: bool = False) -> Array:
    """Whether any element is not 0."""
    return jnp.any(x != 0, axis=axes(dim, x.ndim) if x.ndim else None, keepdims=keepdim and x.ndim > 0)


@aten("all", "all.dims", kind="ReduceMin")
def all_of(call: Call, x: Array, dim: Dimensions = None, keepdim: bool = False) -> Array:
    """Whether no element is 0."""
    return jnp.all(x != 0, axis=axes(dim, x.ndim) if x.ndim else None, keepdims=keepdim and x.ndim > 0)


def _extreme(best: Callable[..., Array], where: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """Value and place of an extreme along one dimension; the gradient goes to the first place alone."""

    def reduce(call: Call, x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        if not x.ndim:
            return x, jnp.zeros((), jnp.int32)
        place = where(x, axis(dim, x.ndim), keepdims=True)
        value = jnp.take_along_axis(x, place, axis(dim, x.ndim))
        if keepdim:
            return value, place
        return jnp.squeeze(value, axis(dim, x.ndim)), jnp.squeeze(place, axis(dim, x.ndim))

    return reduce


aten("max.dim", kind="ReduceMax")(_extreme(jnp.max, jnp.argmax))
aten("min.dim", kind="ReduceMin")(_extreme(jnp.min, jnp.argmin))


@aten("aminmax", kind="ReduceMin")
def least_and_greatest(
    call: Call, x: Array, dim: int | None = None, keepdim: bool = False
) -> tuple[Array, Array]:
    """The least and the greatest element."""
    where = axes(dim, x.ndim)
    return jnp.min(x, where, keepdims=keepdim), jnp.max(x, where, keepdims=keepdim)


@aten("argmax", kind="ArgMax")
def place_of_greatest(call: Call, x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The place of the greatest element, the first of equals."""
    return jnp.argmax(x, dim, keepdims=keepdim) if x.ndim else jnp.zeros(call.shape, jnp.int32)


@aten("argmin", kind="ArgMin")
def place_of_least(call: Call, x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The place of the least element, the first of equals."""
    return jnp.argmin(x, dim, keepdims=keepdim) if x.ndim else jnp.zeros(call.shape, jnp.int32)


def _variance(x: Array, dim: Dimensions, correction: int | None, keepdim: bool) -> Array:
    if isinstance(dim, bool):
        correction, dim = int(dim), None
    return jnp.var(
        widen(x), axis=axes(dim, x.ndim), ddof=1 if correction is None else correction, keepdims=keepdim
    )


@aten("var.correction", "var.default", "var.dim", kind="ReduceMean")
def variance(
    call: Call, x: Array, dim: Dimensions = None, correction: int | None = 1, keepdim: bool = False
) -> Array:
    """The variance, divided by the count less ``correction``."""
    return _variance(x, dim, correction, keepdim)


@aten("std.correction", "std.default", "std.dim", kind="ReduceMean")
def deviation(
    call: Call, x: Array, dim: Dimensions = None, correction: int | None = 1, keepdim: bool = False
) -> Array:
    """The standard deviation."""
    return jnp.sqrt(_variance(x, dim, correction, keepdim))


@aten("var_mean.correction", kind="ReduceMean")
def variance_and_mean(
    call: Call, x: Array, dim: Dimensions = None, correction: int | None = 1, keepdim: bool = False
) -> tuple[Array, Array]:
    """Variance and mean."""
    return _variance(x, dim, correction, keepdim), jnp.mean(widen(x), axes(dim, x.ndim), keepdims=keepdim)


@aten("std_mean.correction", kind="ReduceMean")
def deviation_and_mean(
    call: Call, x: Array, dim: Dimensions = None, correction: int | None = 1, keepdim: bool = False
) -> tuple[Array, Array]:
    """Standard deviation and mean."""
    variances, mean = variance_and_mean(call, x, dim, correction, keepdim)
    return jnp.sqrt(variances), mean


@aten("cumsum", kind="CumSum")
def running_sum(call: Call, x: Array, dim: int, dtype: DTypeArgument | None = None) -> Array:
    """Sums of all elements up to each."""
    return jnp.cumsum(widen(x.astype(call.dtype)), dim) if x.ndim else x.astype(call.dtype)


@aten("cumprod", kind="CumSum")
def running_product(call: Call, x: Array, dim: int, dtype: DTypeArgument | None = None) -> Array:
    """Products of all elements up to each."""
    return jnp.cumprod(x.astype(call.dtype), dim) if x.ndim else x.astype(call.dtype)


def _running_extreme(better: Callable[[Array, Array], Array]) -> Callable[..., tuple[Array, Array]]:
    """Extremes of all elements up to each, and their places, the last of equals; NaN is the most extreme."""

    def reduce(call: Call, x: Array, dim: int) -> tuple[Array, Array]:
        if not x.ndim:
            return x, jnp.zeros((), jnp.int32)
        where = axis(dim, x.ndim)
        places = jax.lax.broadcasted_iota(jnp.int32, x.shape, where)

        def combine(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
            later = better(b[0], a[0]) | (b[0] == a[0]) | (b[0] != b[0])
            return jnp.where(later, b[0], a[0]), jnp.where(later, b[1], a[1])

        _, best = jax.lax.associative_scan(combine, (jax.lax.stop_gradient(x), places), axis=where)
        return jnp.take_along_axis(x, best, where), best

    return reduce


aten("cummax", kind="CumSum")(_running_extreme(jnp.greater))
aten("cummin", kind="CumSum")(_running_extreme(jnp.less))


@aten("logcumsumexp", kind="CumSum")
def running_log_sum(call: Call, x: Array, dim: int) -> Array:
    """Logarithms of running sums of exponentials."""
    return jax.lax.cumlogsumexp(x, axis(dim, x.ndim)) if x.ndim else x


@aten("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.Scalar", kind="ReduceL2")
def vector_norm(
    call: Call,
    x: Array,
    ord: PythonNumber | None = 2,
    dim: Dimensions = None,
    keepdim: bool = False,
    dtype: DTypeArgument | None = None,
) -> Array:
    """The norm of the elements along dimensions; its gradient at 0 is 0."""
    where, x = axes(dim, x.ndim), absolute(widen(x))
    order = 2 if ord is None else ord
    if order == float("inf"):
        return jnp.max(x, where, keepdims=keepdim)
    if order == float("-inf"):
        return jnp.min(x, where, keepdims=keepdim)
    if order == 0:
        return jnp.sum((x != 0).astype(x.dtype), where, keepdims=keepdim)
    if order == 1:
        return jnp.sum(x, where, keepdims=keepdim)
    powers = jnp.square(x) if order == 2 else jnp.power(x, order)
    sums = jnp.sum(powers, where, keepdims=keepdim)
    safe = jnp.where(sums == 0, 1, sums)
    return jnp.where(sums == 0, 0, jnp.sqrt(safe) if order == 2 else jnp.power(safe, 1 / order))


@aten("count_nonzero", kind="ReduceSum")
def count_nonzero(call: Call, x: Array, dim: Dimensions = None) -> Array:
    """How many elements are not 0."""
    return jnp.sum((x != 0).astype(jnp.int32), axes(dim, x.ndim) if x.ndim else None)


@aten("histc", kind="Reduce")
def histogram(call: Call, x: Array, bins: int = 100, low: float = 0, high: float = 0) -> Array:
    """How many elements fall into each of ``bins`` equal parts from ``low`` to ``high`` (of x, if both are equal)."""
    wide = x.reshape(-1).astype(jnp.float32)
    first, last = (jnp.min(wide), jnp.max(wide)) if low == high else (jnp.float32(low), jnp.float32(high))
    alone = first == last
    first, last = jnp.where(alone, first - 1, first), jnp.where(alone, last + 1, last)
    place = jnp.clip(jnp.floor((wide - first) * (bins / (last - first))).astype(jnp.int32), 0, bins - 1)
    inside = (wide >= first) & (wide <= last)
    return jnp.zeros(bins, jnp.float32).at[place].add(inside.astype(jnp.float32))


@aten("segment_reduce", kind="Reduce")
def segment_reduce(
    call: Call,
    x: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    indices: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Array:
    """Each of the parts that follow each other along the last dimension of ``lengths`` (or between ``offsets``),
    reduced: sum, mean, prod, max or min. A part without elements is ``initial``, or the reduction's neutral element."""
    if offsets is not None:
        begins, ends = offsets[..., :-1], offsets[..., 1:]
    else:
        if lengths is None:
            raise InternalError("segment_reduce has neither lengths nor offsets, of which torch asks for one")
        ends = jnp.cumsum(lengths, -1)
        begins = ends - lengths
    where = jnp.arange(x.shape[axis])
    member = (where >= begins[..., None]) & (where < ends[..., None])  # [..., parts, elements]
    rest = x.ndim - axis - 1
    member = member.reshape(member.shape + (1,) * rest)
    wide = jnp.expand_dims(widen(x), axis)
    neutral = {"max": -jnp.inf, "min": jnp.inf, "prod": 1.0}.get(reduce, 0.0)
    chosen = jnp.where(member, wide, neutral)
    count = jnp.sum(member, axis + 1)
    start = neutral if initial is None else initial
    if reduce == "mean":
        total = jnp.sum(chosen, axis + 1) + (start if initial is not None else 0.0)
        empty = jnp.nan if initial is None else initial
        return jnp.where(count > 0, total / jnp.maximum(count, 1), empty)
    if reduce == "sum":
        return jnp.sum(chosen, axis + 1) + start
    if reduce == "prod":
        return jnp.prod(chosen, axis + 1) * start
    extreme = (jnp.max if reduce == "max" else jnp.min)(chosen, axis + 1)
    return (jnp.maximum if reduce == "max" else jnp.minimum)(extreme, start)
