"""Reading and writing elements by index. The new elements of a write are values: nothing is changed in place."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from podrun.numerics.shared_places import combined, element_places
from podrun.poptorch.operators.table import Call, Operand, PythonNumber, aten, aten_expressions, axis


@aten("embedding", kind="Gather")
def rows_of_table(call: Call, weight: Array, indices: Array, padding_idx: int = -1, *rest: object) -> Array:
    """Rows of a table; the row ``padding_idx`` is not trained."""
    rows = jnp.take(weight, indices, 0)
    if padding_idx < 0:
        return rows
    return jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(rows), rows)


@aten("gather", kind="GatherElements")
def gather(call: Call, x: Array, dim: int, indices: Array, sparse_grad: bool = False) -> Array:
    """``x[i, indices[i, j]]`` for every place."""
    if not x.ndim:
        return jnp.broadcast_to(x, indices.shape)
    where = axis(dim, x.ndim)
    cut = tuple(slice(0, None if a == where else n) for a, n in enumerate(indices.shape))
    return jnp.take_along_axis(x[cut], indices, where)


def _full_index(indices: Sequence[Array | None]) -> tuple[Array | slice, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


@aten("index.Tensor", "_unsafe_index.Tensor", kind="GatherND")
def index(call: Call, x: Array, indices: Sequence[Array | None]) -> Array:
    """``x[indices]`` with tensors of integers as indices."""
    return x[_full_index(indices)]


@aten("index_put", "_unsafe_index_put", "_index_put_impl", kind="ScatterND")
def index_put(
    call: Call,
    x: Array,
    indices: Sequence[Array | None],
    values: Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Array:
    """x with ``x[indices] = values``, or with values added to the elements there."""
    values = values.astype(x.dtype)
    first = indices[0]
    if len(indices) == 1 and first is not None and first.dtype == jnp.bool_ and values.size == 1:
        mask = first.reshape(first.shape + (1,) * (x.ndim - first.ndim))
        filled = values.reshape(())
        return jnp.where(mask, x + filled if accumulate else filled, x)
    if first is not None and first.dtype == jnp.bool_:
        return _masked_put(x, first, values, accumulate)
    target = x.at[_full_index(indices)]
    return target.add(values) if accumulate else target.set(values)


def _masked_put(x: Array, mask: Array, values: Array, accumulate: bool) -> Array:
    """x with one row of ``values`` after the other where a mask of its first dimensions holds."""
    rest = x.ndim - mask.ndim
    where = mask.reshape(mask.shape + (1,) * rest)
    if values.ndim > rest and values.shape[0] > 1:
        places = jnp.clip(jnp.cumsum(mask.reshape(-1)) - 1, 0, values.shape[0] - 1)
        values = values[places].reshape(*mask.shape, *values.shape[1:])
    elif values.ndim > rest:
        values = values[0]
    return jnp.where(where, x + values if accumulate else values, x)


@aten("put", kind="ScatterElements")
def put(call: Call, x: Array, indices: Array, source: Array, accumulate: bool = False) -> Array:
    """x with elements replaced, or added to, by their place in x read row by row."""
    target = x.reshape(-1).at[indices.reshape(-1)]
    values = source.astype(x.dtype).reshape(-1)
    return (target.add(values) if accumulate else target.set(values)).reshape(x.shape)


_REDUCTIONS = {
    None: "none",
    "add": "add",
    "sum": "add",
    "multiply": "mul",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
    "mean": "mean",
}
"""Torch's names of reductions as `podrun.numerics.shared_places.combined` has them."""


def _scattered(
    x: Array, dim: int, indices: Array, source: Operand, reduce: str | None, include: bool = True
) -> Array:
    if not x.ndim:
        line = jnp.asarray(source).reshape(-1)
        return _scattered(x[None], 0, indices.reshape(-1), line, reduce, include)[0]
    values = jnp.asarray(source).astype(x.dtype)
    part = tuple(slice(0, n) for n in indices.shape)
    values = values[part] if values.ndim else jnp.broadcast_to(values, indices.shape)
    places = element_places(indices, axis(dim, x.ndim))
    result: Array = combined(x, places, values, _REDUCTIONS[reduce], include=include)
    return result


@aten("scatter", kind="ScatterElements")
def scatter(
    call: Call, x: Array, dim: int, indices: Array, source: Operand, reduce: str | None = None
) -> Array:
    """x with ``x[i, indices[i, j]] = source[i, j]``, or reduced with the elements there."""
    return _scattered(x, dim, indices, source, reduce)


@aten("scatter_reduce.two", kind="ScatterElements")
def scatter_reduce(
    call: Call, x: Array, dim: int, indices: Array, source: Array, reduce: str, include_self: bool = True
) -> Array:
    """x with ``source`` reduced into it at the indices."""
    return _scattered(x, dim, indices, source, reduce, include_self)


@aten("index_reduce", kind="ScatterElements")
def index_reduce(
    call: Call, x: Array, dim: int, indices: Array, source: Array, reduce: str, include_self: bool = True
) -> Array:
    """x with ``source`` reduced into elements of one dimension."""
    where = axis(dim, x.ndim) if x.ndim else 0
    shape = [1] * source.ndim
    if source.ndim:
        shape[where] = -1
    return _scattered(
        x, dim, jnp.broadcast_to(indices.reshape(shape), source.shape), source, reduce, include_self
    )


