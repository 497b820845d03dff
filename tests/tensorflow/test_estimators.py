"""Estimators, rule by rule: what they call, count, log and refuse, and how they start without a checkpoint."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import UnsupportedError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
NUMBERS = np.arange(8, dtype=np.float32)


class Estimators:
    """The SDK's estimators in version 1 of TensorFlow, with one IPU for each shard."""

    def __init__(self, ipu: Any, folder: Path) -> None:
        import tensorflow.compat.v1 as tf

        self.ipu, self.tf, self.folder = ipu, tf, folder
        self.host = importlib.import_module("podrun.tensorflow.sdk.estimator_sessions").HostEstimator
        self.parts = importlib.import_module("podrun.tensorflow.sdk.estimator_parts")

    def config(self, iterations: int = 1, shards: int = 1, replicas: int = 1, **options: Any) -> Any:
        """A configuration of an estimator."""
        device = self.ipu.config.IPUConfig()
        device.auto_select_ipus = shards * replicas
        module = self.ipu.ipu_run_config
        options = {"model_dir": self.model_dir()} | options
        run = module.IPURunConfig(iterations, device, num_replicas=replicas, num_shards=shards)
        return module.RunConfig(ipu_run_config=run, **options)

    def model_dir(self) -> str:
        """A new folder for a model."""
        return tempfile.mkdtemp(dir=self.folder)

    def make(
        self, model_fn: Callable[..., Any], iterations: int = 1, *, params: Any = None, **options: Any
    ) -> Any:
        """An estimator of a model function."""
        config = self.config(iterations, **options)
        return self.ipu.ipu_estimator.IPUEstimator(model_fn, config=config, params=params)

    def spec(self, mode: str, loss: Any, **options: Any) -> Any:
        """A specification whose training does nothing."""
        kind = self.ipu.ipu_estimator.IPUEstimatorSpec
        return kind(mode, loss=loss, train_op=self.tf.identity(loss), **options)

    def data(self, *columns: Any) -> Callable[[], Any]:
        """An input function."""
        element = columns if len(columns) > 1 else columns[0]
        return lambda: self.tf.data.Dataset.from_tensor_slices(element)


@pytest.fixture
def estimators(ipu: Any, tmp_path: Path) -> Estimators:
    return Estimators(ipu, tmp_path)


def test_losses_are_logged_and_steps_rounded_up(estimators: Estimators, tmp_path: Path) -> None:
    tf, runs = estimators.tf, []

    class Counter(tf.train.SessionRunHook):  # type: ignore[misc]
        def after_run(self, run_context: Any, run_values: Any) -> None:
            runs.append(run_context)

    def model(features: Any, labels: Any, mode: str) -> Any:
        return estimators.spec(mode, features + labels)

    own = estimators.make(model, 2, model_dir=str(tmp_path), save_summary_steps=1)
    own.train(estimators.data(NUMBERS, NUMBERS), max_steps=3, hooks=[Counter()])
    assert len(runs) == 2
    assert own.get_variable_value("global_step") == 4
    (events,) = tmp_path.glob("*tfevents*")
    values = [v for e in tf.train.summary_iterator(str(events)) for v in e.summary.value if v.tag == "loss"]
    assert [v.simple_value for v in values] == [1.0, 5.0]
    with pytest.raises(ValueError, match="must be a multiple of iterations_per_loop"):
        own.train(estimators.data(NUMBERS, NUMBERS), steps=3)


def test_evaluation_starts_without_a_checkpoint_and_runs_once_for_a_step(estimators: Estimators) -> None:
    """Hooks see one run for each call; the global step grows beside it."""
    tf, runs = estimators.tf, []

    class Counter(tf.train.SessionRunHook):  # type: ignore[misc]
        def after_run(self, run_context: Any, run_values: Any) -> None:
            runs.append(run_context)

    def metrics(features: Any) -> Any:
        return {"mean": tf.metrics.mean(features)}

    def model(features: Any, labels: Any, mode: str) -> Any:
        assert (labels is None) == (mode == "infer")
        if mode == "infer":
            return estimators.parts.EstimatorSpec(mode, predictions=features * 2.0)
        step = tf.cast(tf.train.get_global_step(), tf.float32)
        return estimators.spec(mode, step, eval_metrics=(metrics, [features]))

    own = estimators.make(model, 2)
    scores = own.evaluate(estimators.data(NUMBERS, NUMBERS), steps=8, hooks=[Counter()])
    assert len(runs) == 4
    assert scores == {"mean": 3.5, "loss": 3.0, "global_step": 0}
    outputs = own.predict(estimators.data(NUMBERS, NUMBERS), num_predictions=4)
    np.testing.assert_array_equal(list(outputs), NUMBERS[:4] * 2)


