"""Lists of tensors (``tf.TensorArray``): the size of their elements, also where a program does not say it.

A list is an array with the list's length in front, so its size must be known when it is made. A program says it with
``element_shape``, by what it writes to the list, or by how it stacks it: also in the bodies of loops and in functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from podrun.private_apis.tensorflow import symbol
from podrun.tensorflow.graph.builder import Value
from podrun.tensorflow.graph.importer import Importer, function_graph, reads_as

_constant_value = symbol("framework.tensor_util.constant_value")
_LOOPS = ("While", "StatelessWhile")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def _said(shape: tf.Tensor) -> tuple[int, ...] | None:
    """The sizes that a tensor holds; None if some are unknown."""
    value = _constant_value(shape)
    if value is None or value.ndim != 1 or (value < 0).any():
        return None
    return tuple(int(size) for size in value)


def _shape_at(operation: tf.Operation) -> tuple[int, ...] | None:
    """The size of a list's elements that one of its uses tells."""
    if operation.type == "TensorListSetItem":
        item = operation.inputs[2].shape
        return tuple(item.as_list()) if item.is_fully_defined() else None
    if operation.type in ("TensorListStack", "TensorListGetItem"):
        shape = operation.outputs[0].shape
        lead = 1 if operation.type == "TensorListStack" else 0
        if shape.rank is not None and shape[lead:].is_fully_defined():
            return tuple(shape[lead:].as_list())
        return _said(operation.inputs[-1])
    return None


def _onwards(operation: tf.Operation, place: int) -> Iterator[tf.Tensor]:
    """The tensors that are the same list, after an operation that has it as its input number ``place``."""
    if operation.type in ("TensorListSetItem", "Identity"):
        yield operation.outputs[0]
    elif operation.type in _LOOPS:
        yield operation.outputs[place]
        yield function_graph(operation.graph, operation.get_attr("body").name).inputs[place]
    elif operation.type in _CALLS:
        called = function_graph(operation.graph, operation.get_attr("f").name)
        yield called.inputs[place]
        for inner, outer in zip(called.outputs, operation.outputs, strict=True):
            if inner is called.inputs[place]:
                yield outer


def element_shape(maker: tf.Operation) -> tuple[int, ...] | None:
    """The size of the elements of the list that an operation makes; None if nothing tells it."""
    stated = _said(maker.inputs[0])
    waiting, seen = [maker.outputs[0]], set[int]()
    while waiting and stated is None:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        for user in tensor.consumers():
            for place, source in enumerate(user.inputs):
                if source is tensor:
                    stated = stated or _shape_at(user)
                    waiting += list(_onwards(user, place))
    return stated


@reads_as("TensorListReserve")
def _reserve(importer: Importer, operation: tf.Operation, inputs: list[Value]) -> Sequence[Value]:
    return importer.builder.add(
        "TensorListReserve",
        importer.names(operation, inputs),
        name=operation.name,
        output=operation.get_attr("element_dtype").base_dtype.name,
        element=element_shape(operation),
    )
