"""What published programs and tests ask of the SDK's TensorFlow besides numbers: devices, names, messages, reports."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.version_1_programs import Program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
IPU = "/job:localhost/replica:0/task:0/device:IPU:0"
POINTS = np.random.RandomState(0).rand(32, 4).astype(np.float32)
SUMS = POINTS.sum(1, keepdims=True)


@pytest.fixture
def own_configuration(ipu: Any) -> Iterator[None]:
    """A test may configure the IPUs as it likes: afterwards there is one, without options."""
    yield
    Program(ipu, 1)


def test_values_of_programs_name_their_ipu(ipu: Any) -> None:
    import tensorflow as tf

    strategy = ipu.ipu_strategy.IPUStrategy()
    with strategy.scope():
        variable = tf.Variable(1.0)
        result = strategy.run(tf.function(lambda x: x + variable), args=[tf.constant(1.0)])
        assert (variable.device, result.device) == (IPU, IPU)
        assert tf.constant(1.0).device.endswith("CPU:0")
    assert tf.Variable(1.0).device.endswith("CPU:0")
    with tf.Graph().as_default(), tf.device("/device:IPU:0"):
        assert tf.constant(1.0).op.device == "/device:IPU:0"


def test_a_strategy_runs_functions_of_every_kind(ipu: Any) -> None:
    import tensorflow as tf

    strategy, one = ipu.ipu_strategy.IPUStrategy(), tf.constant(1.0)
    function = tf.function(lambda x: x + 1.0)
    concrete = function.get_concrete_function(tf.TensorSpec([], tf.float32))
    with strategy.scope():
        assert strategy.run(concrete, args=[one]) == 2.0
        assert tf.function(lambda: strategy.run(lambda x: x + 2.0, args=[one]))() == 3.0
        with pytest.raises(ValueError, match="does not support eager execution"):
            strategy.run(lambda x: x, args=[one])


@pytest.mark.usefixtures("own_configuration")
def test_a_replica_reduces_over_all(ipu: Any) -> None:
    import tensorflow as tf

    Program(ipu, 2)
    strategy = ipu.ipu_strategy.IPUStrategy()

    @tf.function
    def total() -> Any:
        own = tf.cast(ipu.replication_ops.replication_index(), tf.float32)
        return tf.distribute.get_replica_context().all_reduce("SUM", own + 1.0)

    with strategy.scope():
        assert strategy.run(total) == 3.0


def test_other_threads_iterate_as_usual(ipu: Any) -> None:
    import tensorflow as tf

    numbers: list[int] = []
    with ipu.ipu_strategy.IPUStrategy().scope():
        data = tf.data.Dataset.range(3)
        thread = threading.Thread(target=lambda: numbers.extend(int(v) for v in data))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match=r"tf\.function"):
            next(iter(data))
    assert numbers == [int(v) for v in data] == [0, 1, 2]


def test_optimizer_functions_say_what_does_not_fit(ipu: Any) -> None:
    import tensorflow as tf
    import tf_keras

    output = ipu.pipelining_ops.OptimizerFunctionOutput
    with tf.Graph().as_default():
        loss, tape = tf.square(1.0), tf.GradientTape()
        first = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        second = tf_keras.optimizers.legacy.SGD()
        for wrong, text in (
            ((second, {"compute_gradients_args": (1,)}), "may not be used with OptimizerV2 instances"),
            ((first, {"tape": tape}), "tape may only be used with OptimizerV2"),
            ((first, {"variables": [1]}), "variables may only be used with OptimizerV2"),
            ((second, {"tape": tape, "variables": [1]}), "may not be used when"),
        ):
            with pytest.raises(ValueError, match=text):
                output(wrong[0], loss, **wrong[1])
        with pytest.raises(TypeError, match="tape must be a GradientTape"):
            output(second, loss, tape=["a"])
        fits = output(second, loss, tape=tape)
        with pytest.raises(ValueError, match="variables must be empty"):
            fits.variables = [1]


def test_scopes_leave_their_attributes(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    kind = importlib.import_module("tensorflow.compiler.xla.xla_data_pb2").FrontendAttributes
    with tf.Graph().as_default():
        with ipu.scopes.frontend_attribute("a", "1"), ipu.scopes.frontend_attribute("b", "2"):
            inside = tf.no_op()
        outside = tf.no_op()
        values = kind.FromString(inside.get_attr(ipu.scopes.FRONTEND_ATTRIBUTES_NAME)).map
        assert dict(values) == {"a": "1", "b": "2"}
        with pytest.raises(ValueError, match="has no attr"):
            outside.get_attr(ipu.scopes.FRONTEND_ATTRIBUTES_NAME)
        with (
            pytest.raises(ValueError, match="Only support float16, float32, provided float64"),
            ipu.scopes.partials_type(np.float64),
        ):
            pass


@pytest.mark.usefixtures("own_configuration")
def test_reports_are_where_the_configuration_says(ipu: Any) -> None:
    import tensorflow as tf

    tools = ipu.test_utils
    helper, config = tools.ReportHelper(), ipu.config.IPUConfig()
    helper.set_autoreport_options(config, output_execution_profile=True)
    tools.add_hw_ci_connection_options(config)
    config.configure_ipu_system()
    strategy = ipu.ipu_strategy.IPUStrategy()
    function = tf.function(lambda x: x * 2.0)
    with strategy.scope():
        for _ in range(2):
            strategy.run(function, args=[tf.constant([1.0])])
        helper.assert_num_reports(1)
        strategy.run(function, args=[tf.constant([1.0, 2.0])])
    helper.assert_num_reports(2)
    helper.clear_reports()
    helper.assert_num_reports(0)


def test_gradients_of_layers_are_captured(ipu: Any) -> None:
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.addons.capturing import CaptureActivationGradients, CaptureUpstreamGradients

    class Capturing(tf_keras.optimizers.legacy.SGD):
        supports_captured_grads = True

        def apply_gradients(self, pairs: Any, captured_grads: Any = None, **options: Any) -> Any:
            (self.tag,) = captured_grads
            self.total.assign_add(tf.reduce_sum(captured_grads[self.tag]))
            return super().apply_gradients(pairs, **options)

    def captured(layer: Any, targets: np.ndarray) -> tuple[str, float]:
        entry = tf_keras.Input(4, batch_size=8)
        model = tf_keras.Model(entry, layer(entry))
        optimizer = Capturing(0.0)
        optimizer.total = tf.Variable(0.0)
        model.compile(optimizer, "mse")
        model.fit(POINTS, targets, batch_size=8, verbose=0)
        return optimizer.tag, float(optimizer.total.numpy())

    with ipu.ipu_strategy.IPUStrategy().scope():
        plain = tf_keras.layers.Dense(1, kernel_initializer="ones", name="plain")
        assert captured(CaptureUpstreamGradients(plain), SUMS + 1) == (
            "plain_cug",
            pytest.approx(-8.0, rel=1e-4),
        )
        curved = tf_keras.layers.Dense(1, activation="relu", kernel_initializer="ones", name="curved")
        tag, total = captured(CaptureActivationGradients(curved), SUMS + 1)
        assert (tag, total) == ("curved_cag_activation", pytest.approx(-8.0, rel=1e-4))
        with pytest.raises(ValueError, match="does not use an activation function"):
            CaptureActivationGradients(tf_keras.layers.Flatten())


def test_layers_say_which_of_their_activations_are_captured(ipu: Any) -> None:
    """Those of a cell, of which a loop gives no gradients, and those that a layer keeps for itself."""
    import tf_keras

    from podrun.tensorflow.addons.capturing import ActivationCapture, CaptureActivationGradients

    class Curved(tf_keras.layers.Layer):
        def __init__(self, last_activation: Any = "relu", **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self._last_activation = tf_keras.activations.get(last_activation)

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "last_activation": self._last_activation}

    own = Curved()
    assert CaptureActivationGradients.layer_is_supported(own)
    assert not CaptureActivationGradients.layer_is_supported(tf_keras.layers.Flatten())
    captured = CaptureActivationGradients(own)
    assert list(captured._wrapped_activations) == ["last_activation"]
    assert isinstance(captured.layer._last_activation, ActivationCapture)
    assert own._last_activation is tf_keras.activations.relu, "the program's layer stays as it is"
    for asked in (CaptureActivationGradients.layer_is_supported, CaptureActivationGradients):
        with pytest.raises(ValueError, match="Expected an instance of a keras"):
            asked(3)
    with pytest.warns(UserWarning, match="No gradients are captured inside the loop of lstm"):
        wrapped = CaptureActivationGradients(tf_keras.layers.LSTM(2))
    assert sorted(wrapped._wrapped_activations) == ["activation", "recurrent_activation"]


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSProp"])
def test_scaled_updates_are_those_of_the_optimizer(ipu: Any, name: str) -> None:
    import tf_keras

    from podrun.tensorflow.addons import capturing

    legacy = tf_keras.optimizers.legacy
    plain = {"Adam": legacy.Adam, "SGD": legacy.SGD, "RMSProp": legacy.RMSprop}[name]
    weights = []
    for optimizer in (getattr(capturing, f"ALSOptimizer{name}")(0.01), plain(0.01)):
        with ipu.ipu_strategy.IPUStrategy().scope():
            layer = tf_keras.layers.Dense(1, kernel_initializer="ones", input_shape=(4,))
            model = tf_keras.Sequential([layer])
            model.compile(optimizer, "mse", steps_per_execution=4)
            model.fit(POINTS, SUMS * 2, batch_size=8, epochs=4, shuffle=False, verbose=0)
            weights.append(model.get_weights()[0])
    np.testing.assert_allclose(weights[0], weights[1], atol=1e-4)


@pytest.mark.usefixtures("own_configuration")
def test_equal_programs_are_compiled_once(ipu: Any) -> None:
    """A program that is made twice, with queues of its own, has one report; a configuration starts anew."""
    import tensorflow.compat.v1 as tf

    def build(session: Any, factor: float) -> list[float]:
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(
            tf.data.Dataset.from_tensor_slices(np.ones(4, np.float32))
        )
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def body(total: Any, x: Any) -> Any:
            return total + factor * x, outfeed.enqueue(total)

        with ipu.scopes.ipu_scope("/device:IPU:0"):
            result = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(4, body, [0.0], infeed))
        dequeued = outfeed.dequeue()
        session.run(infeed.initializer)
        session.run(result)
        return list(session.run(dequeued))

    helper = ipu.test_utils.ReportHelper()
    for _ in range(2):
        config = ipu.config.IPUConfig()
        helper.set_autoreport_options(config)
        config.configure_ipu_system()
        with tf.Graph().as_default(), tf.Session() as session:
            assert build(session, 1.0) == build(session, 1.0) == [0.0, 1.0, 2.0, 3.0]
            helper.assert_num_reports(1)
            assert build(session, 2.0) == [0.0, 2.0, 4.0, 6.0]
        helper.assert_num_reports(2)
        helper.clear_reports()


@pytest.mark.usefixtures("own_configuration")
def test_tests_check_reports_of_what_they_place(ipu: Any) -> None:
    """``XLATestCase`` gives a session of a new graph; tests of TensorFlow have checks of reports."""
    import tensorflow.compat.v1 as tf

    from podrun.report.document import open_report
    from podrun.tensorflow.sdk.cases_of_tests import XLATestCase

    helper, config = ipu.test_utils.ReportHelper(), ipu.config.IPUConfig()
    helper.set_autoreport_options(config)
    config.configure_ipu_system()
    case: Any = XLATestCase("test_session")
    with case.session() as session:
        assert tf.get_default_graph() is session.graph
        with tf.device("/device:IPU:0"):
            x = tf.placeholder(tf.float32, [4, 4])
            y = tf.matmul(x, x)
        session.run(y, {x: np.eye(4)})
    report = open_report(helper.find_report())
    names = [one.name for one in report.compilation.computeSets]
    assert names
    case.assert_all_compute_sets_and_list(report, names)
    case.assert_compute_sets_matches(report, "*no such name*", 0)
    case.assert_each_tile_memory_is_less_than(report, 624 * 1024)
    total = sum(tile.memory.total.excludingGaps for tile in report.compilation.tiles)
    case.assert_total_tile_memory(report, total)
    live = sum(tile.memory.alwaysLiveBytes for tile in report.compilation.tiles)
    case.assert_always_live_memory(report, live)
    cycles = report.execution.totalCycles.total
    assert cycles > 0
    case.assert_execution_report_cycles(report, cycles)
    case.assert_num_reports(helper, 1)
    for wrong in (
        lambda: case.assert_compute_sets_contain_list(report, ["no such name"]),
        lambda: case.assert_compute_sets_not_in_blacklist(report, [names[0]]),
        lambda: case.assert_all_compute_sets_and_list(report, []),
        lambda: case.assert_total_tile_memory(report, 2 * total),
        lambda: case.assert_max_tile_memory(report, 1),
        lambda: case.assert_always_live_memory(report, 2 * live + 1),
        lambda: case.assert_execution_report_cycles(report, 2 * cycles),
        lambda: case.assert_execution_report_cycles(report, cycles, expected_executions=2),
        lambda: case.assert_num_reports(helper, 2),
        lambda: case.assert_number_of_executions(report, len(report.execution.runs) + 1),
    ):
        with pytest.raises(AssertionError):
            wrong()


@pytest.mark.usefixtures("own_configuration")
def test_cleared_caches_let_programs_be_compiled_again(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    operations = importlib.import_module("tensorflow.compiler.plugin.poplar.ops.gen_ipu_ops")
    events = importlib.import_module("tensorflow.compiler.plugin.poplar.driver.trace_pb2").IpuTraceEvent
    assert events.COMPILE_END == 1
    helper, config = ipu.test_utils.ReportHelper(), ipu.config.IPUConfig()
    helper.set_autoreport_options(config)
    config.configure_ipu_system()
    with tf.Graph().as_default(), tf.Session() as session:
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            count = tf.get_variable("count", initializer=[0.0])
            (after,) = ipu.ipu_compiler.compile(lambda: tf.assign_add(count, [1.0]))
        clear = operations.ipu_clear_all_xla_compilation_caches()
        session.run(tf.global_variables_initializer())
        assert [float(session.run(after)) for _ in range(2)] == [1.0, 2.0]
        helper.assert_num_reports(1)
        session.run(clear)
        assert session.run(after) == 3.0
    helper.assert_num_reports(2)


def test_loss_scaling_shows_its_state(ipu: Any) -> None:
    from tf_keras.optimizers.legacy import SGD

    from podrun.tensorflow.addons.loss_scaling import ALSOptimizer

    optimizer = ALSOptimizer(SGD(0.1), initial_loss_scaling_factor=16, increase_factor=4)
    optimizer.histogram.assign([3.0, 1.0])
    optimizer.loss_scaling_factor.assign(4.0)
    assert optimizer.normalized_histogram.numpy().tolist() == [0.75, 0.25]
    assert optimizer.clip_levels.numpy().tolist() == [2.0**13]
    for name in ("histogram", "normalized_histogram", "loss_scaling_factor", "clip_levels"):
        with pytest.raises(ValueError, match=f"{name} is a read only property"):
            setattr(optimizer, name, 1)
    optimizer.reset()
    assert (optimizer.initial_loss_scaling_factor, optimizer.loss_scaling_factor.numpy()) == (16, 16)
    assert optimizer.normalized_histogram.numpy().tolist() == [0, 0]
    assert (optimizer.increase_factor, optimizer.max_loss_scaling_factor) == (4, 32768)
