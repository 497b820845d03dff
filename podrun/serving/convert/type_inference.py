"""Types and shapes of a model's tensors: ONNX's inference, and functions for operators that it does not know.

    @register_shape_func(["MyOp"])
    class MyShape(ShapeFunc):
        def __call__(self, model, node):
            ...
            return model, True

Large weights are left out of what is handed to ONNX's library, which copies the whole model several times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from podrun.core.errors import UsageError
from podrun.serving.convert.graph_walk import (
    GRAPHCORE_DOMAIN,
    ONNX_DOMAINS,
    TensorKind,
    attribute,
    graphs_within,
)

MOST_VALUES = 1024
"""Elements of the largest initializer whose values inference may want (shapes, axes, indices)."""


class ShapeFunc:
    """A shape function: ``__call__(model, node)`` puts the types of the node's results among ``model.graph.value_info``
    and returns the model and True, or False where it cannot tell.
    """

    def __call__(self, model: ModelProto, node: NodeProto) -> tuple[ModelProto, bool]:
        raise NotImplementedError


_functions: dict[str, ShapeFunc] = {}
C = TypeVar("C", bound=type[ShapeFunc])


def register_shape_func(operators: Sequence[str] | str) -> Callable[[C], C]:
    """Register a `ShapeFunc` for operators outside of ONNX's own domain."""
    names = [operators] if isinstance(operators, str) else list(operators)

    def registered(function: C) -> C:
        if not (isinstance(function, type) and issubclass(function, ShapeFunc)):
            raise UsageError("register_shape_func takes a class derived from ShapeFunc")
        for name in names:
            _functions[name] = function()
        return function

    return registered


def type_of_value(value: ValueInfoProto) -> TensorKind | None:
    """The type that a graph states for a tensor; None for sequences and the like."""
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.elem_type:
        return None
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return TensorKind(tensor.elem_type, None)
    sizes = tuple(
        d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else None for d in tensor.shape.dim
    )
    return TensorKind(tensor.elem_type, sizes)


def value_of_type(name: str, kind: TensorKind) -> ValueInfoProto:
    """What a graph states of a tensor."""
    return helper.make_tensor_value_info(name, kind.element, None if kind.shape is None else list(kind.shape))


def without_weights(model: ModelProto, most: int = MOST_VALUES, names: bool = False) -> ModelProto:
    """A copy whose large initializers are inputs of their type."""
    light = ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name or "graph"
    graph.node.extend(model.graph.node)
    graph.output.extend(model.graph.output)
    held = {tensor.name for tensor in model.graph.initializer}
    graph.input.extend(value for value in model.graph.input if value.name not in held)
    if names:
        graph.value_info.extend(model.graph.value_info)
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    for tensor in model.graph.initializer:
        if int(np.prod(tensor.dims, dtype=np.int64)) <= most:
            graph.initializer.append(tensor)
        else:
            graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    return light


def infer_types(model: ModelProto, nodes: Sequence[NodeProto] | None = None) -> dict[str, TensorKind]:
    """Types of all tensors, in inner graphs too, as far as they can be told. UsageError for a model whose types
    contradict each other. ``nodes``: those of the main graph, if they are not written back.
    """
    light = without_weights(model)
    if nodes is not None:
        del light.graph.node[:]
        light.graph.node.extend(nodes)
    pending = [n for n in light.graph.node if n.domain not in ONNX_DOMAINS]
    types = _inferred(light)
    while pending:
        left = []
        for node in pending:
            if all(name in types and types[name].shape is not None for name in node.output if name):
                continue
            told = _of_own_operator(light, node, types)
            light.graph.value_info.extend(value_of_type(name, kind) for name, kind in told.items())
            types.update(told)
            if not told:
                left.append(node)
        if len(left) == len(pending):
            break
        pending = left
        types |= {n: k for n, k in _inferred(light).items() if n not in types or types[n].sizes is None}
    return types


