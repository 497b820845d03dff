"""Operations that pick and place by index: gather, scatter, one-hot, extremes, sorting."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import UnsupportedError
from podrun.tensorflow.operators.table import computes

Array = Any


@computes("GatherV2", "Gather", attributes="batch_dims", folds=True)
def _gather(ctx: Any, node: Any, x: Array, indices: Array, axis: Any = None) -> Array:
    place = 0 if axis is None else int(np.asarray(ctx.constant(2)).item())
    batch = int(node.get("batch_dims", 0))
    if batch:
        place = place if place >= 0 else place + x.ndim

        def one(row: Array, index: Array) -> Array:
            return jnp.take(row, index, axis=place - batch)

        function = one
        for _ in range(batch):
            function = jax.vmap(function)
        return function(x, indices)
    return np.take(x, indices, place) if ctx.xp is np else jnp.take(x, indices, axis=place)


@computes("GatherNd", attributes="bad_indices_policy")
def _gather_nd(ctx: Any, node: Any, x: Array, indices: Array) -> Array:
    return x[tuple(jnp.moveaxis(indices, -1, 0))]


@computes("ScatterNd", attributes="bad_indices_policy")
def _scatter_nd(ctx: Any, node: Any, indices: Array, updates: Array, shape: Any) -> Array:
    sizes = tuple(int(v) for v in np.atleast_1d(ctx.constant(2)))
    return jnp.zeros(sizes, updates.dtype).at[tuple(jnp.moveaxis(indices, -1, 0))].add(updates)


@computes("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin",
          attributes="bad_indices_policy")  # fmt: skip
def _scatter_into(ctx: Any, node: Any, x: Array, indices: Array, updates: Array) -> Array:
    place = jnp.asarray(x).at[tuple(jnp.moveaxis(indices, -1, 0))]
    kind = node.op_type.removeprefix("TensorScatter")
    if kind == "Sub":
        return place.add(-updates)
    choices: dict[str, Any] = {"Update": place.set, "Add": place.add, "Max": place.max, "Min": place.min}
    return choices[kind](updates)


@computes("OneHot", attributes="axis")
def _one_hot(ctx: Any, node: Any, indices: Array, depth: Any, on: Array, off: Array) -> Array:
    count = int(np.asarray(ctx.constant(1)).item())
    hot = jax.nn.one_hot(indices, count, dtype=jnp.bool_, axis=node["axis"])
    return jnp.where(hot, on, off)


@computes("ArgMax", "ArgMin", attributes="output_type output")
def _extreme(ctx: Any, node: Any, x: Array, axis: Any) -> Array:
    function = jnp.argmax if node.op_type == "ArgMax" else jnp.argmin
    return function(x, int(np.asarray(ctx.constant(1)).item())).astype(jnp.int32)


@computes("TopKV2", attributes="sorted")
def _top(ctx: Any, node: Any, x: Array, k: Any) -> Any:
    return tuple(jax.lax.top_k(x, int(np.asarray(ctx.constant(1)).item())))


@computes("InTopKV2")
def _in_top(ctx: Any, node: Any, predictions: Array, targets: Array, k: Any) -> Array:
    own = jnp.take_along_axis(predictions, targets[:, None].astype(jnp.int32), 1)
    return jnp.sum(predictions > own, 1) < jnp.asarray(k)


@computes("Where")
def _where(ctx: Any, node: Any, x: Array) -> Array:
    raise UnsupportedError(
        f"{node.describe()} has a result whose size depends on data; programs on IPUs have static shapes."
    )


@computes("UnsortedSegmentSum", "SegmentSumV2", attributes="")
def _segment_sum(ctx: Any, node: Any, x: Array, ids: Array, count: Any) -> Array:
    return jax.ops.segment_sum(
        x.reshape(-1, *x.shape[ids.ndim :]), ids.reshape(-1), int(np.asarray(ctx.constant(2)).item())
    )


# Lists of tensors of one size are arrays with the list's length in front.


@computes("TensorListReserve", attributes="output element")
def _list_reserve(ctx: Any, node: Any, shape: Any, count: Any) -> Array:
    if node["element"] is None:
        raise UnsupportedError(
            f"{node.describe()} has elements whose size is not known when it is made.",
            hint="Give tf.TensorArray an element_shape.",
        )
    return jnp.zeros((int(ctx.constant(1)), *node["element"]), node["output"])


@computes("TensorListFromTensor")
def _list_from(ctx: Any, node: Any, x: Array, shape: Any) -> Array:
    return x


@computes("TensorListGetItem")
def _list_get(ctx: Any, node: Any, items: Array, index: Array, shape: Any) -> Array:
    return jnp.asarray(items)[index]


@computes("TensorListSetItem", attributes="resize_if_index_out_of_bounds")
def _list_set(ctx: Any, node: Any, items: Array, index: Array, item: Array) -> Array:
    return jnp.asarray(items).at[index].set(item)


@computes("TensorListStack", attributes="num_elements")
def _list_stack(ctx: Any, node: Any, items: Array, shape: Any) -> Array:
    return items


@computes("TensorListLength")
def _list_length(ctx: Any, node: Any, items: Array) -> Array:
    return np.asarray(items.shape[0], np.int32)
