"""From a network of `podrun.models` to cost reports: forward, or forward and backward. Cached by question.

The network is built with the front end (weights declared, not made), lowered as a session would, differentiated, and
costed on one chip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from podrun import models
from podrun.costmodel import plan_cache
from podrun.costmodel.cost import cost_jaxpr
from podrun.models import sequences
from podrun.models.catalogue import Built, finished
from podrun.models.catalogue import lstm_network as lstm_stack
from podrun.models.network import Declared, Network
from podrun.popart.building.builder import Builder

PADDED_CHANNELS = 4
"""Channels of an image on the device: the library pads three to four."""


def costed(
    built: Built,
    *,
    chip: str,
    train: bool,
    partials: str = "float32",
    proportion: float = 0.6,
    input_gradient: bool = False,
    product_type: str | None = None,
    forward_only: bool = False,
) -> tuple[dict[str, Any], int]:
    """Cost a built network on one chip, its forward or its forward and backward; also its number of weights.

    ``input_gradient``: also the gradient of the first input, for a part of a larger network. ``forward_only``: the
    forward pass as training runs it.
    """
    import jax
    import jax.numpy as jnp
    import onnx

    from podrun.core.executable import numpy_dtype
    from podrun.onnx_models.lowering import lower

    model = onnx.load_from_string(built.model)
    lowered = lower(model, training=train)
    # Running statistics are part of a training step, and read by nothing in it.
    kept = [
        name
        for node in model.graph.node
        if train and node.op_type == "BatchNormalization"
        for name in node.output[1:3]
    ]
    lowered = replace(lowered, returns=(*lowered.returns, *kept))
    given = {
        name: jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec.dtype))  # type: ignore[no-untyped-call]
        for name, spec in lowered.inputs.items()
    }
    trained = {*built.weights, *(built.inputs[:1] if input_gradient else ())}
    weights = {name: spec for name, spec in given.items() if name in trained}
    rest = {name: spec for name, spec in given.items() if name not in trained}
    key = jax.eval_shape(lambda: jax.random.key(0))

    def forward(weights: Any, rest: Any, key: Any) -> Any:
        return lowered.forward({}, {**weights, **rest}, key)[built.output]

    def loss(weights: Any, rest: Any, key: Any) -> Any:
        made = lowered.forward({}, {**weights, **rest}, key)
        out = made[built.output]
        return jnp.sum(out * out), [made[name] for name in kept]

    step = jax.grad(loss, has_aux=True) if train and not forward_only else forward
    jaxpr = jax.make_jaxpr(step)(weights, rest, key)
    report = cost_jaxpr(
        jaxpr,
        chip,
        partials_type=partials,
        available_memory_proportion=proportion,
        product_type=product_type,
        results_stay=not train,
    )
    report["normalisations"] = sum(node.op_type.endswith("Normalization") for node in model.graph.node)
    return report, sum(given[name].size for name in built.weights if name in given)


def on_disk(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps answers by arguments, and by the text of networks, front end and this file, in the plan cache."""

    @functools.wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        text = plan_cache.sources("models", "popart"), Path(__file__).read_text(encoding="utf-8")
        question = (function.__name__, text, args, kwargs)
        return plan_cache.remembered(question, lambda: function(*args, **kwargs))

    return asked


@functools.lru_cache(maxsize=256)
@on_disk
def image_network(
    name: str,
    chip: str,
    batch: int,
    side: int,
    train: bool,
    kind: str,
    recompute: bool,
    dtype: str,
    partials: str,
    proportion: float,
    group_size: int,
    eight_bit: bool = False,
) -> tuple[dict[str, Any], int]:
    """Report and number of weights of an image network at one micro-batch. ``recompute``: forward twice."""
    built = models.build(
        name,
        batch=batch,
        size=side,
        weights=Declared(dtype),
        train=train,
        images=models.Images(kind, group_size, PADDED_CHANNELS),
    )
    question: dict[str, Any] = {"chip": chip, "train": train, "partials": partials, "proportion": proportion}
    question["product_type"] = "float8" if eight_bit else None
    report, weights = costed(built, **question)
    if recompute and train:
        again, _ = costed(built, **question, forward_only=True)
        step = dict(report["step"])
        step["cycles"] = step["cycles"] + again["step"]["cycles"]
        report = {**report, "step": step}
    return report, weights


@functools.lru_cache(maxsize=256)
@on_disk
def transformer_parts(
    chip: str,
    batch: int,
    tokens: int,
    name: str,
    train: bool,
    partials: str,
    proportion: float,
    predicted: float = 0.15,
    attention_dropout: bool = True,
    dtype: str = "float16",
    eight_bit: bool = False,
) -> dict[str, tuple[dict[str, Any], int]]:
    """Reports and numbers of weights of one encoder layer, the embedding and the prediction head.

    ``predicted``: share of the tokens whose words are predicted in training. ``attention_dropout``: drop
    attention's shares too.
    """
    size = models.TRANSFORMERS[name]
    common: dict[str, Any] = {"chip": chip, "train": train, "partials": partials, "proportion": proportion}
    common["product_type"] = "float8" if eight_bit else None

    def network() -> Network:
        return Network(Builder(), Declared(dtype), train=train)

    net = network()
    x = net.input("x", (batch, tokens, size.hidden))
    mask = sequences.causal_mask(net, tokens) if size.causal else net.input("mask", (batch, 1, 1, tokens))
    y = sequences.encoder_layer(
        net, x, "layer", size.heads, size.feed_forward, mask, attention_dropout=attention_dropout
    )
    layer = costed(finished(net, (x,), y), input_gradient=True, **common)
    net = network()
    words = net.input("words", (batch, tokens), "INT32")
    embedding = costed(
        finished(net, (words,), sequences.embedding(net, words, size.vocabulary, size.hidden)), **common
    )
    net = network()
    x = net.input("x", (batch, tokens, size.hidden))
    predictions = max(1, round(tokens * predicted)) if train else 1
    head = costed(
        finished(net, (x,), sequences.prediction_head(net, x, size.vocabulary, predictions)),
        input_gradient=True,
        **common,
    )
    return {"layer": layer, "embedding": embedding, "head": head}


@functools.lru_cache(maxsize=64)
def lstm_network(
    chip: str,
    batch: int,
    steps: int,
    layers: int,
    hidden: int,
    train: bool,
    partials: str,
    dtype: str = "float16",
) -> tuple[dict[str, Any], int]:
    """Report and number of weights of an LSTM stack whose input is as wide as its state."""
    built = lstm_stack(batch, steps, layers, hidden, weights=Declared(dtype))
    return costed(built, chip=chip, train=train, partials=partials)
