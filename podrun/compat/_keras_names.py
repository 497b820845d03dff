"""Modules of Keras and of the SDK's layers under the names that programs import.

``keras.ipu`` (also ``tensorflow.keras.ipu`` and ``tensorflow.python.ipu.keras``) and ``ipu_tensorflow_addons`` are
modules of ours; old internal names such as ``keras.engine.training`` and ``tensorflow.python.keras`` are those of
``tf_keras``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

from podrun.compat._addons_names import ADDON_LAYERS, ADDON_MODULES, RECURRENT_LAYERS

_OURS = "podrun.tensorflow.keras."
_ADDONS = "podrun.tensorflow.addons."
IPU_ROOTS = ("keras.ipu", "tf_keras.ipu", "tensorflow.keras.ipu", "tensorflow.python.ipu.keras")
"""The names of Keras' module for IPUs."""
ADDONS_ROOT = "ipu_tensorflow_addons"
_STAGES = (
    "PipelineStage", "FunctionalLayerPipelineStageAssignment", "FunctionalNestedModelPipelineStageAssignment",
    "ModelLayerPipelineStageAssignment", "NestedModelPipelineStageAssignment",
    "SequentialLayerPipelineStageAssignment", "SequentialNestedModelPipelineStageAssignment",
)  # fmt: skip
_IPU: dict[str, dict[str, str]] = {
    "": {
        **{name: f"{_OURS}stage_classes:{name}" for name in _STAGES},
        "ReplicatedMetricReductionMethod": f"{_OURS}model_options:ReplicatedMetricReductionMethod",
    },
    "extensions": {},
    "extensions.sequential_extensions": {name: f"{_OURS}stage_classes:{name}" for name in _STAGES},
    "extensions.functional_extensions": {name: f"{_OURS}stage_classes:{name}" for name in _STAGES},
    "extensions.model_extensions": {name: f"{_OURS}stage_classes:{name}" for name in _STAGES},
    "pipeline": {name: f"{_OURS}stage_classes:{name}" for name in _STAGES},
}
"""Module below Keras' for IPUs -> its names, each with our module and name."""
_IPU["extensions"] |= {name: f"{_OURS}stage_classes:{name}" for name in _STAGES}
_IPU["extensions.pipeline_stage_assignment"] = _IPU["pipeline"]
_IPU["extensions.data_adapter"] = {"IPUDataHandler": f"{_OURS}data_rules:IPUDataHandler"}
_IPU["extensions.sequential_extensions"]["SequentialExtension"] = f"{_OURS}stage_methods:SequentialExtension"
_IPU["extensions.functional_extensions"]["FunctionalExtension"] = f"{_OURS}stage_methods:FunctionalExtension"
_IPU["extensions.model_extensions"]["ModelExtension"] = f"{_OURS}stage_methods:SubclassExtension"
_IPU["optimizers"] = {
    "GradientAccumulationOptimizer": f"{_ADDONS}accumulating_wrappers:KerasGradientAccumulation",
    "IpuOptimizer": f"{_ADDONS}accumulating_wrappers:WrappedOptimizer",
    "CrossReplicaOptimizer": f"{_ADDONS}accumulating_wrappers:KerasCrossReplica",
    "MapGradientOptimizerInvertedChaining": f"{_ADDONS}accumulating_wrappers:KerasMapGradient",
    "ALSOptimizer": f"{_ADDONS}loss_scaling:ALSOptimizer",
    "AutomaticLossScalingOptimizer": f"{_ADDONS}older_loss_scaling:KerasLossScaling",
    **{
        name: f"{_ADDONS}capturing:{name}"
        for name in (
            "ALSOptimizerAdam", "ALSOptimizerSGD", "ALSOptimizerRMSProp", "ALSGradientAccumulationOptimizer",
        )
    },
    "ALSOptimizerGradientAccumulationWrapper": f"{_ADDONS}capturing:ALSGradientAccumulationOptimizer",
}  # fmt: skip
_IPU["layers"] = ADDON_LAYERS | {
    name: f"{_ADDONS}capturing:{name}" for name in ("CaptureUpstreamGradients", "CaptureActivationGradients")
}
_IPU |= {
    f"optimizers.{module}": _IPU["optimizers"]
    for module in (
        "als_optimizer", "automatic_loss_scaling_optimizer", "gradient_accumulation_optimizer", "ipu_wrappers",
        "cross_replica_optimizer", "map_gradient_optimizer", "adam", "gradient_descent", "rmsprop",
    )
}  # fmt: skip
_IPU["layers"]["Dense"] = f"{_ADDONS}layers:Dense"
_IPU["losses"] = _IPU["losses.ctc"] = {"CTCLoss": ADDON_LAYERS["CTCLoss"]}
_IPU[""] |= _IPU["losses"]
_IPU |= {
    f"layers.{module}": _IPU["layers"]
    for module in (
        "capture_upstream_gradients", "assume_equal_across_replicas", "ctc", "dropout", "effective_transformer",
        "dense", "embedding_lookup", "normalization", "recomputation", "rnn",
    )
}  # fmt: skip
_IPU["layers.capture_upstream_gradients"] = _IPU["layers"] | {
    "_ActivationCapture": f"{_ADDONS}capturing:ActivationCapture"
}
_IPU["optimizers.ipu_wrappers"] = {
    "IpuOptimizer": f"{_ADDONS}accumulating_wrappers:WrappedOptimizer",
    "_KerasOptimizerWrapper": f"{_ADDONS}accumulating_wrappers:FirstVersionOptimizer",
    "_TensorflowOptimizerWrapper": f"{_ADDONS}accumulating_wrappers:FirstVersionOptimizer",
}
_SUBMODULES: dict[str, dict[str, dict[str, str]]] = {
    **dict.fromkeys(IPU_ROOTS, _IPU),
    ADDONS_ROOT: ADDON_MODULES,
    "tensorflow.python.ipu.rnn_ops": {"": RECURRENT_LAYERS},
    "tensorflow.python.ipu.ops.rnn_ops": {"": RECURRENT_LAYERS},
}
"""Root -> its modules."""
_OLD_KERAS = {
    **{
        f"optimizer_v2.{name}": f"src.optimizers.legacy.{name}"
        for name in (
            "optimizer_v2", "adadelta", "adagrad", "adam", "adamax", "ftrl", "gradient_descent", "nadam", "rmsprop",
        )
    },
    "optimizer_v2.learning_rate_schedule": "src.optimizers.schedules.learning_rate_schedule",
    "optimizer_v2.utils": "src.optimizers.utils",
    "backend": "src.backend",
    "layers.embeddings": "src.layers.core.embedding",
    "layers.merge": "src.layers.merging",
    "layers.advanced_activations": "src.layers.activation",
    "layers.dense_attention": "src.layers.attention",
    "layers.wrappers": "src.layers",
    "initializers.initializers_v2": "src.initializers.initializers",
    "optimizer_v1": "src.optimizers.optimizer_v1",
    "layers.recurrent": "src.layers.rnn",
    "layers.recurrent_v2": "src.layers.rnn",
    "saving.hdf5_format": "src.saving.legacy.hdf5_format",
    "saving.save": "src.saving.legacy.save",
    "saving.model_config": "src.saving.legacy.model_config",
    "saving.saving_utils": "src.saving.legacy.saving_utils",
    "saving.saved_model.load": "src.saving.legacy.saved_model.load",
    "saving.saved_model": "src.saving.legacy.saved_model",
    "saving.saved_model.json_utils": "src.saving.legacy.saved_model.json_utils",
    "combinations": "src.testing_infra.test_combinations",
    "keras_parameterized": "src.testing_infra.test_combinations",
    "testing_utils": "src.testing_infra.test_utils",
}  # fmt: skip
"""Names below ``keras`` of version 2.6, and where ``tf_keras`` has them."""
_OLD_OPTIMIZERS = "optimizer_v2"
"""A package of version 2.6 whose modules are in several places now."""
_API = "tf_keras.api._v2.keras"
_KERAS_ROOTS = ("tensorflow.python.keras", "keras", _API, "tf_keras")
"""Where programs look for these names; ``tf_keras`` itself and its public modules call themselves so."""


