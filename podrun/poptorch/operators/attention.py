"""Scaled dot-product attention."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from podrun.poptorch.operators.products import product
from podrun.poptorch.operators.randomness import dropped
from podrun.poptorch.operators.table import Array, Call, aten, widened


@aten("scaled_dot_product_attention", kind="MatMul")
def attention(
    call: Call,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """``softmax(scale * query @ key.T + mask) @ value``. A boolean mask is True where attention is allowed."""
    if enable_gqa:
        key, value = (jnp.repeat(each, query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.einsum("...qd,...kd->...qk", query, key, preferred_element_type=jnp.float32) * scale
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + widened(mask)
    weights = jax.nn.softmax(scores, -1)
    if mask is not None and mask.dtype == jnp.bool_:
        weights = jnp.where(jnp.any(mask, -1, keepdims=True), weights, 0)
    if dropout:
        weights = dropped(call, weights, dropout)[0]
    return product(weights, value)
