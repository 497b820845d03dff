"""TensorFlow for programs written for the SDK: the real package, with modules of ours under the SDK's names.

A folder ``tensorflow`` of ours stands before site-packages on the path. Imported, it takes itself out of the way,
imports the real package in its place, and installs a finder for the names that only the SDK has. Nothing is written
into site-packages. Whether ``import tensorflow`` gives version 1 (``tf.compat.v1``) stands in ``_tensorflow_version``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podrun.compat._keras_names import serve_keras_names
from podrun.compat._numpy_1 import give_back
from podrun.compat._tensorflow_contrib import PARTS, contrib_module, missing_part
from podrun.compat._tensorflow_log import quiet_start
from podrun.compat._tensorflow_names import (
    MODULES,
    MOVED,
    MOVED_NAMES,
    NAMES,
    OPTIMIZER_MODULES,
    REFUSED,
    REFUSED_MEMBERS,
)
from podrun.compat._tensorflow_version import wants_version_1
from podrun.core.environment import chosen_by_user, set_default

_HERE = str(Path(__file__).resolve().parent)
_SDK = "podrun.tensorflow.sdk."
ROOT = "tensorflow.python.ipu"
_CONTRIB = "tensorflow.contrib."


def _joined(name: str, key: str) -> types.ModuleType:
    """A module with the public names of ours."""
    module = types.ModuleType(name)
    module.__path__ = []
    for source in MODULES[key]:
        loaded = importlib.import_module(_SDK + source)
        for entry in dir(loaded):
            if not entry.startswith("__") and entry != "annotations":
                setattr(module, entry, getattr(loaded, entry))
    below = {entry[len(key) + 1 :] for entry in MODULES if entry.startswith(key + ".")}
    fallbacks = [
        getattr(importlib.import_module(_SDK + source), "__getattr__", None) for source in MODULES[key]
    ]

    def lookup(entry: str) -> Any:
        if entry in below or (key == "optimizers" and entry in OPTIMIZER_MODULES):
            return importlib.import_module(f"{name}.{entry}")
        if entry in REFUSED_MEMBERS.get(key, {}):
            raise NotImplementedError(
                f"podrun does not have ipu.{key}.{entry}: {REFUSED_MEMBERS[key][entry]}"
            )
        for fallback in fallbacks:
            if fallback is not None:
                return fallback(entry)
        raise AttributeError(f"module {name!r} has no attribute {entry!r}")

    module.__getattr__ = lookup  # type: ignore[method-assign]
    for name_of_sdk, own in NAMES.get(key, {}).items():
        setattr(module, name_of_sdk, getattr(module, own))
    return module


def _root() -> types.ModuleType:
    """``tensorflow.python.ipu`` itself, whose modules load when they are first used."""
    module = types.ModuleType(ROOT)
    module.__path__ = []

    def lookup(name: str) -> Any:
        if name in REFUSED:
            raise NotImplementedError(f"podrun does not have ipu.{name}: {REFUSED[name]}")
        if name == "outlined_function":
            return getattr(importlib.import_module(_SDK + "replica_ops"), name)
        if name == "function":  # The module of this name holds it too.
            return importlib.import_module(_SDK + "ipu_compiler").ipu_function
        if name in MODULES or name in ("ops", "keras", "rnn_ops"):
            return importlib.import_module(f"{ROOT}.{name}")
        raise AttributeError(f"module 'tensorflow.python.ipu' has no attribute {name!r}")

    module.__getattr__ = lookup  # type: ignore[method-assign]
    return module


def _operations_module(name: str) -> types.ModuleType:
    """A module of ``tensorflow.python.ipu.ops`` that a program reads as an attribute."""
    if name not in MODULES and name != "rnn_ops":
        raise AttributeError(f"module 'tensorflow.python.ipu.ops' has no attribute {name!r}")
    return importlib.import_module(f"{ROOT}.ops.{name}")


def _library_operations(module: str) -> Mapping[str, Any]:
    """The operations or enumerations of a module of the SDK's libraries that stand in a table."""
    if module == "gen_application_runtime":
        source = importlib.import_module(_SDK + "embedded_runtime")
        return {
            "application_runtime": source.application_runtime,
            "application_call": source.application_call,
        }
    if module == "config_pb2":
        return dict(importlib.import_module(_SDK + "config").MESSAGE_ENUMERATIONS)
    if not module.startswith("gen_"):
        return {}
    return dict(importlib.import_module(_SDK + "generated_operations").LIBRARY_OPERATIONS.get(module, {}))