_AUTO = "keras.experimental.auto_pipeline."
_PROFILED = "profiles of layers; use podrun profile"
REFUSED_NAMES = {
    "Dense": "a layer for float8; use keras.ipu.layers.Dense",
    **dict.fromkeys(
        ("Model", "Sequential", "PipelineModel", "PipelineSequential", "SequentialPipelineModel"),
        "classes of SDK 2.2; use keras.Model and keras.Sequential under an IPUStrategy",
    ),
    f"{_AUTO}utils.profiler": _PROFILED,
    f"{_AUTO}utils.pva_utils": "profiles of layers; use pva",
    f"{_AUTO}prediction.partition.parse_layer_profile": _PROFILED,
    f"{_AUTO}prediction.partition.create_model_profile": _PROFILED,
    f"{_AUTO}prediction.partition_evaluate": "profiles of pipelines; use podrun profile",
    f"{_AUTO}prediction.max_throughput": "searches by profiles of layers; use podrun estimate --scan",
}
"""Names of the SDK's layers, and of what is below its addons, that are refused, and what to use instead."""


_MODULES_WITH_REFUSED = (
    ".layers",
    "ipu.optimizers",
    "keras.optimizers",
    "ipu.keras.pipeline",
    "keras.ipu.pipeline",
)


def _entry(place: str) -> object:
    module, _, name = place.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


