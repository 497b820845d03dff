"""Keras optimizers of the SDK whose state and arithmetic have types of their own: Adam, LAMB and SGD.

Formulas: Kingma and Ba, Adam, 2015; You et al., Large Batch Optimization for Deep Learning (LAMB), 2020; Keras' SGD.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf
from tf_keras.optimizers.legacy import Optimizer
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

    def typed_slot(self, variable: tf.Variable, name: str, dtype: tf.DType | None) -> None:
        """Make a slot of zeros; None: of the variable's type."""
        key = variable._unique_id
        slots = self._slots.setdefault(key, {})
        if name in slots:
            return
        with tf.init_scope(), tf.distribute.get_strategy().extended.colocate_vars_with(variable):
            slot = tf.Variable(
                tf.zeros(variable.shape, dtype or variable.dtype.base_dtype),
                trainable=False,
                name=f"{variable._shared_name}/{name}",
            )
        slots[name] = slot
        self._restore_slot_variable(slot_name=name, variable=variable, slot_variable=slot)
        self._weights.append(slot)

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
        """Subtract a step from a variable, and write its slots."""
        new = tf.cast(variable, self.opt_dtypes[0]) - step
        writes = [self.write_slot(variable, name, value) for name, value in slots.items()]
        return tf.group(variable.assign(tf.cast(new, variable.dtype), read_value=False), *writes)


class AdamIpuOptimizer(IpuOptimizerBase):
    """Keras' Adam with moments of the types ``m_dtype``, ``v_dtype`` and ``vhat_dtype``. ``debiasing``: whether moments
    are corrected for their start at zero.
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
        super().__init__(name, **kwargs)  # type: ignore[arg-type]
        self._set_hyper("learning_rate", kwargs.get("lr", learning_rate))
        self._set_hyper("decay", self._initial_decay)
        self._set_hyper("beta_1", beta_1)
        self._set_hyper("beta_2", beta_2)
        self.epsilon, self.amsgrad, self.debiasing = epsilon, amsgrad, debiasing
        self.m_dtype, self.v_dtype, self.vhat_dtype = m_dtype, v_dtype, vhat_dtype

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        for variable in var_list:
            self.typed_slot(variable, "m", self.m_dtype)
        for variable in var_list:
            self.typed_slot(variable, "v", self.v_dtype)
        for variable in var_list if self.amsgrad else ():
            self.typed_slot(variable, "vhat", self.vhat_dtype)

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: object = None
    ) -> tf.Operation:
        first, second = self._moments(tf.cast(grad, self.opt_dtypes[0]), var)
        slots, rate, most = {"m": first, "v": second}, self._rate(), second
        if self.debiasing:
            rate = rate * tf.sqrt(1 - self._power("beta_2")) / (1 - self._power("beta_1"))
        if self.amsgrad:
            most = slots["vhat"] = tf.maximum(self.read_slot(var, "vhat"), second)
        return self._update(var, rate * first / (tf.sqrt(most) + self.epsilon), slots)

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        return {
            **super().get_config(), "learning_rate": self._serialize_hyperparameter("learning_rate"),
            "decay": self._initial_decay, "beta_1": self._serialize_hyperparameter("beta_1"),
            "beta_2": self._serialize_hyperparameter("beta_2"), "epsilon": self.epsilon, "amsgrad": self.amsgrad,
            "debiasing": self.debiasing, "m_dtype": self.m_dtype, "v_dtype": self.v_dtype,
            "vhat_dtype": self.vhat_dtype,
        }  # fmt: skip


class LAMBIpuOptimizer(IpuOptimizerBase):
    """LAMB: Adam's step, with weight decay, as long as the weights' norm says. Names that match a pattern of
    ``exclude_from_weight_decay`` or ``exclude_from_layer_adaptation`` go without.
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
        self._set_hyper("learning_rate", kwargs.get("lr", learning_rate))
        self._set_hyper("decay", self._initial_decay)
        self._set_hyper("beta_1", beta_1)
        self._set_hyper("beta_2", beta_2)
        self._set_hyper("weight_decay_rate", weight_decay_rate)
        self.epsilon, self.debiasing, self.weight_norm_clip = epsilon, debiasing, weight_norm_clip
        self.m_dtype, self.v_dtype = m_dtype, v_dtype
        self.exclude_from_weight_decay = list(exclude_from_weight_decay or [])
        adapted = exclude_from_layer_adaptation
        self.exclude_from_layer_adaptation = list(
            self.exclude_from_weight_decay if adapted is None else adapted
        )

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        for variable in var_list:
            self.typed_slot(variable, "m", self.m_dtype)
        for variable in var_list:
            self.typed_slot(variable, "v", self.v_dtype)

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: object = None
    ) -> tf.Operation:
        dtype = self.opt_dtypes[0]
        first, second = self._moments(tf.cast(grad, dtype), var)
        unbiased, spread = first, second
        if self.debiasing:
            unbiased, spread = first / (1 - self._power("beta_1")), second / (1 - self._power("beta_2"))
        step = unbiased / (tf.sqrt(spread) + self.epsilon)
        weights = tf.cast(var, dtype)
        name = var.name.removesuffix(":0")
        if not _matches(name, self.exclude_from_weight_decay):
            step += self._get_hyper("weight_decay_rate", dtype) * weights
        ratio = tf.constant(1.0, dtype)
        if not _matches(name, self.exclude_from_layer_adaptation):
            length, taken = (tf.sqrt(tf.reduce_sum(tf.square(t))) for t in (weights, step))
            if self.weight_norm_clip is not None:
                length = tf.minimum(length, tf.cast(self.weight_norm_clip, dtype))
            safe = tf.where(taken > 0, taken, tf.ones_like(taken))
            ratio = tf.where((length > 0) & (taken > 0), length / safe, tf.ones_like(length))
        return self._update(var, ratio * self._rate() * step, {"m": first, "v": second})

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


class SGDIpuOptimizer(IpuOptimizerBase):
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
        super().__init__(name, **kwargs)  # type: ignore[arg-type]
        if not 0 <= momentum <= 1:
            raise ValueError("`momentum` must be between [0, 1].")
        self._set_hyper("learning_rate", kwargs.get("lr", learning_rate))
        self._set_hyper("decay", self._initial_decay)
        self._set_hyper("momentum", momentum)
        self._has_momentum, self.nesterov = momentum > 0, nesterov
        self.momentum_accum_dtype = momentum_accum_dtype

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        for variable in var_list if self._has_momentum else ():
            self.typed_slot(variable, "momentum", self.momentum_accum_dtype)

    def _resource_apply_dense(
        self, grad: tf.Tensor, var: tf.Variable, apply_state: object = None
    ) -> tf.Operation:
        step = self._rate() * tf.cast(grad, self.opt_dtypes[0])
        if not self._has_momentum:
            return self._update(var, step, {})
        momentum = self._get_hyper("momentum", self.opt_dtypes[0])
        speed = self.read_slot(var, "momentum") * momentum - step
        taken = step - speed * momentum if self.nesterov else -speed
        return self._update(var, taken, {"momentum": speed})

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        return {
            **super().get_config(), "learning_rate": self._serialize_hyperparameter("learning_rate"),
            "decay": self._initial_decay, "momentum": self._serialize_hyperparameter("momentum"),
            "nesterov": self.nesterov, "momentum_accum_dtype": self.momentum_accum_dtype,
        }  # fmt: skip
