"""Operations that pick and place by index: gather, scatter, one-hot, extremes, sorting."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import UnsupportedError
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.tensorflow.operators.table import Array, computes


@computes("GatherV2", "Gather", attributes="batch_dims", folds=True)
def _gather(ctx: Context, node: Node, x: Array, indices: Array, axis: Array | None = None) -> Array:
    """Entries by index; zeros, as on an IPU, where an index is none of an entry."""
    place = 0 if axis is None else int(np.asarray(ctx.constant(2)).item())
    batch = int(node.get("batch_dims", 0))
    if batch:
        place = place if place >= 0 else place + x.ndim

        def one(row: Array, index: Array) -> Array:
            return _taken(jnp, row, index, place - batch)

        function = one
        for _ in range(batch):
            function = jax.vmap(function)
        return function(x, indices)
    return _taken(ctx.xp, x, indices, place)


def _taken(xp: Array, x: Array, indices: Array, axis: int) -> Array:
    """``xp``: NumPy for what is computed when the program is compiled, else JAX's."""
    x, places = xp.asarray(x), xp.asarray(indices)
    axis = axis if axis >= 0 else axis + x.ndim
    inside = (places >= 0) & (places < x.shape[axis])
    if not x.shape[axis]:
        return xp.zeros((*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]), x.dtype)
    entries = xp.take(x, xp.where(inside, places, 0), axis=axis, mode="clip")
    return xp.where(
        inside.reshape(*places.shape, *(1,) * (x.ndim - axis - 1)), entries, xp.zeros((), x.dtype)
    )


@computes("GatherNd", attributes="bad_indices_policy")
def _gather_nd(ctx: Context, node: Node, x: Array, indices: Array) -> Array:
    return x[tuple(jnp.moveaxis(indices, -1, 0))]


@computes("ScatterNd", attributes="bad_indices_policy")
def _scatter_nd(ctx: Context, node: Node, indices: Array, updates: Array, shape: Array) -> Array:
    sizes = tuple(int(v) for v in np.atleast_1d(ctx.constant(2)))
    return jnp.zeros(sizes, updates.dtype).at[tuple(jnp.moveaxis(indices, -1, 0))].add(updates)


@computes("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin",
          attributes="bad_indices_policy")  # fmt: skip
def _scatter_into(ctx: Context, node: Node, x: Array, indices: Array, updates: Array) -> Array:
    place = jnp.asarray(x).at[tuple(jnp.moveaxis(indices, -1, 0))]
    kind = node.op_type.removeprefix("TensorScatter")
    if kind == "Sub":
        return place.add(-updates)
    choices: dict[str, Callable[..., Array]] = {
        "Update": place.set,
        "Add": place.add,
        "Max": place.max,
        "Min": place.min,
    }
    return choices[kind](updates)


@computes("OneHot", attributes="axis")
def _one_hot(ctx: Context, node: Node, indices: Array, depth: Array, on: Array, off: Array) -> Array:
    count = int(np.asarray(ctx.constant(1)).item())
    hot = jax.nn.one_hot(indices, count, dtype=jnp.bool_, axis=node["axis"])
    return jnp.where(hot, on, off)


@computes("ArgMax", "ArgMin", attributes="output_type output")
def _extreme(ctx: Context, node: Node, x: Array, axis: Array) -> Array:
    function = jnp.argmax if node.op_type == "ArgMax" else jnp.argmin
    return function(x, int(np.asarray(ctx.constant(1)).item())).astype(jnp.int32)


@computes("TopKV2", attributes="sorted")
def _top(ctx: Context, node: Node, x: Array, k: Array) -> tuple[Array, ...]:
    return tuple(jax.lax.top_k(x, int(np.asarray(ctx.constant(1)).item())))


@computes("InTopKV2")
def _in_top(ctx: Context, node: Node, predictions: Array, targets: Array, k: Array) -> Array:
    own = jnp.take_along_axis(predictions, targets[:, None].astype(jnp.int32), 1)
    return jnp.sum(predictions > own, 1) < jnp.asarray(k)


@computes("Bucketize", attributes="boundaries")
def _buckets(ctx: Context, node: Node, x: Array) -> Array:
    """How many boundaries are not above a value; of a NaN, none, as XLA's comparisons have it."""
    limits = jnp.asarray(np.asarray(node["boundaries"], np.float32))
    return jnp.sum(jnp.asarray(x)[..., None] >= limits, -1).astype(jnp.int32)


@computes("Where")
def _where(ctx: Context, node: Node, x: Array) -> Array:
    raise UnsupportedError(
        f"{node.describe()} has a result whose size depends on data; programs on IPUs have static shapes."
    )


@computes("UnsortedSegmentSum", "SegmentSumV2", attributes="")
def _segment_sum(ctx: Context, node: Node, x: Array, ids: Array, count: Array) -> Array:
    return jax.ops.segment_sum(
        x.reshape(-1, *x.shape[ids.ndim :]), ids.reshape(-1), int(np.asarray(ctx.constant(2)).item())
    )


# Lists of tensors of one size are arrays with the list's length in front.


@computes("TensorListReserve", attributes="output element")
def _list_reserve(ctx: Context, node: Node, shape: Array, count: Array) -> Array:
    if node["element"] is None:
        raise UnsupportedError(
            f"{node.describe()} has elements whose size is not known when it is made.",
            hint="Give tf.TensorArray an element_shape.",
        )
    return jnp.zeros((int(ctx.constant(1)), *node["element"]), node["output"])


@computes("TensorListFromTensor")
def _list_from(ctx: Context, node: Node, x: Array, shape: Array) -> Array:
    return x


@computes("TensorListGetItem")
def _list_get(ctx: Context, node: Node, items: Array, index: Array, shape: Array) -> Array:
    _check_place(ctx, node, items.shape[0], "reads")
    return jnp.asarray(items)[_within(items, index)]


def _within(items: Array, index: Array) -> Array:
    """The place in a list nearest to one that is only known in a run: XLA's slices move a place outside to the end."""
    return jnp.clip(jnp.asarray(index), 0, items.shape[0] - 1)


def _check_place(ctx: Context, node: Node, size: int, does: str) -> None:
    """UnsupportedError for a place outside of a list, if it is known before the program runs."""
    place = ctx.known(1)
    if place is not None and not 0 <= int(place) < size:
        raise UnsupportedError(
            f"{node.describe()} {does} element {int(place)} of a list of size {size}, and lists do not grow on an IPU.",
            hint=f"Give the list a size of at least {int(place) + 1}: tf.TensorArray(dtype, size=N)."
            if int(place) >= 0
            else "Count elements from 0.",
        )


@computes("TensorListSetItem", attributes="resize_if_index_out_of_bounds")
def _list_set(ctx: Context, node: Node, items: Array, index: Array, item: Array) -> Array:
    if not items.shape[0]:
        raise UnsupportedError(
            f"{node.describe()} writes to a list of size 0, and lists do not grow on an IPU.",
            hint="Give the list its size: tf.TensorArray(dtype, size=N), without dynamic_size=True.",
        )
    _check_place(ctx, node, items.shape[0], "writes")
    return jnp.asarray(items).at[_within(items, index)].set(item)


@computes("TensorListStack", attributes="num_elements")
def _list_stack(ctx: Context, node: Node, items: Array, shape: Array) -> Array:
    return items


@computes("TensorListLength")
def _list_length(ctx: Context, node: Node, items: Array) -> Array:
    return np.asarray(items.shape[0], np.int32)
