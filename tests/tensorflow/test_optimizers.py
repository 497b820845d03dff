"""Every optimizer over 40 updates, with every reduction of accumulated gradients, alone, replicated and pipelined.

The expected weights are those of TensorFlow on the CPU: the same optimizer applies gradients that NumPy computes in
float64 from the weights of each moment, reduced as the SDK says (semantics sections 4.7, 5 and 6). The addons' own
optimizers, which TensorFlow lacks, are compared with their formulas in float64.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
UPDATES, TOGETHER, BATCH = 40, 4, 5
_random = np.random.RandomState(4)
FIRST = (_random.rand(3, 4) - 0.5).astype(np.float32)
SECOND = (_random.rand(4, 1) - 0.5).astype(np.float32)
POINTS = _random.rand(UPDATES * TOGETHER * 2, BATCH, 3).astype(np.float32)
TARGETS = np.sin(3 * POINTS.sum(-1, keepdims=True)).astype(np.float32)
RELATIVE, ABSOLUTE = 1e-4, 2e-5
"""Updates in float32 on both sides, whose gradients differ in the last bits."""
Weights = list[np.ndarray]
Update = Callable[[Weights, Weights], Weights]
"""Weights and reduced gradients -> new weights."""


def gradients_at(weights: Sequence[np.ndarray], element: int) -> Weights:
    """Of the mean squared error of one element, in float64."""
    first, second = (w.astype(np.float64) for w in weights)
    x, y = POINTS[element].astype(np.float64), TARGETS[element]
    hidden = np.tanh(x @ first)
    delta = 2 * (hidden @ second - y) / BATCH
    return [x.T @ ((delta @ second.T) * (1 - hidden**2)), hidden.T @ delta]


def expected(update: Update, reduction: str, together: int, replicas: int, *, mean: bool = True) -> Weights:
    """The weights after all updates. ``mean``: over replicas, else their sum."""
    weights: Weights = [FIRST, SECOND]
    element = 0
    for _ in range(UPDATES):
        total = [np.zeros_like(w, np.float64) for w in weights]
        for step in range(together):
            parts = [gradients_at(weights, element + r) for r in range(replicas)]
            element += replicas
            own = [sum(p[i] for p in parts) / (replicas if mean else 1) for i in range(len(weights))]
            for i, g in enumerate(own):
                total[i] = {
                    "SUM": total[i] + g,
                    "MEAN": total[i] + g / together,
                    "RUNNING_MEAN": total[i] * step / (step + 1) + g / (step + 1),
                }[reduction]
        weights = update(weights, total)
    return weights


def agree(mine: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for got, want, start in zip(mine, wanted, (FIRST, SECOND), strict=True):
        assert np.abs(want - start).max() > 1e-3, "the optimizer does not move"
        np.testing.assert_allclose(got, want, rtol=RELATIVE, atol=ABSOLUTE)


# --- Version 1 ----------------------------------------------------------------------------------------------

VERSION_1: dict[str, tuple[str, dict[str, Any]]] = {
    "descent": ("GradientDescentOptimizer", {"learning_rate": 0.1}),
    "momentum": ("MomentumOptimizer", {"learning_rate": 0.05, "momentum": 0.9}),
    "nesterov": ("MomentumOptimizer", {"learning_rate": 0.05, "momentum": 0.9, "use_nesterov": True}),
    "adam": ("AdamOptimizer", {"learning_rate": 0.01, "epsilon": 1e-3}),
    "rmsprop": ("RMSPropOptimizer", {"learning_rate": 0.01, "momentum": 0.3, "epsilon": 1e-3}),
    "centered": ("RMSPropOptimizer", {"learning_rate": 0.01, "centered": True, "epsilon": 1e-2}),
    "adagrad": ("AdagradOptimizer", {"learning_rate": 0.05}),
    "adadelta": ("AdadeltaOptimizer", {"learning_rate": 1.0, "epsilon": 1e-4}),
    "ftrl": (
        "FtrlOptimizer",
        {"learning_rate": 0.1, "l1_regularization_strength": 1e-3, "l2_regularization_strength": 1e-3},
    ),
    "shrinkage": ("FtrlOptimizer", {"learning_rate": 0.1, "l2_shrinkage_regularization_strength": 0.01}),
    "proximal": (
        "ProximalGradientDescentOptimizer",
        {"learning_rate": 0.1, "l1_regularization_strength": 1e-3, "l2_regularization_strength": 1e-2},
    ),
    "proximal_adagrad": (
        "ProximalAdagradOptimizer",
        {"learning_rate": 0.05, "l1_regularization_strength": 1e-3, "l2_regularization_strength": 1e-2},
    ),
}
"""Name of a case -> the class in ``tf.compat.v1.train``, and its arguments."""


def version_1(name: str) -> Any:
    """A new optimizer of version 1."""
    import tensorflow.compat.v1 as tf

    kind, arguments = VERSION_1[name]
    return getattr(tf.train, kind)(**arguments)


def on_cpu_1(name: str) -> Update:
    """What TensorFlow's own optimizer does with reduced gradients, in a session that keeps its slots."""
    import tensorflow.compat.v1 as tf

    graph = tf.Graph()
    with graph.as_default():
        variables = [
            tf.get_variable(n, initializer=v, use_resource=True)
            for n, v in (("first", FIRST), ("second", SECOND))
        ]
        fed = [tf.placeholder(tf.float32, v.shape) for v in variables]
        train = version_1(name).apply_gradients(list(zip(fed, variables, strict=True)))
        session = tf.Session(graph=graph)
        session.run(tf.global_variables_initializer())

    def update(weights: Weights, total: Weights) -> Weights:
        session.run(train, dict(zip(fed, total, strict=True)))
        return list(session.run(variables))

    return update


