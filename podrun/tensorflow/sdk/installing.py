"""What changes in TensorFlow itself when a program for IPUs imports it: gradients, sessions, device names."""

from __future__ import annotations

import contextlib
from typing import Any

from podrun.private_apis.tensorflow import missing_symbols, private_module
from podrun.tensorflow.capture.gradient_cuts import install_cuts
from podrun.tensorflow.execution.launching import install_sessions

_IPU = "device:IPU"


def install_front_end() -> None:
    """Make the changes, once. ImportError if this TensorFlow lacks what podrun needs."""
    missing = missing_symbols()
    if missing:
        raise ImportError(f"this TensorFlow has no tensorflow.python.{missing[0]}, which podrun needs")
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
