"""``keras.ipu.optimizers``: optimizers of Keras that wrap another one. One accumulates gradients; two, of SDKs before
3.0, work on each gradient in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf
import tf_keras
from tf_keras.optimizers.legacy import Optimizer

from podrun.tensorflow.keras.accumulating_optimizers import (
    accumulated_update,
    takes_reduced,
    wrapped_update,
)
from podrun.tensorflow.sdk.gradient_accumulation import (
    Accumulation,
    AccumulatorType,
    GradientAccumulationReductionMethod,
    GradientPairs,
)
from podrun.tensorflow.sdk.pipeline_rules import ThreeState, check_sharded_state
from podrun.tensorflow.sdk.replica_ops import cross_replica_mean


class WrappedOptimizer(Optimizer):  # type: ignore[misc]
    """An optimizer that has its hyperparameters, slots and weights from another one."""

    def __init__(self, opt: Optimizer, name: str) -> None:
        if not isinstance(opt, Optimizer):
            raise ValueError(
                f"Expected `opt` to be an optimizer of Keras (OptimizerV2), not {type(opt).__name__}."
            )
        super().__init__(name)
        self._opt = opt

    @property
    def iterations(self) -> tf.Variable:
        """The updates that were made."""
        return self._opt.iterations

    @iterations.setter
    def iterations(self, variable: tf.Variable) -> None:
        self._opt.iterations = variable

    def variables(self) -> list[tf.Variable]:
        """The result of the wrapped optimizer's method."""
        variables: list[tf.Variable] = self._opt.variables()
        return variables

    @property
    def weights(self) -> list[tf.Variable]:
        """The result of the wrapped optimizer's method."""
        weights: list[tf.Variable] = self._opt.weights
        return weights

    def _create_all_weights(self, var_list: Sequence[tf.Variable]) -> None:
        self._opt._create_all_weights(var_list)

    def get_slot_names(self) -> list[str]:
        """The result of the wrapped optimizer's method."""
        return list(self._opt.get_slot_names())

    def get_slot(self, var: tf.Variable, slot_name: str) -> tf.Variable:
        """The result of the wrapped optimizer's method."""
        return self._opt.get_slot(var, slot_name)

    def __getattribute__(self, name: str) -> object:
        if name in ("lr", "learning_rate"):
            return getattr(object.__getattribute__(self, "_opt"), name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("lr", "learning_rate"):
            setattr(self._opt, name, value)
            return
        if name == "weights":
            raise AttributeError("can't set attribute 'weights': use `set_weights`")
        super().__setattr__(name, value)

    def get_gradients(self, loss: tf.Tensor, params: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """The result of the wrapped optimizer's method."""
        gradients: list[tf.Tensor] = self._opt.get_gradients(loss, params)
        return gradients

    def get_config(self) -> dict[str, object]:
        """The wrapped optimizer, as Keras writes it."""
        return {"opt": tf_keras.optimizers.serialize(self._opt), "name": self._name}

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], custom_objects: Mapping[str, object] | None = None
    ) -> WrappedOptimizer:
        """The optimizer of which `get_config` gave the configuration."""
        options = dict(config)
        return cls(inner_optimizer(options.pop("opt"), custom_objects or {}), **options)  # type: ignore[arg-type]


def inner_optimizer(opt: object, custom_objects: Mapping[str, object]) -> object:
    """The wrapped optimizer: the argument itself, or the one that a configuration describes."""
    if not isinstance(opt, dict):
        return opt
    name = str(opt["class_name"]).rpartition(">")[2]
    ours = (*WrappedOptimizer.__subclasses__(), *GradientWrapper.__subclasses__())
    kinds = {kind.__name__: kind for kind in ours}
    kind = kinds.get(name) or custom_objects.get(name) or getattr(tf_keras.optimizers.legacy, name, None)
    registered = kind or tf_keras.utils.get_registered_object(opt["class_name"])
    from_config: Callable[[object], object] = getattr(registered, "from_config")  # noqa: B009
    with tf_keras.utils.custom_object_scope(custom_objects):  # For what stands in that configuration.
        return from_config(opt["config"])