class Version1:
    """A program of version 1 that trains both weights on one or two IPUs."""

    def __init__(self, ipu: Any, name: str, reduction: str) -> None:
        self.ipu, self.name, self.reduction = ipu, name, reduction

    def loss(self, x: Any, y: Any) -> Any:
        """The mean squared error."""
        return self.last(*self.start(x, y))

    def start(self, x: Any, y: Any) -> Any:
        """The first stage."""
        import tensorflow.compat.v1 as tf

        return tf.tanh(x @ tf.get_variable("first", initializer=FIRST)), y

    def last(self, hidden: Any, y: Any) -> Any:
        """The second stage."""
        import tensorflow.compat.v1 as tf

        return tf.reduce_mean((hidden @ tf.get_variable("second", initializer=SECOND) - y) ** 2)

    def repeated(self, infeed: Any, replicas: int) -> Any:
        """A loop whose optimizer accumulates."""
        import tensorflow.compat.v1 as tf

        kind = (
            "CrossReplicaGradientAccumulationOptimizerV2"
            if replicas > 1
            else "GradientAccumulationOptimizerV2"
        )

        def body(x: Any, y: Any) -> Any:
            wrapped = getattr(self.ipu.optimizers, kind)(
                version_1(self.name), TOGETHER, reduction_method=self.reduction
            )
            return wrapped.minimize(self.loss(x, y))

        with tf.variable_scope("", use_resource=True):
            return self.ipu.loops.repeat(UPDATES * TOGETHER, body, infeed_queue=infeed)

    def pipelined(self, infeed: Any) -> Any:
        """Two stages."""
        ops = self.ipu.pipelining_ops

        def optimizer(loss: Any) -> Any:
            return ops.OptimizerFunctionOutput(version_1(self.name), loss)

        return ops.pipeline(
            [self.start, self.last],
            gradient_accumulation_count=TOGETHER,
            repeat_count=UPDATES,
            infeed_queue=infeed,
            outfeed_queue=self.ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
            optimizer_function=optimizer,
            reduction_method=self.reduction,
        )

    def run(self, layout: str) -> Weights:
        """The weights after training."""
        import tensorflow.compat.v1 as tf

        config = self.ipu.config.IPUConfig()
        config.auto_select_ipus = 1 if layout == "alone" else 2
        config.configure_ipu_system()
        with tf.Graph().as_default(), tf.Session() as session:
            data = tf.data.Dataset.from_tensor_slices((POINTS, TARGETS))
            infeed = self.ipu.ipu_infeed_queue.IPUInfeedQueue(data)

            def net() -> Any:
                if layout == "pipelined":
                    return self.pipelined(infeed)
                return self.repeated(infeed, 2 if layout == "replicated" else 1)

            with self.ipu.scopes.ipu_scope("/device:IPU:0"):
                program = self.ipu.ipu_compiler.compile(net)
            session.run(tf.global_variables_initializer())
            session.run(infeed.initializer)
            session.run(program)
            names = {v.op.name: v for v in tf.global_variables()}
            return list(session.run([names["first"], names["second"]]))


REDUCTIONS = ("SUM", "MEAN", "RUNNING_MEAN")
LAYOUTS = ("alone", "replicated", "pipelined")
_CHOSEN = [
    (name, reduction, layout)
    for number, name in enumerate(VERSION_1)
    for place, reduction in enumerate(REDUCTIONS)
    for column, layout in enumerate(LAYOUTS)
    if name in ("momentum", "adam") or (number + place + column) % 3 == 0
]
"""Every combination for two optimizers; for the others each reduction and each layout once."""


@pytest.mark.parametrize(("name", "reduction", "layout"), _CHOSEN)
def test_an_optimizer_of_version_1(ipu: Any, name: str, reduction: str, layout: str) -> None:
    replicas = 2 if layout == "replicated" else 1
    wanted = expected(on_cpu_1(name), reduction, TOGETHER, replicas)
    agree(Version1(ipu, name, reduction).run(layout), wanted)


# --- Keras --------------------------------------------------------------------------------------------------

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


# --- The addons' optimizers -----------------------------------------------------------------------------------


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
