"""What programs and tests written for the SDK rely on beyond numbers: names of devices, messages of queues and hooks,
events of compilations, runs in reports.
"""

from __future__ import annotations

import importlib
import importlib.util
import unittest.mock
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


def configured(ipu: Any, count: int | list[int] = 1) -> Any:
    """Version 1 of TensorFlow, with a device of so many IPUs, or with several devices."""
    import tensorflow.compat.v1 as tf

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = count
    config.configure_ipu_system()
    return tf


def test_messages_of_queues_have_their_names(ipu: Any) -> None:
    """Old programs name their queues. A deleter refuses a queue that no run has made."""
    tf = configured(ipu)
    last = ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST
    with tf.Graph().as_default(), tf.Session() as session:
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensors(1.0), "numbers")
        with pytest.raises(tf.errors.NotFoundError, match="Infeed with id='numbers'"):
            session.run(infeed.deleter)
        assert infeed.initializer is not None
        with pytest.raises(ValueError, match="`initializer` function can only be accessed once"):
            assert infeed.initializer is None
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue("losses", outfeed_mode=last)
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            enqueued = ipu.ipu_compiler.compile(outfeed.enqueue, [2.0])
        delete, dequeued = outfeed.deleter, outfeed.dequeue()
        for _ in range(2):
            with pytest.raises(tf.errors.NotFoundError, match="Outfeed with id='losses'"):
                session.run(delete)
            session.run(enqueued)
            assert session.run(dequeued) == 2.0
            session.run(delete)
    with pytest.raises(ValueError, match=r"to be of `ipu_outfeed_queue.IPUOutfeedMode` type, but is"):
        ipu.ipu_outfeed_queue.IPUOutfeedQueue("losses", outfeed_mode="last")


def test_hooks_log_what_the_model_gives(ipu: Any) -> None:
    """Texts reach TensorFlow's own log, through what stands there when they are written."""
    tf = configured(ipu)
    hook_class = importlib.import_module("tensorflow.python.ipu.ipu_session_run_hooks").IPULoggingTensorHook
    with pytest.raises(ValueError, match="Either every_n_iter, every_n_secs or at_end should be provided"):
        hook_class()
    for wrong in ("text", [1.0]):
        with pytest.raises(TypeError, match=r"Expected `tf\.Tensor`"):
            hook_class(at_end=True).log(wrong)
    with pytest.raises(RuntimeError, match="Did you forget to call the log function"):
        hook_class(at_end=True).begin()
    with tf.Graph().as_default():
        ends = hook_class(at_end=True, formatter=lambda values: f"end {values}")
        steps = hook_class(every_n_iter=2, logging_mode=hook_class.LoggingMode.ALL)

        def model() -> Any:
            count = tf.get_variable("count", initializer=0, use_resource=True)
            new = count.assign_add(1).value()
            first = ends.log([tf.identity(2.5, name="foo"), tf.identity(3.5, name="bar")])
            with pytest.raises(RuntimeError, match="log function more than once"):
                ends.log(new)
            return first, steps.log({"count": new})

        with ipu.scopes.ipu_scope("/device:IPU:0"):
            run = ipu.ipu_compiler.compile(model)
        module = importlib.import_module("tensorflow.python.platform.tf_logging")
        lines: list[str] = []
        with (
            unittest.mock.patch.object(module, "info", lambda text, *args: lines.append(text % args)),
            tf.train.MonitoredTrainingSession(hooks=[ends, steps]) as session,
        ):
            for _ in range(3):
                session.run(run)
    logged = [line for line in lines if line.startswith(("count", "end"))]
    assert logged[0] == "count = [1]"
    assert logged[1].startswith("count = [2 3] (")
    assert logged[1].endswith(" sec)")
    assert logged[2:] == ["end {'foo:0': 2.5, 'bar:0': 3.5}"]


def test_operations_of_programs_name_their_ipu(ipu: Any) -> None:
    """In a program and its loops; a function that places its operations itself needs no scope around it."""
    tf = configured(ipu)
    devices = []

    def body(value: Any) -> Any:
        devices.append((value + 1.0).device)
        return value + 1.0

    def net(value: Any) -> Any:
        devices.append((value * 2.0).device)
        return ipu.loops.repeat(3, body, [value])

    def placed(value: Any) -> Any:
        with tf.device("/device:IPU:0"):
            scale = tf.get_variable("scale", initializer=2.0, use_resource=True)
            return value * scale

    with tf.Graph().as_default(), tf.Session() as session:
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            looped = ipu.ipu_compiler.compile(net, [1.0])
        own = ipu.ipu_compiler.compile(placed, [4.0])
        with pytest.raises(Exception, match="not placed on an IPU"):
            ipu.ipu_compiler.compile(lambda x: x + 1.0, [4.0])
        session.run(tf.global_variables_initializer())
        assert session.run([looped, own]) == [[4.0], [8.0]]
    assert devices == ["/device:IPU:0"] * len(devices)
    assert len(devices) >= 2


