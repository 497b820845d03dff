"""Programs of version 1, rule by rule (reference: sections 1 to 4 of the semantics; the others:
`test_version_1_training`).

| rule | test |
|---|---|
| 1.1 what compile returns | `test_compile_returns_what_the_function_does` |
| 1.2 placement | `test_a_program_must_be_on_an_ipu` |
| 1.3 resource variables without prefix | `test_variables_are_resources_without_a_prefix` |
| 1.5 operations on an IPU without compile | `test_operations_on_an_ipu_run_without_compile` |
| 1.6 outside_compilation_scope | `test_the_host_takes_no_part_outside_of_programs`, `test_parts.py` |
| 2.1, 2.2 elements and arguments | `test_elements_are_arguments` |
| 2.3 the iterator lives on | `test_the_next_run_goes_on_where_the_last_ended` |
| 2.4 initializer, deleter | `test_queues_are_initialized` |
| 2.5 types | `test_types_that_the_device_lacks` |
| 2.6, 6.1, 6.2 replicas | `test_replicas_take_consecutive_elements` |
| 2.7 a finished dataset | `test_a_finished_dataset`, `test_a_dataset_that_fails` |
| 3.1, 3.2 structures, shapes | `test_outfeeds_keep_structures` |
| 3.3 last | `test_the_last_element` |
| 3.4 once | `test_an_outfeed_is_enqueued_once` |
| 4 loops | `test_loops_return_values`, `test_loops_check_their_bodies` |
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.version_1_programs import VALUES, Program
from tests.tensorflow.version_1_programs import program as program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


def test_compile_returns_what_the_function_does(program: Program) -> None:
    tf = program.tf
    x = tf.placeholder(tf.float32, [2])
    one = program.compiled(lambda v: v * 2, [x])
    assert isinstance(one, list)
    assert len(one) == 1
    nested = program.compiled(lambda v: (v, [v + 1, v + 2]), [x])
    assert isinstance(nested[1], list)
    named = program.compiled(lambda v: {"plus": v + 1, "less": v - 1}, [x])
    nothing = program.compiled(lambda v: None, [x])
    assert isinstance(nothing, tf.Operation)
    with program.session() as session:
        np.testing.assert_array_equal(session.run(one, {x: [1, 2]})[0], [2, 4])
        assert session.run(nested, {x: [1, 2]})[1][1].tolist() == [3, 4]
        assert {k: v.tolist() for k, v in session.run(named, {x: [1, 2]}).items()} == {
            "plus": [2, 3],
            "less": [0, 1],
        }
        assert session.run(nothing, {x: [1, 2]}) is None


def test_a_program_must_be_on_an_ipu(program: Program) -> None:
    tf, compile_ = program.tf, program.ipu.ipu_compiler.compile
    with pytest.raises(Exception, match="not placed on an IPU device"):
        compile_(lambda: tf.constant(1.0) + tf.random_uniform([]))
    assert isinstance(compile_(tf.no_op), tf.Operation)
    with tf.device("/job:localhost/task:0/device:IPU:0"):
        assert compile_(lambda: tf.random_uniform([]))


def test_variables_are_resources_without_a_prefix(program: Program) -> None:
    tf = program.tf

    def net() -> Any:
        with tf.variable_scope("part"):
            return tf.get_variable("w", [2], initializer=tf.ones_initializer()) * 2

    (result,) = program.compiled(net)
    (variable,) = tf.global_variables()
    assert variable.name == "part/w:0"
    assert variable.handle.dtype == tf.resource
    program.ipu.utils.move_variable_initialization_to_cpu()
    with program.session() as session:
        np.testing.assert_array_equal(session.run(result), [2, 2])


def test_operations_on_an_ipu_run_without_compile(program: Program) -> None:
    tf = program.tf
    x = tf.placeholder(tf.float32, [2])
    with tf.device("/device:IPU:0"):
        y = tf.matmul(x[None], tf.ones([2, 3]))
    with program.session() as session:
        np.testing.assert_array_equal(session.run(y, {x: [1, 2]}), [[3, 3, 3]])


def test_the_host_takes_no_part_outside_of_programs(program: Program) -> None:
    with (
        pytest.raises(ValueError, match="only allowed in XLA context"),
        program.ipu.scopes.outside_compilation_scope(),
    ):
        pass


def test_elements_are_arguments(program: Program) -> None:
    pairs = program.infeed((VALUES, VALUES + 1))
    named = program.infeed({"a": VALUES, "b": VALUES * 2})
    inner = program.infeed(({"a": VALUES}, VALUES))
    out = program.outfeed()
    runs = [
        program.looped(2, lambda t, x, y: t + x * y, pairs, [0.0]),
        program.looped(2, lambda t, a, b: t + a * b, named, [0.0]),
        program.looped(2, lambda features, y: out.enqueue(features["a"] + y), inner),
    ]
    with program.session(pairs, named, inner) as session:
        totals = session.run(runs[:2])
        session.run(runs[2])
        assert [float(np.ravel(t)[0]) for t in totals] == [2.0, 2.0]
        np.testing.assert_array_equal(session.run(out.dequeue()), [0, 2])
    with pytest.raises(ValueError, match="Nested list/tuple"):
        program.infeed(((VALUES, VALUES), VALUES))
    with pytest.raises(ValueError, match="drop_remainder"):
        program.ipu.ipu_infeed_queue.IPUInfeedQueue(
            program.tf.data.Dataset.from_tensor_slices(VALUES).batch(5)
        )


def test_the_next_run_goes_on_where_the_last_ended(program: Program) -> None:
    tf = program.tf
    infeed, out, count = program.infeed(), program.outfeed(), tf.placeholder(tf.int32, [])
    with program.ipu.scopes.ipu_scope("/device:IPU:0"):
        run = program.ipu.ipu_compiler.compile(
            lambda n: program.ipu.loops.repeat(n, out.enqueue, infeed_queue=infeed), [count]
        )
    with program.session(infeed) as session:
        for steps in (2, 0, 3):
            session.run(run, {count: steps})
        np.testing.assert_array_equal(session.run(out.dequeue()), VALUES[:5])
        assert session.run(out.dequeue()).shape == (0,)


def test_queues_are_initialized(program: Program) -> None:
    errors = program.tf.errors
    infeed, out = program.infeed(), program.outfeed()
    run, start, stop = program.looped(2, out.enqueue, infeed), infeed.initializer, infeed.deleter
    with pytest.raises(ValueError, match="can only be accessed once"):
        _ = infeed.initializer
    with program.tf.Session() as session:
        with pytest.raises(errors.FailedPreconditionError, match="Did you initialize the infeed_queue"):
            session.run(run)
        with pytest.raises(errors.NotFoundError, match="Infeed with id="):
            session.run(stop)
        for operation in (start, run, stop, start, run):
            session.run(operation)
        np.testing.assert_array_equal(session.run(out.dequeue()), [0, 1, 0, 1])


def test_types_that_the_device_lacks(program: Program) -> None:
    errors, out = program.tf.errors, program.outfeed()
    infeed = program.infeed(VALUES.astype(np.int64))
    program.looped(2, out.enqueue, infeed)
    with (
        program.session() as session,
        pytest.raises(errors.FailedPreconditionError, match="Unsupported datatype int64 on index 0"),
    ):
        session.run(infeed.initializer)
    empty, other = program.infeed(np.zeros((4, 0), np.float32)), program.outfeed()
    run = program.looped(2, other.enqueue, empty)
    with program.session(empty) as session, pytest.raises(errors.InvalidArgumentError, match="zero-sized"):
        session.run(run)
    small, last = program.infeed(VALUES.astype(np.uint8)), program.outfeed()
    run = program.looped(2, lambda x: last.enqueue(program.tf.cast(x, program.tf.float32)), small)
    with program.session(small) as session:
        session.run(run)
        np.testing.assert_array_equal(session.run(last.dequeue()), [0, 1])


def test_replicas_take_consecutive_elements(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        program = Program(ipu, 4)
        infeed, out = program.infeed(), program.outfeed()
        run = program.looped(3, out.enqueue, infeed)
        with program.session(infeed) as session:
            session.run(run)
            np.testing.assert_array_equal(session.run(out.dequeue()), VALUES.reshape(3, 4))


def test_a_thread_draws_elements_without_runs_of_the_session(
    ipu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run fetches is worked out in every run, which takes longer than to draw the elements."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        program = Program(ipu, 2)
        infeed, out = program.infeed(), program.outfeed()
        run = program.looped(5, out.enqueue, infeed)
        with program.session(infeed) as session:
            runs, plain = [], type(session).run
            monkeypatch.setattr(
                type(session), "run", lambda *args, **named: runs.append(args) or plain(*args, **named)
            )
            session.run(run)
            assert len(runs) == 1


def test_a_finished_dataset(program: Program) -> None:
    infeed, out = program.infeed(), program.outfeed()
    run = program.looped(12, out.enqueue, infeed)
    with program.session(infeed) as session:
        session.run(run)
        with pytest.raises(program.tf.errors.OutOfRangeError, match="Infeed dataset iterator out of range"):
            session.run(run)


def test_a_dataset_that_fails(program: Program) -> None:
    tf = program.tf

    def checked(x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(x, 3.0)]):
            return tf.identity(x)

    data = tf.data.Dataset.from_tensor_slices(VALUES).map(checked)
    infeed, out = program.ipu.ipu_infeed_queue.IPUInfeedQueue(data), program.outfeed()
    run = program.looped(6, out.enqueue, infeed)
    with (
        program.session(infeed) as session,
        pytest.raises(tf.errors.OpError, match="An infeed dataset iterator has failed with status"),
    ):
        session.run(run)


def test_outfeeds_keep_structures(program: Program) -> None:
    tf = program.tf
    infeed, out = program.infeed(), program.outfeed()
    run = program.looped(3, lambda x: out.enqueue({"x": x, "rest": (x * 2, [1.0])}), infeed)
    with program.session(infeed) as session:
        session.run(run)
        result = session.run(out.dequeue())
    np.testing.assert_array_equal(result["x"], [0, 1, 2])
    np.testing.assert_array_equal(result["rest"][0], [0, 2, 4])
    assert isinstance(result["rest"], tuple)
    assert result["rest"][1][0].shape == (3,)
    with pytest.raises(ValueError, match="has not been enqueued"):
        program.outfeed().dequeue()
    assert tf.get_default_graph()


def test_the_last_element(program: Program) -> None:
    mode = program.ipu.ipu_outfeed_queue.IPUOutfeedMode
    infeed, out = program.infeed(), program.outfeed(mode.LAST)
    run = program.looped(3, out.enqueue, infeed)
    dequeued = out.dequeue()
    with program.session(infeed) as session:
        with pytest.raises(program.tf.errors.FailedPreconditionError, match="Trying to get the last value"):
            session.run(dequeued)
        session.run(run)
        assert session.run(dequeued).shape == ()
        assert session.run(dequeued) == 2
    with pytest.raises(ValueError, match="IPUOutfeedMode"):
        program.outfeed(3)


def test_an_outfeed_is_enqueued_once(program: Program) -> None:
    infeed, out = program.infeed(), program.outfeed()
    with pytest.raises(ValueError, match="only be enqueued once"):
        program.looped(3, lambda x: program.tf.group(out.enqueue(x), out.enqueue(x)), infeed)


def test_loops_return_values(program: Program) -> None:
    tf, loops = program.tf, program.ipu.loops

    def net() -> Any:
        one = loops.repeat(3, lambda a: a + 1, [tf.constant(0)])
        two = loops.repeat(tf.constant(3), lambda a, b: (a + b, b * 2), [0.0, 1.0])
        ended = loops.while_loop(lambda a: a < 10, lambda a: a * 2, [1])
        assert isinstance(two, list)
        return one, *two, ended

    result = program.compiled(net)
    with program.session() as session:
        assert session.run(result) == [3, 7.0, 8.0, 16]


def test_loops_check_their_bodies(program: Program) -> None:
    tf = program.tf
    with pytest.raises(TypeError, match="body function cannot be called"):
        program.looped(2, lambda a, b: a, None, [1.0])
    with pytest.raises(TypeError, match="Mismatch between input types and output types"):
        program.looped(2, lambda a: tf.cast(a, tf.float32), None, [1])
    with pytest.raises(ValueError, match="zero or more Tensor values"):
        program.looped(2, lambda a: (tf.no_op(), a), None, [1.0])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("optimizers.gradient_accumulation_optimizer", "CrossReplicaGradientAccumulationOptimizerV2"),
        ("ops.pipelining_ops", "PipelineStageOptions"),
        ("ipu_estimator", "IPUEstimatorSpec"),
        ("ipu_session_run_hooks", "IPULoggingTensorHook"),
        ("horovod", "allreduce"),
        ("data.ops.dataset_ops", "BufferDataset"),
        ("ops.within_replica_ops", "reduce_scatter"),
        ("sharding", "propagate_sharding"),
        ("functional_ops", "function"),
        ("horovod.ipu_horovod_strategy", "IPUHorovodStrategyV1"),
    ],
)
def test_names_are_where_programs_import_them_from(ipu: Any, module: str, name: str) -> None:
    import importlib

    assert getattr(importlib.import_module(f"tensorflow.python.ipu.{module}"), name)
    place = ipu
    for part in module.split("."):
        place = getattr(place, part)
    assert getattr(place, name)


def test_datasets_are_measured(program: Program) -> None:
    import json

    ipu, fed = program.ipu, program.tf.placeholder(program.tf.float32, [None])
    measured = ipu.dataset_benchmark.infeed_benchmark(program.infeed(fed), 2, 6, print_stats=False)
    with program.session() as session:
        epochs = json.loads(session.run(measured, {fed: VALUES})[0])["epochs"]
    assert [epoch["elements_processed"] for epoch in epochs] == [6, 6]
    assert epochs[0]["total_bytes_processed"] == 6 * 4