@aten("index_add", kind="ScatterElements")
def index_add(
    call: Call, x: Array, dim: int, indices: Array, source: Array, alpha: PythonNumber = 1
) -> Array:
    """x with ``alpha * source`` added to elements of one dimension."""
    if not x.ndim:
        return x + jnp.sum(source.astype(x.dtype) * alpha)
    place = (slice(None),) * axis(dim, x.ndim) + (indices,)
    return x.at[place].add((source * jnp.asarray(alpha, x.dtype)).astype(x.dtype))


@aten("index_copy", kind="ScatterElements")
def index_copy(call: Call, x: Array, dim: int, indices: Array, source: Array) -> Array:
    """x with elements of one dimension replaced."""
    if not x.ndim:
        return source.reshape(())
    return x.at[(slice(None),) * axis(dim, x.ndim) + (indices,)].set(source.astype(x.dtype))


@aten("index_fill.int_Scalar", "index_fill.int_Tensor", kind="ScatterElements")
def index_fill(call: Call, x: Array, dim: int, indices: Array, value: Operand) -> Array:
    """x with elements of one dimension set to a value."""
    if not x.ndim:
        return jnp.asarray(value).astype(x.dtype).reshape(())
    return x.at[(slice(None),) * axis(dim, x.ndim) + (indices,)].set(jnp.asarray(value).astype(x.dtype))


@aten("masked_scatter", kind="ScatterElements")
def masked_scatter(call: Call, x: Array, mask: Array, source: Array) -> Array:
    """x with the elements of ``source``, in order, where the mask holds."""
    mask = jnp.broadcast_to(mask, x.shape)
    places = jnp.clip(jnp.cumsum(mask.reshape(-1)) - 1, 0, source.size - 1)
    return jnp.where(mask, source.reshape(-1)[places].reshape(x.shape), x)


@aten("select_scatter", kind="ScatterElements")
def select_scatter(call: Call, x: Array, source: Array, dim: int, place: int) -> Array:
    """x with one element of a dimension replaced."""
    return x.at[(slice(None),) * axis(dim, x.ndim) + (place,)].set(source)


@aten("slice_scatter", kind="ScatterElements")
def slice_scatter(
    call: Call,
    x: Array,
    source: Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Array:
    """x with a slice of a dimension replaced."""
    return x.at[(slice(None),) * axis(dim, x.ndim) + (slice(start, end, step),)].set(source)


@aten("nonzero_static")
def places_of_nonzero(call: Call, x: Array, size: int, fill_value: int = -1) -> Array:
    """The places of the first ``size`` elements that are not 0, a row each."""
    places = jnp.nonzero(x.reshape(x.shape or (1,)), size=size, fill_value=fill_value)
    return jnp.stack(places, -1)[:, : call.shape[1]]


@aten("narrow.Tensor", kind="DynamicSlice")
def narrow_at(call: Call, x: Array, dim: int, start: Array, length: int) -> Array:
    """``length`` elements of a dimension from a place that data determine."""
    where = axis(dim, x.ndim)
    first = jnp.where(start < 0, start + x.shape[where], start).reshape(())
    return lax.dynamic_slice_in_dim(x, first, length, where)


EMBEDDING_BAG_MEAN, EMBEDDING_BAG_MAX = 1, 2


@aten("_embedding_bag", "embedding_bag", "_embedding_bag_forward_only", kind="Gather")
def embedding_bag(
    call: Call,
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = -1,
) -> tuple[Array, ...]:
    """Sum (mode 0), mean (1) or maximum (2) of the rows of each bag; bag b begins at ``offsets[b]``."""
    padding = -1 if padding_idx is None else padding_idx
    bags = call.results[0].shape[0]
    bag_of = jnp.searchsorted(offsets[:bags], jnp.arange(indices.shape[0]), side="right") - 1
    rows = jnp.take(weight, indices, 0)
    counted = (indices != padding) if padding >= 0 else jnp.ones(indices.shape, bool)
    count = jax.ops.segment_sum(counted.astype(rows.dtype), bag_of, bags)
    if mode == EMBEDDING_BAG_MAX:
        lowest = jnp.where(counted[:, None], rows, -jnp.inf)
        pooled = jax.ops.segment_max(lowest, bag_of, bags)
        pooled = jnp.where(count[:, None] > 0, pooled, 0)
    else:
        rows = jnp.where(counted[:, None], rows, 0)
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[:, None]
        pooled = jax.ops.segment_sum(rows, bag_of, bags)
        if mode == EMBEDDING_BAG_MEAN:
            pooled = pooled / jnp.maximum(count, 1)[:, None]
    others = [jnp.zeros(result.shape, result.dtype) for result in call.results[1:]]
    return pooled, *others


aten_expressions(
    {
        "Gather": {
            "index_select": lambda call, x, dim, indices: (
                jnp.take(x, indices.reshape(-1), dim) if x.ndim else x
            ),
            "take": lambda call, x, indices: jnp.take(x.reshape(-1), indices),
        },
        "ScatterElements": {
            "scatter_add": lambda call, x, dim, indices, source: _scattered(x, dim, indices, source, "add"),
            "bincount": lambda call, x, weights=None, minlength=0: jnp.bincount(
                x, weights, length=call.shape[0]
            ),
        },
        "OneHot": {
            "one_hot": lambda call, x, classes=-1: jax.nn.one_hot(x, call.shape[-1], dtype=call.dtype),
        },
    }
)
