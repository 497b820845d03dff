"""Recurrent networks, lists of tensors and summaries of version 1, against TensorFlow on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
X = np.random.RandomState(3).randn(2, 5, 3).astype(np.float32)
STEPS = 3


def _results(ipu: Any, net: Callable[..., Any], on_ipu: bool) -> list[list[np.ndarray]]:
    """What three runs of a network give, from the same weights."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(X.dtype, X.shape)
        if on_ipu:
            with ipu.scopes.ipu_scope("/device:IPU:0"):
                fetched = list(ipu.ipu_compiler.compile(net, [x]))
        else:
            with tf.variable_scope("", use_resource=True):
                fetched = [r for r in net(x) if r is not None]
        session.run(tf.global_variables_initializer())
        weights = np.random.RandomState(0)
        for variable in sorted(tf.trainable_variables(), key=lambda v: v.name):
            variable.load(weights.randn(*variable.shape.as_list()) * 0.3, session)
        runs = [session.run(fetched, {x: X}) for _ in range(STEPS)]
    return [[np.asarray(value) for value in run if value is not None] for run in runs]


def _lstm(x: Any) -> Any:
    import tensorflow.compat.v1 as tf

    outputs, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.LSTMCell(8), x, dtype=tf.float32)
    loss = tf.reduce_mean(outputs**2)
    return loss, state.h, tf.train.GradientDescentOptimizer(0.1).minimize(loss)


def _gru_of_lengths(x: Any) -> Any:
    import tensorflow.compat.v1 as tf

    lengths = tf.cast(tf.reduce_sum(x[:, 0] * 0.0, 1), tf.int32) + tf.constant([3, 4])
    outputs, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(8), x, lengths, dtype=tf.float32)
    loss = tf.reduce_mean(outputs**2)
    return loss, state, tf.train.GradientDescentOptimizer(0.1).minimize(loss)


def _written_in_a_loop(x: Any) -> Any:
    import tensorflow.compat.v1 as tf

    def body(i: Any, rows: Any) -> Any:
        return i + 1, rows.write(i, x[:, i] * tf.cast(i, tf.float32))

    rows = tf.while_loop(lambda i, _: i < 5, body, [0, tf.TensorArray(tf.float32, size=5)])[1].stack()
    return rows, tf.gradients(tf.reduce_sum(rows**2), x)[0]


def _mapped_and_scanned(x: Any) -> Any:
    import tensorflow.compat.v1 as tf

    mapped, scanned = tf.map_fn(lambda a: a * 2 + 1, x), tf.scan(lambda a, b: a + b, x)
    return mapped, scanned, tf.gradients(tf.reduce_sum(mapped**2) + tf.reduce_sum(scanned**2), x)[0]


def _summarized(x: Any) -> Any:
    import tensorflow.compat.v1 as tf

    tf.summary.scalar("total", tf.reduce_sum(x))
    tf.summary.histogram("values", x)
    return [x * 2]


@pytest.mark.parametrize(
    "net", [_lstm, _gru_of_lengths, _written_in_a_loop, _mapped_and_scanned, _summarized]
)
def test_it_computes_what_tensorflow_does(ipu: Any, net: Callable[..., Any]) -> None:
    mine, theirs = _results(ipu, net, True), _results(ipu, net, False)
    for run, expected in zip(mine, theirs, strict=True):
        assert len(run) == len(expected)
        for value, want in zip(run, expected, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5)