class KerasGradientAccumulation(WrappedOptimizer):
    """``GradientAccumulationOptimizer``: the wrapped optimizer updates once for ``num_mini_batches`` gradients, with
    their sum or mean, summed over replicas. It clips and transforms each of them. For one gradient it is the wrapped
    optimizer itself.
    """

    def __new__(
        cls, opt: Optimizer | None = None, num_mini_batches: int = 0, *_: object, **__: object
    ) -> KerasGradientAccumulation:
        """The wrapper, or the wrapped optimizer where nothing accumulates. Copies are created without arguments."""
        whole: KerasGradientAccumulation = super().__new__(cls)
        return opt if num_mini_batches == 1 and isinstance(opt, Optimizer) else whole

    def __init__(
        self,
        opt: Optimizer,
        num_mini_batches: int,
        offload_weight_update_variables: bool | str | None = None,
        replicated_optimizer_state_sharding: bool | str = False,
        dtype: AccumulatorType = None,
        reduction_method: str | GradientAccumulationReductionMethod = "SUM",
        name: str = "GradientAccumulationOptimizer",
        **kwargs: object,
    ) -> None:
        super().__init__(opt, name)
        if num_mini_batches < 1:
            raise ValueError("num_mini_batches must be a positive number.")
        self._options = {
            "num_mini_batches": num_mini_batches,
            "offload_weight_update_variables": offload_weight_update_variables,
            "replicated_optimizer_state_sharding": replicated_optimizer_state_sharding,
            "dtype": dtype,
            "reduction_method": reduction_method,
        }
        storage = {
            "offload_weight_update_variables": ThreeState.read(offload_weight_update_variables),
            "replicated_optimizer_state_sharding": bool(ThreeState.read(replicated_optimizer_state_sharding)),
        }
        check_sharded_state(storage)
        self._accumulation = Accumulation(
            num_mini_batches, reduction_method, dtype, storage, transforms_each=True
        )

    def _compute_gradients(self, *args: object, **kwargs: object) -> object:
        return self._opt._compute_gradients(*args, **kwargs)

    def apply_gradients(
        self,
        grads_and_vars: GradientPairs,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> object:
        """Accumulate, and update when the gradients are complete."""
        update = functools.partial(wrapped_update, self._opt)
        itself = not takes_reduced(self._opt)
        return accumulated_update(
            self._opt, self._accumulation, grads_and_vars, update, reduces_itself=itself
        )

    def get_config(self) -> dict[str, object]:
        """The wrapped optimizer, as Keras writes it, and the options."""
        return {**super().get_config(), **self._options}


_DELEGATED = (
    "_prepare", "_create_hypers", "_create_slots", "_transform_unaggregated_gradients", "_aggregate_gradients",
    "_transform_gradients", "add_slot",
)  # fmt: skip
"""Steps of an update that `GradientWrapper` leaves to the wrapped optimizer."""


class GradientWrapper(WrappedOptimizer):
    """A wrapper that changes each gradient just before the wrapped optimizer applies it, after the sum over replicas
    and the gradient transformers. Of several, the outermost is the first. On the host sparse gradients are made
    dense, as they are on IPUs.
    """

    def __init__(self, opt: Optimizer, name: str) -> None:
        whole = isinstance(opt, WrappedOptimizer) and not isinstance(opt, GradientWrapper)
        if whole or isinstance(opt, tf_keras.mixed_precision.LossScaleOptimizer):
            raise ValueError(
                f"{name} cannot wrap {type(opt).__name__}, which has no update of one gradient: let "
                f"{type(opt).__name__} wrap {name} instead."
            )
        super().__init__(opt, name)

    def changed_gradient(self, grad: tf.Tensor, var: tf.Variable) -> tf.Tensor:
        """What the wrapped optimizer applies for a gradient."""
        raise NotImplementedError

    def __getattribute__(self, name: str) -> object:
        if name in _DELEGATED:
            return getattr(object.__getattribute__(self, "_opt"), name)
        return super().__getattribute__(name)

    def _resource_apply_dense(
        self, grad: tf.Tensor, handle: tf.Variable, apply_state: Mapping[object, object] | None = None
    ) -> tf.Operation:
        state = {"apply_state": apply_state} if "apply_state" in self._opt._dense_apply_args else {}
        return self._opt._resource_apply_dense(self.changed_gradient(grad, handle), handle, **state)

    def _resource_apply_sparse(
        self,
        grad: tf.Tensor,
        handle: tf.Variable,
        indices: tf.Tensor,
        apply_state: Mapping[object, object] | None = None,
    ) -> tf.Operation:
        whole = tf.scatter_nd(tf.cast(indices, tf.int64)[:, None], grad, tf.shape(handle, tf.int64))
        return self._resource_apply_dense(whole, handle, apply_state)


class KerasCrossReplica(GradientWrapper):
    """``CrossReplicaOptimizer``: the mean of the gradients over replicas. Under an ``IPUStrategy`` Keras has summed
    them by then, so that it is the mean of equal values: the sum is applied, as without this wrapper.
    """

    def __init__(self, opt: Optimizer, name: str = "CrossReplicaOptimizer") -> None:
        super().__init__(opt, name)

    def changed_gradient(self, grad: tf.Tensor, var: tf.Variable) -> tf.Tensor:
        """The gradient averaged over all replicas."""
        return cross_replica_mean(grad)


class KerasMapGradient(GradientWrapper):
    """``MapGradientOptimizerInvertedChaining``: a function of the gradient and the variable."""

    def __init__(
        self,
        opt: Optimizer,
        gradient_mapping_function: Callable[[tf.Tensor, tf.Variable], tf.Tensor],
        name: str = "MapGradientOptimizerInvertedChaining",
    ) -> None:
        super().__init__(opt, name)
        if not callable(gradient_mapping_function):
            raise ValueError("gradient_mapping_function must be a callable.")
        self.gradient_mapping_function = gradient_mapping_function

    def changed_gradient(self, grad: tf.Tensor, var: tf.Variable) -> tf.Tensor:
        """The gradient as the program's function changes it."""
        return self.gradient_mapping_function(grad, var)

    def get_config(self) -> dict[str, object]:
        """The wrapped optimizer, as Keras writes it, and the function, of which files have the name."""
        return {**super().get_config(), "gradient_mapping_function": self.gradient_mapping_function}

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], custom_objects: Mapping[str, object] | None = None
    ) -> WrappedOptimizer:
        """The optimizer of which `get_config` gave the configuration. ValueError for the name of a function that the
        program has not made known.
        """
        function = config["gradient_mapping_function"]
        if not callable(function):
            written = (
                function.get("config") if isinstance(function, dict) else function
            )  # Inside another optimizer.
            name = written if isinstance(written, str) else "<lambda>"
            function = tf_keras.utils.get_registered_object(name, custom_objects)
            if function is None:
                raise ValueError(
                    f"{cls.__name__} was saved with the function `{name}`, which is not known here: give it as "
                    f"`custom_objects={{{name!r}: ...}}`, or decorate a named function with "
                    "`@keras.utils.register_keras_serializable()` before the model is saved."
                )
        return super().from_config({**config, "gradient_mapping_function": function}, custom_objects)


class FirstVersionOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of Keras with the methods of those of version 1 (``ipu_wrappers._KerasOptimizerWrapper``), which
    makes gradients of the weights of ``model``, or without a model of the variables that are asked for.
    """

    def __init__(self, model: tf_keras.Model | None, opt: Optimizer) -> None:
        super().__init__(use_locking=False, name="optimizer_shim")
        self._model, self._optimizer = model, opt

    def compute_gradients(
        self, loss: tf.Tensor, var_list: Sequence[tf.Variable] | None = None, **_: object
    ) -> GradientPairs:
        """Gradients and their variables. ValueError without a model and variables."""
        variables = var_list if self._model is None else self._model.trainable_weights
        if not variables:
            raise ValueError(
                "When _KerasOptimizerWrapper has been instantiated with it's model set to None, var_list must be "
                "provided."
            )
        if isinstance(self._optimizer, tf.compat.v1.train.Optimizer):
            return list(self._optimizer.compute_gradients(loss, variables))
        return list(zip(self._optimizer.get_gradients(loss, variables), variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: GradientPairs, global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation:
        """Update the variables with the Keras optimizer; returns its operation. ``global_step`` is not counted."""
        return self._optimizer.apply_gradients(grads_and_vars)
