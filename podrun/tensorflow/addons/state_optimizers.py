"""Keras optimizers of the SDK whose state and arithmetic have types of their own: Adam, LAMB and SGD.

Formulas: Kingma and Ba, Adam, 2015; You et al., Large Batch Optimization for Deep Learning (LAMB), 2020; Keras' SGD.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf
from tf_keras import initializers
from tf_keras.optimizers.legacy import SGD, Adam, Optimizer
from tf_keras.optimizers.schedules import LearningRateSchedule

Rate: TypeAlias = float | LearningRateSchedule


class IpuOptimizerBase(Optimizer):  # type: ignore[misc]
    """Keras' optimizers with slots of any type. ``optimizer_compute_precisions``: the type in which updates are
    computed, the first one; ``outline_apply_gradients`` changes no numbers.
    """

    def __init__(
        self,
        name: str,
        optimizer_compute_precisions: Sequence[tf.DType] = (tf.float32,),
        outline_apply_gradients: bool = False,
        outline_apply_gradients_kwargs: dict[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(name, **kwargs)
        self.opt_dtypes = tuple(optimizer_compute_precisions)
        self.outline_apply_gradients = outline_apply_gradients
        self.outline_apply_gradients_kwargs = dict(outline_apply_gradients_kwargs or {})

    def get_slot_dtype(self, var: tf.Variable, slot_name: str) -> tf.DType | None:
        """The type of a slot; None: the variable's. For subclasses."""
        return var.dtype

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        return {
            **super().get_config(), "optimizer_compute_precisions": self.opt_dtypes,
            "outline_apply_gradients": self.outline_apply_gradients,
            "outline_apply_gradients_kwargs": self.outline_apply_gradients_kwargs,
        }  # fmt: skip

    def add_slot(
        self,
        var: tf.Variable,
        slot_name: str,
        initializer: object = "zeros",
        shape: object = None,
        dtype: tf.DType | None = None,
    ) -> tf.Variable:
        """A slot of a variable, made if it is not there. Its type: ``dtype``, else what `get_slot_dtype` says, else the
        variable's.
        """
        if slot_name not in self._slot_names:
            self._slot_names.append(slot_name)
        slots = self._slots.setdefault(var._unique_id, {})
        if slot_name not in slots:
            kind = tf.as_dtype(dtype or self.get_slot_dtype(var, slot_name) or var.dtype).base_dtype
            with tf.init_scope(), tf.distribute.get_strategy().extended.colocate_vars_with(var):
                value = initializers.get(initializer)(var.shape if shape is None else shape, dtype=kind)
                slot = tf.Variable(value, trainable=False, name=f"{var._shared_name}/{slot_name}")
            slots[slot_name] = slot
            self._restore_slot_variable(slot_name=slot_name, variable=var, slot_variable=slot)
            self._weights.append(slot)
        return slots[slot_name]

    def add_slot_with_dtype(
        self, var: tf.Variable, slot_name: str, dtype: tf.DType | None, initializer: object = "zeros"
    ) -> tf.Variable:
        """A slot of a type."""
        return self.add_slot(var, slot_name, initializer, dtype=dtype)

    def read_slot(self, variable: tf.Variable, name: str) -> tf.Tensor:
        """A slot in the type of the computation."""
        return tf.cast(self.get_slot(variable, name), self.opt_dtypes[0])

    def write_slot(self, variable: tf.Variable, name: str, value: tf.Tensor) -> tf.Operation:
        """Give a slot a new value."""
        slot = self.get_slot(variable, name)
        return slot.assign(tf.cast(value, slot.dtype), read_value=False)

    def _power(self, name: str) -> tf.Tensor:
        dtype = self.opt_dtypes[0]
        step = tf.cast(self.iterations + 1, tf.float32)
        return tf.cast(tf.pow(self._get_hyper(name, tf.float32), step), dtype)

    def _rate(self) -> tf.Tensor:
        return tf.cast(self._decayed_lr(tf.float32), self.opt_dtypes[0])

    def _unbiased(self, first: tf.Tensor, second: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Moving averages, corrected for their start at zero."""
        return first / (1 - self._power("beta_1")), second / (1 - self._power("beta_2"))

    def _moments(self, gradient: tf.Tensor, variable: tf.Variable) -> tuple[tf.Tensor, tf.Tensor]:
        """The moving averages of a gradient and of its square."""
        dtype = self.opt_dtypes[0]
        beta_1, beta_2 = self._get_hyper("beta_1", dtype), self._get_hyper("beta_2", dtype)
        first = self.read_slot(variable, "m") * beta_1 + gradient * (1 - beta_1)
        second = self.read_slot(variable, "v") * beta_2 + tf.square(gradient) * (1 - beta_2)
        return first, second

    def _resource_apply_sparse(
        self, grad: tf.Tensor, var: tf.Variable, indices: tf.Tensor, **kwargs: object
    ) -> tf.Operation:
        whole = tf.IndexedSlices(grad, indices, tf.constant(var.shape.as_list(), tf.int64))
        return self._resource_apply_dense(tf.convert_to_tensor(whole), var, **kwargs)

    def _update(self, variable: tf.Variable, step: tf.Tensor, slots: dict[str, tf.Tensor]) -> tf.Operation:
        """Subtract a step from a variable in the variable's type, and write its slots."""
        writes = [self.write_slot(variable, name, value) for name, value in slots.items()]
        return tf.group(variable.assign_sub(tf.cast(step, variable.dtype), read_value=False), *writes)


class AdamIpuOptimizer(Adam, IpuOptimizerBase):  # type: ignore[misc]
    """Keras' Adam with moments of the types ``m_dtype``, ``v_dtype`` and ``vhat_dtype``. ``debiasing``: whether moments
    are corrected for their start at zero, before ``epsilon`` is added and before ``amsgrad`` takes the largest.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str = "Adam",
        m_dtype: tf.DType | None = None,
        v_dtype: tf.DType | None = None,
        vhat_dtype: tf.DType | None = None,
        debiasing: bool = True,
        **kwargs: object,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, name, **kwargs)  # type: ignore[arg-type, call-arg]
        self.m_dtype, self.v_dtype, self.vhat_dtype = m_dtype, v_dtype, vhat_dtype
        self.debiasing = debiasing

    def get_slot_dtype(self, var: tf.Variable, slot_name: str) -> tf.DType | None:
        """The type of a moment."""
        return {"m": self.m_dtype, "v": self.v_dtype, "vhat": self.vhat_dtype}[slot_name]

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        for name in ("m", "v", *(["vhat"] if self.amsgrad else [])):
            for variable in var_list:
                self.add_slot(variable, name)

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: object = None
    ) -> tf.Operation:
        first, second = self._moments(tf.cast(grad, self.opt_dtypes[0]), var)
        slots = {"m": first, "v": second}
        unbiased, spread = self._unbiased(first, second) if self.debiasing else (first, second)
        if self.amsgrad:
            spread = slots["vhat"] = tf.maximum(self.read_slot(var, "vhat"), spread)
        return self._update(var, self._rate() * unbiased / (tf.sqrt(spread) + self.epsilon), slots)

    _resource_apply_sparse = IpuOptimizerBase._resource_apply_sparse

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        return {
            **super().get_config(), "debiasing": self.debiasing, "m_dtype": self.m_dtype, "v_dtype": self.v_dtype,
            "vhat_dtype": self.vhat_dtype,
        }  # fmt: skip


class LAMBIpuOptimizer(IpuOptimizerBase):
    """LAMB: Adam's step, with weight decay, as long as the weights' norm says. Names that match a pattern of
    ``exclude_from_weight_decay`` or ``exclude_from_layer_adaptation`` go without. The second compute precision is that
    of the last product.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay_rate: float = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        name: str = "LAMB",
        debiasing: bool = True,
        m_dtype: tf.DType | None = None,
        v_dtype: tf.DType | None = None,
        weight_norm_clip: float | None = None,
        optimizer_compute_precisions: Sequence[tf.DType] = (tf.float32, tf.float32),
        **kwargs: object,
    ) -> None:
        super().__init__(name, optimizer_compute_precisions, **kwargs)  # type: ignore[arg-type]
        if len(self.opt_dtypes) != 2:
            raise ValueError(
                "Must provide a list of two elements for the optimizer compute precision. The final stage of the "
                "weight update can be done in a different precision to the initial stage."
            )
        self._set_hyper("learning_rate", kwargs.get("lr", learning_rate))
        self._set_hyper("decay", self._initial_decay)
        self._set_hyper("beta_1", beta_1)
        self._set_hyper("beta_2", beta_2)
        self._set_hyper("weight_decay_rate", weight_decay_rate)
        self.epsilon, self.debiasing, self.weight_norm_clip = epsilon, debiasing, weight_norm_clip
        self.m_dtype, self.v_dtype = m_dtype, v_dtype
        self.exclude_from_weight_decay = list(exclude_from_weight_decay or [])
        self.exclude_from_layer_adaptation = list(exclude_from_layer_adaptation or [])

    def get_slot_dtype(self, var: tf.Variable, slot_name: str) -> tf.DType | None:
        """The type of a moment."""
        return self.m_dtype if slot_name == "m" else self.v_dtype

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        for name in ("m", "v"):
            for variable in var_list:
                self.add_slot(variable, name)

    def _do_use_weight_decay(self, param_name: str) -> bool:
        return not _matches(param_name, self.exclude_from_weight_decay)

    def _do_layer_adaptation(self, param_name: str) -> bool:
        return not _matches(param_name, self.exclude_from_layer_adaptation)

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: object = None
    ) -> tf.Operation:
        dtype = self.opt_dtypes[0]
        first, second = self._moments(tf.cast(grad, dtype), var)
        unbiased, spread = self._unbiased(first, second) if self.debiasing else (first, second)
        step = unbiased / (tf.sqrt(spread) + self.epsilon)
        weights = tf.cast(var, dtype)
        name = var.name.removesuffix(":0")
        if self._do_use_weight_decay(name):
            step += self._get_hyper("weight_decay_rate", dtype) * weights
        ratio = tf.constant(1.0, dtype)
        if self._do_layer_adaptation(name):
            length, taken = (tf.sqrt(tf.reduce_sum(tf.square(t))) for t in (weights, step))
            if self.weight_norm_clip is not None:
                length = tf.minimum(length, tf.cast(self.weight_norm_clip, dtype))
            safe = tf.compat.v2.where(taken > 0, taken, tf.ones_like(taken))
            ratio = tf.compat.v2.where((length > 0) & (taken > 0), length / safe, tf.ones_like(length))
        factor, wanted = (tf.cast(t, self.opt_dtypes[1]) for t in (ratio * self._rate(), step))
        return self._update(var, factor * wanted, {"m": first, "v": second})

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        return {
            **super().get_config(), "learning_rate": self._serialize_hyperparameter("learning_rate"),
            "decay": self._initial_decay, "beta_1": self._serialize_hyperparameter("beta_1"),
            "beta_2": self._serialize_hyperparameter("beta_2"), "epsilon": self.epsilon,
            "weight_decay_rate": self._serialize_hyperparameter("weight_decay_rate"),
            "exclude_from_weight_decay": self.exclude_from_weight_decay,
            "exclude_from_layer_adaptation": self.exclude_from_layer_adaptation, "debiasing": self.debiasing,
            "m_dtype": self.m_dtype, "v_dtype": self.v_dtype, "weight_norm_clip": self.weight_norm_clip,
        }  # fmt: skip


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


