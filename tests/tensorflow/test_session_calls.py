"""Callables and stepped runs of sessions go through the device as ``run`` does."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import UnsupportedError
from tests.tensorflow.test_clusters import DEVICE, tf

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
__all__ = ["tf"]


def test_callables_are_runs_of_the_device(tf: Any, ipu: Any) -> None:
    """A half that overflows is clipped there; an assertion of a program is raised in the words of the SDK."""
    from tensorflow.core.protobuf import config_pb2

    with tf.device(DEVICE), tf.variable_scope("", use_resource=True):
        x = tf.get_variable("x", initializer=np.float16([1000.0, 2.0])).read_value()
        y = x * x

    def checked(value: Any) -> Any:
        with tf.control_dependencies([tf.debugging.Assert(value[1] > 1.0, [value])]):
            return value + 1.0

    with ipu.scopes.ipu_scope(DEVICE):
        (compiled,) = ipu.ipu_compiler.compile(checked, [x])
    with tf.Session() as session:
        session.make_callable(tf.global_variables_initializer())()
        assert session.make_callable(y)().tolist() == [65504.0, 4.0]
        assert session.make_callable({"y": y}, accept_options=True)()["y"].tolist() == [65504.0, 4.0]
        fed = session.make_callable([y, compiled], feed_list=[x])
        assert [v.tolist() for v in fed([3.0, 4.0])] == [[9.0, 16.0], [4.0, 5.0]]
        options = config_pb2.CallableOptions()
        options.fetch.append(y.name)
        options.feed.append(x.name)
        made = session._make_callable_from_options(options)
        assert [v.tolist() for v in made(np.float16([300.0, 0.5]))] == [[65504.0, 0.25]]
        with pytest.raises(tf.errors.InternalError, match="An assertion of the program failed"):
            session.make_callable(compiled, feed_list=[x])([0.0, 0.0])


def test_runs_in_steps_keep_what_was_fed_and_fetched(tf: Any) -> None:
    with tf.device(DEVICE), tf.variable_scope("", use_resource=True):
        first, second = (tf.placeholder(tf.float16, [2], name=name) for name in ("first", "second"))
        squared = first * first
        added = squared + second
        count = tf.get_variable("count", shape=[], initializer=tf.zeros_initializer())
        counted = tf.assign_add(count, 1.0)
        doubled = counted * 2.0
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        handle = session.partial_run_setup([squared, added, counted, doubled], [first, second])
        own, up = session.partial_run(handle, [squared, counted], {first: [1000.0, 2.0]})
        assert (own.tolist(), up) == ([65504.0, 4.0], 1.0)
        assert session.partial_run(handle, added, {second: [-4.0, 1.0]}).tolist() == [
            65504.0 - 4.0 + 4.0,
            5.0,
        ]
        with pytest.raises(tf.errors.InvalidArgumentError, match="The feed mul:0 was not specified"):
            session.partial_run(handle, doubled, {squared: [1.0, 1.0]})
        handle = session.partial_run_setup([counted, doubled], [])
        assert session.partial_run(handle, doubled) == 4.0
        with pytest.raises(UnsupportedError, match="a second time"):
            session.partial_run(handle, counted)
        assert session.run(count) == 2.0


def test_runs_in_steps_give_what_was_announced_once(tf: Any) -> None:
    """As TensorFlow's; a run of which all is fetched is forgotten."""
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [], name="x")
        y = x + 1.0
        z = y * 2.0
    session = tf.Session()
    refused = tf.errors.InvalidArgumentError
    handle = session.partial_run_setup({"two": [y, z]}, x)
    with pytest.raises(refused, match="The fetch mul:0 was not specified"):
        session.partial_run(session.partial_run_setup(y, [x]), z, {x: 1.0})
    assert session.partial_run(handle, {"y": y}, {x: 1.0}) == {"y": 2.0}
    with pytest.raises(refused, match=r"The fetch add:0 .* an earlier step had it"):
        session.partial_run(handle, y)
    with pytest.raises(refused, match=r"The feed x:0 .* an earlier step had it"):
        session.partial_run(handle, z, {x: 5.0})
    assert session.partial_run(handle, z) == 4.0
    assert handle not in session._ipu_partial_runs
    with pytest.raises(refused, match="Must run 'setup'"):
        session.partial_run(handle, z)
    with pytest.raises(TypeError, match="has invalid type"):
        session.partial_run_setup([y, 3])
    session.close()
    with pytest.raises(RuntimeError, match="closed Session"):
        session.partial_run_setup([y], [x])


def test_steps_of_a_run_share_what_the_first_of_them_drew(tf: Any) -> None:
    """An operation with an effect runs in the first step that needs it, and its value is kept for the others."""
    drawn = tf.random.uniform([64])
    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [], name="x")
        y = drawn + x
        z = y * drawn
    with tf.Session() as session:
        handle = session.partial_run_setup([y, z, drawn], [x])
        first = session.partial_run(handle, y, {x: 2.0})
        second, own = session.partial_run(handle, [z, drawn])
    assert len(np.unique(own)) > 32
    np.testing.assert_array_equal(first, own + np.float32(2.0))
    np.testing.assert_array_equal(second, first * own)


def test_programs_that_are_compiled_run_in_steps(tf: Any, ipu: Any) -> None:
    """A graph that launches programs, and has nothing on an IPU itself: the scope is inside of the program."""
    from podrun.tensorflow.execution.placed_devices import is_placed_graph

    def one_more(value: Any) -> Any:
        with ipu.scopes.ipu_scope(DEVICE):
            return value + 1.0

    x = tf.placeholder(tf.float32, [], name="x")
    (y,) = ipu.ipu_compiler.compile(one_more, [x])
    assert not is_placed_graph(tf.get_default_graph())
    z = y * 3.0
    with tf.Session() as session:
        handle = session.partial_run_setup([y, z], [x])
        assert handle in session._ipu_partial_runs
        assert session.partial_run(handle, y, {x: 2.0}) == 3.0
        assert session.partial_run(handle, z) == 9.0


def test_callables_tell_what_is_wrong_when_they_are_made_and_pass_options(tf: Any) -> None:
    from tensorflow.core.protobuf import config_pb2

    with tf.device(DEVICE):
        x = tf.placeholder(tf.float32, [], name="x")
        y = x + 1.0
    with tf.Session() as session:
        with pytest.raises(TypeError, match="has invalid type"):
            session.make_callable([y, 3])
        chosen: list[Any] = []
        session.run = lambda fetches, fed, options, metadata: chosen.append(options) or [2.0]
        options = config_pb2.CallableOptions(fetch=[y.name], feed=[x.name])
        assert session._make_callable_from_options(options)(1.0) == [2.0]
        options.run_options.timeout_in_ms = 7
        assert session._make_callable_from_options(options)(1.0) == [2.0]
    assert chosen == [None, config_pb2.RunOptions(timeout_in_ms=7)]


def test_queues_draw_past_the_runs_of_a_servers_session(tf: Any) -> None:
    """A run in the drawing thread would drop the errors of the main thread's."""
    from podrun.tensorflow.sdk.ipu_infeed_queue import _drawing

    with tf.device(DEVICE):
        tf.placeholder(tf.float32, [], name="x")
    one = tf.constant(1.0)
    with tf.Session() as session:
        session._target = "grpc://server"
        session.run = None
        draw = _drawing(session, [one, one + 1.0])
        assert list(draw()) == [1.0, 2.0]
