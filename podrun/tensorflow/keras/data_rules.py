"""Which data models on IPUs take, and how many steps an epoch has: each step of each replica takes an element.

Replica r takes the element ``s * R + r`` at step s, where R replicas run. Steps are counted for one replica.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

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
    if hasattr(x, "__next__") or isinstance(x, (sequence, tf.data.Iterator)):
        raise ValueError(
            f"A {type(x).__name__} is not supported under an IPUStrategy: generators, iterators and "
            "keras.utils.Sequence have no static shapes. Use a tf.data.Dataset, for example "
            "tf.data.Dataset.from_generator with `output_signature`."
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
    """Steps of an epoch for one replica. ValueError if ``steps_per_execution`` does not divide them, or data lack."""
    model = handler._model
    if not on_ipu(model):
        return plain(handler, steps, dataset)  # type: ignore[return-value]
    _check_partial_batch(handler)
    replicas = replicas_of(model)
    if steps is not None and steps != -1:
        count = int(steps)
        _check_enough(handler, dataset, count, replicas)
    else:
        batches = plain(handler, steps, dataset)
        if not isinstance(batches, int):
            raise ValueError(
                "Could not infer the size of the data. You must specify the number of steps to run: `steps_per_epoch` "
                "of fit, `steps` of evaluate and predict."
            )
        count = batches // replicas
        _warn_of_rest(batches, replicas)
        if not count:
            raise ValueError(
                f"The data have {batches} batches, which are too few for one step of {replicas} replicas: each step of "
                "each replica takes a batch."
            )
    _check_execution(handler, count)
    return count


def _check_partial_batch(handler: DataHandler) -> None:
    adapter = handler._adapter
    if hasattr(adapter, "_partial_batch_size") and adapter.has_partial_batch():
        raise ValueError(
            f"The input data has a partial batch: the last of its batches has {adapter.partial_batch_size()} samples, "
            f"not {adapter.batch_size()}. Models on IPUs take batches of one size."
        )


def _check_enough(handler: DataHandler, dataset: object, count: int, replicas: int) -> None:
    """ValueError if an epoch needs more batches than there are. Epochs of exactly all batches start again."""
    size = handler._adapter.get_size()
    if size is None and isinstance(dataset, tf.data.Dataset):
        known = int(dataset.cardinality().numpy())
        size = known if known >= 0 else None
    if size is None:
        return
    needed = count * replicas
    if needed > size:
        text = f"{count} steps" if replicas == 1 else f"{count} steps for each of {replicas} replicas"
        raise ValueError(
            f"The dataset does not have enough data: {text} take {needed} batches, there are {size}."
        )
    if needed == size and hasattr(handler._adapter, "_user_steps"):
        handler._adapter._user_steps = size


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
            f"steps_per_execution {executed} must be a divisor of the number of steps per replica {count}."
        )


def install_data_rules() -> None:
    """Let Keras' iteration over data count steps as the SDK's does."""
    handler = importlib.import_module("tf_keras.src.engine.data_adapter").DataHandler
    replace_method(handler, "_infer_steps", _inferred)