class SGDIpuOptimizer(SGD, IpuOptimizerBase):  # type: ignore[misc]
    """Keras' SGD with a momentum of the type ``momentum_accum_dtype``."""

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        name: str = "SGD",
        momentum_accum_dtype: tf.DType | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(learning_rate, momentum, nesterov, name, **kwargs)  # type: ignore[arg-type]
        self.momentum_accum_dtype = momentum_accum_dtype

    def get_slot_dtype(self, var: tf.Variable, slot_name: str) -> tf.DType | None:
        """The type of the momentum."""
        return self.momentum_accum_dtype

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        for variable in var_list if self._momentum else ():
            self.add_slot(variable, "momentum")

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: object = None
    ) -> tf.Operation:
        step = self._rate() * tf.cast(grad, self.opt_dtypes[0])
        if not self._momentum:
            return self._update(var, step, {})
        momentum = self._get_hyper("momentum", self.opt_dtypes[0])
        speed = self.read_slot(var, "momentum") * momentum - step
        taken = step - speed * momentum if self.nesterov else -speed
        return self._update(var, taken, {"momentum": speed})

    _resource_apply_sparse = IpuOptimizerBase._resource_apply_sparse
    _resource_apply_sparse_duplicate_indices = Optimizer._resource_apply_sparse_duplicate_indices

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        return {**super().get_config(), "momentum_accum_dtype": self.momentum_accum_dtype}