def test_replicas_are_averaged_and_predict_together(estimators: Estimators) -> None:
    """Metrics of the IPU are averaged over replicas; those of the host see iterations, replicas and batches."""
    tf, shapes = estimators.tf, []

    def metrics(features: Any) -> Any:
        shapes.append(features.shape.as_list())
        return {"largest": tf.metrics.mean(tf.reduce_max(features, -1))}

    def model(features: Any, mode: str, params: Any) -> Any:
        loss = tf.reduce_max(features)
        if mode == "infer":
            return estimators.parts.EstimatorSpec(mode, predictions={"batch": features, "largest": loss})
        if params["host"]:
            return estimators.spec(mode, loss, eval_metrics=(metrics, [features]))
        return estimators.spec(mode, loss, eval_metric_ops={"mean": tf.metrics.mean(features)})

    numbers = np.array([[1, 3], [5, 3], [1, 3], [9, 7]], np.float32)
    for host, name, value in ((False, "mean", 4.0), (True, "largest", 5.0)):
        own = estimators.make(model, 2, replicas=2, params={"host": host})
        assert own.evaluate(estimators.data(numbers), steps=2)[name] == value
    assert [shape[1:] for shape in shapes] == [[2, 2]]
    (first, last) = own.predict(estimators.data(numbers), num_predictions=2, yield_single_examples=False)
    np.testing.assert_array_equal([first["batch"], last["batch"]], numbers.reshape(2, 2, 2))
    np.testing.assert_array_equal([first["largest"], last["largest"]], [[3, 5], [3, 9]])
    own = own.predict(estimators.data(numbers), ["largest"], num_predictions=4)
    assert [row["largest"] for row in own] == [3, 5, 3, 9]


def test_functions_of_the_host(estimators: Estimators) -> None:
    """Its variables are on the CPU, the model's tensors on the IPU; it may take none, and must return something."""
    tf, devices = estimators.tf, []

    def summed(value: Any) -> Any:
        total = tf.get_variable("total", initializer=0.0)
        devices.append(total.device)
        return total.assign_add(value)

    def counted() -> Any:
        return tf.get_variable("calls", initializer=0.0).assign_add(1.0)

    def model_of(function: Callable[..., Any], tensors: bool) -> Callable[..., Any]:
        def model(features: Any, labels: Any, mode: str) -> Any:
            loss = features + labels
            devices.append(loss.device)
            return estimators.spec(mode, loss, host_call=(function, [loss] if tensors else []))

        return model

    for function, tensors, name, total in ((summed, True, "total", 2.0), (counted, False, "calls", 2.0)):
        own = estimators.make(model_of(function, tensors))
        own.train(estimators.data(NUMBERS, NUMBERS), steps=2)
        assert own.get_variable_value(name) == total
    assert devices == ["/device:IPU:0", "/device:CPU:*", "/device:IPU:0"]
    with pytest.raises(TypeError, match="`host_call` return value must be Operation or Tensor"):
        estimators.make(model_of(lambda: None, False)).train(estimators.data(NUMBERS, NUMBERS), steps=1)
    with pytest.raises(ValueError, match="host_call is not allowed for iterations_per_loop > 1"):
        estimators.make(model_of(counted, False), 2).train(estimators.data(NUMBERS, NUMBERS), steps=2)


