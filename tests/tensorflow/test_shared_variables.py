"""Variables that machines share by slices: programs read and write them as any other, between runs and across files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
REPLICAS = 8
"""On two machines."""
STEPS = 3
DRAW = np.random.RandomState(0)
POINTS = DRAW.rand(4 * STEPS * REPLICAS, 6, 5).astype(np.float32)
TARGETS = POINTS.sum(-1, keepdims=True).astype(np.float32)


def parameters() -> list[Any]:
    """A network of two layers."""
    import tensorflow.compat.v1 as tf

    draw = np.random.RandomState(1)
    shapes = {"w": (5, 4), "b": (4,), "v": (4, 1)}
    return [
        tf.get_variable(name, initializer=draw.uniform(-0.5, 0.5, shape).astype(np.float32))
        for name, shape in shapes.items()
    ]


def loss_of(x: Any, y: Any) -> Any:
    """The mean square of the network's error."""
    import tensorflow.compat.v1 as tf

    with tf.variable_scope("net", reuse=tf.AUTO_REUSE):
        w, b, v = parameters()
    return tf.reduce_mean((tf.tanh(x @ w + b) @ v - y) ** 2)


def scheduled() -> Any:
    """Descent with a rate that falls as steps are counted."""
    import tensorflow.compat.v1 as tf

    step = tf.train.get_global_step()
    return tf.train.GradientDescentOptimizer(tf.train.inverse_time_decay(0.3, step, 1.0, 0.5))


def optimizers() -> dict[str, Callable[[], Any]]:
    import tensorflow.compat.v1 as tf

    return {
        "descent": lambda: tf.train.GradientDescentOptimizer(0.1),
        "scheduled": scheduled,
        "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
        "nesterov": lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
        "adam": lambda: tf.train.AdamOptimizer(0.02, epsilon=1e-3),
        "rmsprop": lambda: tf.train.RMSPropOptimizer(0.02, epsilon=1e-3),
    }


class Training:
    """A loop of steps on eight replicas, in a graph and session of its own."""

    def __init__(self, ipu: Any, optimizer: str) -> None:
        import tensorflow.compat.v1 as tf

        config = ipu.config.IPUConfig()
        config.auto_select_ipus = REPLICAS
        config.configure_ipu_system()
        self.infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(
            tf.data.Dataset.from_tensor_slices((POINTS, TARGETS))
        )
        self.start, self.stop = self.infeed.initializer, self.infeed.deleter
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        counter = tf.train.get_or_create_global_step()

        def step(x: Any, y: Any) -> Any:
            loss = loss_of(x, y)
            rule = ipu.optimizers.CrossReplicaOptimizer(optimizers()[optimizer]())
            with tf.control_dependencies([rule.minimize(loss, counter)]):
                return outfeed.enqueue(loss)

        with ipu.scopes.ipu_scope("/device:IPU:0"):
            run = ipu.ipu_compiler.compile(
                lambda: ipu.loops.repeat(STEPS, step, infeed_queue=self.infeed), inputs=[]
            )
        self.run, self.losses = run, outfeed.dequeue()
        self.variables = [v for v in tf.global_variables() if v.shape.rank]
        self.session = tf.Session()
        self.session.run([tf.global_variables_initializer(), self.start])

    def train(self) -> Any:
        """The losses of some steps."""
        self.session.run(self.run)
        return self.session.run(self.losses)

    def train_again(self) -> Any:
        """The losses of steps with the first samples."""
        self.session.run(self.stop)
        self.session.run(self.start)
        return self.train()

    def values(self) -> dict[str, Any]:
        return {
            v.op.name: value
            for v, value in zip(self.variables, self.session.run(self.variables), strict=True)
        }


def on_the_host(optimizer: str, runs: int, change: Callable[[Any, list[Any]], None]) -> dict[str, Any]:
    """The variables after as many runs by TensorFlow, with the samples of all replicas in a batch."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default(), tf.Session() as session:
        x, y = (tf.placeholder(tf.float32, [None, *v.shape[1:]]) for v in (POINTS, TARGETS))
        counter = tf.train.get_or_create_global_step()
        train = optimizers()[optimizer]().minimize(loss_of(x, y), counter)
        session.run(tf.global_variables_initializer())
        held = [v for v in tf.global_variables() if v.shape.rank]
        for step in range(runs * STEPS):
            here = slice(step * REPLICAS, (step + 1) * REPLICAS)
            session.run(train, {x: POINTS[here], y: TARGETS[here]})
            if (step + 1) % STEPS == 0:
                change(session, held)
        return {v.op.name: value for v, value in zip(held, session.run(held), strict=True)}


def halve(session: Any, variables: list[Any]) -> None:
    """Write some of the weights, as a program does between runs."""
    chosen = [v for v in variables if v.op.name in ("net/w", "net/b")]
    session.run([v.assign(v * 0.5) for v in chosen])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The executables that a test compiles."""
    from podrun.runtime.device_program import DeviceProgram

    seen: list[Any] = []
    prepared = DeviceProgram.prepared

    def note(self: Any, call: Any) -> Any:
        executable = prepared(self, call)
        seen.append(executable)
        return executable

    monkeypatch.setattr(DeviceProgram, "prepared", note)
    return seen


@pytest.mark.parametrize("optimizer", ["descent", "scheduled", "momentum", "nesterov", "adam", "rmsprop"])
def test_a_program_reads_and_writes_weights_between_runs(
    ipu: Any, optimizer: str, compiled: list[Any]
) -> None:
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        training = Training(ipu, optimizer)
        with training.session:
            for _ in range(3):
                training.train()
                halve(training.session, training.variables)
            values = training.values()
    held = {v.arena for v in compiled[-1].variables.values() if v.spec.shape}
    assert all(arena is not None and arena.startswith("variables.") for arena in held)
    for name, expected in on_the_host(optimizer, 3, halve).items():
        np.testing.assert_allclose(values[name], expected, rtol=2e-4, atol=2e-6, err_msg=name)


def test_a_saved_file_brings_weights_and_slots_back(ipu: Any, tmp_path: Path) -> None:
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        training = Training(ipu, "adam")
        saver = tf.train.Saver()
        with training.session as session:
            training.train()
            path = saver.save(session, str(tmp_path / "weights"))
            losses, values = training.train_again(), training.values()
            assert np.any(training.train_again() != losses)
            saver.restore(session, path)
            np.testing.assert_array_equal(training.train_again(), losses)
            for name, value in training.values().items():
                np.testing.assert_array_equal(value, values[name], err_msg=name)
