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


SWIN = {
    "swin_t": ((2, 2, 6, 2), 96, 3),
    "swin_l": ((2, 2, 18, 2), 192, 6),
}
"""Blocks of each stage, width and heads of the first (Liu et al.)."""


def swin(make: Maker, images: Any, *, variant: str) -> Any:
    """Swin transformer on [batch, side, side, channels] images; windows of 7, or 12 for 384 pixels."""
    import jax
    import jax.numpy as jnp

    depths, width, heads = SWIN[variant]
    window = 12 if images.shape[1] % 12 == 0 and images.shape[1] >= 384 else 7
    batch, side = images.shape[0], images.shape[1] // 4
    x = images.reshape(batch, side, 4, side, 4, -1).transpose(0, 1, 3, 2, 4, 5).reshape(batch, side, side, -1)
    x = layer_norm(make, "patch.norm", x @ make.get("patch", (x.shape[-1], width)))
    for stage, depth in enumerate(depths):
        if stage:
            side //= 2
            x = x.reshape(batch, side, 2, side, 2, -1).transpose(0, 1, 3, 2, 4, 5)
            x = layer_norm(make, f"merge{stage}.norm", x.reshape(batch, side, side, -1))
            x = x @ make.get(f"merge{stage}", (x.shape[-1], x.shape[-1] // 2))
        for index in range(depth):
            name = f"stage{stage}.block{index}"
            with jax.named_scope(name):
                shift = window // 2 if index % 2 else 0
                x = _swin_block(make, name, x, heads * 2**stage, window, shift)
    return dense(make, "head", jnp.mean(layer_norm(make, "norm", x), (1, 2)), 1000)


def _swin_block(make: Maker, name: str, x: Any, heads: int, window: int, shift: int) -> Any:
    import jax
    import jax.numpy as jnp

    batch, side, _, hidden = x.shape
    count, tokens, size = side // window, window * window, hidden // heads
    y = layer_norm(make, name + ".norm0", x)
    if shift:
        y = jnp.roll(y, (-shift, -shift), (1, 2))
    y = y.reshape(batch, count, window, count, window, hidden).transpose(0, 1, 3, 2, 4, 5)
    rows = y.reshape(-1, hidden)
    qkv = dense(make, name + ".qkv", rows, 3 * hidden).reshape(-1, tokens, 3, heads, size)
    q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    bias = make.get(name + ".bias", (heads, tokens, tokens))
    weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k) * (1.0 / math.sqrt(size)) + bias)
    y = jnp.einsum("bhqk,bhkd->bhqd", weights, v).transpose(0, 2, 1, 3).reshape(-1, hidden)
    y = dense(make, name + ".out", y, hidden).reshape(batch, count, count, window, window, hidden)
    y = y.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)
    if shift:
        y = jnp.roll(y, (shift, shift), (1, 2))
    x = x + y
    y = layer_norm(make, name + ".norm1", x).reshape(-1, hidden)
    y = dense(make, name + ".ff2", jax.nn.gelu(dense(make, name + ".ff1", y, 4 * hidden)), hidden)
    return x + y.reshape(x.shape)
