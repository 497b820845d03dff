"""Scopes: on which device and IPU operations are, and what else a program says of them.

`install_front_end` changes TensorFlow itself when a program for IPUs imports it: gradients, sessions, device names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.private_apis.tensorflow import missing_symbols, private_module
from podrun.tensorflow.capture.gradient_cuts import install_cuts
from podrun.tensorflow.capture.places import at_place
from podrun.tensorflow.capture.program_graphs import in_program
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.launching import install_sessions
from podrun.tensorflow.execution.poplar_flags import flags


@contextlib.contextmanager
def ipu_jit_scope(ipu_scope: Any) -> Iterator[None]:
    """Nothing: programs are compiled whole."""
    yield


@contextlib.contextmanager
def ipu_scope(device: str) -> Iterator[Any]:
    """Operations are on an IPU device, and variables are resources."""
    with tf.device(device), tf.compat.v1.variable_scope("", use_resource=True) as scope:
        yield scope


@contextlib.contextmanager
def ipu_shard(index: Any) -> Iterator[None]:
    """Operations are on the IPU number ``index`` of the device."""
    if not in_program():
        yield
        return
    highest = max(index) if isinstance(index, (list, tuple)) else index
    with at_place(highest):
        yield


_HOST_PART = (
    "podrun does not run operations on the host in the middle of a program: enqueue their inputs, and compute on the "
    "host after the program."
)


def outside_compilation_scope(name: str = "outside") -> NoReturn:
    """Refused: the host takes no part in the middle of a program."""
    if not in_program():
        raise ValueError("outside_compilation_scope is only allowed in XLA context")
    raise NotImplementedError(_HOST_PART)


@contextlib.contextmanager
def frontend_attribute(attribute_name: Any, attribute_value: Any, restore_to: Any = None) -> Iterator[None]:
    """An attribute for the compiler: accepted, without an effect on numbers."""
    yield


@contextlib.contextmanager
def stochastic_rounding(override: bool) -> Iterator[None]:
    """Rounding of the operations inside. UnsupportedError if it is not that of the configuration, which holds for a
    whole program.
    """
    if bool(override) != DEVICES.rounds_stochastically:
        wanted = "ON" if override else "OFF"
        raise UnsupportedError(
            f"scopes.stochastic_rounding({bool(override)}) differs from floating_point_behaviour.esr: podrun rounds "
            "all operations of a program alike.",
            hint=f"Configure esr = StochasticRoundingBehaviour.{wanted}, or leave the scope out.",
        )
    yield


@contextlib.contextmanager
def partials_type(override_type: Any) -> Iterator[None]:
    """The type of partial sums: float16 or float32; sums are in float32."""
    if tf.as_dtype(override_type) not in (tf.float16, tf.float32):
        raise ValueError(f"Only support float16, float32, provided {override_type}")
    yield


_IPU = "device:IPU"


def install_front_end() -> None:
    """Make the changes, once. ImportError if this TensorFlow lacks what podrun needs."""
    missing = missing_symbols()
    if missing:
        raise ImportError(f"this TensorFlow has no tensorflow.python.{missing[0]}, which podrun needs")
    flags()
    install_cuts()
    install_sessions()
    _install_devices()


def _install_devices() -> None:
    """Operations that programs place on an IPU without compiling them are on the CPU."""
    graph_class = private_module("framework.ops").Graph
    context_class = private_module("eager.context").Context
    if getattr(graph_class._apply_device_functions, "ipus", False):
        return
    apply, eager_device = graph_class._apply_device_functions, context_class.device

    def apply_on_host(self: Any, op: Any) -> None:
        apply(self, op)
        if _IPU.lower() in op.device.lower():
            op._set_device_from_string("/device:CPU:0")

    def device(self: Any, name: Any) -> Any:
        if isinstance(name, str) and _IPU.lower() in name.lower():
            return contextlib.nullcontext()
        return eager_device(self, name)

    apply_on_host.ipus = True  # type: ignore[attr-defined]
    graph_class._apply_device_functions = apply_on_host
    context_class.device = device