def test_what_estimators_refuse(estimators: Estimators) -> None:
    tf, kind = estimators.tf, estimators.ipu.ipu_estimator.IPUEstimator

    def grows(features: Any, labels: Any, mode: str) -> Any:
        weight = tf.get_variable("w", initializer=1.0)
        loss = weight * features + labels
        update = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
        return estimators.parts.EstimatorSpec(mode, loss=loss, train_op=update)

    def plain(features: Any, labels: Any, mode: str) -> Any:
        return estimators.parts.EstimatorSpec(mode, loss=features + labels, train_op=tf.no_op())

    data = estimators.data(NUMBERS, NUMBERS)
    with pytest.raises(ValueError, match="Illegal increment of the `global_step`"):
        estimators.make(grows).train(data, steps=1)
    with pytest.raises(ValueError, match="must contain either eval_metric_ops or eval_metrics"):
        estimators.make(plain).evaluate(data, steps=1)
    for host in (False, True):
        own = estimators.host(plain, estimators.model_dir()) if host else estimators.make(plain)
        with pytest.raises(ValueError, match="as a len 2 tuple"):
            own.train(estimators.data(NUMBERS, NUMBERS, NUMBERS), steps=1)
    with pytest.raises(TypeError, match="second element in `eval_metrics` must be a list or dict"):
        estimators.spec("eval", tf.constant(0.0), eval_metrics=(lambda: None, tf.constant(0.0)))
    for size, words in ((0, r"train_batch_size \(got 0\) must be positive"), (2, r"params\['batch_size'\]")):
        with pytest.raises(ValueError, match=words):
            kind(plain, config=estimators.config(), train_batch_size=size).train(data, steps=1)
    with pytest.raises(ValueError, match="batch_size cannot be passed in params when a batch size"):
        kind(plain, config=estimators.config(), params={"batch_size": 1}, eval_batch_size=1)
    with pytest.raises(ValueError, match=r"must be provided with type `ipu_run_config\.RunConfig`"):
        kind(plain)
    with pytest.raises(
        ValueError, match=r"4 devices \(4 replicas times 1 shards\), but `IpuOptions` configured with 1"
    ):
        estimators.ipu.ipu_run_config.IPURunConfig(
            num_replicas=4, ipu_options=estimators.config().ipu_run_config.ipu_options
        )
    multi = importlib.import_module("tensorflow.python.ipu.ipu_multi_worker_strategy")
    with pytest.raises(UnsupportedError, match="IPUMultiWorkerStrategy"):
        multi.IPUMultiWorkerStrategyV1(None)


def test_variables_start_from_another_estimator(estimators: Estimators) -> None:
    tf = estimators.tf

    def model(features: Any, labels: Any, mode: str) -> Any:
        loss = tf.reduce_sum(tf.keras.layers.Dense(1)(features[None, None])) + labels
        update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        return estimators.parts.EstimatorSpec(mode, loss=loss, train_op=update)

    first = estimators.make(model)
    first.train(estimators.data(NUMBERS, NUMBERS), steps=2)
    config = estimators.config()
    second = estimators.ipu.ipu_estimator.IPUEstimator(model, config=config, warm_start_from=first.model_dir)
    second.train(estimators.data(NUMBERS[:1], NUMBERS[:1]), steps=1)
    (bias,) = (name for name in first.get_variable_names() if name.endswith("bias"))
    np.testing.assert_allclose(
        second.get_variable_value(bias), first.get_variable_value(bias) - 0.1, rtol=1e-6
    )


def test_pipelines_of_estimators_say_what_is_wrong(estimators: Estimators) -> None:
    module = estimators.ipu.ipu_pipeline_estimator

    def trained(stages: list[Any], iterations: int = 4, **options: Any) -> Any:
        def model(mode: str) -> Any:
            return module.IPUPipelineEstimatorSpec(mode, computational_stages=stages, **options)

        own = module.IPUPipelineEstimator(model, config=estimators.config(iterations, 2))
        own.train(estimators.data(NUMBERS, NUMBERS), steps=iterations)

    two = [lambda features, labels: (features, labels), lambda features, labels: features + labels]
    given = {"optimizer_function": lambda loss: None, "gradient_accumulation_count": 3}
    with pytest.raises(ValueError, match="must contain `optimizer_function` when training"):
        trained(two, gradient_accumulation_count=1)
    with pytest.raises(ValueError, match=r"requires 0 devices, but `IPURunConfig\.num_shards` was set to 2"):
        trained([], **given)
    with pytest.raises(
        ValueError, match=r"\(got 4\) must be divisible by `gradient_accumulation_count` \(got 3\)"
    ):
        trained(two, **given)
    with pytest.raises(
        ValueError, match=r"\(got 1\) cannot be less than `gradient_accumulation_count` \(got 3\)"
    ):
        trained(two, 1, **given)


def test_a_run_that_only_compiles_gives_zeros(estimators: Estimators) -> None:
    tf = estimators.tf

    def model_fn(features: Any, mode: str) -> Any:
        mean = tf.metrics.mean(features)
        return estimators.spec(
            mode, tf.reduce_sum(features), predictions=features + 1, eval_metric_ops={"m": mean}
        )

    own = estimators.make(model_fn, 2)
    device = own.config.ipu_run_config.ipu_options
    device.device_connection.type = estimators.ipu.config.DeviceConnectionType.PRE_COMPILE
    device.device_connection.version = "ipu2"
    device.serialization_output_folder = estimators.model_dir()
    own.train(estimators.data(NUMBERS), steps=2)
    assert own.evaluate(estimators.data(NUMBERS), steps=2) == {"m": 0.0, "loss": 0.0, "global_step": 2}
    assert len(list(Path(device.serialization_output_folder).glob("*.poplar_exec"))) == 1