def _messages(module: str) -> dict[str, object]:
    """The names of a module of messages."""
    if module == "threestate_pb2":
        states = importlib.import_module(_SDK + "pipeline_rules").ThreeState
        return {**states.__members__, "ThreeState": states}
    if module == "backend_config_pb2":
        messages = importlib.import_module(_SDK + "config_messages")
        kinds = {"FrontendAttributeId": messages.FrontendAttributeId, "MLType": messages.MLType}
        return kinds | {name: member for kind in kinds.values() for name, member in kind.__members__.items()}
    if module == "poplar_executable_pb2":
        kind = importlib.import_module(_SDK + "application_signature").PoplarExecutableProto
        return {"PoplarExecutableProto": kind}
    if module == "trace_pb2":
        events = importlib.import_module("podrun.tensorflow.execution.trace_events")
        return {"IpuTraceEvent": events.IpuTraceEvent}
    return {}


class SdkFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that only the SDK's TensorFlow has."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[types.ModuleType, importlib.machinery.ModuleSpec | None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for names of the SDK; None for all others. ModuleNotFoundError for parts that contrib lacks here."""
        if fullname.startswith(_CONTRIB) and (part := fullname.removeprefix(_CONTRIB)) not in PARTS:
            # Under its own name ``from tensorflow.contrib import part`` would drop the message.
            raise ModuleNotFoundError(missing_part(part), name="tensorflow.contrib")
        below = fullname.startswith(
            (
                f"{ROOT}.",
                "tensorflow.compiler.plugin.",
                "tensorflow.compiler.tests.",
                "tensorflow_core.",
                _CONTRIB,
            )
        )
        alone = (
            fullname in (ROOT, "tensorflow.compiler.plugin", "tensorflow.compiler.tests") or fullname in MOVED
        )
        if below or alone or _is_estimator(fullname):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The module of a spec."""
        name = spec.name
        if name.startswith("tensorflow_core.") or name in MOVED:
            module = importlib.import_module(MOVED.get(name) or "tensorflow." + name.partition(".")[2])
            self._kept.setdefault(module.__name__, (module, module.__spec__))
            return module
        if name.startswith(_CONTRIB):
            part: types.ModuleType = getattr(sys.modules["tensorflow.contrib"], name.removeprefix(_CONTRIB))
            return part
        if _is_estimator(name):
            return _estimator_module(name)
        if name.startswith("tensorflow.compiler.tests"):
            return _joined(name, "xla_test") if name.endswith(".xla_test") else types.ModuleType(name)
        if name.startswith("tensorflow.compiler.plugin"):
            if name.endswith(".test_utils"):
                return _joined(name, "test_utils")
            module = types.ModuleType(name)
            module.__dict__.update(_library_operations(name.rpartition(".")[2]))
            module.__dict__.update(_messages(name.rpartition(".")[2]))
            return module
        if name == ROOT:
            importlib.import_module(_SDK + "scopes").install_front_end()
            return _root()
        key = name.removeprefix(ROOT + ".")
        if key == "ops":
            module = types.ModuleType(name)
            module.__path__ = []
            module.__getattr__ = _operations_module  # type: ignore[method-assign]
            return module
        key = key.removeprefix("ops.")
        if key.removesuffix("_grad") in MODULES and key.endswith("_grad"):
            return types.ModuleType(
                name
            )  # Its import registers gradients in the SDK; ours are there already.
        if key.removeprefix("optimizers.") in OPTIMIZER_MODULES and key not in MODULES:
            key = "optimizers"
        if key in REFUSED:
            raise ModuleNotFoundError(f"podrun does not have {name}: {REFUSED[key]}", name=name)
        if key not in MODULES:
            raise ModuleNotFoundError(f"podrun does not have {name}", name=name)
        return _joined(name, key)

    def exec_module(self, module: types.ModuleType) -> None:
        """Modules are complete when they are made; one of TensorFlow's own keeps its spec."""
        kept, spec = self._kept.get(module.__name__, (None, None))
        if kept is module:
            module.__spec__ = spec


def _real_spec() -> importlib.machinery.ModuleSpec | None:
    path = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    return importlib.machinery.PathFinder.find_spec("tensorflow", path)


