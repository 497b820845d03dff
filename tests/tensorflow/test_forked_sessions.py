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

        def in_the_child() -> None:
            with pytest.raises(UsageError, match=f"process {os.getppid()} has run sessions") as told:
                session.run(three)
            assert "spawn" in told.value.hint

        assert forked(in_the_child) == 0
        assert session.run(three) == 3.0


def test_a_session_with_threads_of_its_own_is_not_refused(tf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from podrun.tensorflow.execution import launching

    three = tf.constant(1.0) + 2.0
    monkeypatch.setattr(launching, "_runs_sessions", [os.getppid()])
    with tf.Session(config=tf.ConfigProto(use_per_session_threads=True)) as session:
        assert session.run(three) == 3.0
    with tf.Session() as session, pytest.raises(UsageError, match="forked"):
        session.run(three)
    monkeypatch.setattr(launching, "_runs_sessions", [])
    with tf.Session() as session:
        assert session.run(three) == 3.0
