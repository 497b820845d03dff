"""Every optimizer of version 1 over 40 updates, with every reduction of accumulated gradients, in every layout.

The expected weights are those of TensorFlow on the CPU: the same optimizer applies gradients that NumPy computes in
float64 from the weights of each moment, reduced as the SDK says (semantics sections 4.7, 5 and 6).
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
