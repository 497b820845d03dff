"""Networks for sequences: transformers (BERT, GPT, ViT), and a stack of LSTM layers on ``[time, batch, features]``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from podrun.models.network import ATTENTION_BLOCKED, Network

CLASSES = 1000


def encoder_layer(
    net: Network,
    x: str,
    name: str,
    heads: int,
    feed_forward: int,
    mask: str = "",
    *,
    attention_dropout: bool = True,
) -> str:
    """One layer on ``[batch, tokens, hidden]``, normalised after each half (BERT). ``mask`` is added to the
    scores; ``attention_dropout``: shares of attention are dropped too.
    """
    batch, tokens, hidden = net.shape(x)
    with net.scope("attention"):
        rows = net.reshape(x, (batch * tokens, hidden))
        y = self_attention(net, rows, name, (batch, tokens), heads, (mask,), dropout=attention_dropout)
    with net.scope("layer_norm"):
        x = net.layer_norm(net.add(x, net.reshape(net.dropout(y), (batch, tokens, hidden))), f"{name}.norm0")
    y = feed_forward_block(net, net.reshape(x, (batch * tokens, hidden)), name, feed_forward)
    with net.scope("layer_norm2"):
        return net.layer_norm(
            net.add(x, net.reshape(net.dropout(y), (batch, tokens, hidden))), f"{name}.norm1"
        )


def self_attention(
    net: Network,
    rows: str,
    name: str,
    grouped: tuple[int, int],
    heads: int,
    added: Sequence[str] = (),
    *,
    dropout: bool = True,
) -> str:
    """Attention of ``grouped`` = (sequences, tokens) on their ``rows``; masks and biases in ``added`` are added to the
    scores, empty names left out.
    """
    batch, tokens = grouped
    hidden = net.shape(rows)[-1]
    size = hidden // heads
    with net.scope("qkv_matmul"):
        qkv = net.dense(rows, f"{name}.qkv", 3 * hidden)
        parts = [net.reshape(part, (batch, tokens, heads, size)) for part in net.split(qkv, 3, 1)]
        q, v = (net.transpose(part, (0, 2, 1, 3)) for part in (parts[0], parts[2]))
        k = net.transpose(parts[1], (0, 2, 3, 1))
    with net.scope("qk_matmul"):
        scores = net.matmul(q, k)
    with net.scope("softmax"):
        scores = net.mul(scores, net.constant(1.0 / math.sqrt(size)))
        for tensor in filter(None, added):
            scores = net.add(scores, tensor)
        shares = net.softmax(scores)
        shares = net.dropout(shares) if dropout else shares
    with net.scope("pv_matmul"):
        context = net.transpose(net.matmul(shares, v), (0, 2, 1, 3))
        context = net.reshape(context, (batch * tokens, hidden))
    with net.scope("attention_out_matmul"):
        return net.dense(context, f"{name}.out", hidden)


def feed_forward_block(net: Network, rows: str, name: str, feed_forward: int) -> str:
    """Two dense layers with gelu between."""
    hidden = net.shape(rows)[-1]
    with net.scope("ff1_matmul"):
        y = net.dense(rows, f"{name}.ff1", feed_forward)
    with net.scope("gelu"):
        y = net.gelu(y)
    with net.scope("ff2_matmul"):
        return net.dense(y, f"{name}.ff2", hidden)


def embedding(net: Network, tokens: str, vocabulary: int, hidden: int) -> str:
    """Word, position and type embeddings of ``[batch, tokens]``, summed and normalised."""
    with net.scope("embedding"):
        length = net.shape(tokens)[1]
        x = net.gather(net.weight("word", (vocabulary, hidden)), tokens)
        x = net.add(x, net.weight("position", (length, hidden)))
        x = net.add(x, net.slice(net.weight("type", (2, hidden)), 0, 0, 1))
        return net.dropout(net.layer_norm(x, "embedding.norm"))


def prediction_head(net: Network, x: str, vocabulary: int, predictions: int, table: str = "") -> str:
    """Log-probabilities of words at the first ``predictions`` tokens of each row.

    ``table``: the embedding table, used transposed; without it the head has weights of its own.
    """
    batch, _, hidden = net.shape(x)
    with net.scope("mlm"):
        y = net.reshape(net.slice(x, 1, 0, predictions), (batch * predictions, hidden))
        y = net.layer_norm(net.gelu(net.dense(y, "transform", hidden)), "head.norm")
        if table:
            return net.log_softmax(net.matmul(y, net.transpose(table, (1, 0))))
        return net.log_softmax(net.dense(y, "vocabulary", vocabulary, bias=False))


def causal_mask(net: Network, tokens: int) -> str:
    """The mask that hides later tokens from each token."""
    blocked = np.triu(np.full((tokens, tokens), ATTENTION_BLOCKED), 1)
    return str(net.builder.aiOnnx.constant(blocked.astype(net.dtype)))


def patches(net: Network, images: str, side: int, hidden: int) -> str:
    """Squares of ``side`` pixels as rows of ``hidden``: ``[batch, rows of patches, columns, hidden]``."""
    batch, channels, rows, columns = net.shape(images)
    down, across = rows // side, columns // side
    x = net.reshape(images, (batch, channels, down, side, across, side))
    x = net.transpose(x, (0, 2, 4, 1, 3, 5))
    x = net.reshape(x, (batch * down * across, channels * side * side))
    return net.reshape(net.dense(x, "patch", hidden), (batch, down, across, hidden))


VIT = {"vit_b16": (12, 768, 12, 3072, 16), "vit_l16": (24, 1024, 16, 4096, 16)}
"""Layers, hidden size, heads, feed-forward size, patch side (Dosovitskiy et al. 2020)."""


def vit(net: Network, images: str, variant: str) -> str:
    """Logits of a vision transformer: a class token, layers normalised before each half."""
    layers, hidden, heads, feed_forward, side = VIT[variant]
    with net.scope("embedding"):
        x = patches(net, images, side, hidden)
        batch, down, across, _ = net.shape(x)
        x = net.reshape(x, (batch, down * across, hidden))
        first = net.builder.aiOnnx.expand(
            [
                net.weight("class", (1, 1, hidden)),
                net.builder.aiOnnx.constant(np.asarray([batch, 1, hidden], np.int64)),
            ]
        )
        tokens = down * across + 1
        x = net.add(net.concat([str(first), x], 1), net.weight("position", (1, tokens, hidden)))
        rows = net.reshape(x, (batch * tokens, hidden))
    for layer in range(layers):
        with net.scope(f"layer{layer}"):
            name = f"layer{layer}"
            y = net.layer_norm(rows, f"{name}.norm0")
            rows = net.add(rows, net.dropout(self_attention(net, y, name, (batch, tokens), heads)))
            y = feed_forward_block(net, net.layer_norm(rows, f"{name}.norm1"), name, feed_forward)
            rows = net.add(rows, net.dropout(y))
    with net.scope("head"):
        x = net.reshape(net.layer_norm(rows, "norm"), (batch, tokens, hidden))
        return net.dense(net.reshape(net.slice(x, 1, 0, 1), (batch, hidden)), "head", CLASSES)


SWIN = {"swin_t": ((2, 2, 6, 2), 96, 3), "swin_l": ((2, 2, 18, 2), 192, 6)}
"""Blocks of each stage, width and heads of the first (Liu et al. 2021)."""


def swin(net: Network, images: str, variant: str) -> str:
    """Logits of a Swin transformer; windows of 12 for sides that take them from 384 pixels on, else of 7."""
    depths, width, heads = SWIN[variant]
    pixels = net.shape(images)[2]
    window = 12 if pixels >= 384 and pixels % 12 == 0 else 7
    with net.scope("patches"):
        x = net.layer_norm(patches(net, images, 4, width), "patch.norm")
    for stage, depth in enumerate(depths):
        if stage:
            with net.scope(f"merge{stage}"):
                x = _merge(net, x, stage)
        for index in range(depth):
            name = f"stage{stage}.block{index}"
            with net.scope(name):
                shift = window // 2 if index % 2 else 0
                x = _swin_block(net, x, name, heads * 2**stage, window, shift)
    with net.scope("head"):
        batch, side, _, hidden = net.shape(x)
        rows = net.reshape(net.layer_norm(x, "norm"), (batch, side * side, hidden))
        mean = net.builder.aiOnnx.reducemean([rows], axes=[1], keepdims=0)
        return net.dense(str(mean), "head", CLASSES)


def _merge(net: Network, x: str, stage: int) -> str:
    """Four neighbours become one token of twice the width."""
    batch, side, _, hidden = net.shape(x)
    half = side // 2
    x = net.transpose(net.reshape(x, (batch, half, 2, half, 2, hidden)), (0, 1, 3, 2, 4, 5))
    rows = net.layer_norm(net.reshape(x, (batch * half * half, 4 * hidden)), f"merge{stage}.norm")
    return net.reshape(
        net.dense(rows, f"merge{stage}", 2 * hidden, bias=False), (batch, half, half, 2 * hidden)
    )


def _roll(net: Network, x: str, by: int) -> str:
    """Rows and columns moved round by ``by`` (negative: towards zero)."""
    for axis in (1, 2):
        side = net.shape(x)[axis]
        start = -by % side
        x = net.concat([net.slice(x, axis, start, side), net.slice(x, axis, 0, start)], axis)
    return x


def _shifted_mask(net: Network, batch: int, side: int, window: int, shift: int) -> str:
    """The mask of shifted windows: pixels that were not neighbours do not attend to each other."""
    count = side // window
    bands = np.repeat([0, 1, 2], [side - window, window - shift, shift])
    regions = 3 * bands[:, None] + bands[None, :]
    windows = regions.reshape(count, window, count, window).transpose(0, 2, 1, 3).reshape(count * count, -1)
    apart = np.where(windows[:, None, :] != windows[:, :, None], ATTENTION_BLOCKED, 0.0)
    whole = np.tile(apart[:, None], (batch, 1, 1, 1))
    return str(net.builder.aiOnnx.constant(whole.astype(net.dtype)))


def _swin_block(net: Network, x: str, name: str, heads: int, window: int, shift: int) -> str:
    batch, side, _, hidden = net.shape(x)
    count, tokens = side // window, window * window
    y = net.layer_norm(x, f"{name}.norm0")
    y = _roll(net, y, -shift) if shift else y
    y = net.transpose(net.reshape(y, (batch, count, window, count, window, hidden)), (0, 1, 3, 2, 4, 5))
    rows = net.reshape(y, (batch * count * count * tokens, hidden))
    bias = net.weight(f"{name}.bias", (1, heads, tokens, tokens))
    mask = _shifted_mask(net, batch, side, window, shift) if shift else ""
    rows = self_attention(net, rows, name, (batch * count * count, tokens), heads, (mask, bias))
    y = net.reshape(rows, (batch, count, count, window, window, hidden))
    y = net.reshape(net.transpose(y, (0, 1, 3, 2, 4, 5)), (batch, side, side, hidden))
    x = net.add(x, _roll(net, y, shift) if shift else y)
    rows = net.reshape(net.layer_norm(x, f"{name}.norm1"), (batch * side * side, hidden))
    return net.add(
        x, net.reshape(feed_forward_block(net, rows, name, 4 * hidden), (batch, side, side, hidden))
    )


def lstm_layers(net: Network, x: str, layers: int, hidden: int) -> str:
    """The last layer's outputs, ``[time, batch, hidden]``; gates in one product per layer and step (PopART LSTM)."""
    features = net.shape(x)[-1]
    for layer in range(layers):
        with net.scope(f"lstm{layer}"):
            wide = features + hidden
            weights = net.weight(f"lstm{layer}", (4, wide, hidden), 1.0 / math.sqrt(wide))
            bias = net.weight(f"lstm{layer}.bias", (4, hidden))
            x = str(net.builder.aiGraphcore.lstm([x, weights, bias], outputFullSequence=1)[0])
            features = hidden
    return x
