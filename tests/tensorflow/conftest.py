"""TensorFlow with podrun's front end inside this process, and as it was before afterwards."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
"""TensorFlow reads it once, when the first test of the process imports it: whichever tests run, tf.keras is Keras 2."""


def _changed_by_the_front_end() -> list[tuple[Any, tuple[str, ...]]]:
    """What podrun changes in TensorFlow and Keras: each owner with the names that it changes or adds."""
    import tensorflow as tf

    from podrun.private_apis.tensorflow import private_module
    from podrun.tensorflow.execution.eager_devices import function_type
    from podrun.tensorflow.execution.placed_devices import changed_classes
    from podrun.tensorflow.keras.accumulating_optimizers import (
        OPTIMIZER_MODULES,
        OPTIMIZER_NAMES,
        SCALING_MODULES,
    )
    from podrun.tensorflow.keras.extensions import ADDED

    def load(name: str) -> Any:
        return importlib.import_module(name)

    model = load("tf_keras.src.engine.training").Model
    return [
        (private_module("ops.gradients_util"), ("_GradientsHelper",)),
        (tf.GradientTape, ("gradient",)),
        (private_module("client.session").BaseSession, ("run",)),
        *changed_classes(),
        (function_type(), ("__call__",)),
        (model, ADDED),
        (load("tf_keras.src.optimizers"), ("get",)),
        *((load(name), (*OPTIMIZER_NAMES, "get")) for name in OPTIMIZER_MODULES),
        *((load(name), ("LossScaleOptimizer",)) for name in SCALING_MODULES),
    ]


@pytest.fixture(scope="module")
def ipu_device() -> Iterator[None]:
    """One IPU with the front end; afterwards TensorFlow is as it was, and the IPU is given back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_USE_LEGACY_KERAS", "1")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
        places = _changed_by_the_front_end()
        before = [(owner, name, vars(owner).get(name)) for owner, names in places for name in names]
        from podrun.tensorflow.execution.device_table import DEVICES
        from podrun.tensorflow.keras.accumulating_optimizers import REPLACED
        from podrun.tensorflow.keras.extensions import install_keras
        from podrun.tensorflow.sdk.config import IPUConfig
        from podrun.tensorflow.sdk.scopes import install_front_end

        install_front_end()
        install_keras()
        config = IPUConfig()
        config.auto_select_ipus = 1
        config.configure_ipu_system()
        try:
            yield
        finally:
            DEVICES.release()
            before += reversed(REPLACED)
            REPLACED.clear()
            for owner, name, value in before:
                if value is not None:
                    setattr(owner, name, value)
                elif name in vars(owner):
                    delattr(owner, name)


@pytest.fixture(scope="module")
def ipu(ipu_device: None) -> Iterator[Any]:
    """``tensorflow.python.ipu``, as programs import it."""
    from podrun.compat._tensorflow import ROOT, SdkFinder

    finder = SdkFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(ROOT)
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n == ROOT or n.startswith(ROOT + ".")]:
            del sys.modules[name]
