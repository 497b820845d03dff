"""A process forked from one that has run sessions runs none: TensorFlow's threads are not there."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from podrun.core.errors import UsageError
from tests.device.test_forked import forked
from tests.tensorflow.test_clusters import tf

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
__all__ = ["tf"]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_forked_process_is_refused_and_does_not_wait(tf: Any) -> None:
    three = tf.constant(1.0) + 2.0
    with tf.Session() as session:
        assert session.run(three) == 3.0
        called = session.make_callable(three)

        def in_the_child() -> None:
            with pytest.raises(UsageError, match=f"process {os.getppid()} has run sessions") as told:
                session.run(three)
            assert "spawn" in told.value.hint
            with pytest.raises(UsageError, match="forked"):
                called()

        assert forked(in_the_child) == 0
        assert session.run(three) == called() == 3.0


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_session_with_threads_of_its_own_is_not_refused(tf: Any) -> None:
    three = tf.constant(1.0) + 2.0
    with tf.Session() as session:
        assert session.run(three) == 3.0
    assert forked(lambda: runs_with_threads_of_its_own(tf, three)) == 0


def runs_with_threads_of_its_own(tf: Any, three: Any) -> None:
    """What a forked process may run, and what it may not."""
    pool = tf.ConfigProto()
    pool.session_inter_op_thread_pool.add(num_threads=1)
    for config in (
        tf.ConfigProto(use_per_session_threads=True),
        tf.ConfigProto(inter_op_parallelism_threads=-1),
        pool,
    ):
        with tf.Session(config=config) as session:
            assert session.run(three) == 3.0
    with tf.Session() as session:
        assert session.run(three, options=tf.RunOptions(inter_op_thread_pool=-1)) == 3.0
        with pytest.raises(UsageError, match="forked"):
            session.run(three)
