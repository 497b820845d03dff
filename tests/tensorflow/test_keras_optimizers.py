"""Every optimizer of Keras and of the addons over 40 updates, as those of version 1 (`test_optimizers`).

The addons' own optimizers, which TensorFlow lacks, are compared with their formulas in float64.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.test_optimizers import (
    BATCH,
    FIRST,
    LAYOUTS,
    POINTS,
    REDUCTIONS,
    SECOND,
    TARGETS,
    TOGETHER,
    UPDATES,
    Update,
    Weights,
    agree,
    expected,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
KERAS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "momentum": ("SGD", {"learning_rate": 0.05, "momentum": 0.9}),
    "nesterov": ("SGD", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"learning_rate": 0.01, "epsilon": 1e-3}),
    "amsgrad": ("Adam", {"learning_rate": 0.01, "amsgrad": True, "epsilon": 1e-3}),
    "adamax": ("Adamax", {"learning_rate": 0.01, "epsilon": 1e-3}),
    "nadam": ("Nadam", {"learning_rate": 0.01, "epsilon": 1e-3}),
    "rmsprop": ("RMSprop", {"learning_rate": 0.01, "epsilon": 1e-3}),
    "rmsprop_momentum": ("RMSprop", {"learning_rate": 0.01, "momentum": 0.3, "epsilon": 1e-3}),
    "centered": ("RMSprop", {"learning_rate": 0.01, "centered": True, "epsilon": 1e-2}),
    "adagrad": ("Adagrad", {"learning_rate": 0.05}),
    "adadelta": ("Adadelta", {"learning_rate": 1.0, "epsilon": 1e-4}),
    "ftrl": ("Ftrl", {"learning_rate": 0.1, "l1_regularization_strength": 1e-3}),
    "decay": ("SGD", {"learning_rate": 0.1, "decay": 0.05}),
    "clipped": ("SGD", {"learning_rate": 0.1, "clipnorm": 0.2}),
}
"""Name of a case -> the class in ``keras.optimizers.legacy``, and its arguments."""


def keras_optimizer(name: str) -> Any:
    """A new optimizer of Keras."""
    import tf_keras

    kind, arguments = KERAS[name]
    return getattr(tf_keras.optimizers.legacy, kind)(**arguments)


def on_cpu_2(make: Callable[[], Any]) -> Update:
    """What an optimizer of Keras does on the host."""
    import tensorflow as tf

    variables, optimizer = [tf.Variable(FIRST), tf.Variable(SECOND)], make()

    def update(weights: Weights, total: Weights) -> Weights:
        grads = [tf.constant(g, tf.float32) for g in total]
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
        return [v.numpy() for v in variables]

    return update


def model(stages: bool) -> Any:
    """A model with both weights."""
    import tf_keras

    layers = tf_keras.layers
    net = tf_keras.Sequential(
        [layers.Dense(4, "tanh", use_bias=False, input_shape=(3,)), layers.Dense(1, use_bias=False)]
    )
    net.set_weights([FIRST, SECOND])
    if stages:
        net.set_pipeline_stage_assignment([0, 1])
    return net


def configure(ipus: int) -> None:
    """A device of so many IPUs."""
    from podrun.tensorflow.sdk.config import IPUConfig

    config = IPUConfig()
    config.auto_select_ipus = ipus
    config.configure_ipu_system()


def fitted(make: Callable[[], Any], reduction: str | None, layout: str) -> Weights:
    """The weights after ``fit`` under a strategy."""
    from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

    configure(1 if layout == "alone" else 2)
    replicas = 2 if layout == "replicated" else 1
    together = TOGETHER if reduction else 1
    options: dict[str, Any] = {
        "gradient_accumulation_steps_per_replica": TOGETHER,
        "gradient_accumulation_reduction_method": reduction,
    }
    count = UPDATES * together * replicas
    points, targets = (v[:count].reshape(count * BATCH, -1) for v in (POINTS, TARGETS))
    with IPUStrategyV1().scope():
        net = model(layout == "pipelined")
        net.compile(make(), "mse", steps_per_execution=UPDATES * together)
        if layout == "pipelined":
            net.set_pipelining_options(**options)
        elif reduction:
            net.set_gradient_accumulation_options(**options)
        net.fit(points, targets, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    return list(net.get_weights())


_KERAS_CHOSEN = [
    (name, reduction, layout)
    for number, name in enumerate(KERAS)
    for place, reduction in enumerate(REDUCTIONS)
    for column, layout in enumerate(LAYOUTS)
    if name in ("momentum", "adam") or (number + place + column) % 3 == 0
]


@pytest.mark.parametrize(("name", "reduction", "layout"), _KERAS_CHOSEN)
def test_an_optimizer_of_keras(ipu_device: None, name: str, reduction: str, layout: str) -> None:
    replicas = 2 if layout == "replicated" else 1
    mine = fitted(lambda: keras_optimizer(name), reduction, layout)
    wanted = expected(on_cpu_2(lambda: keras_optimizer(name)), reduction, TOGETHER, replicas, mean=False)
    agree(mine, wanted)


NEW_FAMILY: dict[str, dict[str, Any]] = {
    "AdamW": {"learning_rate": 0.01, "weight_decay": 0.01},
    "Lion": {"learning_rate": 0.002},
    "Adafactor": {"learning_rate": 0.05},
}


@pytest.mark.parametrize("name", NEW_FAMILY)
def test_an_optimizer_of_kerass_new_family(ipu_device: None, name: str) -> None:
    import tf_keras

    def make() -> Any:
        return getattr(tf_keras.optimizers, name)(**NEW_FAMILY[name])

    agree(fitted(make, None, "alone"), expected(on_cpu_2(make), "SUM", 1, 1))


def _sgd(momentum: float, nesterov: bool) -> Update:
    speeds: Weights = [np.zeros_like(FIRST, np.float64), np.zeros_like(SECOND, np.float64)]

    def update(weights: Weights, total: Weights) -> Weights:
        speeds[:] = [momentum * s - 0.05 * g for s, g in zip(speeds, total, strict=True)]
        steps = [momentum * s - 0.05 * g if nesterov else s for s, g in zip(speeds, total, strict=True)]
        return [w + s for w, s in zip(weights, steps, strict=True)]

    return update


def _moments(step: Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]) -> Update:
    """An update with the moments of Adam. ``step(weight, first, second, count)`` gives the change of a weight."""
    firsts: list[Any] = [0.0, 0.0]
    seconds: list[Any] = [0.0, 0.0]
    count = [0]

    def update(weights: Weights, total: Weights) -> Weights:
        count[0] += 1
        firsts[:] = [0.9 * m + 0.1 * g for m, g in zip(firsts, total, strict=True)]
        seconds[:] = [0.999 * v + 0.001 * g * g for v, g in zip(seconds, total, strict=True)]
        return [
            w - step(w.astype(np.float64), m, v, count[0])
            for w, m, v in zip(weights, firsts, seconds, strict=True)
        ]

    return update


def _adam_step(w: np.ndarray, m: np.ndarray, v: np.ndarray, t: int) -> np.ndarray:
    return 0.01 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-3)


def _lamb_step(w: np.ndarray, m: np.ndarray, v: np.ndarray, t: int) -> np.ndarray:
    step = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-3) + 0.05 * w
    return np.asarray(0.01 * np.linalg.norm(w) / np.linalg.norm(step) * step)


ADDONS: dict[str, tuple[str, dict[str, Any], Callable[[], Update]]] = {
    "sgd": ("SGDIpuOptimizer", {"learning_rate": 0.05, "momentum": 0.9}, lambda: _sgd(0.9, False)),
    "nesterov": (
        "SGDIpuOptimizer",
        {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True},
        lambda: _sgd(0.9, True),
    ),
    "adam": ("AdamIpuOptimizer", {"learning_rate": 0.01, "epsilon": 1e-3}, lambda: _moments(_adam_step)),
    "lamb": (
        "LAMBIpuOptimizer",
        {"learning_rate": 0.01, "epsilon": 1e-3, "weight_decay_rate": 0.05},
        lambda: _moments(_lamb_step),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ADDONS)
def test_an_optimizer_of_the_addons(ipu_device: None, name: str, layout: str) -> None:
    from podrun.tensorflow.addons import state_optimizers

    kind, arguments, update = ADDONS[name]
    reduction = REDUCTIONS[(list(ADDONS).index(name) + LAYOUTS.index(layout)) % 3]
    replicas = 2 if layout == "replicated" else 1
    mine = fitted(lambda: getattr(state_optimizers, kind)(**arguments), reduction, layout)
    agree(mine, expected(update(), reduction, TOGETHER, replicas, mean=False))
