"""Matrix products, einsum, determinants, and attention with what goes with it.

Halves are multiplied with float32 partials; scores, softmax and states of attention are float32 too. Results are
rounded once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.core.errors import InputMismatch
from podrun.numerics.precision import half_partials, is_float, is_half, rounds_once, widen
from podrun.onnx_models.ops.common import Array, onnx_dtype, same_dtype
from podrun.onnx_models.ops.registry import ONNX, operator
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


def onnx_matrix_product(node: Node, a: Array, b: Array) -> Array:
    """``a @ b`` with partials as the hardware keeps them: float32 for halves (rounded once), exact for integers."""
    if is_half(a):
        partials = node.get("__partials_type", "FLOAT")
        if partials == "HALF":
            return half_partials(a, b)
        return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)
    return jnp.matmul(a, b)


@operator(ONNX, "MatMul", since=(1, 9, 13))
def matmul(ctx: Context, node: Node, a: Array, b: Array) -> Array:
    """Matrix product as numpy.matmul: ``[..., m, k] @ [..., k, n]``, leading axes broadcast (ONNX MatMul)."""
    same_dtype(a, b)
    return onnx_matrix_product(node, a, b)


@operator(ONNX, "Gemm", since=(1, 6, 7, 9, 11, 13))
def gemm(ctx: Context, node: Node, a: Array, b: Array, c: Array = None) -> Array:
    """``alpha`` * A @ B + ``beta`` * C, A and B transposed if so said, C broadcast (ONNX Gemm)."""
    same_dtype(*(x for x in (a, b, c) if x is not None))
    a = a.T if node.get("transA", 0) else a
    dtype = a.dtype
    wide = jnp.float32 if is_half(a) else dtype
    if node.get("__partials_type") == "HALF" and is_half(a):
        y = half_partials(a, b.T if node.get("transB", 0) else b).astype(wide)
    elif node.get("transB", 0):
        # B A^T transposed: XLA on CPUs takes fifteen times as long for A B^T where A has one row and K is
        # large
        y = lax.dot_general(
            b, a, (((1,), (1,)), ((), ())), preferred_element_type=wide if is_float(a) else None
        ).T
    else:
        y = jnp.matmul(a, b, preferred_element_type=wide if is_float(a) else None)
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    if alpha != 1.0:
        y = y * np.asarray(alpha).astype(wide)
    if c is not None and beta != 0.0:
        c = c.astype(wide)
        y = y + (c if beta == 1.0 else c * np.asarray(beta).astype(wide))
    return y.astype(dtype)


@operator(ONNX, "Einsum", since=(12, 28))
@rounds_once
def onnx_einsum(ctx: Context, node: Node, *inputs: Array) -> Array:
    """Einstein summation by ``equation`` (ONNX Einsum)."""
    same_dtype(*inputs)
    return jnp.einsum(node["equation"].replace(" ", ""), *inputs)


@operator(ONNX, "Det", since=(11, 22))
@rounds_once
def det(ctx: Context, node: Node, x: Array) -> Array:
    """Determinants of the square matrices in the last two axes (ONNX Det)."""
    return jnp.linalg.det(x)


def _heads(x: Array, count: int | None) -> Array:
    """``[batch, time, heads * size]`` as ``[batch, heads, time, size]``; four axes stay."""
    if x.ndim == 4:
        return x
    if not count or x.shape[2] % count:
        raise InputMismatch(f"{count} heads do not fit {x.shape}")
    return jnp.swapaxes(x.reshape(*x.shape[:2], count, x.shape[2] // count), 1, 2)


def _allowed(node: Node, queries: int, keys: int, offset: Array) -> Array | None:
    """The keys that the causal rule and the windows let each query see: ``[..., queries, keys]``, or None for all."""
    left, right = node.get("left_window_size", -1), node.get("right_window_size", -1)
    causal = bool(node.get("is_causal", 0))
    if not causal and left < 0 and right < 0:
        return None
    ahead = jnp.arange(keys)[None, :] - (jnp.arange(queries)[:, None] + offset)
    allowed = jnp.ones(ahead.shape, bool)
    if causal:
        allowed &= ahead <= 0
    if left >= 0:
        allowed &= -ahead <= left
    if right >= 0:
        allowed &= ahead <= right
    return allowed


def _bias(
    node: Node, dtype: Any, queries: int, keys: int, mask: Array | None, past: int, valid: Array | None
) -> Array:
    """The addend of the scores: 0 or minus infinity by the masks, or the float mask itself."""
    nothing, never = jnp.zeros((), dtype), jnp.asarray(-jnp.inf, dtype)
    bias = jnp.zeros((queries, keys), dtype)
    if mask is not None:
        short = keys - mask.shape[-1]
        if short > 0:
            config = [(0, 0, 0)] * (mask.ndim - 1) + [(0, short, 0)]
            mask = lax.pad(mask, np.asarray(False if mask.dtype == bool else -np.inf, mask.dtype), config)
        bias = bias + (jnp.where(mask, nothing, never) if mask.dtype == bool else mask.astype(dtype))
    offset: Any = past
    if valid is not None and not past:
        offset = (valid.reshape(-1) - queries).reshape(-1, 1, 1, 1)
    allowed = _allowed(node, queries, keys, offset)
    if allowed is not None:
        bias = bias + jnp.where(allowed, nothing, never)
    if valid is not None:
        inside = jnp.arange(keys) < valid.reshape(-1, 1, 1, 1)
        bias = bias + jnp.where(inside, nothing, never)
    return bias


def _attention_scores(ctx: Context, node: Node, q: Array, k: Array, bias: Array) -> tuple[Array, ...]:
    """Scaled products of queries and keys ``[batch, heads, queries, keys]``: raw, capped, with the bias, and as weights
    of the values, which are 0 for a query that may see no key.
    """
    scale = jnp.asarray(np.sqrt(node.get("scale") or 1 / np.sqrt(q.shape[3])), q.dtype)
    raw = jnp.einsum("bhqd,bhkd->bhqk", q * scale, k * scale, preferred_element_type=bias.dtype)
    cap = node.get("softcap", 0.0)
    capped = jnp.tanh(raw / cap) * cap if cap else raw
    biased = capped + bias
    scores = biased
    if node.get("softmax_precision"):
        scores = scores.astype(onnx_dtype(node["softmax_precision"], ctx))
    empty = jnp.max(bias, axis=-1, keepdims=True) == -jnp.inf
    p = jnp.where(empty, jnp.zeros((), scores.dtype), jax.nn.softmax(jnp.where(empty, 0, scores), axis=-1))
    return raw, capped, biased, p


@operator(ONNX, "Attention", since=(23, 24, 25))
def onnx_attention(
    ctx: Context,
    node: Node,
    q: Array,
    k: Array,
    v: Array,
    mask: Array = None,
    past_key: Array = None,
    past_value: Array = None,
    valid: Array = None,
) -> tuple[Array, ...]:
    """softmax(scale * Q K^T + masks) V with grouped heads, causal masks, windows and key-value caches (ONNX Attention).

    A query that may see no key gives zeros. Outputs: Y, the present keys and values, and the scores as
    ``qk_matmul_output_mode`` says.
    """
    packed = q.ndim == 3
    kind = q.dtype
    q, k, v = (
        _heads(q, node.get("q_num_heads")),
        _heads(k, node.get("kv_num_heads")),
        _heads(v, node.get("kv_num_heads")),
    )
    past = 0 if past_key is None else past_key.shape[2]
    k = k if past_key is None else jnp.concatenate([past_key, k], axis=2)
    v = v if past_value is None else jnp.concatenate([past_value, v], axis=2)
    present = k, v
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = jnp.repeat(k, repeats, axis=1), jnp.repeat(v, repeats, axis=1)
    wide = jnp.float32 if is_half(q) else kind
    bias = _bias(node, wide, q.shape[2], k.shape[2], mask, past, valid)
    *scores, p = _attention_scores(ctx, node, q, k, bias)
    y = jnp.einsum("bhqk,bhkd->bhqd", p.astype(wide), v.astype(wide)).astype(kind)
    if packed:
        y = jnp.swapaxes(y, 1, 2).reshape(y.shape[0], y.shape[2], y.shape[1] * y.shape[3])
    shown = (*scores, p)[node.get("qk_matmul_output_mode", 0)]
    return y, *present, shown.astype(kind)


@operator(ONNX, "LinearAttention", since=(27,))
def linear_attention(
    ctx: Context,
    node: Node,
    q: Array,
    k: Array,
    v: Array,
    past: Array = None,
    decay: Array = None,
    beta: Array = None,
) -> tuple[Array, Array]:
    """A state per head updated at every step and read by the query (ONNX LinearAttention): ``update_rule`` says how.

    ``linear``: S + k v^T; ``gated``: S decays by exp(g) first; ``delta``: v less what S gives for k, times beta.
    """
    rule = node.get("update_rule", "gated_delta")
    heads, groups = node["q_num_heads"], node["kv_num_heads"]
    kind, state_kind = q.dtype, (q.dtype if past is None else past.dtype)
    batch, steps, _ = q.shape
    queries, keys, values = (_heads(widen(x), n) for x, n in ((q, heads), (k, groups), (v, groups)))
    wide = queries.dtype
    size, out = queries.shape[-1], values.shape[-1]
    scale = node.get("scale") or 1 / np.sqrt(size)
    gates = jnp.zeros((steps, 1, 1, 1), wide)
    if decay is not None:
        gates = jnp.moveaxis(widen(decay).reshape(batch, steps, groups, -1), 1, 0)
    rates = jnp.ones((steps, 1, 1, 1), wide)
    if beta is not None:
        rates = jnp.moveaxis(widen(beta).reshape(batch, steps, -1, 1), 1, 0)
    state = jnp.zeros((batch, groups, size, out), wide) if past is None else widen(past)

    def step(state: Array, scanned: Any) -> tuple[Array, Array]:
        query, key, value, gate, rate = scanned
        if rule in ("gated", "gated_delta"):
            state = state * jnp.exp(gate)[..., None]
        if rule in ("delta", "gated_delta"):
            value = rate * (value - jnp.einsum("bhdm,bhd->bhm", state, key))
        state = state + key[..., :, None] * value[..., None, :]
        seen = jnp.repeat(state, heads // groups, axis=1)
        return state, jnp.einsum("bhd,bhdm->bhm", query, seen) * np.asarray(scale, wide)

    over_time = tuple(jnp.moveaxis(x, 2, 0) for x in (queries, keys, values))
    final, outputs = lax.scan(step, state, (*over_time, gates, rates))
    y = jnp.transpose(outputs, (1, 0, 2, 3)).reshape(batch, steps, heads * out)
    return y.astype(kind), final.astype(state_kind)


@operator(ONNX, "RotaryEmbedding", since=(23,))
def rotary_embedding(
    ctx: Context, node: Node, x: Array, cos: Array, sin: Array, position: Array = None
) -> Array:
    """The first ``rotary_embedding_dim`` elements of each head rotated by its position's angles (ONNX
    RotaryEmbedding).
    """
    packed = x.ndim == 3
    heads = _heads(x, node.get("num_heads")) if packed else x
    turned = node.get("rotary_embedding_dim", 0) or heads.shape[-1]
    if position is not None:
        cos, sin = cos[position], sin[position]
    cos, sin = cos[:, None], sin[:, None]
    part, rest = heads[..., :turned], heads[..., turned:]
    if node.get("interleaved", 0):
        a, b = part[..., 0::2], part[..., 1::2]
    else:
        a, b = jnp.split(part, 2, axis=-1)
    kind = x.dtype
    wide = (widen(t) for t in (a, b, cos, sin))
    a, b, cos, sin = wide
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if node.get("interleaved", 0):
        rotated = jnp.stack([real, imaginary], axis=-1).reshape(part.shape)
    else:
        rotated = jnp.concatenate([real, imaginary], axis=-1)
    y = jnp.concatenate([rotated.astype(kind), rest], axis=-1)
    return jnp.swapaxes(y, 1, 2).reshape(x.shape) if packed else y
