"""Gathering and scattering by index, and slices at places found while running.

Scattering writes, or reduces into places that several updates share.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch
from podrun.numerics.gradients import ArrayIndex
from podrun.numerics.shared_places import combined, element_places, from_front, index_tuples, reversed_within
from podrun.onnx_models.ops.common import Array, axis_in, ints, same_dtype
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


@operator(ONNX, "Gather", since=(1, 11, 13), folds=True)
def onnx_gather(ctx: Context, node: Node, x: Array, indices: Array) -> Array:
    """Slices of x along ``axis`` at the indices: ``x.shape[:axis] + indices.shape + x.shape[axis+1:]``
    (ONNX Gather).
    """
    axis = axis_in(node.get("axis", 0), x.ndim)
    if ctx.xp is np:
        return np.take(x, indices, axis=axis)
    return jnp.take(x, from_front(indices, x.shape[axis]), axis=axis, mode="clip")


@operator(ONNX, "GatherElements", since=(11, 13))
def gather_elements(ctx: Context, node: Node, x: Array, indices: Array) -> Array:
    """For each place, the element of x at that place but for ``axis``, where indices say (ONNX GatherElements)."""
    axis = axis_in(node.get("axis", 0), x.ndim)
    return x[element_places(from_front(indices, x.shape[axis]), axis)]


@operator(ONNX, "GatherND", since=(11, 12, 13))
def gather_nd(ctx: Context, node: Node, x: Array, indices: Array) -> Array:
    """Slices of x at the index tuples in the last axis of indices, within ``batch_dims`` leading axes
    (ONNX GatherND).
    """

    def pick(data: Array, at: Array) -> Array:
        return data[index_tuples(at, data.shape)]

    for _ in range(node.get("batch_dims", 0)):
        pick = jax.vmap(pick)
    return pick(x, indices)


@operator(ONNX, "TensorScatter", since=(24,))
def tensor_scatter(ctx: Context, node: Node, past: Array, update: Array, write: Array = None) -> Array:
    """A cache with new entries written along ``axis`` at each batch's write index, wrapping if ``circular``."""
    axis = axis_in(node.get("axis", -2), past.ndim)
    size, count = past.shape[axis], update.shape[axis]
    start = jnp.zeros(past.shape[0], jnp.int32) if write is None else write
    places = start[:, None] + jnp.arange(count, dtype=start.dtype)[None, :]
    if node.get("mode", "linear") == "circular":
        places = places % size
    moved, new = jnp.moveaxis(past, axis, 1), jnp.moveaxis(update, axis, 1)
    written = jax.vmap(lambda cache, at, values: cache.at[at].set(values, mode="drop"))(moved, places, new)
    return jnp.moveaxis(written, 1, axis)


@operator(ONNX, "OneHot", since=(9, 11, 28))
def onnx_one_hot(ctx: Context, node: Node, indices: Array, depth: Array, values: Array) -> Array:
    """values[1] at the index along a new ``axis`` of size depth, values[0] elsewhere (ONNX OneHot)."""
    size = int(ctx.constant(1).reshape(()))
    axis = axis_in(node.get("axis", -1), indices.ndim + 1)
    whole = indices.astype(jnp.int32) if jnp.issubdtype(indices.dtype, jnp.floating) else indices
    hot = jnp.expand_dims(from_front(whole, size), axis)
    counter = jax.lax.broadcasted_iota(
        hot.dtype, tuple(size if a == axis else 1 for a in range(hot.ndim)), axis
    )
    return jnp.where(hot == counter, values[1], values[0])


@operator(ONNX, "Compress", since=(9, 11, 28))
def compress(ctx: Context, node: Node, x: Array, condition: Array) -> Array:
    """Slices of x along ``axis`` (or elements of x flattened) where the condition, known while tracing, holds."""
    keep = np.nonzero(ctx.constant(1))[0]
    if "axis" not in node.attributes:
        return x.reshape(-1)[keep]
    return jnp.take(x, keep, axis=axis_in(node["axis"], x.ndim))


@operator(ONNX, "ReverseSequence", since=(10, 28))
def reverse_sequence(ctx: Context, node: Node, x: Array, lengths: Array) -> Array:
    """The first ``lengths[b]`` steps of each batch back to front (ONNX ReverseSequence)."""
    return reversed_within(x, lengths, node.get("batch_axis", 1), node.get("time_axis", 0))


# --- ai.graphcore
# -----------------------------------------------------------------------------------------------------


