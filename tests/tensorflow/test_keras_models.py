"""Generated Keras models on IPUs against plain Keras: alone, replicated, accumulated and pipelined.

The host trains the same network from the same weights: each replica has its batch, gradients are reduced as the SDK
says (semantics sections 5 and 6), one update of the same optimizer. Running statistics are replica 0's.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.generated_models import KINDS, GeneratedModel, assign_stages, generated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
BATCH, UPDATES, TOGETHER = 4, 5, 4
LAYOUTS = {"alone": (1, 1, "SUM"), "replicated": (2, 1, "SUM"), "accumulated": (2, TOGETHER, "MEAN"),
           "pipelined": (1, TOGETHER, "RUNNING_MEAN")}  # fmt: skip
"""Name -> replicas, mini-batches of an update, and how these are reduced."""
SEEDS = {"dense": 3, "cnn": 3, "lstm": 1, "transformer": 1}
"""Models of a kind: recurrent loops and attention take the longest to compile."""


def _loss() -> Any:
    import tf_keras

    return tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _optimizer() -> Any:
    import tf_keras

    return tf_keras.optimizers.legacy.SGD(0.05, momentum=0.9)


def on_ipus(model: GeneratedModel, layout: str) -> None:
    """Train the network in place."""
    replicas, together, reduction = LAYOUTS[layout]
    network = model.network
    if layout == "pipelined":
        assign_stages(network)
        network.set_pipelining_options(together, gradient_accumulation_reduction_method=reduction)
    elif together > 1:
        network.set_gradient_accumulation_options(together, gradient_accumulation_reduction_method=reduction)
    network.compile(_optimizer(), _loss(), steps_per_execution=UPDATES * together)
    count = UPDATES * together * replicas * BATCH
    network.fit(model.inputs[:count], model.labels[:count], batch_size=BATCH, shuffle=False, verbose=0)


def on_host(model: GeneratedModel, layout: str) -> None:
    """Train the network in place, with TensorFlow alone."""
    import tensorflow as tf

    replicas, together, reduction = LAYOUTS[layout]
    network, loss, optimizer = model.network, _loss(), _optimizer()
    others = [w for w in network.weights if all(w is not t for t in network.trainable_weights)]
    states = [[w.numpy() for w in others] for _ in range(replicas)]

    @tf.function
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            total = loss(y, network(x, training=True)) + sum(network.losses)
        return [tf.convert_to_tensor(g) for g in tape.gradient(total, network.trainable_weights)]

    place = 0
    for _ in range(UPDATES):
        reduced: list[Any] = [0.0] * len(network.trainable_weights)
        for _ in range(together):
            for replica in range(replicas):
                part = slice(place * BATCH, (place + 1) * BATCH)
                for weight, value in zip(others, states[replica], strict=True):
                    weight.assign(value)
                own = gradients(tf.constant(model.inputs[part]), tf.constant(model.labels[part]))
                share = 1 if reduction == "SUM" else together
                reduced = [r + g.numpy() / share for r, g in zip(reduced, own, strict=True)]
                states[replica] = [w.numpy() for w in others]
                place += 1
        pairs = zip([tf.constant(r) for r in reduced], network.trainable_weights, strict=True)
        optimizer.apply_gradients(list(pairs))
    for weight, value in zip(others, states[0], strict=True):
        weight.assign(value)


def _configure(ipus: int) -> None:
    from podrun.tensorflow.sdk.config import IPUConfig

    config = IPUConfig()
    config.auto_select_ipus = ipus
    config.configure_ipu_system()


def _compare(kind: str, seed: int, layout: str, tolerance: float) -> None:
    from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

    replicas, together, _ = LAYOUTS[layout]
    samples = UPDATES * together * replicas * BATCH
    _configure(1 if layout == "alone" else 2)
    with IPUStrategyV1().scope():
        mine = generated(kind, seed, samples)
        start = mine.network.get_weights()
        on_ipus(mine, layout)
    theirs = generated(kind, seed, samples)
    theirs.network.set_weights(start)
    on_host(theirs, layout)
    moved = 0.0
    for got, want, first in zip(mine.network.get_weights(), theirs.network.get_weights(), start, strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
        moved = max(moved, float(np.abs(want - first).max()))
    assert moved > 1e-2
    few = slice(0, together * replicas * BATCH)
    predicted = mine.network.predict(mine.inputs[few], batch_size=BATCH, verbose=0)
    wanted = theirs.network.predict(theirs.inputs[few], batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(predicted, wanted, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in KINDS for seed in range(SEEDS[kind])])
def test_a_model_trains_as_on_the_host(ipu_device: None, kind: str, seed: int, layout: str) -> None:
    _compare(kind, seed, layout, 1e-4)
