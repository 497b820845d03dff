"""What programs use beside the converter: passes by name, inputs of models, helpers for passes, operations."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper

from podrun.core.errors import UsageError
from podrun.serving.convert.graph_edit import ModelEditor
from podrun.serving.convert.graph_walk import attribute, graphs_within, names_used, sorted_nodes
from podrun.serving.convert.pass_manager import Pass, PassManager
from podrun.serving.convert.structure_passes import ShapeInference, true_inputs
from podrun.serving.convert.type_inference import infer_types


class PassOptimizer:
    """Passes by name: ``PassOptimizer(["eliminate_identity"]).run(model)``, which programs know as Optimizer."""

    def __init__(self, passes: Sequence[str | Pass] = ()) -> None:
        self._manager = PassManager(passes)

    def run(self, model: ModelProto) -> ModelProto:
        return self._manager.run(model)


class LazyImport:
    """A module that is imported when it is first used: ``tf = LazyImport("tensorflow")``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute_name: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute_name)


def get_input_info_from_model_proto(model: ModelProto) -> tuple[dict[str, list[int]], dict[str, np.dtype]]:
    """Shapes and dtypes of a model's inputs by name; a size that is open is 0."""
    inputs = true_inputs(model)
    shapes = {n: [d.dim_value for d in v.type.tensor_type.shape.dim] for n, v in inputs.items()}
    return shapes, {n: onnx_tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for n, v in inputs.items()}


def onnx_tensor_dtype_to_np_dtype(element: int) -> np.dtype:
    """NumPy's type for an element type of ONNX. UsageError for a number that is none."""
    try:
        dtype: np.dtype = np.dtype(helper.tensor_dtype_to_np_dtype(element))
    except KeyError as error:
        raise UsageError(f"ONNX has no element type {element!r}") from error
    return dtype


def topological_sort(graph: GraphProto) -> None:
    """Sort a graph's nodes in place, so that every tensor is made before it is used."""
    nodes = list(graph.node)
    makers = {name for node in nodes for name in node.output}
    ordered = sorted_nodes(nodes, {n for node in nodes for n in names_used(node)} - makers)
    copies = [_copied(node) for node in ordered]
    del graph.node[:]
    graph.node.extend(copies)


def _copied(node: NodeProto) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


def clean_info(model: ModelProto) -> ModelProto:
    """Forget what a model states of tensors within it: a pass may have changed them."""
    for graph in graphs_within(model.graph):
        del graph.value_info[:]
    return model


def get_dtype(model: ModelProto, name: str) -> int | None:
    """The element type of a tensor, if it is known."""
    kind = infer_types(model).get(name)
    return kind.element if kind is not None else None


def get_constant(model: ModelProto, name: str) -> np.ndarray | None:
    """The value of a constant of the main graph; None for what is none."""
    return ModelEditor(model).main.constant(name)


def infer_shapes(model: ModelProto) -> ModelProto:
    """The model with the types and shapes of its tensors stated."""
    return ShapeInference().run(model)


NodeShapes = Sequence[Sequence[int]]


def _of_matmul(node: NodeProto, inputs: NodeShapes, outputs: NodeShapes) -> int:
    return 2 * int(np.prod(outputs[0], dtype=np.int64)) * int(inputs[0][-1])


def _of_gemm(node: NodeProto, inputs: NodeShapes, outputs: NodeShapes) -> int:
    depth = inputs[0][0 if attribute(node, "transA", 0) else 1]
    return 2 * int(np.prod(outputs[0], dtype=np.int64)) * int(depth)


def _of_conv(node: NodeProto, inputs: NodeShapes, outputs: NodeShapes) -> int:
    return 2 * int(np.prod(outputs[0], dtype=np.int64)) * int(np.prod(inputs[1][1:], dtype=np.int64))


def _of_elements(node: NodeProto, inputs: NodeShapes, outputs: NodeShapes) -> int:
    return int(np.prod(outputs[0], dtype=np.int64)) if outputs else 0


_COUNTS: dict[str, Callable[[NodeProto, NodeShapes, NodeShapes], int]] = {
    "MatMul": _of_matmul,
    "Gemm": _of_gemm,
    "Conv": _of_conv,
}
_FREE = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Constant", "Shape", "Cast")


class OperationCounter:
    """Operations of nodes: products count two for each multiplication and addition, others one for each result."""

    def get_profiler(self, op_type: str) -> Callable[[NodeProto, NodeShapes, NodeShapes], int]:
        """A function of a node, its inputs' and its outputs' shapes."""
        if op_type in _FREE:
            return lambda node, inputs, outputs: 0
        return _COUNTS.get(op_type, _of_elements)


def get_model_flops(model: ModelProto, by_operator: bool = False) -> Any:
    """Operations of the main graph; with ``by_operator`` a dictionary. UsageError where a shape is not known."""
    types = infer_types(model)
    counts: dict[str, int] = {}
    for node in model.graph.node:
        ends = [[n for n in names if n] for names in (node.input, node.output)]
        shapes = []
        for names in ends:
            kinds = [types.get(name) for name in names]
            if any(kind is None or kind.sizes is None for kind in kinds):
                raise UsageError(f"the shapes of node {node.name or node.op_type!r} are not known")
            shapes.append([kind.sizes for kind in kinds if kind is not None and kind.sizes is not None])
        count = OperationCounter().get_profiler(node.op_type)(node, shapes[0], shapes[1])
        counts[node.op_type] = counts.get(node.op_type, 0) + count
    return counts if by_operator else sum(counts.values())
