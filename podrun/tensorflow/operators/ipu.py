"""Operations that only IPUs have: between replicas, and those of the SDK's own libraries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from podrun.compiler.model_collectives import Combination, all_gather, all_reduce, replica_position
from podrun.core.errors import UsageError
from podrun.tensorflow.operators.table import computes

Array = Any


def _groups(ctx: Any, size: int | None) -> tuple[tuple[int, ...], ...]:
    """Groups of neighbouring replicas. UsageError if they do not divide the replicas."""
    count = size or ctx.replicas
    if ctx.replicas % count:
        raise UsageError(f"replica_group_size {count} does not divide the {ctx.replicas} replicas.")
    return tuple(tuple(range(i, i + count)) for i in range(0, ctx.replicas, count))


@computes("Podrun:cross_replica_sum", attributes="group")
def _cross_sum(ctx: Any, node: Any, x: Array) -> Array:
    return all_reduce(jnp.asarray(x), Combination.ADD, _groups(ctx, node["group"]))


@computes("Podrun:cross_replica_mean", attributes="group")
def _cross_mean(ctx: Any, node: Any, x: Array) -> Array:
    return all_reduce(jnp.asarray(x), Combination.MEAN, _groups(ctx, node["group"]))


@computes("Podrun:replica_sum_over_count")
def _mean_of_sum(ctx: Any, node: Any, x: Array) -> Array:
    return jnp.asarray(x) / ctx.replicas


@computes("Podrun:replication_index")
def _replica(ctx: Any, node: Any) -> Array:
    if ctx.replicas == 1:
        return jnp.zeros((), jnp.int32)

    return jnp.asarray(replica_position(_groups(ctx, None))).astype(jnp.int32).reshape(())


@computes("Podrun:all_gather")
def _gather(ctx: Any, node: Any, x: Array) -> Array:
    if ctx.replicas == 1:
        return jnp.asarray(x)[None]
    return all_gather(jnp.asarray(x), _groups(ctx, None))


@computes("Podrun:gelu", attributes="approximate")
def _gelu(ctx: Any, node: Any, x: Array) -> Array:
    return jax.nn.gelu(x, approximate=node["approximate"])


@computes("Podrun:group_norm", attributes="groups axis epsilon strided")
def _group_norm(ctx: Any, node: Any, x: Array, gamma: Array, beta: Array) -> Array:
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