def _inferred(light: ModelProto) -> dict[str, TensorKind]:
    try:
        whole = onnx.shape_inference.infer_shapes(light, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError) as error:
        raise UsageError(f"the model's types and shapes contradict each other: {error}") from error
    types: dict[str, TensorKind] = {}
    for graph in graphs_within(whole.graph):
        _collect(graph, types)
    return types


def _collect(graph: GraphProto, types: dict[str, TensorKind]) -> None:
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = type_of_value(value)
        before = types.get(value.name)
        if kind is not None and (before is None or before.sizes is None):
            types[value.name] = kind
    for tensor in graph.initializer:
        types[tensor.name] = TensorKind(tensor.data_type, tuple(tensor.dims))


def _of_own_operator(
    light: ModelProto, node: NodeProto, types: dict[str, TensorKind]
) -> dict[str, TensorKind]:
    own = _functions.get(node.op_type)
    if own is not None:
        known = len(light.graph.value_info)
        light.graph.value_info.extend(value_of_type(n, types[n]) for n in node.input if n in types)
        _, told = own(light, node)
        new = [v for v in light.graph.value_info[known:] if v.name in node.output]
        del light.graph.value_info[known:]
        return {v.name: kind for v in new if (kind := type_of_value(v)) is not None} if told else {}
    rule = _RULES.get(node.op_type) if node.domain == GRAPHCORE_DOMAIN else None
    if rule is None or any(name and (name not in types or types[name].shape is None) for name in node.input):
        return {}
    results = rule(node, [types.get(name) for name in node.input])
    return {name: kind for name, kind in zip(node.output, results, strict=False) if name}


Kinds = list[Any]
"""Types of a node's inputs."""


def _like_first(node: NodeProto, kinds: Kinds) -> Kinds:
    return [kinds[0]]


def _normalised(node: NodeProto, kinds: Kinds) -> Kinds:
    x, groups = kinds[0], attribute(node, "num_groups", 1)
    rows = x.shape[0] * groups if x.shape and x.shape[0] is not None else None
    return [x, TensorKind(x.element, (rows,)), TensorKind(x.element, (rows,))]


def _to_float8(node: NodeProto, kinds: Kinds) -> Kinds:
    return [TensorKind(int(attribute(node, "to")), kinds[0].shape)]


def _from_float8(node: NodeProto, kinds: Kinds) -> Kinds:
    return [TensorKind(int(attribute(node, "to", TensorProto.FLOAT16)), kinds[0].shape)]


def _normalised_image(node: NodeProto, kinds: Kinds) -> Kinds:
    x, offsets = kinds[0], kinds[1]
    return [TensorKind(offsets.element, None if x.shape is None else (*x.shape[:-1], 4))]


_RULES: dict[str, Callable[[NodeProto, Kinds], Kinds]] = {
    **dict.fromkeys(
        (
            "Gelu",
            "GeluErf",
            "Swish",
            "Scale",
            "Nop",
            "TensorRemap",
            "Detach",
            "PrintTensor",
            "PrintTileMapping",
        ),
        _like_first,
    ),
    "GroupNormalization": _normalised,
    "Pow2ScaleThenCast": _to_float8,
    "CastThenPow2Scale": _from_float8,
    "NormalizeImage": _normalised_image,
}
"""Shapes of ai.graphcore's operators that passes put into models."""


def own_shape_rule(operator: str, rule: Callable[[NodeProto, Kinds], Kinds]) -> None:
    """Say how an operator of ai.graphcore gets its result's type from those of its inputs."""
    _RULES[operator] = rule


def _broadcast_kinds(node: NodeProto, kinds: Kinds) -> Kinds:
    shapes = [kind.sizes for kind in kinds]
    shape = None if None in shapes else np.broadcast_shapes(*shapes)
    return [TensorKind(kinds[-1].element, shape)]


_RULES |= {
    "ErfV2": _like_first,
    "SoftmaxV2": _like_first,
    "FastNorm": _like_first,
    "WhereV2": _broadcast_kinds,
}
