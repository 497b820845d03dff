"""IPUs as devices of TensorFlow: the names that programs read from ``device``, and what is placed on an IPU without
being compiled.

TensorFlow knows no device of that type, so its own kernels compute operations outside of programs on the CPU; a session
runs those of a version-1 program in clusters on the IPU (`clusters`). Variables that an IPU strategy made, tensors that
a program returned and operations in an IPU's scope name the IPU, as in the SDK.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from podrun.private_apis.tensorflow import private_module
from podrun.tensorflow.capture.markers import REFERENCES, marked

_IPU = re.compile(r"device:IPU:(\d+)", re.IGNORECASE)
_NAME = "_ipu_device"
"""The attribute of what names an IPU as its device."""
OWN_DEVICE = "_ipu_of_all_operations"
"""The attribute of graphs of which every operation that names no device lies on an IPU: its name."""
_HAS_PLACED = "_has_ipu_operations"
"""The attribute of graphs that have such operations."""


def placed_ordinal(graph: tf.Graph) -> int | None:
    """The number of the IPU device in whose scope a graph is being made; None outside of any."""
    ordinal = None
    for entry in graph._device_functions_outer_to_inner:
        text = str((getattr(entry, "string_merge", None) and entry.display_name) or entry)
        hit = _IPU.search(text)
        if hit:
            ordinal = int(hit.group(1))
        elif "device:CPU" in text:
            ordinal = None
    return ordinal


def made_on_ipu() -> bool:
    """Whether the operations that are being made in a graph lie on an IPU."""
    return not tf.executing_eagerly() and placed_ordinal(tf.compat.v1.get_default_graph()) is not None


def ipu_in(name: object) -> int | None:
    """The number of the IPU device that a name names; None for another device."""
    hit = _IPU.search(name) if isinstance(name, str) else None
    return int(hit.group(1)) if hit else None


def placed_on(operation: tf.Operation) -> int | None:
    """The number of the IPU device on which a program placed an operation; None for the host."""
    hit = _IPU.search(getattr(operation, _NAME, None) or "")
    return int(hit.group(1)) if hit else None


def is_placed_graph(graph: tf.Graph) -> bool:
    """Whether a program placed operations of a graph on IPUs."""
    return bool(getattr(graph, _HAS_PLACED, False))


def placed_inside(graph: tf.Graph) -> int | None:
    """The number of the IPU device on which the operations of a function's graph lie; None if none lies on one."""
    for operation in graph.get_operations():
        marker = marked(operation) or {}
        number = placed_on(operation)
        if number is None and "loop" in marker:
            number = placed_inside(REFERENCES[marker["loop"]].body_graph)
        if number is not None:
            return number
    return None


def name_device(value: tf.Tensor, ordinal: int) -> tf.Tensor:
    """The variable or tensor, which names the IPU number ``ordinal`` as its device from now on."""
    with contextlib.suppress(AttributeError):
        object.__setattr__(value, _NAME, f"/job:localhost/replica:0/task:0/device:IPU:{ordinal}")
    return value


def named_variables(ordinal: int) -> Any:
    """A scope in which new variables name the IPU as their device."""

    def create(next_creator: Callable[..., tf.Variable], **options: object) -> Any:
        return name_device(next_creator(**options), ordinal)

    return tf.variable_creator_scope(create)


def changed_classes() -> list[tuple[Any, tuple[str, ...]]]:
    """What `install_devices` changes: each owner with the names."""
    operations = private_module("framework.ops")
    return [
        (operations.Graph, ("_apply_device_functions",)),
        (private_module("eager.context").Context, ("device",)),
        (private_module("compiler.xla.xla"), ("compile",)),
        (operations.Operation, ("_set_device",)),
        (private_module("ops.control_flow_util"), ("EnableControlFlowV2",)),
        (private_module("ops.cond_v2"), ("cond_v2",)),
        (private_module("ops.control_flow_util_v2"), ("output_all_intermediates",)),
        *((owner, ("device",)) for owner in _named_classes()),
    ]


def _named_classes() -> list[Any]:
    operations = private_module("framework.ops")
    variable = private_module("ops.resource_variable_ops").BaseResourceVariable
    return [operations.Operation, operations.SymbolicTensor, operations.EagerTensor, variable]


