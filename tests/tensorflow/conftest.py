"""TensorFlow with podrun's front end inside this process, and as it was before afterwards."""

from __future__ import annotations

import importlib
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.quick_programs import programs_of_tests_compile_quickly as programs_of_tests_compile_quickly

# What the user's environment says of programs is not what tests are about.
for _name in list(os.environ):
    if _name.startswith("POPDIST_") or _name in (
        "TF_POPLAR_FLAGS",
        "POPLAR_ENGINE_OPTIONS",
        "PODRUN_TENSORFLOW",
    ):
        del os.environ[_name]
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
"""TensorFlow reads it once, when the first test of the process imports it: whichever tests run, tf.keras is Keras 2."""


@pytest.fixture(scope="module", autouse=True)
def _leaves_no_temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the last test of a file that leaves folders where temporary files of this process go."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield
    assert sorted(path.name for path in folder.glob("tmp????????")) == [], "temporary folders are left"


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Each test draws from the same seed, whichever ran before; afterwards seeds are what they were."""
    if "tensorflow" not in sys.modules:
        yield
        return
    import tensorflow as tf

    from podrun.private_apis.tensorflow import private_module

    before = private_module("eager.context").global_seed()
    states = random.getstate(), np.random.get_state()
    random.seed(1)  # Keras takes seeds of initial weights from it.
    np.random.seed(1)
    tf.random.set_seed(1)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    tf.random.set_seed(before)


@pytest.fixture(autouse=True)
def _keeps_the_configuration(request: pytest.FixtureRequest) -> Iterator[None]:
    """The IPUs that a file's tests begin with are configured again after a test that configured others."""
    if "ipu_device" not in request.fixturenames:
        yield
        return
    from podrun.tensorflow.execution.device_table import DEVICES

    before = DEVICES.config, DEVICES.ipus, DEVICES.distributed
    yield
    if DEVICES.config is not before[0]:
        DEVICES.configure(*before)


def _changed_by_the_front_end() -> list[tuple[Any, tuple[str, ...]]]:
    """What podrun changes in TensorFlow and Keras: each owner with the names that it changes or adds."""
    import tensorflow as tf

    from podrun.compat._tensorflow_names import MOVED_NAMES
    from podrun.private_apis.tensorflow import private_module
    from podrun.tensorflow.execution.eager_devices import function_type
    from podrun.tensorflow.execution.placed_devices import changed_classes
    from podrun.tensorflow.keras.extensions import ADDED
    from podrun.tensorflow.keras.optimizer_names import OPTIMIZER_MODULES, OPTIMIZER_NAMES, SCALING_MODULES
    from podrun.tensorflow.sdk.layer_ops import _FUSED_NORMS

    def load(name: str) -> Any:
        return importlib.import_module(name)

    model = load("tf_keras.src.engine.training").Model
    return [
        (private_module("autograph.core.config"), ("CONVERSION_RULES",)),
        (private_module("ops.gradients_util"), ("_GradientsHelper",)),
        (private_module("ops.gen_nn_ops"), _FUSED_NORMS),
        (tf.GradientTape, ("gradient",)),
        (
            private_module("client.session").BaseSession,
            ("run", "make_callable", "_make_callable_from_options", "partial_run_setup", "partial_run"),
        ),
        *changed_classes(),
        (function_type(), ("__call__",)),
        (model, ADDED),
        (load("tf_keras.src.optimizers"), ("get",)),
        *((load(name), (*OPTIMIZER_NAMES, "get")) for name in OPTIMIZER_MODULES),
        *((load(name), ("LossScaleOptimizer",)) for name in SCALING_MODULES),
        *((private_module(name), tuple(names)) for name, names in MOVED_NAMES.items()),
        (
            private_module("ops.resource_variable_ops").BaseResourceVariable,
            ("initialized_value", "_cached_value"),
        ),
        (tf.compat.v1.train.Saver, ("save", "restore")),
        (np, ("__getattr__", "fromstring")),
    ]


@pytest.fixture(scope="module")
def ipu_device() -> Iterator[None]:
    """One IPU with the front end; afterwards TensorFlow is as it was, and the IPU is given back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_USE_LEGACY_KERAS", "1")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
        places = _changed_by_the_front_end()
        before = [(owner, name, vars(owner).get(name)) for owner, names in places for name in names]
        from podrun.tensorflow.capture.markers import on_host
        from podrun.tensorflow.execution.device_table import DEVICES
        from podrun.tensorflow.keras.accumulating_optimizers import REPLACED
        from podrun.tensorflow.keras.extensions import install_keras
        from podrun.tensorflow.sdk.config import IPUConfig
        from podrun.tensorflow.sdk.scopes import install_front_end

        running = list(on_host)
        install_front_end()
        install_keras()
        config = IPUConfig()
        config.auto_select_ipus = 1
        config.configure_ipu_system()
        try:
            yield
        finally:
            DEVICES.release()
            DEVICES.streams.clear()
            on_host[:] = running
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

    finder, before = SdkFinder(), set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(ROOT)
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n not in before and finder.find_spec(n, None) is not None]:
            _forget(name)


def _forget(name: str) -> None:
    """Take a module out of the loaded ones, and out of its package."""
    module = sys.modules.pop(name)
    package, _, own = name.rpartition(".")
    if vars(sys.modules.get(package, sys)).get(own) is module:
        delattr(sys.modules[package], own)
