"""Programs in parts: several loops, work around loops, loops in loops, conditions, operations of the host."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.version_1_programs import VALUES, Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


@pytest.fixture
def program(ipu: Any) -> Iterator[Program]:
    """An empty graph."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        yield Program(ipu)


def computed(program: Program, function: Callable[..., Any], inputs: Any = None, *queues: Any) -> Any:
    """The results of one run."""
    results = program.compiled(function, inputs)
    with program.session(*queues) as session:
        return session.run(results)


def test_loops_follow_each_other(program: Program) -> None:
    queue, repeat = program.infeed(), program.ipu.loops.repeat

    def net() -> Any:
        first = repeat(3, lambda v, x: v + x, [0.0], queue)
        return repeat(2, lambda v, x: v * x, [first + 1.0], queue)

    assert computed(program, net, None, queue) == [(0 + 1 + 2 + 1.0) * 3 * 4]


def test_work_before_and_after_a_loop(program: Program) -> None:
    tf, queue = program.tf, program.infeed()
    outfeed = program.outfeed()

    def net(scale: Any) -> Any:
        total = program.ipu.loops.repeat(4, lambda v, x: (v + x, outfeed.enqueue(x)), [scale * 2.0], queue)
        return total / 4.0, tf.reduce_sum(tf.stack([total, total]))

    results = program.compiled(net, [tf.constant(5.0)])
    dequeued = outfeed.dequeue()
    with program.session(queue) as session:
        assert session.run(results) == [4.0, 32.0]
        assert session.run(dequeued).tolist() == [0, 1, 2, 3]


def test_variables_go_on_behind_a_loop(program: Program) -> None:
    tf, queue = program.tf, program.infeed()

    def net() -> Any:
        weight = tf.get_variable("weight", initializer=1.0)
        total = program.ipu.loops.repeat(3, lambda v, x: v + weight.assign_add(x), [0.0], queue)
        with tf.control_dependencies([total]):
            return total, weight.assign_add(10.0)

    results = program.compiled(net)
    with program.session(queue) as session:
        assert session.run(results) == [1 + 2 + 4, 14.0]
        assert session.run(tf.global_variables()[0]) == 14.0


def test_a_loop_ends_by_what_it_computes(program: Program) -> None:
    queue = program.infeed()

    def net() -> Any:
        return program.ipu.loops.while_loop(
            lambda i, v: v < 20.0, lambda i, v, x: (i + 1, v + x), [0, 0.0], queue
        )

    assert computed(program, net, None, queue) == [7, 21.0]


def test_counters_have_steps(program: Program) -> None:
    queue = program.infeed()

    def net() -> Any:
        return program.ipu.loops.while_loop(
            lambda i, v: i < 7, lambda i, v, x: (i + 2, v + x), [0, 0.0], queue
        )

    assert computed(program, net, None, queue) == [8, 6.0]


def test_a_loop_ends_by_a_variable_that_it_writes(ipu: Any) -> None:
    import tensorflow as tf

    strategy = ipu.ipu_strategy.IPUStrategy()
    with strategy.scope():
        iterator = iter(tf.data.Dataset.from_tensor_slices(VALUES))
        total = tf.Variable(0.0)

        @tf.function
        def add(iterator: Any) -> Any:
            while total < 20.0:
                value = next(iterator)
                if value > 2.0:
                    total.assign_add(value)
            return total.read_value() * 2.0

        assert strategy.run(add, args=[iterator]) == 50.0
        assert total.numpy() == 25.0


def test_loops_are_nested(program: Program) -> None:
    queue, outfeed, repeat = program.infeed(), program.outfeed(), program.ipu.loops.repeat

    def outer(value: Any) -> Any:
        inner = repeat(3, lambda v, x: v + x, [0.0], queue)
        return value + inner, outfeed.enqueue(inner)

    results = program.compiled(lambda: repeat(2, outer, [0.0]))
    dequeued = outfeed.dequeue()
    with program.session(queue) as session:
        assert session.run(results) == [15.0]
        assert session.run(dequeued).tolist() == [3, 12]


