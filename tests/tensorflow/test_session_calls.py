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
        with pytest.raises(ValueError, match="was not given to partial_run_setup"):
            session.partial_run(handle, added, {squared: [1.0, 1.0]})
        handle = session.partial_run_setup([counted, doubled], [])
        assert session.partial_run(handle, doubled) == 4.0
        with pytest.raises(UnsupportedError, match="a second time"):
            session.partial_run(handle, counted)
        assert session.run(count) == 2.0
