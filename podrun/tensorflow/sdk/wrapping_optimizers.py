"""Optimizers of version 1 around others: averages over replicas, gradient accumulation, mapped gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from podrun.tensorflow.capture.markers import mark_like
from podrun.tensorflow.capture.places import PipelineShape, pipeline_of, shape_pipeline
from podrun.tensorflow.capture.program_graphs import innermost_program
from podrun.tensorflow.sdk.gradient_accumulation import (
    Accumulation,
    AccumulatorType,
    GradientAccumulationReductionMethod,
    GradientPairs,
)
from podrun.tensorflow.sdk.pipeline_rules import check_sharded_state, state_storage

_Optimizer: Any = tf.compat.v1.train.Optimizer
SUM = GradientAccumulationReductionMethod.SUM


def _checked_optimizer(opt: object) -> tf.compat.v1.train.Optimizer:
    if isinstance(opt, _Optimizer):
        return opt
    if hasattr(opt, "apply_gradients") and hasattr(opt, "get_config"):
        raise ValueError("Should use optimizer in keras.ipu.optimizers to wrap Keras optimizers.")
    raise TypeError(f"{opt} is not a TensorFlow optimizer.")


def mean_over_replicas(gradient: tf.Tensor) -> tf.Tensor:
    """A gradient averaged over the replicas."""
    return mark_like("cross_replica_mean", tf.convert_to_tensor(gradient), group=None)


class IpuOptimizer(_Optimizer):  # type: ignore[misc]
    """An optimizer that passes everything on to ``opt``."""

    def __init__(self, opt: tf.compat.v1.train.Optimizer, name: str = "IpuOptimizer") -> None:
        super().__init__(False, name)
        self._opt = _checked_optimizer(opt)

    def compute_gradients(
        self, loss: tf.Tensor, var_list: Sequence[tf.Variable] | None = None, **kwargs: Any
    ) -> GradientPairs:
        """The result of the wrapped optimizer's method."""
        return list(self._opt.compute_gradients(loss, var_list=var_list, **kwargs))

    def apply_gradients(
        self, grads_and_vars: GradientPairs, global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation:
        """The result of the wrapped optimizer's method."""
        return self._opt.apply_gradients(grads_and_vars, global_step, name)

    def get_slot(self, *args: Any, **kwargs: Any) -> tf.Variable | None:
        """The result of the wrapped optimizer's method."""
        return self._opt.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> list[str]:
        """The result of the wrapped optimizer's method."""
        return list(self._opt.get_slot_names(*args, **kwargs))

    def variables(self) -> list[tf.Variable]:
        """The result of the wrapped optimizer's method."""
        return list(self._opt.variables())


class CrossReplicaOptimizer(IpuOptimizer):
    """Averages gradients over the replicas when they are applied."""

    def __init__(self, opt: tf.compat.v1.train.Optimizer, name: str = "CrossReplicaOptimizer") -> None:
        super().__init__(opt, name)

    def apply_gradients(
        self, grads_and_vars: GradientPairs, global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation:
        """Average, then apply."""
        pairs = [(None if g is None else mean_over_replicas(g), v) for g, v in grads_and_vars]
        return self._opt.apply_gradients(pairs, global_step, name)


class GradientAccumulationOptimizerV2(IpuOptimizer):
    """One update with the gradients of ``num_mini_batches`` iterations of a loop."""

    _reduce: Callable[[tf.Tensor], tf.Tensor] = staticmethod(lambda gradient: gradient)

    def __init__(
        self,
        opt: tf.compat.v1.train.Optimizer,
        num_mini_batches: int,
        offload_weight_update_variables: bool | None = None,
        replicated_optimizer_state_sharding: bool = False,
        dtype: AccumulatorType = None,
        reduction_method: GradientAccumulationReductionMethod | str = SUM,
        name: str = "GradientAccumulationOptimizerV2",
    ) -> None:
        super().__init__(opt, name)
        if num_mini_batches < 1:
            raise ValueError("num_mini_batches must be a positive number.")
        self._accumulation = Accumulation(num_mini_batches, reduction_method, dtype)
        self._storage = {
            "offload_weight_update_variables": offload_weight_update_variables,
            "replicated_optimizer_state_sharding": replicated_optimizer_state_sharding,
        }
        check_sharded_state(self._storage)

    def apply_gradients(
        self, grads_and_vars: GradientPairs, global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation:
        """Add the gradients, and update after the last of the mini-batches."""
        program = innermost_program()
        if program is None or program.name != "loop_body":
            raise tf.errors.FailedPreconditionError(
                None, None, "Detected a gradient accumulation operation which is not inside a training loop."
            )
        program.accumulation = self._accumulation.count
        if pipeline_of(program) is None:
            shape_pipeline(
                program,
                PipelineShape(self._accumulation.count, None, (0,), storage=state_storage(self._storage)),
            )

        def update(pairs: GradientPairs) -> tf.Operation:
            return self._opt.apply_gradients(pairs, global_step, name)

        inner = self._opt
        while hasattr(inner, "_opt"):
            inner = inner._opt
        with tf.init_scope():
            inner._create_slots([v for g, v in grads_and_vars if g is not None])
        return self._accumulation.apply(list(grads_and_vars), update, self._reduce)


class CrossReplicaGradientAccumulationOptimizerV2(GradientAccumulationOptimizerV2):
    """Accumulates on each replica, then averages over the replicas."""

    _reduce = staticmethod(mean_over_replicas)

    def __init__(
        self, opt: tf.compat.v1.train.Optimizer, num_mini_batches: int, *args: Any, **kwargs: Any
    ) -> None:
        kwargs.setdefault("name", "CrossReplicaGradientAccumulationOptimizerV2")
        super().__init__(opt, num_mini_batches, *args, **kwargs)


class GradientAccumulationOptimizer(GradientAccumulationOptimizerV2):
    """The first version: the sum, for plain and momentum descent."""

    def __init__(
        self,
        opt: tf.compat.v1.train.Optimizer,
        num_mini_batches: int,
        verify_usage: bool = True,
        name: str = "GradientAccumulationOptimizer",
    ) -> None:
        kinds = (tf.compat.v1.train.GradientDescentOptimizer, tf.compat.v1.train.MomentumOptimizer)
        inner = opt._opt if isinstance(opt, ShardedOptimizer) else opt
        if verify_usage and type(inner) not in kinds:
            raise ValueError(
                f"Only GradientDescentOptimizer and MomentumOptimizer can be wrapped, not {type(opt)}."
            )
        super().__init__(opt, num_mini_batches, name=name)


class CrossReplicaGradientAccumulationOptimizer(GradientAccumulationOptimizer):
    """`GradientAccumulationOptimizer` with the gradients of an update averaged over the replicas."""

    _reduce = staticmethod(mean_over_replicas)


class MapGradientOptimizer(IpuOptimizer):
    """Gradients are what ``gradient_mapping_function(gradient, variable)`` makes of them."""

    def __init__(
        self,
        wrapped_optimizer: tf.compat.v1.train.Optimizer,
        gradient_mapping_function: Callable[[tf.Tensor, tf.Variable], tf.Tensor],
        name: str = "MapGradientOptimizer",
    ) -> None:
        super().__init__(wrapped_optimizer, name)
        self._map = gradient_mapping_function

    def compute_gradients(self, *args: Any, **kwargs: Any) -> GradientPairs:
        """The wrapped optimizer's, mapped."""
        pairs = self._opt.compute_gradients(*args, **kwargs)
        return [(g if g is None else self._map(g, v), v) for g, v in pairs]


class ShardedOptimizer(IpuOptimizer):
    """The wrapped optimizer: where gradients are computed changes no numbers."""

    def __init__(self, optimizer: tf.compat.v1.train.Optimizer) -> None:
        super().__init__(optimizer, "ShardedOptimizer")
