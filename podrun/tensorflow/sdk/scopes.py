"""Scopes: on which device and IPU operations are, and what else a program says of them.

`install_front_end` changes TensorFlow itself when a program for IPUs imports it: gradients, sessions, device names.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.private_apis.tensorflow import missing_symbols
from podrun.tensorflow.capture.gradient_cuts import install_cuts
from podrun.tensorflow.capture.places import at_place
from podrun.tensorflow.capture.program_graphs import (
    OUTSIDE,
    in_program,
    leave_unconverted,
    outermost_program,
    read_variables_in_programs,
)
from podrun.tensorflow.execution.cluster_plans import differentiated_on_device
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.eager_devices import install_eager_devices
from podrun.tensorflow.execution.launching import install_sessions
from podrun.tensorflow.execution.placed_devices import install_devices, made_on_ipu
from podrun.tensorflow.execution.poplar_flags import flags
from podrun.tensorflow.sdk.layer_ops import let_batch_norms_take_halves
from podrun.tensorflow.sdk.shard_ops import SHARDING


@contextlib.contextmanager
def ipu_jit_scope(ipu_scope: str) -> Iterator[None]:
    """Nothing: programs are compiled whole."""
    yield


@contextlib.contextmanager
def ipu_scope(device: str) -> Iterator[Any]:
    """Operations are on an IPU device, and variables are resources."""
    with tf.device(device), tf.compat.v1.variable_scope("", use_resource=True) as scope:
        yield scope


@contextlib.contextmanager
def ipu_shard(index: int | list[int] | tuple[int, ...]) -> Iterator[None]:
    """Operations are on the IPU number ``index`` of the device, and carry it as an attribute for the compiler."""
    ipus: list[int] = list(index) if isinstance(index, (list, tuple)) else [index]
    kind = importlib.import_module("tensorflow.compiler.xla.xla_data_pb2").OpSharding
    sharding = kind(type=kind.MAXIMAL, tile_assignment_devices=ipus)
    attribute = tf.compat.v1.AttrValue(s=sharding.SerializeToString())
    with contextlib.ExitStack() as scopes:
        if in_program():
            scopes.enter_context(at_place(max(ipus)))
        if not tf.executing_eagerly():
            graph: tf.Graph = tf.compat.v1.get_default_graph()
            scopes.enter_context(graph._attr_scope({SHARDING: attribute}))
        yield


_IN_CONTROL_FLOW = "`outside_compilation_scope` enclosed in control flow (loop or cond) is not supported"


@contextlib.contextmanager
def outside_compilation_scope(name: str = "outside") -> Iterator[None]:
    """Operations inside are computed by the host, each time the program reaches them. ValueError outside of a program,
    and in another such scope. A program where it stands in a loop or branch ends with UnimplementedError.
    """
    program = outermost_program()
    if program is None:
        raise ValueError("outside_compilation_scope is only allowed in XLA context")
    graph: tf.Graph = tf.compat.v1.get_default_graph()
    if OUTSIDE in graph._attr_scope_map:
        raise ValueError("Illegal nesting of outside_compilation_scope")
    if graph is not program:
        program.refused = _IN_CONTROL_FLOW
    unique = graph.unique_name(name, mark_as_used=True)
    value = tf.compat.v1.AttrValue(s=unique.encode())
    with tf.name_scope(unique), graph._attr_scope({OUTSIDE: value}):
        yield


FRONTEND_ATTRIBUTES_NAME = "_XlaFrontendAttributes"
"""The attribute of operations that has what `frontend_attribute` says of them."""


@contextlib.contextmanager
def frontend_attribute(
    attribute_name: str, attribute_value: str, restore_to: str | None = None
) -> Iterator[None]:
    """Operations inside carry an attribute for the compiler, which has no effect on numbers. ``restore_to``: its value
    for operations after the scope, if it had none before.
    """
    kind = importlib.import_module("tensorflow.compiler.xla.xla_data_pb2").FrontendAttributes
    graph: tf.Graph = tf.compat.v1.get_default_graph()
    saved, inside = kind(), kind()
    before = graph._attr_scope_map.get(FRONTEND_ATTRIBUTES_NAME)
    if before is not None:
        saved.ParseFromString(before.s)
        inside.ParseFromString(before.s)
    inside.map[attribute_name] = attribute_value
    value = tf.compat.v1.AttrValue(s=inside.SerializeToString())
    with graph._attr_scope({FRONTEND_ATTRIBUTES_NAME: value}):
        yield
    if restore_to is not None and attribute_name not in saved.map:
        saved.map[attribute_name] = restore_to
        after = tf.compat.v1.AttrValue(s=saved.SerializeToString())
        graph._attr_scope_map[FRONTEND_ATTRIBUTES_NAME] = after


@contextlib.contextmanager
def stochastic_rounding(override: bool) -> Iterator[None]:
    """Rounding of the operations inside. UnsupportedError if it is not that of the configuration, which holds for a
    whole program.
    """
    wanted = "ON" if override else "OFF"
    if in_program() and bool(override) != DEVICES.rounds_stochastically:
        raise UnsupportedError(
            f"scopes.stochastic_rounding({bool(override)}) differs from floating_point_behaviour.esr: podrun rounds "
            "all operations of a program alike.",
            hint=f"Configure esr = StochasticRoundingBehaviour.{wanted}, or leave the scope out.",
        )
    with frontend_attribute("STOCHASTIC_ROUNDING", f"THREESTATE_{wanted}", "THREESTATE_UNDEFINED"):
        yield


@contextlib.contextmanager
def partials_type(override_type: tf.DType) -> Iterator[None]:
    """The type of partial sums: float16 or float32; sums are in float32."""
    name = tf.as_dtype(override_type).name
    if name not in ("float16", "float32"):
        raise ValueError(f"Only support float16, float32, provided {name}")
    with frontend_attribute("PARTIALS_TYPE", "F16" if name == "float16" else "F32", "PRIMITIVE_TYPE_INVALID"):
        yield


def install_front_end() -> None:
    """Make the changes, once. ImportError if this TensorFlow lacks what podrun needs."""
    missing = missing_symbols()
    if missing:
        raise ImportError(f"this TensorFlow has no tensorflow.python.{missing[0]}, which podrun needs")
    flags()
    leave_unconverted()
    install_cuts(differentiated_on_device)
    read_variables_in_programs(made_on_ipu)
    install_sessions()
    install_devices()
    let_batch_norms_take_halves()
    install_eager_devices()
    importlib.import_module("podrun.tensorflow.sdk.host_markers").install_host_markers()