def install_devices() -> None:
    """Let operations on IPUs outside of programs be the CPU's, let ``device`` name IPUs, and let ``xla.compile`` in the
    scope of an IPU make a program.
    """
    graph_class = private_module("framework.ops").Graph
    operation_class = private_module("framework.ops").Operation
    if getattr(graph_class._apply_device_functions, "ipus", False):
        return
    apply = graph_class._apply_device_functions

    def apply_on_host(self: tf.Graph, op: tf.Operation) -> None:
        apply(self, op)
        chosen = op.device
        if not chosen:
            chosen = _own_device(self)
            if chosen:
                object.__setattr__(op, _NAME, chosen)
        elif _IPU.search(chosen):
            op._set_device_from_string("/device:CPU:0")
            object.__setattr__(op, _NAME, chosen)
            setattr(self, _HAS_PLACED, True)

    set_device = operation_class._set_device

    def set_on_host(self: Any, chosen: Any) -> None:
        text = str(getattr(chosen, "display_name", chosen))
        if not _IPU.search(text):
            set_device(self, chosen)
            if hasattr(self, _NAME):
                object.__delattr__(self, _NAME)
            return
        self._set_device_from_string("/device:CPU:0")
        object.__setattr__(self, _NAME, text)
        setattr(self.graph, _HAS_PLACED, True)

    operation_class._set_device = set_on_host
    apply_on_host.ipus = True  # type: ignore[attr-defined]
    graph_class._apply_device_functions = apply_on_host
    for owner in _named_classes():
        owner.device = _named(owner.device)
    _install_compile()
    _install_control_flow()


def _named(plain: Any) -> property:
    """The property ``device`` of a class: the IPU's name where there is one."""

    def device(self: Any) -> Any:
        own = getattr(self, _NAME, None)
        if own is None:
            whole = getattr(self, "handle", self)
            own = getattr(None if whole is None else _operation_of(whole), _NAME, None)
        return plain.__get__(self, type(self)) if own is None else own

    return property(device)


def _own_device(graph: tf.Graph | None) -> str:
    """The IPU of operations that name no device: that of the program around a graph; empty outside of programs."""
    while graph is not None:
        own = getattr(graph, OWN_DEVICE, "")
        if own:
            return str(own)
        graph = getattr(graph, "outer_graph", None)
    return ""


def _operation_of(tensor: Any) -> Any:
    """The operation that gives a tensor of a graph; None for eager ones and for operations."""
    return tensor.op if isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy") else None


def _install_compile() -> None:
    xla = private_module("compiler.xla.xla")
    plain = xla.compile

    def compile(computation: Callable[..., Any], inputs: Any = None) -> Any:
        if tf.executing_eagerly() or placed_ordinal(tf.compat.v1.get_default_graph()) is None:
            return plain(computation, inputs)
        own = importlib.import_module("podrun.tensorflow.sdk.ipu_compiler").compile
        return own(computation, inputs)

    xla.compile = compile
    tf.xla.experimental.compile = compile


def _install_control_flow() -> None:
    """Let conditions and loops of a version-1 graph be operations that have graphs of their own, where they are made in
    the scope of an IPU, which computes them then. Variables that are no resources cannot be in these graphs.
    """
    flow, conditions = private_module("ops.control_flow_util"), private_module("ops.cond_v2")
    plain, plain_condition = flow.EnableControlFlowV2, conditions.cond_v2

    def on_ipu(graph: tf.Graph) -> bool:
        if plain(graph):
            return False
        variables = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        return placed_ordinal(graph) is not None and all(hasattr(v, "handle") for v in variables)

    def enabled(graph: tf.Graph) -> bool:
        return bool(plain(graph)) or on_ipu(graph)

    def condition(*args: object, **options: object) -> object:
        one = on_ipu(tf.compat.v1.get_default_graph())
        result = plain_condition(*args, **options)
        return result[0] if one and isinstance(result, (list, tuple)) and len(result) == 1 else result

    flow.EnableControlFlowV2, conditions.cond_v2 = enabled, condition
    inner = private_module("ops.control_flow_util_v2")
    plain_keeping = inner.output_all_intermediates
    # For gradients of TensorFlow's own, beside layers of Keras; on an IPU JAX differentiates.
    inner.output_all_intermediates = lambda: not made_on_ipu() and plain_keeping()
