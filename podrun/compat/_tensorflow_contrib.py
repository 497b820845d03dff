"""``tf.contrib``: the names that programs of version 1 for IPUs use, from TensorFlow's own modules.

TensorFlow has no contrib since 2.0. What is not here is refused by name.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any


class HParams:
    """Named values that are attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def values(self) -> dict[str, Any]:
        """All values by name."""
        return dict(self.__dict__)

    def add_hparam(self, name: str, value: Any) -> None:
        """Add a value. ValueError for a name that is there."""
        if name in self.__dict__:
            raise ValueError(f"Hyperparameter name is reserved: {name}")
        self.__dict__[name] = value

    def override_from_dict(self, values: Mapping[str, Any]) -> HParams:
        """Replace the values of these names, or add them."""
        self.__dict__.update(values)
        return self


def _xavier(version_1: Any) -> Any:
    def initializer(uniform: bool = True, seed: int | None = None, dtype: Any = version_1.float32) -> Any:
        kind = version_1.glorot_uniform_initializer if uniform else version_1.glorot_normal_initializer
        return kind(seed=seed, dtype=dtype)

    return initializer


def _scaling(version_1: Any) -> Any:
    def initializer(
        factor: float = 2.0,
        mode: str = "FAN_IN",
        uniform: bool = False,
        seed: int | None = None,
        dtype: Any = version_1.float32,
    ) -> Any:
        shape = "uniform" if uniform else "truncated_normal"
        return version_1.variance_scaling_initializer(factor, mode.lower(), shape, seed=seed, dtype=dtype)

    return initializer


def _decay(version_1: Any) -> Any:
    def regularizer(scale: float, scope: str | None = None) -> Any:
        return lambda weights: scale * version_1.nn.l2_loss(weights)

    return regularizer


def _names(version_1: Any) -> dict[str, dict[str, Any]]:
    """Part of contrib -> its names."""
    layers, cells = version_1.layers, version_1.nn.rnn_cell
    return {
        "layers": {
            "xavier_initializer": _xavier(version_1),
            "xavier_initializer_conv2d": _xavier(version_1),
            "variance_scaling_initializer": _scaling(version_1),
            "l2_regularizer": _decay(version_1),
            "flatten": layers.flatten,
            "batch_norm": layers.batch_normalization,
        },
        "rnn": {
            name: getattr(cells, name)
            for name in ("LSTMCell", "BasicLSTMCell", "GRUCell", "BasicRNNCell", "MultiRNNCell", "DropoutWrapper",
                         "LSTMStateTuple", "RNNCell")
        },
        "framework": {
            "nest": version_1.nest,
            "get_or_create_global_step": version_1.train.get_or_create_global_step,
            "get_variables": version_1.global_variables,
        },
        "training": {"HParams": HParams},
        "compiler": {
            name: importlib.import_module(f"tensorflow.python.compiler.xla.{name}") for name in ("jit", "xla")
        },
        "data": {"AUTOTUNE": version_1.data.experimental.AUTOTUNE},
        "seq2seq": {},
    }  # fmt: skip


PARTS = ("compiler", "data", "framework", "ipu", "layers", "rnn", "seq2seq", "training")
"""The parts of contrib that there are."""


class MissingPartError(NotImplementedError, AttributeError):
    """A part of contrib that is not here; for ``hasattr`` and ``except ImportError``, a name that is missing."""


def missing_part(name: str) -> str:
    """What is said of a part that is not here."""
    return (
        f"podrun does not have tf.contrib.{name}: TensorFlow has no contrib since 2.0. Of contrib there are "
        f"{', '.join(PARTS)}."
    )


def contrib_module(version_1: Any) -> types.ModuleType:
    """``tensorflow.contrib``, whose parts load when they are first used. MissingPartError for other names."""
    contrib = types.ModuleType("tensorflow.contrib")
    contrib.__path__ = []
    parts: dict[str, types.ModuleType] = {}

    def part(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "ipu":
            return importlib.import_module("tensorflow.python.ipu")
        if name not in PARTS:
            raise MissingPartError(missing_part(name))
        names = _names(version_1)
        if name == "seq2seq":
            decoding = importlib.import_module("podrun.tensorflow.sdk.sequence_beams")
            names[name] = decoding.sequence_names()
        if name not in parts:
            parts[name] = types.ModuleType(f"tensorflow.contrib.{name}")
            parts[name].__dict__.update(names[name])
            sys.modules[f"tensorflow.contrib.{name}"] = parts[name]
        return parts[name]

    contrib.__getattr__ = part  # type: ignore[method-assign]
    sys.modules["tensorflow.contrib"] = contrib
    return contrib
