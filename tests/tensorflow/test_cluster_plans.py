"""What a session of version 1 plans for an IPU: where operations go, what may be fed, how plans are kept."""

from __future__ import annotations

import importlib.util
from threading import Thread
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.test_clusters import DEVICE, clusters_of, tf

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
HOST = "/device:CPU:0"
__all__ = ["tf"]


@pytest.mark.parametrize("first_soft", [True, False])
def test_soft_placement_is_a_sessions_own(tf: Any, first_soft: bool) -> None:
    with tf.device(DEVICE):
        exact = tf.placeholder(tf.float64, [2])
        double = exact + exact
    for soft in (first_soft, not first_soft):
        with tf.Session(config=tf.ConfigProto(allow_soft_placement=soft)) as session:
            if soft:
                assert session.run(double, {exact: [1.0, 2.0]}).tolist() == [2.0, 4.0]
                continue
            with pytest.raises(tf.errors.InvalidArgumentError, match="no supported kernel"):
                session.run(double, {exact: [1.0, 2.0]})


def test_what_is_fed_must_fit(tf: Any) -> None:
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [2])
        y = tf.exp(x)
    with tf.Session() as session:
        with pytest.raises(ValueError, match="Cannot feed value of shape"):
            session.run(y, {x: [1.0, 2.0, 3.0]})
        assert session.run(y, {x: [0.0, 0.0]}).tolist() == [1.0, 1.0]
    assert clusters_of(tf) == [1]


def test_integers_that_an_ipu_cannot_hold_are_refused(tf: Any) -> None:
    with tf.device(DEVICE):
        x = tf.placeholder(tf.int64, [None])
        y = x + x
    with tf.Session() as session:
        assert session.run(y, {x: [2, -3]}).tolist() == [4, -6]
        with pytest.raises(tf.errors.InvalidArgumentError, match="outside of -2147483648"):
            session.run(y, {x: [1, 2**40]})
    assert clusters_of(tf) == [1]


def test_a_constant_that_an_ipu_cannot_hold_is_the_hosts(tf: Any) -> None:
    with tf.device(DEVICE):
        x = tf.placeholder(tf.int64, [None])
        y = x + tf.constant(2**40, tf.int64)
    with tf.Session() as session:
        assert session.run(y, {x: [2]}).tolist() == [2**40 + 2]
    assert clusters_of(tf) == [0]


def test_colocation_with_the_host_is_the_hosts(tf: Any) -> None:
    with tf.device(HOST):
        x = tf.placeholder(tf.float32, [2])
    with tf.get_default_graph().colocate_with(x), tf.device(DEVICE):
        y = tf.exp(x)
    assert "CPU" in y.op.device
    with tf.device(DEVICE):
        z = tf.exp(x)
    with tf.Session() as session:
        session.run([y, z], {x: [1.0, 2.0]})
        session.run(y, {x: [1.0, 2.0]})
    assert clusters_of(tf) == [1, 0]


def test_variables_assigned_the_same_tensor_keep_their_own_values(tf: Any) -> None:
    with tf.device(DEVICE), tf.variable_scope("", use_resource=True):
        start = tf.constant([1.0, 2.0])
        one, other = (tf.get_variable(name, initializer=start) for name in ("one", "other"))
        ups = [tf.assign_add(one, [1.0, 1.0]), tf.assign_add(other, [5.0, 5.0])]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(ups)
        assert [v.tolist() for v in session.run([one, other])] == [[2.0, 3.0], [6.0, 7.0]]


def test_threads_lose_no_update(tf: Any) -> None:
    with tf.device(DEVICE), tf.variable_scope("", use_resource=True):
        count = tf.get_variable("count", [], initializer=tf.zeros_initializer())
        up = tf.assign_add(count, 1.0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())

        def run() -> None:
            for _ in range(20):
                session.run(up)

        threads = [Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert session.run(count) == 40.0


def test_operations_that_are_added_keep_plans_and_programs_few(
    tf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podrun.tensorflow.execution.clusters._MOST_PROGRAMS", 2)
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [None])
        y = tf.exp(x)
    with tf.Session() as session:
        for size in range(1, 5):
            tf.constant(size)
            session.run(y, {x: np.zeros(size)})
    (plan,) = tf.get_default_graph()._ipu_clusters.plans.values()
    assert len(plan.clusters[0].programs) == 2


def test_clusters_of_a_graph_have_names_of_their_own(tf: Any) -> None:
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [2])
        y, z = tf.exp(x), tf.sin(x)
    with tf.Session() as session:
        session.run(y, {x: [1.0, 2.0]})
        session.run(z, {x: [1.0, 2.0]})
    plans = tf.get_default_graph()._ipu_clusters.plans.values()
    assert [plan.clusters[0].plan.program.graph.name for plan in plans] == ["cluster_0", "cluster_1"]


def test_metadata_of_a_run_of_the_device(tf: Any) -> None:
    with tf.device(DEVICE), tf.variable_scope("", use_resource=True):
        count = tf.get_variable("count", [], initializer=tf.zeros_initializer())
        up = tf.assign_add(count, 1.0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        metadata = tf.RunMetadata()
        session.run(up, options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), run_metadata=metadata)
    assert len(metadata.step_stats.dev_stats) > 0
