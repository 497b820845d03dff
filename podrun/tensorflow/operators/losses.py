"""Cross entropies: the loss of each row, and its gradient as TensorFlow's operation gives it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from podrun.tensorflow.operators.table import operator

Array = Any


@operator("SparseSoftmaxCrossEntropyWithLogits")
def _sparse(ctx: Any, node: Any, logits: Array, labels: Array) -> Any:
    wide = logits.astype(jnp.float32)
    logs = jax.nn.log_softmax(wide)
    loss = -jnp.take_along_axis(logs, labels[:, None].astype(jnp.int32), 1)[:, 0]
    hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)
    gradient = jax.lax.stop_gradient(jnp.exp(logs) - hot)
    return loss.astype(logits.dtype), gradient.astype(logits.dtype)


@operator("SoftmaxCrossEntropyWithLogits")
def _dense(ctx: Any, node: Any, logits: Array, labels: Array) -> Any:
    wide, target = jnp.broadcast_arrays(logits.astype(jnp.float32), labels.astype(jnp.float32))
    logs = jax.nn.log_softmax(wide)
    loss = -jnp.sum(target * logs, -1)
    gradient = jax.lax.stop_gradient(jnp.exp(logs) * jnp.sum(target, -1, keepdims=True) - target)
    return loss.astype(logits.dtype), gradient.astype(logits.dtype)
