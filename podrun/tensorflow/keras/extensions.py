"""What Keras models get under an IPU strategy: their functions on the device, and the SDK's methods."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.keras.accumulating_optimizers import (
    install_accumulation,
    install_optimizer_names,
    on_ipu,
    replace_method,
)
from podrun.tensorflow.keras.model_programs import ModelProgram
from podrun.tensorflow.sdk.gradient_accumulation import Accumulation, GradientAccumulationReductionMethod
from podrun.tensorflow.sdk.ipu_strategy import HOST_ITERATION, IPUStrategyV1

_NOT_FOR_ACCUMULATION = ("opt", "num_mini_batches", "experimental_normalize_gradients")


def replicas_of(model: Any) -> int:
    """The replicas of a model's programs in this process."""
    return DEVICES.settings(
        model.distribute_strategy.ordinal, getattr(model, "_ipu_shards", 1)
    ).local_replicas


@contextlib.contextmanager
def _host_iteration() -> Iterator[None]:
    HOST_ITERATION.append(True)
    try:
        yield
    finally:
        HOST_ITERATION.pop()


class ModelExtension:
    """The methods of the SDK, which Keras' model class gets."""

    def set_gradient_accumulation_options(
        self,
        gradient_accumulation_steps_per_replica: int | None = None,
        gradient_accumulation_reduction_method: Any = "sum",
        use_v2_gradient_accumulation_optimizer: bool = False,
        **gradient_accumulation_optimizer_kwargs: Any,
    ) -> None:
        """One weight update for so many steps of a replica."""
        for name in _NOT_FOR_ACCUMULATION:
            if name in gradient_accumulation_optimizer_kwargs:
                raise ValueError(f"Found `{name}` key in `gradient_accumulation_optimizer_kwargs`.")
        method = GradientAccumulationReductionMethod.parse(gradient_accumulation_reduction_method)
        steps = gradient_accumulation_steps_per_replica
        dtype = gradient_accumulation_optimizer_kwargs.get("dtype")
        self._ipu_accumulation = None if not steps else Accumulation(steps, method, dtype)
        self._ipu_options = getattr(self, "_ipu_options", 0) + 1

    def set_asynchronous_callbacks(self, asynchronous: bool = False) -> None:
        """Accepted: callbacks run after each execution."""
        self._ipu_asynchronous = asynchronous

    def set_infeed_queue_options(self, **kwargs: Any) -> None:
        """Options of the infeed; they change no numbers."""
        for name in ("dataset", "infeed_spec", "element_spec"):
            if name in kwargs:
                raise ValueError(f"Found `{name}` key in `set_infeed_queue_options`, which Keras sets.")

    def set_outfeed_queue_options(self, **kwargs: Any) -> None:
        """Options of the outfeed; they change no numbers."""
        for name in ("outfeed_mode", "device_ordinal"):
            if name in kwargs:
                raise ValueError(f"Found `{name}` key in `set_outfeed_queue_options`, which Keras sets.")

    def set_replication_options(self, replicated_metric_reduction_method: Any = "NONE") -> None:
        """How metrics of replicas are reduced: NONE, the default, gives one replica's."""
        name = str(getattr(replicated_metric_reduction_method, "name", replicated_metric_reduction_method))
        if name.upper() != "NONE":
            raise NotImplementedError(f"podrun reports one replica's metrics; {name} is not implemented.")


def _make_function(kind: str, attribute: str) -> Any:
    """``make_train_function`` and its like, for models on IPUs."""

    def make(self: Any, original: Any, force: bool = False) -> Any:
        if not on_ipu(self):
            return original(self, force)
        if getattr(self, attribute) is None or force or getattr(self, f"_ipu_{kind}", None) is None:
            step = getattr(self, f"{kind}_step")
            program = ModelProgram(self, step, collects=kind == "predict")
            setattr(self, f"_ipu_{kind}", program)
            setattr(self, attribute, program)
            if kind == "train":
                self.train_tf_function = program
        return getattr(self, attribute)

    return make


