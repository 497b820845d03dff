"""Runs of a session in which clusters on an IPU and the host wait for each other."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import UnsupportedError
from tests.tensorflow.test_clusters import DEVICE, clusters_of, tf

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
HOST = "/device:CPU:0"
__all__ = ["tf"]


def model(tf: Any, device: str) -> tuple[Any, Any, Any]:
    """A loss with two weights on a device."""
    x = tf.placeholder(tf.float32, [None, 4], "x")
    with tf.device(device), tf.variable_scope("", use_resource=True):
        weight = tf.get_variable("w", initializer=np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
        bias = tf.get_variable("b", initializer=np.float32([0.1, 0.2, 0.3]))
        loss = tf.reduce_mean(tf.square(tf.tanh(tf.matmul(x, weight) + bias) - 0.5))
    return x, loss, [weight, bias]


def step_variable(tf: Any, resource: bool) -> Any:
    """A global step on the host."""
    return tf.get_variable(
        "step", [], tf.int64, tf.zeros_initializer(), use_resource=resource, trainable=False
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["descent", "adam"])
@pytest.mark.parametrize("resource", [True, False])
def test_a_step_on_the_host_counts_what_a_device_trains(tf: Any, optimizer: str, resource: bool) -> None:
    rows = np.random.RandomState(0).rand(5, 2, 4).astype(np.float32)

    def trained(device: str) -> tuple[list[Any], list[int]]:
        with tf.Graph().as_default():
            x, loss, weights = model(tf, device)
            step = step_variable(tf, resource)
            kinds = {"descent": tf.train.GradientDescentOptimizer, "adam": tf.train.AdamOptimizer}
            train = kinds[optimizer](0.1).minimize(loss, global_step=step)
            summed = tf.group(train, tf.no_op())
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                tf.get_default_graph().finalize()
                losses = [session.run([train, loss], {x: row})[1] for row in rows[:3]]
                session.run(train, {x: rows[3]})
                session.run(summed, {x: rows[4]})
                outcome = [*losses, session.run(step), *session.run(weights)]
            assert tf.get_default_graph().finalized
            return outcome, clusters_of(tf) if device == DEVICE else []

    own, clusters = trained(DEVICE)
    expected, _ = trained(HOST)
    assert own[3] == 5
    for one, other in zip(own, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert clusters[1:4] == [1, 1, 1]


def test_a_monitored_session_trains(tf: Any) -> None:
    x, loss, _ = model(tf, DEVICE)
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=step)
    rows = np.ones([2, 4], np.float32)
    with tf.train.MonitoredTrainingSession() as session:
        losses = [session.run([train, loss, step], {x: rows})[1] for _ in range(4)]
        assert session.run(step) == 4
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4
    assert 1 in clusters_of(tf)


def test_a_group_with_an_operation_of_the_host_trains(tf: Any) -> None:
    x, loss, weights = model(tf, DEVICE)
    seen: list[float] = []
    train = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
    with tf.variable_scope("", use_resource=False):
        count = tf.get_variable("count", [], initializer=tf.zeros_initializer())
    counted = tf.assign_add(count, 1.0)
    noted = tf.py_func(lambda value: seen.append(float(value)), [loss], [])
    both = tf.group(train, counted, noted)
    with tf.control_dependencies([train]):
        late = tf.assign_add(count, 10.0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(weights)
        session.run(both, {x: np.ones([2, 4])})
        assert session.run(count) == 1.0
        assert session.run(late, {x: np.ones([2, 4])}) == 11.0
        after = session.run(weights)
    assert len(seen) == 1
    assert all((one != other).any() for one, other in zip(before, after, strict=True))
    assert clusters_of(tf)[2] == 1


def test_what_a_cluster_waits_for_runs_before_it_once(tf: Any) -> None:
    calls: list[str] = []
    x = tf.placeholder(tf.float32, [2])
    first = tf.py_func(lambda value: calls.append("first"), [x], [])
    with tf.device(DEVICE), tf.control_dependencies([first]):
        y = tf.exp(x)
    second = tf.py_func(lambda value: calls.append("second"), [y], [])
    with tf.device(DEVICE), tf.control_dependencies([second]):
        z = y * 2.0
    with tf.control_dependencies([z]):
        third = tf.py_func(lambda value: calls.append("third"), [x], [])
    with tf.Session() as session:
        np.testing.assert_allclose(session.run(z, {x: [0, 1]}), 2 * np.exp([0.0, 1.0]), rtol=1e-6)
        assert calls == ["first", "second"]
        session.run([third, z], {x: [0, 1]})
    assert calls == ["first", "second", "first", "second", "third"]
    assert clusters_of(tf) == [2, 2]


def test_a_failing_assertion_of_the_host_ends_the_run(tf: Any) -> None:
    x = tf.placeholder(tf.float32, [2])
    with tf.control_dependencies([tf.assert_positive(x)]), tf.device(DEVICE):
        y = tf.exp(x)
    with tf.Session() as session:
        np.testing.assert_allclose(session.run(y, {x: [1, 2]}), np.exp([1.0, 2.0]), rtol=1e-6)
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.run(y, {x: [1, -2]})


def test_a_later_cluster_reads_what_an_earlier_one_wrote(tf: Any) -> None:
    with tf.device(DEVICE), tf.variable_scope("", use_resource=True):
        count = tf.get_variable("count", [], initializer=tf.ones_initializer())
        once = tf.assign_add(count, 1.0)
    on_host = once * 3.0
    with tf.device(DEVICE), tf.control_dependencies([on_host]):
        twice = tf.assign_add(count, 1.0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run([once, on_host, twice]) == [2.0, 6.0, 3.0]
        assert session.run(count) == 3.0
    assert clusters_of(tf)[1] == 2


def test_what_a_device_writes_later_is_read_before(tf: Any) -> None:
    with tf.variable_scope("", use_resource=True):
        variable = tf.get_variable("v", [], initializer=tf.ones_initializer())
    read = tf.identity(variable.read_value())
    with tf.device(DEVICE), tf.control_dependencies([read]):
        up = tf.assign_add(variable, 5.0)
    with tf.control_dependencies([up]):
        late = variable.read_value() + read
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run(late) == 7.0
        assert session.run([late, read]) == [17.0, 6.0]
    assert clusters_of(tf)[1:] == [1, 1]


def test_what_the_host_read_is_not_read_again(tf: Any) -> None:
    with tf.variable_scope("", use_resource=True):
        variable = tf.get_variable("v", [], initializer=tf.ones_initializer())
    read = variable.read_value() + 1.0
    scaled = read * 3.0
    with tf.device(DEVICE):
        up = tf.assign_add(variable, scaled)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run([read, up]) == [2.0, 7.0]
        assert session.run([read, up]) == [8.0, 31.0]
    assert clusters_of(tf)[1:] == [1]


@pytest.mark.parametrize("how", [pytest.param("edge", marks=pytest.mark.slow), "incoming"])
def test_gradients_in_a_later_cluster_than_their_forward_pass(tf: Any, how: str) -> None:
    rows = np.random.RandomState(0).rand(2, 4).astype(np.float32)
    notes: list[float] = []

    def computed(device: str) -> list[Any]:
        with tf.Graph().as_default():
            x, loss, weights = model(tf, device)
            with tf.device(HOST):
                on_host = tf.exp(loss)
                noted = tf.py_func(lambda value: notes.append(float(value)), [loss], [])
            with tf.control_dependencies([noted] if how == "edge" else []):
                train = tf.gradients(loss, weights, None if how == "edge" else [on_host])
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                outcome = session.run([loss, *train], {x: rows})
            if device == DEVICE:
                assert clusters_of(tf)[1] == 2
            return list(outcome)

    for own, expected in zip(computed(DEVICE), computed(HOST), strict=True):
        assert np.any(expected)
        np.testing.assert_allclose(own, expected, rtol=2e-5, atol=1e-6)
    assert len(notes) == (2 if how == "edge" else 0)


def test_gradients_through_the_host_beside_what_only_an_ipu_computes(tf: Any) -> None:
    """A marker beside the path does not cut gradients; one on it lets the device compute the host's part too."""
    from podrun.tensorflow.capture.markers import mark_like

    x = tf.placeholder(tf.float32, [3])
    with tf.device(DEVICE):
        beside = mark_like("cross_replica_sum", x, group=None)
        first = tf.exp(x) * beside
    on_host = tf.sin(first)
    with tf.device(DEVICE):
        loss = tf.reduce_sum(on_host * 2.0)
        through = tf.exp(mark_like("cross_replica_sum", x * x, group=None))
    passed = tf.sin(through)
    with tf.device(DEVICE):
        after = tf.reduce_sum(passed * 3.0)
    gradients = [tf.gradients(loss, first)[0], tf.gradients(after, x)[0]]
    values = np.float32([0.1, 0.5, 1.0])
    with tf.Session() as session:
        own = session.run([first, *gradients, passed], {x: values})
    wide = values.astype(np.float64)
    squared = np.exp(wide * wide)
    np.testing.assert_allclose(own[1], 2 * np.cos(np.exp(wide) * wide), rtol=1e-5)
    np.testing.assert_allclose(own[2], 3 * np.cos(squared) * squared * 2 * wide, rtol=1e-5)
    np.testing.assert_allclose(own[3], np.sin(squared), rtol=1e-5)
    assert clusters_of(tf) == [2]


