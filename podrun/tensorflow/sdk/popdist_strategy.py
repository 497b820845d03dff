"""``PopDistStrategy``: one program over the instances that ``podrun`` starts, with all replicas of all of them.

Keras divides a loss by the number of replicas, and gradients are summed over them: updates are made with the mean. All
instances start from the values that instance 0 gives its variables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.popdist import core
from podrun.tensorflow.capture.program_graphs import in_program
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.sdk.config import IPUConfig, place_instance
from podrun.tensorflow.sdk.host_collectives import Average as AverageOfInstances
from podrun.tensorflow.sdk.host_collectives import Sum as SumOfInstances
from podrun.tensorflow.sdk.host_collectives import horovod_allreduce, init_instances, tensor_broadcast
from podrun.tensorflow.sdk.ipu_strategy import IPUExtended, IPUStrategyV1

if TYPE_CHECKING:
    from collections.abc import Callable

_KEPT = (tf.string, tf.resource, tf.variant)
"""Types of variables that instances do not share."""


class PopDistExtended(IPUExtended):
    """Variables of all instances start with instance 0's values; values of the host are reduced over instances."""

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
        if core.getNumInstances() > 1 and not tf.compat.v1.executing_eagerly_outside_functions():
            kwargs["initial_value"] = _of_instance_0(kwargs.get("initial_value"), kwargs.get("dtype"))
        variable = super()._create_variable(next_creator, **kwargs)
        if core.getNumInstances() > 1 and tf.executing_eagerly() and variable.dtype not in _KEPT:
            variable.assign(tensor_broadcast(variable.read_value(), 0))
        return variable

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: tf.Tensor, destinations: object, options: object
    ) -> tf.Tensor:
        if in_program() or core.getNumInstances() == 1:
            return super()._reduce_to(reduce_op, value, destinations, options)
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        return horovod_allreduce(value, op=AverageOfInstances if mean else SumOfInstances)


def _of_instance_0(initial: object, dtype: object) -> object:
    """What a variable of a session starts with: instance 0's value of ``initial``, once its initializer runs."""

    def shared() -> tf.Tensor:
        value = tf.convert_to_tensor(initial() if callable(initial) else initial, dtype)
        return value if value.dtype in _KEPT else tensor_broadcast(value, 0)

    return shared


class RefusedMultiWorkerStrategy:
    """``IPUMultiWorkerStrategy``, which programs may import, not make: UnsupportedError."""

    def __init__(self, *_: object, **__: object) -> None:
        raise UnsupportedError(
            "podrun does not have IPUMultiWorkerStrategy, whose workers talk over TensorFlow's own network.",
            hint="Use PopDistStrategy, and start the program with podrun --num-instances.",
        )


class PopDistStrategy(IPUStrategyV1):
    """An IPU strategy over all instances. ``add_ipu_cross_replica_reductions=False``: programs reduce gradients
    themselves, with a cross-replica optimizer or operations.
    """

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        add_ipu_cross_replica_reductions: bool = True,
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        self.adds_reductions = add_ipu_cross_replica_reductions
        super().__init__(
            ipu_device,
            enable_dataset_iterators=enable_dataset_iterators,
            enable_keras_extensions=enable_keras_extensions,
        )
        tf.distribute.Strategy.__init__(self, PopDistExtended(self, "/device:CPU:0"))
        init_instances()

    @property
    def num_replicas_in_sync(self) -> int:
        """The replicas of all instances."""
        if core.isPopdistEnvSet():
            return int(core.getNumTotalReplicas())
        return int(DEVICES.settings(self.ordinal, 1).replicas)

    def update_ipu_config(self, config: IPUConfig) -> None:
        """Let a configuration be that of this instance: its IPUs, and its number among all."""
        place_instance(config, int(core.getNumIpusPerReplica()) if core.isPopdistEnvSet() else 1)


class HorovodStrategy(PopDistStrategy):
    """``IPUHorovodStrategy``: the same with the arguments of the SDK. ``variables_on_host`` changes no result."""

    def __init__(
        self, ipu_device: str = "/device:IPU:0", variables_on_host: bool = False, **options: bool
    ) -> None:
        self.variables_on_host = variables_on_host
        super().__init__(ipu_device, **options)


PopDistStrategyV1 = PopDistStrategy
