"""Choices and comparisons in forms that PopART has, or that cost less."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper

from podrun.serving.convert.graph_edit import GraphEditor
from podrun.serving.convert.graph_walk import GRAPHCORE_DOMAIN
from podrun.serving.convert.pass_manager import rewrite

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


def _or_equal(graph: GraphEditor, operator: str, strict: str) -> None:
    for node in graph.onnx_nodes(operator):
        above = graph.node(strict, list(node.input))
        equal = graph.node("Equal", list(node.input))
        last = graph.node("Or", [above.output[0], equal.output[0]], node.output[0])
        graph.replace([node], [above, equal, last])


@rewrite("replace_greater_or_equal")
def _greater_or_equal(graph: GraphEditor) -> None:
    """GreaterOrEqual becomes "greater, or equal"."""
    _or_equal(graph, "GreaterOrEqual", "Greater")


@rewrite("replace_less_or_equal")
def _less_or_equal(graph: GraphEditor) -> None:
    """LessOrEqual becomes "less, or equal"."""
    _or_equal(graph, "LessOrEqual", "Less")


@rewrite("replace_where_mask")
def _where_mask(graph: GraphEditor) -> None:
    """Where with one large negative number for what is masked, before a Softmax, becomes a sum with a mask.

    What is masked has probability 0 either way; the numbers before the Softmax differ there.
    """
    for node in graph.onnx_nodes("Where"):
        user = graph.sole_user(node.output[0])
        if user is None or user.op_type != "Softmax" or user.domain:
            continue
        for masked in (1, 2):
            value, other = graph.scalar(node.input[masked]), node.input[3 - masked]
            same = graph.sizes(other) == graph.sizes(node.output[0])
            if value is None or value > -1e4 or graph.element(other) not in _FLOATS or not same:
                continue
            dtype = helper.tensor_dtype_to_np_dtype(graph.element(other) or TensorProto.FLOAT)
            with np.errstate(over="ignore"):
                far = np.maximum(np.asarray(value, dtype), np.finfo(dtype).min / 2).astype(dtype)
            numbers = [graph.add_constant(v, "mask") for v in (far, np.zeros((), dtype))]
            mask = graph.node("Where", [node.input[0], *(numbers if masked == 1 else numbers[::-1])])
            graph.replace([node], [mask, graph.node("Add", [other, mask.output[0]], node.output[0])])
            break
    graph.drop_dead()


@rewrite("replace_where_with_mul_add")
def _where_with_mul_add(graph: GraphEditor) -> None:
    """Where of constant, finite numbers becomes ``b + condition * (a - b)``: one of the two must be a constant."""
    for node in graph.onnx_nodes("Where"):
        element = graph.element(node.output[0])
        values = [graph.constant(name) for name in node.input[1:3]]
        if element not in _FLOATS or any(v is None or not np.isfinite(v).all() for v in values):
            continue
        new = _blended(graph, node, element, [v for v in values if v is not None])
        if new:
            graph.replace([node], new)
    graph.drop_dead()


def _blended(graph: GraphEditor, node: NodeProto, element: int, values: list[np.ndarray]) -> list[NodeProto]:
    a, b = values
    step = a.astype(np.float64) - b
    exact = (b.astype(np.float64) + step.astype(a.dtype)).astype(a.dtype) == a
    if (
        not np.isfinite(step.astype(a.dtype)).all()
        or not np.broadcast_to(exact, np.broadcast(a, b).shape).all()
    ):
        return []
    weight = graph.node("Cast", [node.input[0]], to=element)
    difference = graph.add_constant(step.astype(a.dtype), "difference")
    product = graph.node("Mul", [weight.output[0], difference])
    return [weight, product, graph.node("Add", [product.output[0], node.input[2]], node.output[0])]


@rewrite("replace_where_with_wherev2")
def _wherev2(graph: GraphEditor) -> None:
    """Where becomes ai.graphcore.WhereV2."""
    for node in graph.onnx_nodes("Where"):
        new = graph.node("WhereV2", list(node.input), node.output[0], domain=GRAPHCORE_DOMAIN)
        graph.replace([node], [new])