def test_an_element_outside_of_programs(ipu: Any) -> None:
    """An outfeed works without `compile`; a dataset in a strategy's scope says how to take elements."""
    tf = configured(ipu)
    queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    with tf.Graph().as_default(), tf.Session() as session:
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            enqueued = queue.enqueue(tf.constant([1.0, 2.0]))
        dequeued = queue.dequeue()
        session.run(enqueued)
        np.testing.assert_array_equal(session.run(dequeued), [[1.0, 2.0]])
    with (
        ipu.ipu_strategy.IPUStrategy().scope(),
        pytest.raises(RuntimeError, match=r"can not be accessed in eager mode.*enable_dataset_iterators"),
    ):
        next(iter(tf.data.Dataset.range(3)))


def test_events_say_what_was_compiled_and_run(ipu: Any) -> None:
    """Four events for a program, one more for variables that it is sent; the stages of a pipeline with their IPUs."""
    import tensorflow.compat.v1 as tf

    module = importlib.import_module("tensorflow.compiler.plugin.poplar.ops.gen_ipu_ops")
    kinds = importlib.import_module("tensorflow.compiler.plugin.poplar.driver.trace_pb2").IpuTraceEvent
    utils = ipu.test_utils
    config = ipu.config.IPUConfig()
    config.auto_select_ipus, config.ipu_model.tiles_per_ipu = 2, 128
    utils.enable_ipu_events(config)
    config.configure_ipu_system()
    with tf.Graph().as_default(), tf.Session() as session:
        queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def net() -> Any:
            return ipu.pipelining_ops.pipeline(
                [lambda: tf.get_variable("w", initializer=2.0, use_resource=True) + 1.0, lambda x: x * 3.0],
                4,
                outfeed_queue=queue,
                device_mapping=[1, 0],
            )

        value = tf.placeholder(tf.float32, [])
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            doubled = ipu.ipu_compiler.compile(lambda x: x * 2.0, [value])
            piped = ipu.ipu_compiler.compile(net)
        trace, report = module.ipu_event_trace(), utils.ReportJSON(unittest.TestCase(), session)
        report.reset()
        session.run(tf.global_variables_initializer())
        report.assert_no_event()
        session.run(doubled, {value: 1.0})
        session.run(doubled, {value: 2.0})
        events = session.run(trace)
        types = [kinds.COMPILE_BEGIN, kinds.COMPILE_END, kinds.LOAD_ENGINE, kinds.EXECUTE, kinds.EXECUTE]
        assert utils.extract_all_types_from_event_trace(events) == types
        assert "Compile end: " in utils.extract_all_strings_from_event_trace(events)
        session.run(piped)
        assert report.parse_log()[kinds.EXECUTE] == 1
        report.assert_num_events(5)
        report.assert_num_host_to_device_transfer_events(1)
        report.assert_host_to_device_event_names(["*"])
        report.assert_pipeline_stages_on_expected_ipu([1, 0], 128)
        with pytest.raises(AssertionError, match="Stage 0 lies on IPUs"):
            report.assert_pipeline_stages_on_expected_ipu([0, 1], 128)


def test_reports_count_the_runs_of_equal_programs(ipu: Any) -> None:
    """A step that makes its variables at its first call is traced twice; its report shows all its runs."""
    import tensorflow as tf

    from podrun.report.document import open_report

    helper = ipu.test_utils.ReportHelper()
    config = ipu.config.IPUConfig()
    helper.set_autoreport_options(config, output_execution_profile=True, max_execution_reports=3)
    config.configure_ipu_system()
    strategy = ipu.ipu_strategy.IPUStrategy()
    with strategy.scope():
        layer = tf.keras.layers.Dense(1)

        @tf.function
        def step(value: Any) -> Any:
            return layer(value)

        counts = []
        for _ in range(4):
            strategy.run(step, [tf.ones((2, 3))])
            counts.append(len(open_report(helper.find_report()).execution.runs))
    assert counts == [1, 2, 3, 3]


def test_variables_start_from_others(ipu: Any) -> None:
    """``initialized_value`` of a resource variable, which TensorFlow no longer has; `ipu_device` takes it away."""
    compat = importlib.import_module("podrun.compat._tensorflow")
    compat._give_back_names()
    tf = configured(ipu)
    with tf.Graph().as_default(), tf.Session() as session:

        def net() -> Any:
            one = tf.Variable([1.0, 2.0], use_resource=True)
            return one * tf.Variable(one.initialized_value(), use_resource=True)

        with ipu.scopes.ipu_scope("/device:IPU:0"):
            (product,) = ipu.ipu_compiler.compile(net)
        session.run(tf.global_variables_initializer())
        np.testing.assert_array_equal(session.run(product), [1.0, 4.0])
