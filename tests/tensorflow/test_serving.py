"""Programs of TensorFlow in PopEF files: exported steps, pipelines and Keras models, and the embedded runtime."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import UnsupportedError, UsageError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
X = np.random.RandomState(0).rand(4, 3).astype(np.float32)
W = np.random.RandomState(1).rand(3, 2).astype(np.float32)


def _served(folder: Path) -> np.ndarray:
    """What the executable in a folder gives for `X`."""
    from podrun.serving.runner import ModelRunner

    with ModelRunner(str(folder / "executable.popef")) as runner:
        (inputs,), (outputs,) = runner.get_execute_inputs(), runner.get_execute_outputs()
        result = np.empty(outputs.shape, outputs.dtype)
        runner.execute({inputs.name: X}, {outputs.name: result})
    return result


def test_a_step_is_served_and_saved(ipu: Any, tmp_path: Path) -> None:
    import tensorflow as tf

    folder = tmp_path / "model"
    with ipu.ipu_strategy.IPUStrategyV1().scope():
        weights = tf.Variable(W)

    @tf.function(input_signature=[tf.TensorSpec([4, 3], tf.float32)])
    def step(x: Any) -> Any:
        return tf.nn.relu(x @ weights) - 1.0

    def after(y: Any) -> Any:
        return 10 * y

    export = ipu.serving.export_single_step
    export(step, str(folder), iterations=2, output_names="y", postprocessing_step=after)
    np.testing.assert_allclose(_served(folder), X @ W - 1, atol=1e-6)
    saved = tf.saved_model.load(str(folder)).signatures["serving_default"](tf.constant(X))
    np.testing.assert_allclose(saved["y"], 10 * (X @ W - 1), atol=1e-5)
    with pytest.raises(ValueError, match="is not empty"):
        export(step, str(folder), iterations=2)
    with pytest.raises(TypeError, match=r"tf\.data\.Dataset"):
        export(lambda x: x, str(tmp_path / "other"), iterations=1, input_dataset=[X])


def test_a_keras_model_exports_itself(ipu: Any, tmp_path: Path) -> None:
    """A graph of layers with two inputs, and a subclass whose ``build`` said the shape of its input."""
    import tensorflow as tf
    from tensorflow import keras

    class Scaled(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2, use_bias=False)

        def call(self, inputs: object) -> object:
            return self.dense(inputs)

    with ipu.ipu_strategy.IPUStrategyV1().scope():
        inputs = [keras.Input(3, batch_size=4, name=f"input_{i}") for i in range(2)]
        graph = keras.Model(inputs, keras.layers.Subtract()(inputs))
        graph.compile(steps_per_execution=2)
        subclass = Scaled()
        with pytest.raises(
            ValueError, match="has not been built, so that the shapes of its inputs are not known"
        ):
            subclass.export_for_ipu_serving(str(tmp_path / "none"))
        subclass.build((4, 3))
        subclass.set_weights([W])
    exporters = graph.export_for_ipu_serving, ipu.serving.export_keras
    own, function = ([*inspect.signature(exporter).parameters] for exporter in exporters)
    assert own == function[1:]  # Behind the model.
    run = graph.export_for_ipu_serving(
        str(tmp_path / "graph"),
        preprocessing_step=lambda left, right: (2 * left, right),
        preprocessing_step_signature=[tf.TensorSpec([4, 3])] * 2,
    )
    np.testing.assert_allclose(*run(tf.constant(X), tf.constant(X)).values(), X, rtol=1e-6)
    subclass.export_for_ipu_serving(str(tmp_path / "subclass"), output_names="y")
    np.testing.assert_allclose(_served(tmp_path / "subclass"), X @ W, rtol=1e-5)
    with pytest.raises(ValueError, match="is not empty"):
        subclass.export_for_ipu_serving(str(tmp_path / "subclass"))
    subclass.export_for_ipu_serving(str(tmp_path / "subclass"), purge_export_dir=True)


def test_a_pipeline_and_a_keras_model_are_served(ipu: Any, tmp_path: Path) -> None:
    import tensorflow as tf
    from tensorflow import keras

    stages = [lambda x: x @ W, tf.nn.relu]
    signature = [tf.TensorSpec([4, 3], tf.float32, "x")]
    ipu.serving.export_pipeline(
        stages, str(tmp_path / "pipeline"), iterations=2, predict_step_signature=signature
    )
    np.testing.assert_allclose(_served(tmp_path / "pipeline"), X @ W, atol=1e-6)
    with ipu.ipu_strategy.IPUStrategyV1().scope():
        model = keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])
    ipu.serving.export_keras(model, str(tmp_path / "keras"), batch_size=4)
    np.testing.assert_allclose(_served(tmp_path / "keras"), model(X), atol=1e-6)


def test_a_compiled_loop_runs_from_its_file(ipu: Any, tmp_path: Path) -> None:
    import tensorflow.compat.v1 as tf

    path = str(tmp_path / "application.poplar_exec")
    with tf.Graph().as_default():
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensors(tf.zeros([4, 3])).repeat())
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def body(x: Any) -> Any:
            with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(x > -1e6), [x])]):
                return outfeed.enqueue(x @ tf.get_variable("w", initializer=W, use_resource=True))

        def loop() -> Any:
            return ipu.loops.repeat(3, body, infeed_queue=infeed)

        compiled = ipu.application_compile_op.experimental_application_compile_op(loop, output_path=path)
        x = tf.placeholder(tf.float32, [4, 3])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            assert session.run(compiled).decode() == path
            runtime = ipu.embedded_runtime
            for inputs, message in (
                (4, r"Expected the inputs to be a list\."),
                ([], "expects 1 inputs, but 0 were provided"),
                ({}, "Failed to find input tensor with name 'XLA_Args/w' in input dictionary"),
                (
                    [W.T],
                    r"input shape at position 0 \('XLA_Args/w'\)\. Expected \[3, 2\], but input 0 has shape \[2, 3\]",
                ),
                ([W.astype(np.int32)], r"Expected <dtype: 'float32'>, but input 0 has dtype int32"),
            ):
                with pytest.raises(ValueError, match=message):
                    runtime.embedded_runtime_start(path, inputs, "application")
            copied = shutil.copy(path, tmp_path / "copied.poplar_exec")  # As another process would find it.
            for file in (path, copied):
                with pytest.raises(UnsupportedError, match="is not what"):
                    runtime.embedded_runtime_start(file, [W + 1], "application")
            with pytest.raises(ValueError, match="expects 1 inputs, but 0 were provided"):
                runtime.embedded_runtime_start(copied, [], "application")
            context = runtime.embedded_runtime_start(path.encode(), {"XLA_Args/w": W}, "application")
            with contextlib.closing(context.runner):
                called = runtime.embedded_runtime_call([x], context)
                with pytest.raises(tf.errors.InternalError, match="An assertion of the program failed"):
                    session.run(called, {x: X - 2e6})
                (result,) = session.run(called, {x: X})
    np.testing.assert_allclose(result, X @ W, atol=1e-6)


def test_variables_of_eager_applications_are_in_the_order_of_their_numbers(ipu: Any, tmp_path: Path) -> None:
    """``XLA_Args/2`` is before ``XLA_Args/10``."""
    import tensorflow as tf

    variables = [tf.Variable(float(place)) for place in range(12)]
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensors(tf.zeros([2])).repeat())
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def loop() -> Any:
        def body(x: Any) -> Any:
            for variable in variables:
                x = x * 2.0 + variable
            return outfeed.enqueue(x)

        return ipu.loops.repeat(2, body, infeed_queue=infeed)

    path = ipu.application_compile_op.experimental_application_compile_op(
        loop, output_path=str(tmp_path / "eager.poplar_exec")
    )
    values = [float(place) for place in range(12)]
    runtime = ipu.embedded_runtime
    with pytest.raises(UnsupportedError, match="'XLA_Args/11' is not what"):
        runtime.embedded_runtime_start(path, [np.float32(v) for v in [*values[:11], 0.0]], "eager")
    context = runtime.embedded_runtime_start(path, [np.float32(v) for v in values], "eager")
    assert context.executable_file == path.numpy().decode()


def test_a_model_that_reads_integers_is_called_before_it_is_exported(ipu: Any, tmp_path: Path) -> None:
    """A shape does not say that an ``Embedding`` reads integers."""
    import tensorflow as tf
    from tensorflow import keras

    class Looked(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(5, 2)

        def call(self, inputs: object) -> object:
            return self.table(inputs)

    with ipu.ipu_strategy.IPUStrategyV1().scope():
        built, called = Looked(), Looked()
        built.build((4, 3))
        with pytest.raises(ValueError, match="call the model once"):
            ipu.serving.export_keras(built, str(tmp_path / "built"), batch_size=4)
        called(tf.zeros([4, 3], tf.int32))
        ipu.serving.export_keras(called, str(tmp_path / "called"), batch_size=4)
    saved = tf.saved_model.load(str(tmp_path / "called")).signatures["serving_default"]
    (spec,) = saved.structured_input_signature[1].values()
    assert spec.dtype == tf.int32


def test_an_application_takes_elements_without_a_batch_in_common(ipu: Any, tmp_path: Path) -> None:
    import tensorflow as tf

    elements = tf.data.Dataset.from_tensors((0.0, tf.zeros([2, 3]))).repeat()
    infeed, outfeed = ipu.ipu_infeed_queue.IPUInfeedQueue(elements), ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def loop() -> Any:
        return ipu.loops.repeat(2, lambda x, y: outfeed.enqueue(x * y), infeed_queue=infeed)

    path = str(tmp_path / "elements.poplar_exec")
    ipu.application_compile_op.experimental_application_compile_op(loop, output_path=path)
    context = ipu.embedded_runtime.embedded_runtime_start(path, [], "elements")
    with contextlib.closing(context.runner):
        (result,) = ipu.embedded_runtime.embedded_runtime_call([2.0, tf.ones([2, 3])], context)
        with pytest.raises(UsageError, match=r"Input 1 has shape \[2\]; the program takes \[2, 3\]"):
            ipu.embedded_runtime.embedded_runtime_call([2.0, tf.ones([2])], context)
    np.testing.assert_array_equal(result, np.full([2, 3], 2.0))


def test_an_application_says_what_it_takes_and_gives(ipu: Any, tmp_path: Path) -> None:
    """Functions of version 2 too: their loops over elements, and results that need no input."""
    import tensorflow as tf
    from tensorflow.compiler.plugin.poplar.driver import poplar_executable_pb2

    runtime, compiled = (
        ipu.embedded_runtime,
        ipu.application_compile_op.experimental_application_compile_op,
    )
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensors(tf.zeros([3])).repeat())
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    scale = tf.Variable([1.0, 2.0, 3.0])

    @tf.function
    def looped() -> None:
        for _ in tf.range(4):
            outfeed.enqueue(infeed._dequeue() * scale)

    @tf.function
    def constant() -> tf.Tensor:
        return scale * 2.0

    @tf.function
    def asking(value: tf.Tensor) -> tf.Tensor:
        return value * scale

    for function, freezes, expected in (
        (looped, False, (1, 1, 0, 1)),
        (looped, True, (0, 1, 0, 1)),
        (constant, True, (0, 0, 1, 0)),
    ):
        path = compiled(function, output_path=str(tmp_path / "a.poplar_exec"), freeze_variables=freezes)
        executable = poplar_executable_pb2.PoplarExecutableProto()
        executable.ParseFromString(runtime._find_opaque_blob(path))
        own = executable.embedded_runtime_config.signature
        assert (
            tuple(map(len, (own.inputs, own.streamed_inputs, own.outputs, own.streamed_outputs))) == expected
        )
    context = runtime.embedded_runtime_start(path, [], "constant")
    with contextlib.closing(context.runner):
        (result,) = runtime.embedded_runtime_call([], context)
    np.testing.assert_array_equal(result, [2.0, 4.0, 6.0])
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        compiled(asking)
    with pytest.raises(tf.errors.InternalError, match="Failed to open file for writing"):
        compiled(constant, output_path=str(tmp_path / "missing" / "a.poplar_exec"))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="Detected unsupported operations when trying to"
    ):
        compiled(lambda x: x * x, inputs=[tf.zeros([2], tf.float64)], output_path=str(tmp_path / "wide"))