def _lazy_module(name: str, names: Mapping[str, str], below: Sequence[str]) -> types.ModuleType:
    """A module whose names are loaded when they are first used. ``below``: the modules inside it."""
    module = types.ModuleType(name)
    module.__path__ = []

    def lookup(entry: str) -> object:
        if entry in names:
            value = _entry(names[entry])
            setattr(module, entry, value)
            return value
        short = entry if name in IPU_ROOTS or name.endswith(_MODULES_WITH_REFUSED) else None
        why = REFUSED_NAMES.get(short or f"{name}.{entry}".removeprefix(f"{ADDONS_ROOT}."))
        if why:
            raise NotImplementedError(f"podrun does not have {name}.{entry}: {why}")
        if entry in below:
            return importlib.import_module(f"{name}.{entry}")
        raise AttributeError(f"module {name!r} has no attribute {entry!r}")

    module.__getattr__ = lookup  # type: ignore[method-assign]
    module.__all__ = [*names, *below]  # type: ignore[attr-defined]
    return module


def own_module(fullname: str) -> types.ModuleType | None:
    """The module of ours that has a name."""
    for root, modules in _SUBMODULES.items():
        if fullname != root and not fullname.startswith(root + "."):
            continue
        key = fullname[len(root) + 1 :]
        if key in REFUSED_NAMES:
            raise NotImplementedError(f"podrun does not have {fullname}: {REFUSED_NAMES[key]}")
        if key not in modules:
            return None
        lead = f"{key}." if key else ""
        below = [m[len(lead) :] for m in modules if m and m.startswith(lead)]
        return _lazy_module(fullname, modules[key], [m for m in below if "." not in m])
    return None


_FROZEN_ROOT = "tensorflow.python.keras"
_FROZEN: dict[str, types.ModuleType] = {}
"""TensorFlow's own copy of Keras, which it has loaded itself: module below its root -> module."""
_FROZEN_ALONE = ("layers.legacy_rnn", "legacy_tf_layers", "optimizer_v2.legacy_learning_rate_decay")
"""Modules of the copy that other modules of TensorFlow stand on."""


def _replace_the_copy() -> None:
    """Let ``tensorflow.python.keras`` be ``tf_keras``, though TensorFlow has loaded a copy of Keras under that name:
    models of one do not take layers of the other.
    """
    lead = f"{_FROZEN_ROOT}."
    for name in [n for n in sys.modules if n.startswith(lead)]:
        if not name[len(lead) :].startswith(_FROZEN_ALONE):
            _FROZEN[name[len(lead) :]] = sys.modules.pop(name)
    sys.modules[_FROZEN_ROOT] = importlib.import_module("tf_keras")
    importlib.import_module("tensorflow.python").keras = sys.modules[_FROZEN_ROOT]  # type: ignore[attr-defined]


