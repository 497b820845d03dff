"""The names of Keras' optimizers, as they were in the SDK's TensorFlow.

Programs for IPUs were written when ``keras.optimizers.Adam`` was what Keras now calls ``keras.optimizers.legacy.Adam``.
Gradient accumulation changes that family, so the plain names, and names given as strings, mean it again.
"""

from __future__ import annotations

import importlib
from typing import Any

OPTIMIZER_MODULES = (
    "tf_keras.optimizers",
    "tf_keras.api._v2.keras.optimizers",
    "tensorflow.keras.optimizers",
)
"""The modules in which programs find optimizers."""
OPTIMIZER_NAMES = ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "Optimizer", "RMSprop", "SGD")
"""The names that both families have."""


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