def install_keras() -> None:
    """Give Keras 2's model class the extensions. ImportError, with what to install, without tf_keras."""
    engine = importlib.import_module("tf_keras.src.engine.training")
    adapters = importlib.import_module("tf_keras.src.engine.data_adapter")
    losses = importlib.import_module("tf_keras.src.losses")
    model_class = engine.Model
    if hasattr(model_class, "set_gradient_accumulation_options"):
        return
    for name, method in vars(ModelExtension).items():
        if name.startswith("set_"):
            setattr(model_class, name, method)
    for kind in ("train", "test", "predict"):
        replace_method(model_class, f"make_{kind}_function", _make_function(kind, f"{kind}_function"))
    for name in ("fit", "evaluate", "predict"):
        replace_method(model_class, name, _checked_call)
    _install_steps(adapters.DataHandler)
    _install_losses(losses.Loss)
    install_accumulation()
    install_optimizer_names()


def _checked_call(self: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Keras' fit, evaluate or predict, once the data fit."""
    if not on_ipu(self):
        return plain(self, *args, **kwargs)
    if self.run_eagerly:
        raise RuntimeError("The `run_eagerly` option is not supported with IPUStrategy.")
    _check_data(args[0] if args else kwargs.get("x"), kwargs.get("batch_size"))
    steps = self._steps_per_execution
    accumulation = getattr(self, "_ipu_accumulation", None)
    if plain.__name__ == "fit" and accumulation is not None and steps is not None:
        executed = int(steps.numpy())
        if executed % accumulation.count:
            raise RuntimeError(
                f"steps_per_execution {executed} is not divisible by gradient_accumulation_steps_per_replica "
                f"{accumulation.count}."
            )
    before = None if steps is None else int(steps.numpy())
    try:
        with _host_iteration():
            return plain(self, *args, **kwargs)
    finally:
        if steps is not None and int(steps.numpy()) != before:
            steps.assign(before)


def _check_data(x: Any, batch_size: Any) -> None:
    """ValueError for data that have no static shapes, or that end in a smaller batch."""
    if isinstance(x, tf.data.Dataset):
        for spec in tf.nest.flatten(x.element_spec):
            if not spec.shape.is_fully_defined():
                raise ValueError(
                    f"The shape {spec.shape} of the dataset is not fully defined. If using tf.Dataset.batch, set "
                    "`drop_remainder=True`."
                )
        return
    if hasattr(x, "__next__") or type(x).__name__ == "generator":
        raise ValueError(
            "Generators and iterators are not supported under an IPUStrategy: use a tf.data.Dataset."
        )
    flat = tf.nest.flatten(x)
    if flat and isinstance(flat[0], (np.ndarray, tf.Tensor)):
        size, batch = len(flat[0]), batch_size or 32
        if size % batch:
            raise ValueError(
                f"The input data has a partial batch: {size} samples are not a multiple of the batch size {batch}."
            )


def _install_steps(handler: Any) -> None:
    """Each step of a replica takes an element of its own."""

    def inferred(self: Any, plain: Any, steps: Any, dataset: Any) -> Any:
        result = plain(self, steps, dataset)
        if steps is not None or result is None or not on_ipu(self._model):
            return result
        replicas = replicas_of(self._model)
        if result % replicas:
            warnings.warn(f"{result % replicas} batches are dropped: {replicas} replicas.", stacklevel=2)
        count = result // replicas
        executed = int(self._steps_per_execution.numpy()) if self._steps_per_execution is not None else 1
        if executed <= count and count % executed:
            raise ValueError(
                f"steps_per_execution {executed} must be a divisor of the number of steps per replica {count}."
            )
        return count

    replace_method(handler, "_infer_steps", inferred)


def _install_losses(loss: Any) -> None:
    """A loss that a program calls itself is averaged over its batch, as without a strategy."""

    def reduction(self: Any, plain: Any) -> Any:
        if isinstance(tf.distribute.get_strategy(), IPUStrategyV1) and str(self.reduction) == "auto":
            return "sum_over_batch_size"
        return plain(self)

    replace_method(loss, "_get_reduction", reduction)
