"""Queues to which branches give, which are given nothing, and what old names of queues and strategies say."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import UnsupportedError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
DEVICE = "/device:IPU:0"


def _run(ipu: Any, function: Any, *values: Any) -> Any:
    import tensorflow as tf

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        return strategy.run(tf.function(function), args=[tf.constant(value) for value in values])


def test_a_loop_whose_only_use_of_a_queue_is_in_a_branch(ipu: Any) -> None:
    """In ``if`` of autograph, in ``switch_case``, and in ``tf.cond`` of a loop of version 1."""
    import tensorflow as tf

    first, chosen, last = (ipu.ipu_outfeed_queue.IPUOutfeedQueue() for _ in range(3))

    def conditional(count: Any) -> None:
        for i in tf.range(count):
            if i < 3:
                first.enqueue(i)

    def switched(count: Any) -> None:
        for i in tf.range(count):

            def give(i: Any = i) -> Any:
                chosen.enqueue(i * 10)
                return i

            tf.switch_case(i % 3, [lambda i=i: i, give, lambda i=i: i])

    _run(ipu, conditional, 5)
    assert first.dequeue().numpy().tolist() == [0, 1, 2]
    _run(ipu, switched, 6)
    assert chosen.dequeue().numpy().tolist() == [10, 40]

    def body(i: Any) -> Any:
        def give() -> Any:
            with tf.control_dependencies([last.enqueue(i)]):
                return tf.identity(i)

        return tf.cond(tf.equal(i % 2, 0), give, lambda: tf.identity(i)) + 1

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with ipu.scopes.ipu_scope(DEVICE):
            run = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(6, body, [tf.constant(0)]))
        dequeued = last.dequeue()
        assert session.run(run) == [6]
        assert session.run(dequeued).tolist() == [0, 2, 4]


def test_autograph_converts_functions_of_the_program_and_none_of_podruns(
    ipu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    from podrun.private_apis.tensorflow import private_module

    module, modules = private_module("autograph.impl.api"), set()
    convert = module._convert_actual

    def noted(entity: Any, context: Any) -> Any:
        modules.add(entity.__module__)
        return convert(entity, context)

    monkeypatch.setattr(module, "_convert_actual", noted)
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def halved(x: Any) -> Any:
        while x > 1:
            x = x / 2
            queue.enqueue(x)
        return ipu.cross_replica_ops.cross_replica_sum(ipu.rand_ops.dropout(x, rate=0.0))

    assert _run(ipu, halved, 6.0).numpy() == 0.75
    assert queue.dequeue().numpy().tolist() == [3, 1.5, 0.75]
    assert modules == {__name__}


def test_both_branches_of_a_choice_give_to_one_queue(ipu: Any) -> None:
    """As in the SDK, which asks whether the graph around an operation has one already; a second choice of the same
    step would give a second element, which is refused.
    """

    queue, twice, after = (ipu.ipu_outfeed_queue.IPUOutfeedQueue() for _ in range(3))

    def either(x: Any) -> None:
        if x > 0.0:
            queue.enqueue(x)
        else:
            queue.enqueue(-x * 10.0)

    def repeated(x: Any) -> None:
        if x > 0.0:
            twice.enqueue(x)
        if x > 1.0:
            twice.enqueue(x)

    def behind(x: Any) -> None:
        if x > 0.0:
            after.enqueue(x)
        after.enqueue(x)

    for value in (2.0, -3.0):
        _run(ipu, either, value)
    assert queue.dequeue().numpy().tolist() == [2.0, 30.0]
    with pytest.raises(UnsupportedError, match="gives to one queue twice"):
        _run(ipu, repeated, 2.0)
    with pytest.raises(ValueError, match="only be enqueued once"):
        _run(ipu, behind, 2.0)


def test_a_queue_is_given_empty_tensors(ipu: Any) -> None:
    import tensorflow as tf

    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def net(x: Any) -> None:
        for i in tf.range(4):
            queue.enqueue((x[:0], i))

    _run(ipu, net, np.ones([3, 2], np.float32))
    empty, numbers = queue.dequeue()
    assert empty.shape == (4, 0, 2)
    np.testing.assert_array_equal(numbers, range(4))


def test_old_names_say_what_they_do(ipu: Any) -> None:
    """A name of a queue has an effect, and ``experimental_run_v2`` runs: neither says that it does not."""
    import tensorflow as tf

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = tf.data.Dataset.from_tensors(np.ones(2, np.float32)).repeat()
        assert ipu.ipu_infeed_queue.IPUInfeedQueue(data, feed_name="in")._name == "in"
        assert ipu.ipu_outfeed_queue.IPUOutfeedQueue(feed_name="out")._name == "out"
    with pytest.warns(UserWarning, match="replication_factor=...\\) has no effect any more"):
        ipu.ipu_outfeed_queue.IPUOutfeedQueue(replication_factor=2)
    strategy = ipu.ipu_strategy.IPUStrategyV1()
    with strategy.scope(), pytest.warns(UserWarning, match="is deprecated. Use `run`"):
        result = strategy.experimental_run_v2(tf.function(lambda x: x + 1.0), [tf.constant(1.0)])
    assert result == 2.0
