"""The names of optimizers that programs for IPUs were written with, in Keras of today.

``keras.optimizers.Adam`` was what Keras now calls ``keras.optimizers.legacy.Adam``. Gradient accumulation changes that
family, so the plain names, and names given as strings, mean it again.
"""

from __future__ import annotations

import importlib

from podrun.tensorflow.keras.accumulating_optimizers import (
    Replacement,
    accumulating_families,
    replace_method,
)

OPTIMIZER_MODULES = (
    "tf_keras.optimizers",
    "tf_keras.api._v2.keras.optimizers",
    "tensorflow.keras.optimizers",
)
"""The modules in which programs find optimizers."""
SCALING_MODULES = tuple(name.replace(".optimizers", ".mixed_precision") for name in OPTIMIZER_MODULES)
"""The modules in which programs find the optimizer that scales losses."""
OPTIMIZER_NAMES = ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "Optimizer", "RMSprop", "SGD")
"""The names that both families have."""


def install_optimizer_names() -> None:
    """Let the plain names mean the family of the SDK's TensorFlow. AdamW and others of the new family alone stay."""
    source = importlib.import_module("tf_keras.src.optimizers")
    legacy = importlib.import_module("tf_keras.optimizers.legacy")
    plain_get = source.get
    known = {name.lower() for name in OPTIMIZER_NAMES}

    def get(identifier: object, **kwargs: object) -> object:
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
    scaled = accumulating_families()[1]
    replace_method(type(scaled), "__call__", _scaling_optimizer)
    replace_method(type(scaled), "__instancecheck__", _is_scaling)
    for name in SCALING_MODULES:
        importlib.import_module(name).LossScaleOptimizer = scaled  # type: ignore[attr-defined]


def _scaling_optimizer(
    kind: type, plain: Replacement, inner: object, *args: object, **kwargs: object
) -> object:
    """Make an optimizer that scales losses. The class that programs name is that of legacy optimizers, as in the SDK's
    Keras, so that they can derive from it; it makes the other one where the inner optimizer is of the new family.
    """
    legacy, scaled = accumulating_families()
    if kind is scaled and not isinstance(inner, legacy):
        kind = importlib.import_module(scaled.__module__).BaseLossScaleOptimizer
    return plain(kind, inner, *args, **kwargs)


def _is_scaling(kind: type, plain: Replacement, optimizer: object) -> bool:
    """Whether ``optimizer`` is an instance of a class that scales losses. Keras' newer loss scaling class counts for
    legacy optimizers too, as in Keras.
    """
    _, scaled = accumulating_families()
    if kind is scaled:
        kind = importlib.import_module(scaled.__module__).BaseLossScaleOptimizer
    return bool(plain(kind, optimizer))