def test_a_gradient_through_what_is_fed_is_refused(tf: Any) -> None:
    with tf.device(DEVICE), tf.variable_scope("", use_resource=True):
        weight = tf.get_variable("w", [2], initializer=tf.ones_initializer())
        middle = weight * 3.0
        gradient = tf.gradients(tf.reduce_sum(middle * middle), weight)[0]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run(gradient).tolist() == [18.0, 18.0]
        with pytest.raises(UnsupportedError, match="which is fed"):
            session.run(gradient, {middle: [1.0, 2.0]})


def test_an_update_happens_once_where_the_host_only_waits_for_it(tf: Any) -> None:
    x = tf.placeholder(tf.float32, [2])
    with tf.device(DEVICE), tf.variable_scope("", use_resource=True):
        count = tf.get_variable("count", [2], initializer=tf.zeros_initializer())
        up = tf.identity(tf.assign_add(count, tf.exp(x)))
    on_host = tf.tanh(up)
    both = tf.group(up, tf.group(on_host))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run([up, both], {x: [0.0, 0.0]})
        assert session.run(count).tolist() == [1.0, 1.0]
    assert clusters_of(tf)[1] == 1


def test_operations_whose_values_nobody_takes(tf: Any) -> None:
    calls: list[float] = []
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [])
        y, drawn = tf.exp(x), tf.random.uniform([2])
    with tf.control_dependencies([y, drawn]):
        noted = tf.py_func(lambda value: calls.append(float(value)), [x], [])
    with tf.Session() as session:
        for fetched in (y.op, drawn.op, noted):
            assert session.run(fetched, {x: 2.0}) is None
    assert calls == [2.0]
    assert clusters_of(tf) == [1, 1, 1]


