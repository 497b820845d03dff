"""Which data models on IPUs take, and how many steps an epoch has: each step of each replica takes an element.

Replica r takes the element ``s * R + r`` at step s, where R replicas run. Steps are counted for one replica.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from tf_keras.src.engine import data_adapter

from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.keras.accumulating_optimizers import on_ipu, replace_method
from podrun.tensorflow.keras.model_options import options_of
from podrun.tensorflow.keras.stage_assignment import entry_stages
from podrun.tensorflow.keras.stage_tracing import checked_mapping, may_be_pipelined, pipeline_assignment

if TYPE_CHECKING:
    from tf_keras import Model
    from tf_keras.src.engine.data_adapter import DataHandler


def check_model_data(x: object) -> None:
    """ValueError for data that are no arrays and no dataset, or have no static shapes."""
    if isinstance(x, tf.data.Dataset):
        for spec in tf.nest.flatten(x.element_spec):
            if not spec.shape.is_fully_defined():
                raise ValueError(
                    f"The shape {spec.shape} of the dataset is not fully defined. If using tf.Dataset.batch, set "
                    "`drop_remainder=True`."
                )
        return
    sequence = importlib.import_module("tf_keras.src.utils.data_utils").Sequence
    if not hasattr(x, "__next__") and not isinstance(x, (sequence, tf.data.Iterator)):
        return
    wrap = ""
    if hasattr(x, "__next__") and not inspect.isgenerator(x):
        wrap = (
            "wrap your iterator inside a generator like so:\n\ndef generator:\n    while True:\n        yield "
            "next(iterator)\n\nand "
        )
    advice = f"Please {wrap}use" if wrap else "Please use"
    raise ValueError(
        f"A {type(x).__name__} is not supported under an IPUStrategy, because it has no static shapes. {advice} "
        "`tf.data.Dataset.from_generator()` to specify the shape of your data."
    )


def replicas_of(model: Model) -> int:
    """The replicas of a model's programs in this process."""
    assignment = pipeline_assignment(model) if may_be_pipelined(model) else None
    mapping = options_of(model).device_mapping or [0]
    if assignment is not None:
        mapping = checked_mapping(model, [s for s in entry_stages(assignment) if s is not None])
    elif not may_be_pipelined(model):
        mapping = [0]
    return DEVICES.settings(model.distribute_strategy.ordinal, max(mapping) + 1).local_replicas


def _inferred(
    handler: DataHandler, plain: Callable[..., object], steps: int | None, dataset: object
) -> int | None:
    """Steps of an epoch for one replica: the batches of an epoch, or ``steps`` of the program, are shared by the
    replicas. ValueError if ``steps_per_execution`` does not divide them, or data lack.
    """
    if isinstance(handler, IPUDataHandler):
        handler.asked = steps, dataset
        replicas = handler.replicas
    elif on_ipu(handler._model):
        replicas = replicas_of(handler._model)
    else:
        return plain(handler, steps, dataset)  # type: ignore[return-value]
    _check_partial_batch(handler)
    if replicas is None:
        return plain(handler, steps, dataset)  # type: ignore[return-value]
    if steps is not None and steps != -1:
        batches = int(steps)
    else:
        known = plain(handler, steps, dataset)
        if not isinstance(known, int):
            raise ValueError(
                "Could not infer the size of the data. You must specify the number of steps to run: `steps_per_epoch` "
                "of fit, `steps` of evaluate and predict."
            )
        batches = known
    count = batches // replicas
    _warn_of_rest(batches, replicas)
    if not batches:
        raise TypeError(
            "The arrays are empty, or have fewer samples than a batch: the dataset length is unknown. Give data of at "
            "least one batch for each replica."
        )
    if not count:
        raise ValueError(
            f"The provided dataset contains {batches} items, but all {replicas} replicas are requested to run 1 "
            f"steps each. Make sure the dataset contains at least {replicas} items."
        )
    if steps is not None and steps != -1:
        _check_enough(handler, dataset, count, replicas)
    _check_execution(handler, count)
    return count