def test_replicas_keep_their_values_between_parts(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        program = Program(ipu, ipus=2)
        queue, outfeed = program.infeed(), program.outfeed()

        def net() -> Any:
            total = ipu.loops.repeat(2, lambda v, x: v + x, [0.0], queue)
            return ipu.cross_replica_ops.cross_replica_sum(total * 2.0), outfeed.enqueue(total)

        results = program.compiled(net)
        dequeued = outfeed.dequeue()
        with program.session(queue) as session:
            assert session.run(results)[0] == 2.0 * (0 + 1 + 2 + 3)
            assert session.run(dequeued).tolist() == [[2, 4]]


def test_the_host_computes_in_the_middle(program: Program) -> None:
    tf, seen = program.tf, []

    def host(value: np.ndarray) -> np.ndarray:
        seen.append(value)
        return np.sort(value)[::-1].astype(np.float32)

    def net(x: Any) -> Any:
        weight = tf.get_variable("weight", [3], initializer=tf.ones_initializer())
        squares = x * x
        with program.ipu.scopes.outside_compilation_scope():
            turned = tf.numpy_function(host, [squares + weight], tf.float32)
            turned.set_shape([3])
            lengths = tf.strings.length(tf.strings.as_string(turned))
        with tf.control_dependencies([weight.assign_add(turned)]):
            return tf.identity(turned + 2.0), lengths, weight.read_value()

    results = program.compiled(net, [tf.constant([1.0, 2.0, 3.0])])
    with program.session() as session:
        turned, lengths, weight = session.run(results)
    np.testing.assert_array_equal(turned, [12, 7, 4])
    np.testing.assert_array_equal(lengths, [9, 8, 8])
    np.testing.assert_array_equal(weight, [11, 6, 3])
    assert len(seen) == 1


def test_gradients_pass_through_what_a_device_computes_too(program: Program) -> None:
    tf = program.tf

    def net(x: Any) -> Any:
        weight = tf.get_variable("weight", [3], initializer=tf.ones_initializer())
        with program.ipu.scopes.outside_compilation_scope():
            doubled = x * weight * 2.0
        loss = tf.reduce_sum(doubled)
        return loss, tf.train.GradientDescentOptimizer(0.5).minimize(loss)

    results = program.compiled(net, [tf.constant([1.0, 2.0, 3.0])])
    with program.session() as session:
        assert session.run(results)[0] == 12.0
        np.testing.assert_array_equal(session.run(tf.trainable_variables()[0]), [0, -1, -2])


def test_scopes_of_the_host_are_checked(program: Program) -> None:
    tf, outside = program.tf, program.ipu.scopes.outside_compilation_scope

    def nested(x: Any) -> Any:
        with outside(), outside():
            return x

    with pytest.raises(ValueError, match="Illegal nesting"):
        program.compiled(nested, [tf.constant(1.0)])

    def body(value: Any) -> Any:
        with outside():
            return value * 2.0

    looped = program.looped(3, body, None, [1.0])
    with (
        program.session() as session,
        pytest.raises(tf.errors.UnimplementedError, match="enclosed in control flow"),
    ):
        session.run(looped)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_pipeline_takes_its_count_as_an_input(program: Program, repeats: int) -> None:
    tf, pipelining = program.tf, program.ipu.pipelining_ops
    Program(program.ipu, 2)
    queue, outfeed = program.infeed(np.tile(VALUES, 4)), program.outfeed()

    def first(x: Any) -> Any:
        return x * tf.get_variable("weight", initializer=1.0)

    def optimizer(loss: Any) -> Any:
        return pipelining.OptimizerFunctionOutput(tf.train.GradientDescentOptimizer(1.0), loss)

    def net(count: Any) -> Any:
        return pipelining.pipeline(
            [first, lambda x: x],
            count,
            repeat_count=repeats,
            infeed_queue=queue,
            outfeed_queue=outfeed,
            optimizer_function=optimizer,
            outfeed_loss=True,
            accumulate_outfeed=True,
            reduction_method="mean",
        )

    count = tf.placeholder(tf.int32, [])
    run = program.compiled(net, [count])
    dequeued = outfeed.dequeue()
    with program.session(queue) as session:
        session.run(run, {count: 4})
        assert session.run(dequeued).tolist() == ([6.0] if repeats == 1 else [6.0, -0.5 * (4 + 5 + 6 + 7)])
        with pytest.raises(tf.errors.InternalError, match="Pipeline depth is invalid"):
            session.run(run, {count: 6})


def test_initial_values_are_computed_outside(program: Program) -> None:
    tf = program.tf

    def net(x: Any) -> Any:
        constant = tf.get_variable("constant", initializer=tf.constant([1.0, 2.0]) + 1.0)
        drawn = tf.get_variable("drawn", initializer=tf.random.stateless_uniform([2], [1, 2]))
        return x + constant, drawn

    results = program.compiled(net, [tf.constant(1.0)])
    with program.session() as session:
        sums, drawn = session.run(results)
        np.testing.assert_array_equal(sums, [3, 4])
        np.testing.assert_array_equal(drawn, session.run(tf.random.stateless_uniform([2], [1, 2])))
    with pytest.raises(ValueError, match="depends on inputs of the program"):
        program.compiled(lambda x: tf.get_variable("given", initializer=x) + 1.0, [tf.constant(1.0)])


def test_a_stage_may_hand_on_all(program: Program) -> None:
    tf, pipelining = program.tf, program.ipu.pipelining_ops
    Program(program.ipu, 4)
    outfeed = program.outfeed()

    def net(x: Any) -> Any:
        stages = [lambda x: x + 1.0, lambda x: x, lambda x: x * 2.0]
        return pipelining.pipeline(stages, 6, inputs=[x], outfeed_queue=outfeed)

    run = program.compiled(net, [tf.constant(1.0)])
    dequeued = outfeed.dequeue()
    with program.session() as session:
        session.run(run)
        np.testing.assert_array_equal(np.reshape(session.run(dequeued), -1), [4.0] * 6)


def test_more_elements_and_types(program: Program) -> None:
    tf = program.tf
    pairs = program.infeed(({"a": VALUES, "b": VALUES + 1},))
    looped = program.looped(2, lambda total, a, b: total + a * b, pairs, [0.0])
    wrong = program.infeed(np.arange(3))
    small = program.looped(
        2, lambda v, x: (v + tf.cast(x - 1.0, tf.uint8)), program_feed := program.infeed(), [tf.constant(0, tf.uint8)]
    )  # fmt: skip
    with program.session(pairs, program_feed) as session:
        assert session.run(looped) == [2.0]
        assert session.run(small) == [255]
        with pytest.raises(tf.errors.FailedPreconditionError, match="Unsupported datatype int64 on index 0"):
            session.run(wrong.initializer)
