"""From a network to cost reports: forward, forward and backward, weight update. Cached by question."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from networks import sequence, vision
from podrun.device.tiles.cost import cost_jaxpr

NUMPY_TYPES = {"fp8": "float16", "fp16": "float16", "fp32": "float32"}


def reports(
    function: Callable[[vision.Maker, Any, Any], Any],
    inputs: tuple[int, ...],
    *,
    chip: str,
    train: bool,
    dtype: str = "float16",
    integer: bool = False,
    partials: str = "float32",
    proportion: float = 0.6,
    input_gradient: bool = False,
    product_type: str | None = None,
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Cost ``function(maker, inputs, key)`` on one chip: its forward, or its forward and backward in
    training."""
    import jax
    import jax.numpy as jnp

    kind = jnp.dtype(dtype)
    x = jax.ShapeDtypeStruct(inputs, jnp.int32 if integer else kind)
    key = jax.eval_shape(lambda: jax.random.key(0))
    recorder = vision.Maker(None, kind)
    jax.eval_shape(lambda x, key: function(recorder, x, key), x, key)
    shapes = dict(recorder.shapes)
    weights = {name: jax.ShapeDtypeStruct(shape, kind) for name, shape in shapes.items()}

    def forward(weights: Any, x: Any, key: Any) -> Any:
        return function(vision.Maker(weights, kind), x, key)

    def loss(weights: Any, x: Any, key: Any) -> Any:
        out = forward(weights, x, key)
        return jnp.sum(out * out)

    step: Callable[..., Any] = forward
    if train:
        step = jax.grad(loss, (0, 1) if input_gradient and not integer else 0)
    jaxpr = jax.make_jaxpr(step)(weights, x, key)
    report = cost_jaxpr(
        jaxpr,
        chip,
        partials_type=partials,
        available_memory_proportion=proportion,
        product_type=product_type,
        results_stay=not train,
    )
    return report, shapes


def parameters(shapes: dict[str, tuple[int, ...]]) -> int:
    """Weights in all, masks left out."""
    return sum(math.prod(shape) for name, shape in shapes.items() if name != "mask")


@functools.lru_cache(maxsize=256)
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
    """Report and number of weights of an image network at one micro-batch."""
    depths = {"resnet18": 18, "resnet50": 50, "resnext101": 1011}

    def function(make: vision.Maker, x: Any, key: Any) -> Any:
        del key
        if name in depths:
            return vision.resnet(make, x, depth=depths[name], kind=kind, train=train, recompute=recompute)
        if name in sequence.SWIN:
            return sequence.swin(make, x, variant=name)
        if name == "alexnet":
            return vision.alexnet(make, x)
        variant = name.removeprefix("efficientnet_")
        return vision.efficientnet(make, x, variant=variant, kind=kind, train=train, group_size=group_size)

    # The library pads three input channels to four.
    report, shapes = reports(
        function,
        (batch, side, side, 4),
        chip=chip,
        train=train,
        dtype=dtype,
        partials=partials,
        proportion=proportion,
        product_type="float8" if eight_bit else None,
    )
    return report, parameters(shapes)


@functools.lru_cache(maxsize=256)
def transformer_parts(
    chip: str,
    batch: int,
    tokens: int,
    hidden: int,
    heads: int,
    feed_forward: int,
    vocabulary: int,
    train: bool,
    partials: str,
    proportion: float,
    predicted: float = 0.15,
) -> dict[str, tuple[dict[str, Any], int]]:
    """Reports and numbers of weights of one encoder layer, the embedding and the prediction head."""
    common: dict[str, Any] = {"chip": chip, "train": train, "partials": partials, "proportion": proportion}
    layer = reports(
        lambda make, x, key: sequence.encoder_layer(
            make, x, key, heads=heads, feed_forward=feed_forward, train=train
        ),
        (batch, tokens, hidden),
        input_gradient=True,
        **common,
    )
    embed = reports(
        lambda make, x, key: sequence.embedding(
            make, x, key, vocabulary=vocabulary, hidden=hidden, train=train
        ),
        (batch, tokens),
        integer=True,
        **common,
    )
    predictions = max(1, round(tokens * predicted)) if train else 1
    head = reports(
        lambda make, x, key: sequence.prediction_head(
            make, x, vocabulary=vocabulary, predictions=predictions
        ),
        (batch, tokens, hidden),
        input_gradient=True,
        **common,
    )
    return {
        name: (report, parameters(shapes))
        for name, (report, shapes) in (("layer", layer), ("embedding", embed), ("head", head))
    }


@functools.lru_cache(maxsize=64)
def lstm_network(
    chip: str, batch: int, steps: int, layers: int, hidden: int, train: bool, partials: str
) -> tuple[dict[str, Any], int]:
    """Report and number of weights of an LSTM stack whose input is as wide as its state."""
    report, shapes = reports(
        lambda make, x, key: sequence.lstm(make, x, layers=layers, hidden=hidden),
        (steps, batch, hidden),
        chip=chip,
        train=train,
        partials=partials,
    )
    return report, parameters(shapes)
