"""Networks whose traces and programs an earlier one left: the same bits as that one's, from generated graphs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kept_programs import kept as kept
from tests.kept_programs import traces as traces

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
ROWS, CLASSES, STEPS = 4, 3, 3


@pytest.fixture
def tf() -> Any:
    """TensorFlow's version 1, as programs of the SDK use it."""
    import tensorflow.compat.v1 as tensorflow_1

    return tensorflow_1


def layer(tf: Any, random: np.random.Generator, x: Any, width: int, number: int) -> Any:
    """A dense layer and something behind it, drawn at random."""
    start = random.standard_normal((int(x.shape[-1]), width)).astype(np.float32) / 2
    w = tf.get_variable(f"w{number}", initializer=start)
    b = tf.get_variable(f"b{number}", initializer=np.zeros(width, np.float32))
    made = tf.matmul(x, w) + b
    kinds = (
        tf.nn.relu,
        tf.tanh,
        lambda v: tf.reshape(tf.transpose(tf.reshape(v, [ROWS, 2, -1]), [0, 2, 1]), [ROWS, width]),
        lambda v: v / tf.sqrt(tf.reduce_mean(v * v, axis=-1, keepdims=True) + 1e-3),
        lambda v: tf.concat([v[:, : width // 2], tf.sigmoid(v[:, width // 2 :])], axis=1),
    )
    return kinds[random.integers(len(kinds))](made)


def bits(tf: Any, ipu: Any, seed: int, layers: int) -> list[np.ndarray]:
    """Losses of some steps of a network's training, and its variables then."""
    random = np.random.default_rng(seed)
    data = random.standard_normal((STEPS, ROWS, 6)).astype(np.float32)
    labels = random.integers(CLASSES, size=(STEPS, ROWS)).astype(np.int32)
    ipu.config.IPUConfig().configure_ipu_system()

    def step(x: Any, y: Any) -> Any:
        for number, width in enumerate(2 * random.integers(2, 5, size=layers)):
            x = layer(tf, random, x, int(width), number)
        x = layer(tf, random, x, 2 * CLASSES, layers)[:, :CLASSES]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
        loss = tf.reduce_mean(losses)
        return loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)

    with tf.Graph().as_default(), tf.Session() as session:
        with tf.variable_scope("net", use_resource=True):
            x, y = tf.placeholder(tf.float32, [ROWS, 6]), tf.placeholder(tf.int32, [ROWS])
            with ipu.scopes.ipu_scope("/device:IPU:0"):
                (loss,) = ipu.ipu_compiler.compile(step, [x, y])
        session.run(tf.global_variables_initializer())
        runs = [session.run(loss, {x: one, y: own}) for one, own in zip(data, labels, strict=True)]
        return [*runs, *session.run(tf.global_variables())]


@pytest.mark.parametrize(
    ("seed", "layers"), [(1, 1), *(pytest.param(seed, 2, marks=pytest.mark.slow) for seed in range(1, 10))]
)
def test_a_network_is_trained_to_the_same_bits(
    tf: Any, ipu: Any, kept: Path, traces: list[Any], seed: int, layers: int
) -> None:
    first, count = bits(tf, ipu, seed, layers), len(traces)
    again = bits(tf, ipu, seed, layers)
    assert len(traces) == count > 0
    assert len(first) > STEPS
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
