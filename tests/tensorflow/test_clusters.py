"""Operations that version-1 programs place on an IPU without compiling them: a session runs them there."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
DEVICE = "/device:IPU:0"


@pytest.fixture
def tf(ipu: Any) -> Iterator[Any]:
    """TensorFlow 1 with a graph of its own and one configured IPU."""
    import tensorflow.compat.v1 as module

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()
    with module.Graph().as_default():
        yield module


def clusters_of(tf: Any) -> list[int]:
    """How many clusters each kind of run had."""
    plans = tf.get_default_graph()._ipu_clusters.plans.values()
    return [len(plan.clusters) for plan in plans]


def test_halves_that_overflow_are_clipped_as_on_the_device(tf: Any) -> None:
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float16, [None])
        y = x * x
    with tf.Session() as session:
        assert session.run(y, {x: [1000.0, 2.0]}).tolist() == [65504.0, 4.0]
        assert session.run(y, {x: [1.0, 2.0, 3.0]}).tolist() == [1.0, 4.0, 9.0]
    assert clusters_of(tf) == [1]


def test_training_writes_the_variables(tf: Any, ipu: Any) -> None:
    with ipu.scopes.ipu_scope(DEVICE):
        weight = tf.get_variable("w", initializer=np.float32([[1, 2], [3, 4], [5, 6], [7, 8]]))
        bias = tf.get_variable("b", initializer=np.float32([2, 3]))
        x = tf.placeholder(tf.float32, [1, 4])
        loss = tf.reduce_sum(tf.matmul(x, weight) + bias)
        train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        nothing, first = session.run([train, loss], {x: [[7, 3, 5, 9]]})
        after = session.run({"w": weight, "b": bias})
    assert nothing is None
    assert first == 237.0
    np.testing.assert_allclose(after["w"], [[0.3, 1.3], [2.7, 3.7], [4.5, 5.5], [6.1, 7.1]], rtol=1e-5)
    np.testing.assert_allclose(after["b"], [1.9, 2.9], rtol=1e-6)
    assert clusters_of(tf) == [0, 1, 0]


def test_what_only_an_ipu_computes_runs_and_is_differentiated(tf: Any, ipu: Any) -> None:
    values = np.random.RandomState(0).rand(3, 4).astype(np.float32)
    with ipu.scopes.ipu_scope(DEVICE):
        x = tf.placeholder(tf.float32, [3, 4])
        y = ipu.nn_ops.gelu(x, approximate=False)
        gradient = tf.gradients(tf.reduce_sum(y), x)[0]
    with tf.Session() as session:
        own = session.run([y, gradient], {x: values})
    from math import erf, exp, pi, sqrt

    normal = np.vectorize(lambda v: 0.5 * (1 + erf(v / sqrt(2))))(values.astype(np.float64))
    density = np.vectorize(lambda v: exp(-v * v / 2) / sqrt(2 * pi))(values.astype(np.float64))
    np.testing.assert_allclose(own[0], values * normal, rtol=1e-5)
    np.testing.assert_allclose(own[1], normal + values * density, rtol=1e-5)


def test_layers_of_the_library_are_those_of_keras(tf: Any, ipu: Any) -> None:
    """``gen_popnn_ops``: gates as in Keras, outputs behind the length are 0."""
    operations = importlib.import_module("tensorflow.compiler.plugin.poplar.ops.gen_popnn_ops")
    random = np.random.RandomState(0)
    values, kernel = random.rand(3, 2, 5).astype(np.float32), random.rand(9, 16).astype(np.float32) - 0.5
    small, zeros = random.rand(9, 12).astype(np.float32) - 0.5, np.zeros([2, 4], np.float32)
    ways: list[tuple[str, list[int] | None]] = [("", None), ("dynamic_", [3, 1])]
    layers = []
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, values.shape)
        for name, lengths in ways:
            more: dict[str, Any] = {"num_channels": 4, "is_training": False}
            if lengths is not None:
                more["seq_len"] = tf.constant(lengths)
            lstm = getattr(operations, f"popnn_{name}lstm_layer")
            gru = getattr(operations, f"popnn_{name}gru_layer")
            layers.append(lstm(x, kernel, np.zeros([4, 4], np.float32), zeros, zeros, **more))
            layers.append(gru(x, small, np.zeros([3, 4], np.float32), zeros, **more))
    assert [len(layer) for layer in layers] == [4, 3, 4, 3]
    with tf.Session() as session:
        own = session.run([layer[0] for layer in layers], {x: values})
    for (_, lengths), of_lstm, of_gru in zip(ways, own[::2], own[1::2], strict=True):
        np.testing.assert_allclose(of_lstm, expected_lstm(values, kernel, lengths), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(of_gru, expected_gru(values, small, lengths), rtol=1e-4, atol=1e-6)


def sigmoid(v: np.ndarray) -> np.ndarray:
    """The logistic function in float64."""
    return 1 / (1 + np.exp(-v.astype(np.float64)))


def expected_lstm(x: np.ndarray, kernel: np.ndarray, lengths: list[int] | None) -> np.ndarray:
    """Gates input, forget, memory, output."""
    hidden = memory = np.zeros([x.shape[1], 4])
    rows = []
    for step, row in enumerate(x):
        i, f, g, o = np.split(np.concatenate([row, hidden], 1) @ kernel, 4, axis=1)
        memory = sigmoid(f) * memory + sigmoid(i) * np.tanh(g)
        hidden = sigmoid(o) * np.tanh(memory)
        inside = np.array([[lengths is None or step < lengths[n]] for n in range(x.shape[1])])
        rows.append(hidden * inside)
    return np.stack(rows)


def expected_gru(x: np.ndarray, kernel: np.ndarray, lengths: list[int] | None) -> np.ndarray:
    """Gates update, reset, new state; the reset gate multiplies the state."""
    hidden = np.zeros([x.shape[1], 4])
    rows = []
    for step, row in enumerate(x):
        z, r = np.split(sigmoid(np.concatenate([row, hidden], 1) @ kernel[:, :8]), 2, axis=1)
        new = np.tanh(np.concatenate([row, r * hidden], 1) @ kernel[:, 8:])
        hidden = z * hidden + (1 - z) * new
        inside = np.array([[lengths is None or step < lengths[n]] for n in range(x.shape[1])])
        rows.append(hidden * inside)
    return np.stack(rows)


def test_host_and_device_take_turns_and_draw_each_element_once(tf: Any) -> None:
    elements = tf.data.make_one_shot_iterator(tf.data.Dataset.range(10)).get_next()
    with tf.device(DEVICE):
        squared = tf.square(tf.cast(elements, tf.float32))
    shifted = squared + 1.0
    with tf.device(DEVICE):
        root = tf.sqrt(shifted)
    with tf.Session() as session:
        rows = [session.run([elements, root]) for _ in range(3)]
    assert [int(e) for e, _ in rows] == [0, 1, 2]
    np.testing.assert_allclose([r for _, r in rows], np.sqrt(np.arange(3.0) ** 2 + 1), rtol=1e-6)
    assert clusters_of(tf) == [2]


def test_what_is_fed_in_the_middle_is_fetched_with_its_type(tf: Any) -> None:
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [2])
        middle = tf.exp(x)
        last = middle * 3.0
    with tf.Session() as session:
        fetched = session.run([middle, last], {x: [0, 0], middle: [5, 6]})
    assert fetched[0].dtype == np.float32
    assert [f.tolist() for f in fetched] == [[5.0, 6.0], [15.0, 18.0]]
    assert clusters_of(tf) == [1]


def test_updates_happen_once_a_run(tf: Any) -> None:
    with tf.device(DEVICE), tf.variable_scope("", use_resource=True):
        count = tf.get_variable("count", shape=[], initializer=tf.zeros_initializer())
        up = tf.assign_add(count, 1.0)
    on_host = tf.group(up, tf.no_op())
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(5):
            session.run(up)
        session.run(on_host)
        assert session.run(count) == 6.0
    assert clusters_of(tf)[1:3] == [1, 1]


def test_types_that_an_ipu_lacks(tf: Any) -> None:
    with tf.device(DEVICE):
        wide = tf.placeholder(tf.int64, [2])
        exact = tf.placeholder(tf.float64, [2])
        difference, double = wide - tf.constant([1, 2], tf.int64), exact + exact
    with tf.Session() as session:
        result = session.run(difference, {wide: [5, 5]})
        assert result.dtype == np.int64
        assert result.tolist() == [4, 3]
        assert clusters_of(tf) == [1]
        with pytest.raises(tf.errors.InvalidArgumentError, match="no supported kernel for IPU devices"):
            session.run(double, {exact: [1.0, 2.0]})
    with tf.Session(config=tf.ConfigProto(allow_soft_placement=True)) as session:
        assert session.run(double, {exact: [1.0, 2.0]}).tolist() == [2.0, 4.0]


def test_control_flow_of_version_1_stays_on_the_host(tf: Any) -> None:
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [])
        y = tf.cond(x > 2.0, lambda: tf.exp(x), lambda: -x)
    with tf.Session() as session:
        np.testing.assert_allclose([session.run(y, {x: v}) for v in (1.0, 3.0)], [-1.0, np.exp(3)], rtol=1e-6)


def test_colocated_operations_are_the_devices_too(tf: Any) -> None:
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [2])
    with tf.get_default_graph().colocate_with(x):
        y = x + 1.0
    assert y.op.device == DEVICE
    with tf.Session() as session:
        assert session.run(y, {x: [1.0, 2.0]}).tolist() == [2.0, 3.0]
    assert clusters_of(tf) == [1]


def test_control_flow_of_version_1_is_computed_on_the_device(tf: Any, ipu: Any) -> None:
    """Halves are clipped in it, gradients pass through it, and what TensorFlow gives for one result is a tensor."""
    tf.disable_control_flow_v2()
    try:
        with ipu.scopes.ipu_scope(DEVICE):
            x = tf.placeholder(tf.float16, [2])
            weight = tf.get_variable("w", initializer=np.float32([2, 3]))
            chosen = tf.cond(tf.reduce_sum(x) > 1.0, lambda: [x * 300.0], lambda: [x - 1.0])
            _, power = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, a: (i + 1, a * tf.cast(x, tf.float32) * weight),
                [0, tf.ones([2])],
            )
            (gradient,) = tf.gradients(tf.reduce_sum(power), weight)
            by_choice = tf.gradients(tf.cond(weight[0] > 1.0, lambda: x * 3.0, lambda: x), x)[0]
            written = tf.TensorArray(tf.float32, 2)
            _, written = tf.while_loop(
                lambda i, _: i < 2, lambda i, a: (i + 1, a.write(i, weight[i] * 2.0)), [0, written]
            )
            doubled = written.stack()
        with tf.device(DEVICE):
            tf.Variable(2.0, use_resource=False)
            kept = tf.cond(x[0] > 1.0, lambda: x * 300.0, lambda: x)
    finally:
        tf.enable_control_flow_v2()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        feed = {x: [300.0, 0.5]}
        results = session.run([chosen, power, gradient, by_choice, doubled], feed)
        assert clusters_of(tf)[-1] >= 1
        assert np.isinf(
            session.run(kept, feed)[0]
        )  # Beside variables that are no resources the host computes it.
        other = session.run(chosen, {x: [0.0, 0.5]})
    values = np.array([300.0, 0.5]), np.array([2.0, 3.0])
    np.testing.assert_array_equal(results[0], [65504, 150])
    np.testing.assert_allclose(results[1], (values[0] * values[1]) ** 3, rtol=1e-6)
    np.testing.assert_allclose(results[2], 3 * values[1] ** 2 * values[0] ** 3, rtol=1e-6)
    np.testing.assert_array_equal(results[3], [3, 3])
    np.testing.assert_array_equal(results[4], [4, 6])
    np.testing.assert_array_equal(other, [-1, -0.5])