def _is_public(key: str) -> bool:
    """Whether a module is among the public ones of ``tf_keras``."""
    place = Path(importlib.import_module(_API).__path__[0], *key.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def _keras_module(fullname: str) -> types.ModuleType | None:
    """The module of ``tf_keras`` that an old name means."""
    for root in _KERAS_ROOTS:
        if fullname == root == _FROZEN_ROOT:
            return importlib.import_module("tf_keras")
        if not fullname.startswith(root + "."):
            continue
        key = fullname[len(root) + 1 :]
        if key == _OLD_OPTIMIZERS:
            below = [name.partition(".")[2] for name in _OLD_KERAS if name.startswith(f"{key}.")]
            return _lazy_module(fullname, {}, below)
        public = f"api._v2.keras.{key}" if root != _API and _is_public(key) else None
        for candidate in (_OLD_KERAS.get(key), public, f"src.{key}"):
            if candidate is None:
                continue
            place = f"tf_keras.{candidate}"
            try:
                return importlib.import_module(place)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                    raise  # The module is there, and another that it imports is missing.
        if root == _FROZEN_ROOT and key in _FROZEN:
            return _FROZEN[key]
    return None


def _has_own_file(fullname: str, path: Sequence[str] | None) -> bool:
    """Whether ``tf_keras`` has a module under its own name."""
    if not fullname.startswith("tf_keras."):
        return False
    return importlib.machinery.PathFinder.find_spec(fullname, path) is not None


class KerasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Keras' modules for IPUs, the SDK's layers and optimizers, and old names of Keras' own modules."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[types.ModuleType, importlib.machinery.ModuleSpec | None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for these names; None for all others."""
        roots = (*_SUBMODULES, *_KERAS_ROOTS)
        if fullname == "keras" or not any(fullname == r or fullname.startswith(r + ".") for r in roots):
            return None
        if fullname.startswith("tf_keras.src.") or _has_own_file(fullname, path):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The module of a spec. ModuleNotFoundError for a name that neither has."""
        own = own_module(spec.name)
        if own is not None:
            return own
        module = _keras_module(spec.name)
        if module is None:
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)
        self._kept.setdefault(module.__name__, (module, module.__spec__))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Modules are complete when they are made; one of Keras' own keeps its spec."""
        kept, spec = self._kept.get(module.__name__, (None, None))
        if kept is module and spec is not None:
            module.__spec__ = spec


def serve_keras_names() -> None:
    """Let programs import the SDK's names of Keras, and read ``ipu`` of Keras itself."""
    if not any(isinstance(finder, KerasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, KerasFinder())
    ipu = importlib.import_module("keras.ipu") if "keras" in sys.modules else own_module("keras.ipu")
    for name in ("tf_keras", "tf_keras.api._v2.keras", "tensorflow.keras"):
        importlib.import_module(name).ipu = ipu  # type: ignore[attr-defined]
    _replace_the_copy()
    importlib.import_module("tf_keras").__getattr__ = _old_attribute  # type: ignore[method-assign]
    # The SDK's keras.backend is the module of the sources, with the names of version 1 (set_session).
    sources = importlib.import_module("tf_keras.src.backend")
    importlib.import_module("tf_keras.backend").__getattr__ = functools.partial(getattr, sources)  # type: ignore[method-assign]
    for root in ("tf_keras", _API):
        for name in _MODULES_OF_CLASSES:
            public = importlib.import_module(f"{root}.{name}")
            public.__getattr__ = functools.partial(_inner_attribute, name)  # type: ignore[method-assign]
    policy = importlib.import_module("tf_keras.src.mixed_precision.policy")
    policy.set_policy = policy.set_global_policy  # type: ignore[attr-defined]


_OLD_ATTRIBUTES = {"engine", "testing_utils", "keras_parameterized", "combinations", _OLD_OPTIMIZERS}
"""Modules of version 2.6 that programs read as attributes of Keras, without importing them."""


_MODULES_OF_CLASSES = (
    "activations",
    "callbacks",
    "constraints",
    "initializers",
    "losses",
    "metrics",
    "regularizers",
    "utils",
)
"""Modules of version 2.6 that programs read more of than their public names."""


def _inner_attribute(module: str, name: str) -> object:
    """A class, function or module of Keras that a public module does not name, and not what it imports from others."""
    if not name.startswith("__"):
        value = getattr(importlib.import_module(f"tf_keras.src.{module}"), name, None)
        origin = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", None)
        if isinstance(origin, str) and origin.startswith("tf_keras."):
            return value
    raise AttributeError(f"module 'keras.{module}' has no attribute {name!r}")


def _old_attribute(name: str) -> object:
    if name in _OLD_ATTRIBUTES:
        return importlib.import_module(f"tf_keras.{name}")
    raise AttributeError(f"module 'tf_keras' has no attribute {name!r}")