@pytest.fixture
def old_control_flow(tf: Any) -> Iterator[None]:
    """Control flow of version 1: operations that switch."""
    tf.disable_control_flow_v2()
    yield
    tf.enable_control_flow_v2()


@pytest.mark.usefixtures("old_control_flow")
def test_old_control_flow_of_the_host_runs_once(tf: Any) -> None:
    calls: list[float] = []

    def noted(value: np.ndarray) -> np.ndarray:
        calls.append(float(value))
        return np.float32(value + 1)

    def body(value: Any) -> Any:
        (result,) = tf.py_func(noted, [value], [tf.float32])
        result.set_shape([])
        return result

    x = tf.placeholder(tf.float32, [])
    looped = tf.while_loop(lambda v: v < 3.0, body, [x])
    chosen = tf.cond(x > 0.0, lambda: body(x * 10.0), lambda: x)
    with tf.device(DEVICE), tf.control_dependencies([chosen]):
        y = tf.exp(looped)
    with tf.Session() as session:
        own = session.run([y, looped + 1.0, chosen * 2.0], {x: 1.0})
        np.testing.assert_allclose(own, [np.exp(3.0), 4.0, 22.0], rtol=1e-6)
        assert sorted(calls) == [1.0, 2.0, 10.0]
        calls.clear()
        np.testing.assert_allclose(session.run(y, {x: 2.0}), np.exp(3.0), rtol=1e-6)
    assert sorted(calls) == [2.0, 20.0]
    assert clusters_of(tf) == [1, 1]


@pytest.mark.usefixtures("old_control_flow")
def test_old_control_flow_behind_a_device_takes_the_run_to_the_host(tf: Any) -> None:
    calls: list[float] = []
    x = tf.placeholder(tf.float32, [])
    with tf.device(DEVICE), tf.variable_scope("", use_resource=True):
        count = tf.get_variable("count", [], initializer=tf.zeros_initializer())
        up = tf.assign_add(count, tf.exp(x))
    with tf.control_dependencies([up]):
        chosen = tf.cond(x > -1.0, lambda: tf.py_func(calls.append, [x], []) and x * 2.0, lambda: x)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run(chosen, {x: 0.0}) == 0.0
        assert session.run(count) == 1.0
    assert clusters_of(tf)[1] == 0
