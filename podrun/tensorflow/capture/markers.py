"""Operations of IPUs in a graph of TensorFlow: what the runtime does and TensorFlow has no kernel for.

A marker is a ``PyFunc`` whose token says what it stands for: ``podrun:`` and JSON with its kind and attributes. It
survives when a function is written to a FunctionDef and read back. Where the host reaches one outside of a program,
in eager mode or in a function, `on_host` runs it on an IPU, as TensorFlow places an operation that no CPU has.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from podrun.private_apis.tensorflow import symbol

PREFIX = "podrun:"

_py_func = symbol("ops.gen_script_ops.py_func")
_py_func_stateless = symbol("ops.gen_script_ops.py_func_stateless")
_numbers = itertools.count()

HostRun = Callable[
    [str, Sequence[tf.Tensor], Sequence[tf.TensorSpec], dict[str, Any]], list[tf.Tensor] | None
]
on_host: list[HostRun] = []
"""What runs a marker without an effect outside of a program; it gives None inside of one."""

REFERENCES: dict[int, Any] = {}
"""Objects that tokens name: queues, graphs of loops. They live as long as the process, as graphs do."""


def reference(value: object) -> int:
    """The number under which a token names ``value``."""
    number = next(_numbers)
    REFERENCES[number] = value
    return number


def mark(
    kind: str,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.TensorSpec],
    *,
    stateful: bool = False,
    name: str | None = None,
    **attributes: Any,
) -> Any:
    """An operation of kind ``kind`` in the current graph. Returns the list of its outputs, or the operation if it has
    none.
    """
    for run in () if stateful else on_host:
        ran = run(kind, inputs, outputs, attributes)
        if ran is not None:
            return ran
    return placed_marker(kind, inputs, outputs, attributes, stateful=stateful, name=name)


def token_of(kind: str, attributes: Mapping[str, Any]) -> str:
    """The text in an operation's attribute that tells which marker it is."""
    return PREFIX + json.dumps({"kind": kind, **attributes}, sort_keys=True)


def placed_marker(
    kind: str,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.TensorSpec],
    attributes: Mapping[str, Any],
    *,
    stateful: bool = False,
    name: str | None = None,
) -> Any:
    """`mark` in the current graph, whoever runs it."""
    token = token_of(kind, attributes)
    function = _py_func if stateful else _py_func_stateless
    results = function(list(inputs), token, [spec.dtype for spec in outputs], name=name or kind)
    if isinstance(results, tf.Operation):
        return results
    tensors = list(results)
    for tensor, spec in zip(tensors, outputs, strict=True):
        tensor.set_shape(spec.shape)
    return tensors


def mark_like(kind: str, tensor: tf.Tensor, **attributes: Any) -> tf.Tensor:
    """A marker of one input whose one output has the input's type and shape."""
    (result,) = mark(kind, [tensor], [tf.TensorSpec(tensor.shape, tensor.dtype)], **attributes)
    return result


def marked(operation: tf.Operation) -> dict[str, Any] | None:
    """Kind and attributes of a marker; None for any other operation."""
    if operation.type not in ("PyFunc", "PyFuncStateless"):
        return None
    token = operation.get_attr("token").decode(errors="replace")
    return dict(json.loads(token.removeprefix(PREFIX))) if token.startswith(PREFIX) else None
