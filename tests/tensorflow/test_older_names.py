"""Names of older SDKs, and of the libraries below the public modules."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import UsageError
from tests.tensorflow.version_1_programs import VALUES, Program
from tests.tensorflow.version_1_programs import program as program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
LIBRARY = "tensorflow.compiler.plugin.poplar"


def test_attributes_of_operations_have_numbers(ipu: Any) -> None:
    import tensorflow as tf
    from tensorflow.compiler.xla import xla_data_pb2

    messages = importlib.import_module(f"{LIBRARY}.driver.backend_config_pb2")
    attribute = messages.FrontendAttributeId
    assert (attribute.Value("ML_TYPE"), attribute.KEEP_INPUT_LAYOUTS) == (10, 20)
    assert messages.MLType.Name(messages.TRAINING_WU) == "TRAINING_WU"
    with tf.Graph().as_default(), ipu.scopes.partials_type(tf.float16):
        operation = tf.constant(1.0).op
    said = xla_data_pb2.FrontendAttributes()
    said.ParseFromString(operation.get_attr("_XlaFrontendAttributes"))
    assert said.map[attribute.Name(messages.PARTIALS_TYPE)] == "F16"


def test_arguments_of_queues_until_the_name_went(ipu: Any) -> None:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensors([1.0])
    with pytest.warns(UserWarning, match="replication_factor=...") as warned:
        queue = ipu.ipu_infeed_queue.IPUInfeedQueue(data, "old", 2, 1, 4, 5)
    assert (queue._name, queue._ordinal, queue._depth) == ("old", 2, 5)
    assert sum("data_to_prefetch" in str(w.message) for w in warned) == 1
    with pytest.raises(TypeError, match="takes 6 arguments, not 7"):
        ipu.ipu_infeed_queue.IPUInfeedQueue(data, "old", 2, 1, 4, 5, 6)


def test_a_function_that_says_its_device_itself(ipu: Any) -> None:
    import tensorflow as tf

    @ipu.function
    def squared(x: Any) -> Any:
        return x * x

    module = importlib.import_module("tensorflow.python.ipu.function")
    doubled = module.function(ipu_device="/device:IPU:0", autograph=False)(lambda x: x + x)
    large = tf.constant([1000.0, 2.0], tf.float16)
    assert squared(large).numpy().tolist() == [65504.0, 4.0]
    assert doubled(large).device.endswith("IPU:0")


def test_convolutions_of_a_multi_convolution_are_independent(ipu: Any) -> None:
    import tensorflow as tf

    def run(function: Any) -> Any:
        with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
            return strategy.run(tf.function(function, autograph=False), args=[tf.ones([1, 4, 4, 1])])

    kernel = tf.ones([2, 2, 1, 1])

    @ipu.nn_ops.multi_conv(options={})
    def beside(x: Any) -> Any:
        return tf.nn.conv2d(x, kernel, 1, "VALID"), tf.nn.conv2d(2.0 * x, kernel, 1, "VALID")

    @ipu.nn_ops.multi_conv
    def behind(x: Any) -> Any:
        return tf.nn.conv2d(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "VALID")), kernel, 1, "VALID")

    assert [float(np.max(v)) for v in run(beside)] == [4.0, 8.0]
    with pytest.raises(tf.errors.FailedPreconditionError, match="to be independent of each other"):
        run(behind)


@pytest.fixture
def engines(ipu: Any) -> Iterator[None]:
    """Engines that a test starts; afterwards their IPUs are free."""
    contexts = importlib.import_module("podrun.tensorflow.sdk.embedded_runtime")._contexts
    before = set(contexts)
    yield
    for name in contexts.keys() - before:
        contexts.pop(name).runner.close()


def test_a_function_without_queues_is_compiled_and_called(ipu: Any, tmp_path: Path) -> None:
    import tensorflow.compat.v1 as tf

    library = importlib.import_module(f"{LIBRARY}.ops.gen_application_runtime")
    weights = np.arange(6, dtype=np.float32).reshape(3, 2)
    path = str(tmp_path / "function.poplar_exec")
    with contextlib.ExitStack() as ends, tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, [4, 3])

        def model(value: Any) -> Any:
            return value @ tf.get_variable("w", initializer=weights, use_resource=True)

        compiled = ipu.application_compile_op.experimental_application_compile_op(
            model, inputs=[x], output_path=path, freeze_variables=True
        )
        session.run(tf.global_variables_initializer())
        assert session.run(compiled, {x: np.zeros([4, 3])}).decode() == path
        with pytest.raises(UsageError, match="No application runtime 'engine' was started"):
            library.application_call([x], outfeed_types=[tf.float32], engine_name="engine")
        started = library.application_runtime(inputs=[], filename=path, engine_name="engine")
        own = importlib.import_module("podrun.tensorflow.sdk.embedded_runtime")
        ends.callback(lambda: own._contexts.pop("engine").runner.close())
        with tf.control_dependencies([started]):
            (result,) = library.application_call([x], outfeed_types=[tf.float32], engine_name="engine")
        values = np.random.RandomState(0).rand(4, 3).astype(np.float32)
        np.testing.assert_allclose(session.run(result, {x: values}), values @ weights, rtol=1e-5)
        with pytest.raises(UsageError, match="gives"):
            library.application_call([x], outfeed_types=[tf.int32], engine_name="engine")
        with pytest.raises(UsageError, match="a function with inputs and results"):
            ipu.application_compile_op.experimental_application_compile_op(tf.no_op)


def test_unread_inputs_and_plain_numbers_of_a_function_stay(ipu: Any, engines: None, tmp_path: Path) -> None:
    import tensorflow as tf

    path = ipu.application_compile_op.experimental_application_compile_op(
        lambda a, unread, b: (a - b, 2.0 * a, 3.0),
        inputs=[tf.zeros([2]), tf.zeros([3]), tf.zeros([2])],
        output_path=str(tmp_path / "function.poplar_exec"),
    )
    runtime = ipu.embedded_runtime
    context = runtime.embedded_runtime_start(path, [], "unread")
    inputs = [tf.constant([5.0, 7.0]), tf.zeros([3]), tf.constant([1.0, 2.0])]
    results = runtime.embedded_runtime_call(inputs, context)
    with pytest.raises(UsageError, match="has 3 inputs, not 2"):
        runtime.embedded_runtime_call(inputs[:2], context)
    assert [np.asarray(r).tolist() for r in results] == [[4.0, 5.0], [10.0, 14.0], 3.0]


def test_elements_of_an_infeed_that_a_loop_does_not_read_are_inputs(
    ipu: Any, engines: None, tmp_path: Path
) -> None:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensors((np.zeros(3, np.float32), 0, np.zeros(2, np.float32)))
    infeed, outfeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset), ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def model() -> Any:
        return ipu.loops.repeat(2, lambda label, unread, x: outfeed.enqueue(2.0 * x), [], infeed)

    path = ipu.application_compile_op.experimental_application_compile_op(
        model, output_path=str(tmp_path / "loop.poplar_exec")
    )
    runtime = ipu.embedded_runtime
    context = runtime.embedded_runtime_start(path, [], "loop")
    inputs = [tf.zeros([3]), tf.constant(1), tf.constant([1.0, 2.0])]
    assert np.asarray(runtime.embedded_runtime_call(inputs, context)[0]).tolist() == [2.0, 4.0]
    with pytest.raises(UsageError, match="has 3 inputs, not 1"):
        runtime.embedded_runtime_call(inputs[2:], context)


def test_a_method_is_a_function_of_an_ipu(ipu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    from podrun.tensorflow.execution import eager_devices

    programs: list[bool] = []
    takes_values = eager_devices._takes_values

    def watched(arguments: object) -> bool:
        programs.append(takes_values(arguments))
        return programs[-1]

    monkeypatch.setattr(eager_devices, "_takes_values", watched)
    function = importlib.import_module("tensorflow.python.ipu.function").function

    class Scaled:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        @function
        def call(self, x: Any) -> Any:
            """Scaled."""
            return x * self.scale

    one, two = Scaled(1.0), Scaled(2.0)
    results = [scaled.call(tf.constant([3.0])) for scaled in (one, two)]
    assert [r.numpy().tolist() for r in results] == [[3.0], [6.0]]
    assert programs == [True, True]
    concrete = two.call.get_concrete_function(tf.TensorSpec([1], tf.float32))
    assert concrete.structured_outputs.shape == [1]
    assert Scaled.call.__doc__ == "Scaled."


def test_names_that_tensorflow_lost_are_back(ipu: Any) -> None:
    from podrun.compat import _tensorflow

    _tensorflow._give_back_names()
    nest = importlib.import_module("tensorflow.python.util.nest")
    assert nest.is_sequence([1])
    assert not nest.is_sequence(1)
    cells = importlib.import_module("tensorflow.python.ops.rnn_cell")
    assert cells.nn_ops is importlib.import_module("tensorflow.python.ops.nn_ops")
    with pytest.warns(DeprecationWarning, match=r"numpy\.int is NumPy 1's"):
        assert np.int(np.float32(2.5)) == 2  # type: ignore[attr-defined]


def test_a_session_is_saved_outside_of_its_graph(ipu: Any, tmp_path: Path) -> None:
    """As published programs do, also where TensorFlow would build the saver's operations eagerly."""
    import tensorflow as tf

    from podrun.compat import _tensorflow

    _tensorflow._give_back_names()
    _tensorflow._give_back_names()
    assert tf.executing_eagerly()
    with tf.Graph().as_default() as graph:
        weight = tf.compat.v1.get_variable("weight", initializer=[1.0, 2.0], use_resource=True)
        start = tf.compat.v1.global_variables_initializer()
        saver = tf.compat.v1.train.Saver()
    session = tf.compat.v1.Session(graph=graph)
    session.run(start)
    path = saver.save(session, str(tmp_path / "model"))
    session.close()
    assert tf.executing_eagerly()
    session = tf.compat.v1.Session(graph=graph)
    saver.restore(session, path)
    np.testing.assert_array_equal(session.run(weight), [1.0, 2.0])
    session.close()


def test_values_of_a_queue_that_a_loop_does_not_read_are_told_once(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    infeed = program.infeed((VALUES, VALUES))
    run = program.looped(2, lambda total, x, _: total + x, infeed, [0.0])
    with program.session(infeed) as session, caplog.at_level("WARNING"):
        sums = [session.run(run)[0] for _ in range(3)]
    assert sums == [1.0, 5.0, 9.0]
    assert sum("is not used by the model" in record.message for record in caplog.records) == 1
