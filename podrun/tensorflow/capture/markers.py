"""Operations of IPUs in a graph of TensorFlow: what the runtime does and TensorFlow has no kernel for.

A marker is a ``PyFunc`` whose token says what it stands for: ``podrun:`` and JSON with its kind and attributes. It
survives when a function is written to a FunctionDef and read back. The host never runs one: a marker that is reached
outside of a program on an IPU is an error of TensorFlow's that names the token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from podrun.private_apis.tensorflow import symbol

PREFIX = "podrun:"

_py_func = symbol("ops.gen_script_ops.py_func")
_py_func_stateless = symbol("ops.gen_script_ops.py_func_stateless")
_numbers = itertools.count()

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
    token = PREFIX + json.dumps({"kind": kind, **attributes}, sort_keys=True)
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
