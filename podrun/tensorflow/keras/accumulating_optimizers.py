"""Keras' optimizers for models on IPUs: gradient accumulation, and the names of the SDK's TensorFlow.

Programs for IPUs were written when ``keras.optimizers.Adam`` was what Keras now calls ``keras.optimizers.legacy.Adam``.
Gradient accumulation changes that family, so the plain names, and names given as strings, mean it again.
"""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from podrun.tensorflow.sdk.gradient_accumulation import Accumulation
from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1, reduced_over_replicas

OPTIMIZER_MODULES = (
    "tf_keras.optimizers",
    "tf_keras.api._v2.keras.optimizers",
    "tensorflow.keras.optimizers",
)
"""The modules in which programs find optimizers."""
OPTIMIZER_NAMES = ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "Optimizer", "RMSprop", "SGD")
"""The names that both families have."""
ACCUMULATING: dict[int, Accumulation] = {}
"""Optimizer -> the accumulation of the model whose step is being traced."""


def on_ipu(model: Any) -> bool:
    """Whether a model was made under an IPU strategy with the extensions."""
    strategy = getattr(model, "_distribution_strategy", None) or getattr(model, "distribute_strategy", None)
    return isinstance(strategy, IPUStrategyV1) and strategy._enable_keras_extensions


def replace_method(owner: Any, name: str, function: Any) -> None:
    """Let ``function(self, plain, ...)`` stand for a method, which it gets as ``plain``."""
    plain = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, plain, *args, **kwargs)

    call.__name__, call.__doc__ = name, plain.__doc__
    setattr(owner, name, call)


def install_accumulation() -> None:
    """Optimizers accumulate where the model that is being traced says so."""
    legacy = importlib.import_module("tf_keras.src.optimizers.legacy.optimizer_v2").OptimizerV2

    def apply_gradients(self: Any, plain: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        accumulation = ACCUMULATING.get(id(self))
        if accumulation is None:
            return plain(self, grads_and_vars, *args, **kwargs)
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        with tf.init_scope():
            _ = self.iterations
            self._create_all_weights([v for _, v in pairs])
        kwargs["experimental_aggregate_gradients"] = False

        def total(gradient: Any) -> Any:
            return reduced_over_replicas(tf.distribute.ReduceOp.SUM, gradient)

        return accumulation.apply(pairs, lambda ready: plain(self, ready, *args, **kwargs), total)

    replace_method(legacy, "apply_gradients", apply_gradients)
    engine = importlib.import_module("tf_keras.src.engine.training")

    def train_step(self: Any, plain: Any, data: Any) -> Any:
        accumulation = getattr(self, "_ipu_accumulation", None) if on_ipu(self) else None
        if accumulation is None:
            return plain(self, data)
        if not isinstance(self.optimizer, legacy) or hasattr(self.optimizer, "inner_optimizer"):
            raise NotImplementedError(
                f"podrun does not accumulate gradients for {type(self.optimizer).__name__}: use an optimizer of "
                "keras.optimizers.legacy, or set no gradient accumulation."
            )
        ACCUMULATING[id(self.optimizer)] = accumulation
        try:
            return plain(self, data)
        finally:
            del ACCUMULATING[id(self.optimizer)]

    replace_method(engine.Model, "train_step", train_step)


def install_optimizer_names() -> None:
    """Let the plain names mean the family of the SDK's TensorFlow. AdamW and others of the new family alone stay."""
    source = importlib.import_module("tf_keras.src.optimizers")
    legacy = importlib.import_module("tf_keras.optimizers.legacy")
    plain_get = source.get
    known = {name.lower() for name in OPTIMIZER_NAMES}

    def get(identifier: Any, **kwargs: Any) -> Any:
        if isinstance(identifier, str) and identifier.lower() in known:
            kwargs.setdefault("use_legacy_optimizer", True)
        return plain_get(identifier, **kwargs)

    get.__doc__ = plain_get.__doc__
    source.get = get  # type: ignore[attr-defined]
    for name in OPTIMIZER_MODULES:
        module = importlib.import_module(name)
        for optimizer in OPTIMIZER_NAMES:
            setattr(module, optimizer, getattr(legacy, optimizer))
        module.get = get  # type: ignore[attr-defined]
