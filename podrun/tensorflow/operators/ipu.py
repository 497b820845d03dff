"""Operations that only IPUs have: between replicas, and those of the SDK's own libraries."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podrun.compiler.model_collectives import (
    Combination,
    all_gather,
    all_reduce,
    reduce_scatter,
    replica_position,
)
from podrun.core.errors import UnimplementedError, UsageError
from podrun.numerics.ctc import alignment_losses, best_label_sequences
from podrun.numerics.precision import eight_bit_floats, from_eight_bit_floats
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context
from podrun.runtime.user_operators import attributes_in_text, find_user_operator, with_own_gradient
from podrun.tensorflow.operators.table import Array, computes


class GroupSizeError(UsageError):
    """Groups of replicas that do not divide the replicas, or are not all of them where they must be."""


def neighbour_groups(ctx: Context, size: int | None) -> tuple[tuple[int, ...], ...]:
    """Groups of neighbouring replicas. GroupSizeError if they do not divide the replicas."""
    count = size or ctx.replicas
    if ctx.replicas % count:
        raise GroupSizeError(
            f"The replica group size (got {count}) does not evenly divide the total number of replicas "
            f"(got {ctx.replicas})."
        )
    return tuple(tuple(range(i, i + count)) for i in range(0, ctx.replicas, count))


@computes("Podrun:cross_replica_sum", attributes="group")
def _cross_sum(ctx: Context, node: Node, x: Array) -> Array:
    return all_reduce(jnp.asarray(x), Combination.ADD, neighbour_groups(ctx, node["group"]))


@computes("Podrun:cross_replica_mean", attributes="group")
def _cross_mean(ctx: Context, node: Node, x: Array) -> Array:
    return all_reduce(jnp.asarray(x), Combination.MEAN, neighbour_groups(ctx, node["group"]))


@computes("Podrun:replica_sum_over_count")
def _mean_of_sum(ctx: Context, node: Node, x: Array) -> Array:
    return jnp.asarray(x) / ctx.replicas


@computes("Podrun:replication_index")
def _replica(ctx: Context, node: Node) -> Array:
    if ctx.replicas == 1:
        return jnp.zeros((), jnp.int32)

    return jnp.asarray(replica_position(neighbour_groups(ctx, None))).astype(jnp.int32).reshape(())


@computes("Podrun:all_gather", attributes="group")
def _gather(ctx: Context, node: Node, x: Array) -> Array:
    groups = neighbour_groups(ctx, node["group"])
    if node["group"] == 1:
        return jnp.asarray(x)[None]
    return all_gather(jnp.asarray(x), groups).reshape(node["group"], *jnp.shape(x))


@computes("Podrun:group_norm", attributes="groups axis epsilon strided")
def _group_norm(ctx: Context, node: Node, x: Array, gamma: Array, beta: Array) -> Array:
    """Statistics of each sample over groups of channels and all places, in float32. Strided: channel c is in group
    ``c % groups``.
    """
    axis, groups = node["axis"] % x.ndim, node["groups"]
    moved = jnp.moveaxis(x, axis, -1).astype(jnp.float32)
    channels = moved.shape[-1]
    split = (channels // groups, groups) if node["strided"] else (groups, channels // groups)
    parts = moved.reshape(*moved.shape[:-1], *split)
    over = (*range(1, moved.ndim - 1), moved.ndim - 1 if node["strided"] else moved.ndim)
    mean = parts.mean(over, keepdims=True)
    variance = jnp.square(parts - mean).mean(over, keepdims=True)
    y = ((parts - mean) * jax.lax.rsqrt(variance + node["epsilon"])).reshape(moved.shape)
    y = y * gamma.astype(jnp.float32) + beta.astype(jnp.float32)
    return jnp.moveaxis(y, -1, axis).astype(x.dtype)


@computes("Podrun:all_to_all", attributes="split concat group")
def _all_to_all(ctx: Context, node: Node, x: Array) -> Array:
    """Part *i* of every replica's ``x``, joined in the order of replicas. GroupSizeError for other groups than all."""
    if node["group"] != ctx.replicas:
        raise GroupSizeError(
            f"all_to_all is between all replicas: its replication factor (got {node['group']}) is not the total number "
            f"of replicas (got {ctx.replicas})."
        )
    if ctx.replicas == 1:
        return jnp.asarray(x)
    count, groups = ctx.replicas, neighbour_groups(ctx, None)
    everyone = all_gather(jnp.asarray(x), groups).reshape(count, *x.shape)
    size = x.shape[node["split"]] // count
    here = jnp.asarray(replica_position(groups)).astype(jnp.int32).reshape(()) * size
    own = jax.lax.dynamic_slice_in_dim(everyone, here, size, node["split"] % x.ndim + 1)
    return jnp.concatenate(list(own), node["concat"])