@operator(GRAPHCORE, "GroupedGather")
def grouped_gather(ctx: Context, node: Node, x: Array, indices: Array) -> Array:
    """Gather in each of ``group_size`` groups, which the leading axis of both inputs counts (PopART GroupedGather)."""
    axis = axis_in(node.get("axis", 0), x.ndim)
    axis = max(axis - 1, 0)
    return jax.vmap(lambda d, i: jnp.take(d, from_front(i, d.shape[axis]), axis=axis, mode="clip"))(
        x, indices
    )


def _offsets(offset: Array, axes: tuple[int, ...], rank: int) -> list[Any]:
    starts: list[Any] = [jnp.zeros((), jnp.int32)] * rank
    flat = offset.reshape(-1)
    for i, axis in enumerate(axes):
        starts[axis] = flat[i].astype(jnp.int32)
    return starts


def _dynamic(node: Node, x: Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    axes = tuple(axis_in(a, x.ndim) for a in ints(node["axes"]))
    sizes = ints(node["sizes"])
    if len(axes) != len(sizes):
        raise InputMismatch(f"axes and sizes have {len(axes)} and {len(sizes)} elements")
    return axes, sizes


def _part(x: Array, part: Array, axes: tuple[int, ...], sizes: tuple[int, ...]) -> Array:
    """The part to write into x, with the axes of size 1 that it may leave out."""
    shape = tuple(dict(zip(axes, sizes, strict=True)).get(a, d) for a, d in enumerate(x.shape))
    if part.shape == shape or [d for d in part.shape if d != 1] != [d for d in shape if d != 1]:
        return part
    return part.reshape(shape)


@operator(GRAPHCORE, "DynamicSlice")
def graphcore_dynamic_slice(ctx: Context, node: Node, x: Array, offset: Array, into: Array = None) -> Array:
    """A slice of ``sizes`` along ``axes`` at offsets found while running (PopART DynamicSlice).

    A third input is where the SDK writes the slice; what it holds has no part in the result.
    """
    axes, sizes = _dynamic(node, x)
    shape = list(x.shape)
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    return jax.lax.dynamic_slice(x, _offsets(offset, axes, x.ndim), shape)


@operator(GRAPHCORE, "DynamicUpdate")
def graphcore_dynamic_update(ctx: Context, node: Node, x: Array, offset: Array, part: Array) -> Array:
    """x with ``part`` written at offsets found while running (PopART DynamicUpdate)."""
    axes, sizes = _dynamic(node, x)
    whole = _part(x, part, axes, sizes).astype(x.dtype)
    return jax.lax.dynamic_update_slice(x, whole, _offsets(offset, axes, x.ndim))


@operator(GRAPHCORE, "DynamicAdd")
def dynamic_add(ctx: Context, node: Node, x: Array, offset: Array, part: Array) -> Array:
    """x with ``part`` added at offsets found while running (PopART DynamicAdd)."""
    axes, sizes = _dynamic(node, x)
    starts, part = _offsets(offset, axes, x.ndim), _part(x, part, axes, sizes)
    old = jax.lax.dynamic_slice(x, starts, part.shape)
    return jax.lax.dynamic_update_slice(x, old + part, starts)


@operator(GRAPHCORE, "DynamicZero")
def dynamic_zero(ctx: Context, node: Node, x: Array, offset: Array) -> Array:
    """x with a slice of ``sizes`` at offsets found while running set to 0 (PopART DynamicZero)."""
    axes, sizes = _dynamic(node, x)
    shape = list(x.shape)
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    return jax.lax.dynamic_update_slice(x, jnp.zeros(shape, x.dtype), _offsets(offset, axes, x.ndim))


@operator(GRAPHCORE, "SequenceSlice")
def sequence_slice(
    ctx: Context,
    node: Node,
    source: Array,
    destination: Array,
    counts: Array,
    source_at: Array,
    destination_at: Array,
) -> Array:
    """destination with, for each i, ``counts[i]`` rows copied from ``source_at[i]`` to ``destination_at[i]``.

    With ``zeroUnused`` rows that nothing is copied to are 0 (PopART SequenceSlice).
    """
    rows = jnp.arange(destination.shape[0], dtype=jnp.int32)
    result = jnp.zeros_like(destination) if node.get("zeroUnused", 0) else destination

    def copy(result: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        count, first, target = (e.astype(jnp.int32) for e in part)
        inside = (rows >= target) & (rows < target + count)
        moved = jnp.take(source, jnp.clip(rows - target + first, 0, source.shape[0] - 1), axis=0)
        return jnp.where(inside.reshape((-1,) + (1,) * (destination.ndim - 1)), moved, result), None

    result, _ = jax.lax.scan(
        copy, result, (counts.reshape(-1), source_at.reshape(-1), destination_at.reshape(-1))
    )
    return result


def _combined(ctx: Context, x: Array, at: ArrayIndex, updates: Array, how: str) -> Array:
    """`combined` with the gradients that PopART has for extremes; ONNX has no mean."""
    if how == "mean":
        raise InputMismatch("reduction 'mean' is none of none, add, mul, max, min")
    return combined(x, at, updates, how, whole_to_equals=ctx.training)


@operator(ONNX, "Scatter", since=(9, 11))
@operator(ONNX, "ScatterElements", since=(11, 13, 16, 18))
def scatter_elements(ctx: Context, node: Node, x: Array, indices: Array, updates: Array) -> Array:
    """x with updates written (or reduced) where indices say along ``axis`` (ONNX ScatterElements)."""
    same_dtype(x, updates)
    axis = axis_in(node.get("axis", 0), x.ndim)
    places = element_places(from_front(indices, x.shape[axis]), axis)
    return _combined(ctx, x, places, updates, node.get("reduction", "none"))


@operator(ONNX, "ScatterND", since=(11, 13, 16, 18))
def scatternd(ctx: Context, node: Node, x: Array, indices: Array, updates: Array) -> Array:
    """x with slices of updates written (or reduced) at index tuples (ONNX ScatterND)."""
    same_dtype(x, updates)
    return _combined(ctx, x, index_tuples(indices, x.shape), updates, node.get("reduction", "none"))


# --- ai.graphcore
# -----------------------------------------------------------------------------------------------------

REDUCTIONS = {0: "add", 1: "max", 2: "min", 3: "mul", 4: "none"}
"""popart.ScatterReduction by value."""
_NAMES = {"sum": "add", "max": "max", "min": "min", "mul": "mul", "none": "none", "noreduction": "none"}


def _scatter_reduction(node: Node) -> str:
    stated = node.get("reduction", 0)
    reduction = REDUCTIONS.get(stated) if isinstance(stated, int) else _NAMES.get(str(stated).lower())
    if reduction is None:
        raise InputMismatch(f"reduction {stated!r} is none of Sum, Max, Min, Mul, NoReduction")
    return reduction


def _scatter_reduce(
    ctx: Context, source: Array, index: Array, base: Array | None, size: int, axis: int, reduction: str
) -> Array:
    if index.ndim == 1 and source.ndim > 1:
        shape = [1] * source.ndim
        shape[axis] = -1
        index = index.reshape(shape)
    index = jnp.broadcast_to(index, source.shape)
    target = tuple(size if a == axis else d for a, d in enumerate(source.shape))
    places, extreme = element_places(index, axis), reduction in ("max", "min")
    if base is None:
        base = jnp.full(target, np.asarray(int(reduction == "mul"), source.dtype))
        return combined(base, places, source, reduction, include=not extreme, whole_to_equals=ctx.training)
    return _combined(ctx, base, places, source, reduction)


@operator(GRAPHCORE, "ScatterReduce")
def graphcore_scatter_reduce(
    ctx: Context, node: Node, source: Array, index: Array, base: Array = None
) -> Array:
    """Elements of source reduced into ``axis_size`` places along ``axis`` where index says (PopART ScatterReduce).

    Places that nothing goes to are 0, or what the optional third input holds. An index vector is broadcast.
    """
    axis = axis_in(node.get("axis", -1), source.ndim)
    return _scatter_reduce(ctx, source, index, base, node["axis_size"], axis, _scatter_reduction(node))


@operator(GRAPHCORE, "GroupedScatterReduce")
def grouped_scatter_reduce(
    ctx: Context, node: Node, source: Array, index: Array, base: Array = None
) -> Array:
    """`graphcore_scatter_reduce` in each of ``group_size`` groups, which the leading axis of all inputs counts."""
    groups = node.get("group_size", 1)
    if source.shape[0] != groups:
        raise InputMismatch(f"the leading axis {source.shape[0]} is not group_size {groups}")
    axis = axis_in(node.get("axis", -1), source.ndim) - 1
    if axis < 0:
        raise InputMismatch("axis 0 counts the groups")
    size, how = node["axis_size"], _scatter_reduction(node)
    if base is None:
        return jax.vmap(lambda s, i: _scatter_reduce(ctx, s, i, None, size, axis, how))(source, index)
    return jax.vmap(lambda s, i, b: _scatter_reduce(ctx, s, i, b, size, axis, how))(source, index, base)