def serve_tensorflow() -> None:
    """Import the real TensorFlow under its name, and what the SDK adds. ImportError that says what to install."""
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    if os.environ["TF_USE_LEGACY_KERAS"] != "1":
        raise ImportError("Programs for IPUs use Keras 2, not Keras 3: set TF_USE_LEGACY_KERAS=1.")
    set_default("TF_CPP_MIN_LOG_LEVEL", "2")
    shown = chosen_by_user("TF_CPP_MIN_LOG_LEVEL") is not None
    spec = _real_spec()
    if spec is None or spec.loader is None:
        sys.modules.pop("tensorflow", None)
        raise ModuleNotFoundError(
            "TensorFlow is not installed: pip install 'podrun[tensorflow]' (2.20 or 2.21)", name="tensorflow"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules["tensorflow"] = module
    with quiet_start(shown=shown):
        spec.loader.exec_module(module)
        module.config.list_physical_devices()  # Looks for GPUs, as the first operation would.
    add_sdk(module)


def add_sdk(module: Any) -> None:
    """Add what only the SDK has to the real package. ImportError for a version that podrun does not know."""
    check_version(module.__version__)
    module.python = importlib.import_module("tensorflow.python")
    if not any(isinstance(finder, SdkFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, SdkFinder())
    estimators = _estimator_module()
    module.estimator = module.compat.v1.estimator = estimators
    when_complete("tf_keras", functools.partial(_add_keras, module))


def _add_keras(module: Any) -> None:
    importlib.import_module("podrun.tensorflow.keras.extensions").install_keras()
    serve_keras_names()
    _give_back_names()
    if wants_version_1(module):
        _overlay(module)


class _WatchedSpec(importlib.machinery.ModuleSpec):
    """The spec of a module that is being imported. The import system notes there that the module is complete."""

    action: Callable[[], None]

    def __setattr__(self, name: str, value: object) -> None:
        if name != "_initializing" or value:
            super().__setattr__(name, value)
            return
        self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
        try:
            if getattr(sys.modules.get(self.name), "__spec__", None) is self:  # Else its import failed.
                self.action()
        finally:
            self._initializing = False


def when_complete(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` at once, or, if a module is just being imported, when it is complete: ``import tf_keras`` imports
    TensorFlow before it has any names.
    """
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None or not getattr(spec, "_initializing", False):
        action()
        return
    spec.action = action
    spec.__class__ = _WatchedSpec


def _give_back_names() -> None:
    """Let modules of TensorFlow have the names that other modules have now."""
    for module, names in MOVED_NAMES.items():
        loaded = importlib.import_module(f"tensorflow.python.{module}")
        for name, place in names.items():
            source, _, own = place.partition(":")
            if not hasattr(loaded, name):
                place_now = importlib.import_module(f"tensorflow.python.{source}")
                setattr(loaded, name, getattr(place_now, own) if own else place_now)
    variables = importlib.import_module("tensorflow.python.ops.resource_variable_ops")
    variables.BaseResourceVariable.initialized_value = _initialized_value
    saver = importlib.import_module("tensorflow.python.training.saver").Saver
    for name in ("save", "restore"):
        setattr(saver, name, _in_graph_of_session(getattr(saver, name)))
    give_back()


def _in_graph_of_session(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a Saver that works in the graph of the session that it gets, also where the program runs eagerly."""
    if hasattr(call, "__wrapped__"):
        return call

    @functools.wraps(call)
    def of_saver(self: Any, sess: Any, *more: Any, **named: Any) -> Any:
        graph = getattr(sess, "graph", None)
        if graph is None:
            return call(self, sess, *more, **named)
        with graph.as_default():
            return call(self, sess, *more, **named)

    return of_saver


def _initialized_value(variable: Any) -> Any:
    """``initialized_value`` of a resource variable: its value, or the initial one where it has none yet."""
    tensorflow = importlib.import_module("tensorflow")
    with tensorflow.init_scope():  # Outside of a program: other variables start from it.
        initialized = tensorflow.compat.v1.is_variable_initialized(variable)
        return tensorflow.cond(initialized, variable.read_value, lambda: variable.initial_value)


def _is_estimator(name: str) -> bool:
    """Whether a module is one of the package of estimators, which TensorFlow does not have any more."""
    roots = ("tensorflow_estimator", "tensorflow.python.estimator")
    return any(name == root or name.startswith(root + ".") for root in roots)


def _estimator_module(own: str = "tensorflow.estimator") -> types.ModuleType:
    """``tf.estimator``, or a module of its package, with the names of all of them; they load when they are used."""
    module = types.ModuleType(own)
    module.__path__ = []
    names = {"RunConfig": "EstimatorRunConfig", "Estimator": "HostEstimator"}

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if own != "tensorflow.estimator" and name in _ESTIMATOR_MODULES:
            return importlib.import_module(f"{own}.{name}")
        source = importlib.import_module(
            _SDK + ("estimator_sessions" if name == "Estimator" else "estimator_parts")
        )
        if name == "export":
            raise NotImplementedError("podrun does not have tf.estimator.export: use ipu.serving.")
        return getattr(source, names.get(name, name))

    module.__getattr__ = lookup  # type: ignore[method-assign]
    sys.modules.setdefault(own, module)
    return module


_ESTIMATOR_MODULES = ("python", "estimator", "model_fn", "mode_keys", "run_config", "estimator_lib", "api")


def check_version(version: str) -> None:
    """ImportError for a TensorFlow that podrun does not know."""
    if not version.startswith(("2.20.", "2.21.")):
        raise ImportError(
            f"podrun runs programs with TensorFlow 2.20 and 2.21, not {version}: pip install 'podrun[tensorflow]'"
        )


def _overlay(module: Any) -> None:
    """Let the package's names be those of version 1."""
    version_1 = module.compat.v1
    version_1.disable_v2_behavior()
    kept = {"compat", "estimator", "python"}
    names = {n: getattr(version_1, n) for n in dir(version_1) if not n.startswith("_") and n not in kept}
    module.__dict__.update(names)
    module.contrib = contrib_module(version_1)