class IPUDataHandler(data_adapter.DataHandler):  # type: ignore[misc]
    """Keras' iteration over data with the rules of models on IPUs, for programs that iterate themselves.

    ``replication_factor``: replicas that share the batches of an epoch; None: `set_replication_factor` says it later,
    and only then are the data checked. ValueError for data that do not fit.
    """

    def __init__(
        self, x: object, y: object = None, replication_factor: int | None = 1, **options: object
    ) -> None:
        check_model_data(x)
        self.replicas = replication_factor
        self.asked: tuple[int | None, object] = (None, None)
        super().__init__(x, y, **options)
        wide: tf.data.Dataset = self._dataset
        if any(spec.dtype in _NARROW for spec in tf.nest.flatten(wide.element_spec)):
            several = type(wide.element_spec) is tuple
            self._dataset: tf.data.Dataset = wide.map(
                lambda *e: tf.nest.map_structure(_narrowed, e if several else e[0])
            )

    def set_replication_factor(self, value: int) -> None:
        """Say how many replicas there are. ValueError if the data do not fit to them."""
        self.replicas = value
        self._inferred_steps = self._infer_steps(*self.asked)


_NARROW = {tf.float64: tf.float32, tf.int64: tf.int32}


def _narrowed(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, _NARROW.get(tensor.dtype, tensor.dtype))


def _check_partial_batch(handler: DataHandler) -> None:
    adapter = handler._adapter
    if hasattr(adapter, "_partial_batch_size") and adapter.has_partial_batch():
        raise ValueError(
            "The provided set of data has a partial batch: the last of its batches has "
            f"{adapter.partial_batch_size()} samples, not {adapter.batch_size()}. Models on IPUs take batches of one "
            "size."
        )


def _check_enough(handler: DataHandler, dataset: object, count: int, replicas: int) -> None:
    """ValueError if there are fewer batches than the epochs need. Epochs of exactly all batches of a dataset start
    again, and arrays have their batches in each epoch.
    """
    size = handler._adapter.get_size()
    if size is None and isinstance(dataset, tf.data.Dataset):
        known = int(dataset.cardinality().numpy())
        size = known if known >= 0 else None
    needed = count * replicas
    if isinstance(handler._adapter, data_adapter.DatasetAdapter):
        again = handler._adapter.should_recreate_iterator()
        needed *= 1 if again else handler._epochs - handler._initial_epoch
    if size is not None and needed > size:
        raise ValueError(
            "Your input does not have enough data. Make sure that your dataset or generator can generate at least "
            f"{needed} batches (currently it can only generate {size} batches). You may need to use the repeat() "
            "function when building your dataset."
        )


def _warn_of_rest(batches: int, replicas: int) -> None:
    if batches % replicas:
        tf.get_logger().warning(
            "%d of the %d batches are dropped: the %d replicas take equally many.",
            batches % replicas,
            batches,
            replicas,
        )


def _check_execution(handler: DataHandler, count: int) -> None:
    """What ``steps_per_execution`` has to be: at most an epoch, which it divides, and whole updates of the weights."""
    asked = int(np.asarray(handler._steps_per_execution.numpy()))
    executed = min(asked, count)
    if asked > count:
        tf.get_logger().warning(
            "steps_per_execution %d is more than the %d steps of an epoch for each replica: %d are executed at once.",
            asked,
            count,
            count,
        )
    if count % executed:
        raise ValueError(
            "`steps_per_execution` must be a divisor of the number of batches in the dataset provided. It is "
            f"{executed}, and each replica runs {count} steps."
        )


def install_data_rules() -> None:
    """Let Keras' iteration over data count steps as the SDK's does."""
    replace_method(data_adapter.DataHandler, "_infer_steps", _inferred)
