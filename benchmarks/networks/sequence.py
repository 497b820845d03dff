"""Transformers and recurrent networks: one encoder layer at a time, embeddings, heads, LSTM stacks."""

from __future__ import annotations

import math
from typing import Any

from networks.vision import Maker, dense, normalise


def layer_norm(make: Maker, name: str, x: Any) -> Any:
    """Normalise the last dimension."""
    gamma, beta = make.get(name + ".gamma", (x.shape[-1],)), make.get(name + ".beta", (x.shape[-1],))
    return normalise(x, gamma, beta, (x.ndim - 1,))


def dropout(x: Any, key: Any, train: bool) -> Any:
    """Drop a tenth; one random mask per call."""
    import jax
    import jax.numpy as jnp

    if not train:
        return x
    keep = jax.random.bits(key, x.shape, "uint8") > 25
    return jnp.where(keep, x * 1.1, 0).astype(x.dtype)


def encoder_layer(make: Maker, x: Any, key: Any, *, heads: int, feed_forward: int, train: bool) -> Any:
    """One BERT layer on [batch, tokens, hidden]; attention with a mask, dropout in training."""
    import jax
    import jax.numpy as jnp

    batch, tokens, hidden = x.shape
    size = hidden // heads
    with jax.named_scope("qkv_matmul"):
        qkv = x.reshape(-1, hidden) @ make.get("qkv", (hidden, 3 * hidden))
        qkv = qkv.reshape(batch, tokens, 3, heads, size)
        q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    with jax.named_scope("qk_matmul"):
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    with jax.named_scope("softmax"):
        mask = make.get("mask", (batch, 1, 1, tokens))
        probabilities = jax.nn.softmax(scores * (1.0 / math.sqrt(size)) + mask)
        probabilities = dropout(probabilities, key, train)
    with jax.named_scope("pv_matmul"):
        context = jnp.einsum("bhqk,bhkd->bhqd", probabilities, v).transpose(0, 2, 1, 3)
    with jax.named_scope("attention_out_matmul"):
        y = context.reshape(-1, hidden) @ make.get("out", (hidden, hidden)) + make.get("out.bias", (hidden,))
    with jax.named_scope("layer_norm"):
        x = layer_norm(make, "norm0", x + dropout(y, key, train).reshape(x.shape))
    with jax.named_scope("ff1_matmul"):
        y = dense(make, "ff1", x.reshape(-1, hidden), feed_forward)
    with jax.named_scope("gelu"):
        y = jax.nn.gelu(y)
    with jax.named_scope("ff2_matmul"):
        y = dense(make, "ff2", y, hidden)
    with jax.named_scope("layer_norm2"):
        return layer_norm(make, "norm1", x + dropout(y, key, train).reshape(x.shape))


def embedding(make: Maker, tokens: Any, key: Any, *, vocabulary: int, hidden: int, train: bool) -> Any:
    """Word, position and type embeddings, summed and normalised."""
    import jax

    with jax.named_scope("embedding"):
        length = tokens.shape[1]
        word = make.get("word", (vocabulary, hidden))[tokens]
        x = word + make.get("position", (length, hidden)) + make.get("type", (2, hidden))[0]
        return dropout(layer_norm(make, "norm", x), key, train)


def prediction_head(make: Maker, x: Any, *, vocabulary: int, predictions: int) -> Any:
    """Masked-language head on the first ``predictions`` tokens of each row."""
    import jax

    hidden = x.shape[-1]
    with jax.named_scope("mlm"):
        y = x[:, :predictions].reshape(-1, hidden)
        y = layer_norm(make, "norm", jax.nn.gelu(dense(make, "transform", y, hidden)))
        return jax.nn.log_softmax(y @ make.get("vocabulary", (hidden, vocabulary)))


def lstm(make: Maker, x: Any, *, layers: int, hidden: int) -> Any:
    """A stack of LSTM layers on [time, batch, features]; all gates in one product per step."""
    import jax
    import jax.numpy as jnp

    for layer in range(layers):
        weight = make.get(f"lstm{layer}", (x.shape[-1] + hidden, 4 * hidden))
        zero = jnp.zeros((x.shape[1], hidden), x.dtype)

        def step(state: Any, now: Any, weight: Any = weight) -> Any:
            cell, output = state
            gates = jnp.concatenate([now, output], -1) @ weight
            i, f, g, o = jnp.split(gates, 4, -1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            output = jax.nn.sigmoid(o) * jnp.tanh(cell)
            return (cell, output), output

        with jax.named_scope(f"lstm{layer}"):
            _, x = jax.lax.scan(step, (zero, zero), x)
    return x