@computes("Podrun:reduce_scatter", attributes="op group")
def _reduce_scatter(ctx: Context, node: Node, x: Array) -> Array:
    return reduce_scatter(jnp.asarray(x), Combination[node["op"]], neighbour_groups(ctx, node["group"]))


@computes("Podrun:watched")
def _watched(ctx: Context, node: Node, x: Array, nothing: Array) -> Array:
    """The first input; the second, zeros, has the gradient that reaches it."""
    return x + nothing


@computes("Podrun:ctc_loss", attributes="blank")
def _ctc(ctx: Context, node: Node, logs: Array, labels: Array, lengths: Array, label_lengths: Array) -> Array:
    return alignment_losses(logs, labels, lengths, label_lengths, node["blank"], pairwise=False)


@computes("Podrun:ctc_decode", attributes="blank width paths")
def _ctc_decode(ctx: Context, node: Node, logs: Array, lengths: Array) -> tuple[Array, ...]:
    return best_label_sequences(logs, lengths, node["blank"], node["width"], node["paths"])


@computes("Podrun:user_op", attributes="library op_name attributes differentiable")
def _user_op(ctx: Context, node: Node, *inputs: Array) -> Array | tuple[Array, ...]:
    """What the user's Python function gives; inputs that have no gradient are cut off."""
    function = with_own_gradient(find_user_operator(node["library"], node["op_name"]))
    able = set(node["differentiable"])
    values = [jnp.asarray(x) if i in able else jax.lax.stop_gradient(x) for i, x in enumerate(inputs)]
    results = function(*values, **attributes_in_text(node["attributes"]))
    return tuple(results) if isinstance(results, (list, tuple)) else results


@computes("CTCLoss", "CTCLossV2",
          attributes="preprocess_collapse_repeated ctc_merge_repeated ignore_longer_outputs_than_inputs")  # fmt: skip
def _sparse_ctc(
    ctx: Context, node: Node, x: Array, places: Array, labels: Array, lengths: Array
) -> tuple[Array, ...]:
    """The losses, and their gradients for ``x [time, samples, classes]``, which are no probabilities yet. Labels are
    sparse; the blank is the last class, of the second version the first one.
    """
    collapses, merges = node["preprocess_collapse_repeated"], node["ctc_merge_repeated"]
    if collapses or not merges:
        raise UnimplementedError(
            f"{node.describe()}: labels are taken as they are, and repeated ones of the output merged.",
            hint="Leave preprocess_collapse_repeated and ctc_merge_repeated as they are by default.",
        )
    samples, most = x.shape[1], int(jnp.shape(labels)[0])
    blank = 0 if node.op_type == "CTCLossV2" else x.shape[2] - 1
    rows, columns = jnp.asarray(places)[:, 0], jnp.asarray(places)[:, 1]
    dense = jnp.full((samples, most), blank, jnp.int32).at[rows, columns].set(jnp.asarray(labels, jnp.int32))
    counts = jnp.zeros(samples, jnp.int32).at[rows].add(1)

    def losses(scores: Array) -> Array:
        logs = jax.nn.log_softmax(scores.astype(jnp.float32))
        return alignment_losses(logs, dense, jnp.asarray(lengths), counts, blank, pairwise=False)

    loss = losses(x)
    gradient = jax.grad(lambda scores: losses(scores).sum())(jax.lax.stop_gradient(x))
    return loss.astype(x.dtype), jax.lax.stop_gradient(gradient)


@computes("Podrun:to_eight_bits")
def _to_eight_bits(ctx: Context, node: Node, x: Array, metadata: Array) -> Array:
    return eight_bit_floats(jnp, jnp.asarray(x), metadata)


@computes("Podrun:from_eight_bits")
def _from_eight_bits(ctx: Context, node: Node, data: Array, metadata: Array) -> Array:
    return from_eight_bit_floats(jnp, jnp.asarray(data), metadata)
