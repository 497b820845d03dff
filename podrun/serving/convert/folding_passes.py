"""Folding: what depends on constants alone is computed while converting.

Nodes are computed by ONNX's own reference implementation, one at a time; a node that it cannot compute stays.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from podrun.core.errors import UsageError
from podrun.onnx_models.ops.registry import RANDOM
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import ONNX_DOMAINS, attribute, inner_graphs
from podrun.serving.convert.pass_manager import Pass, register, rewrite

_log = logging.getLogger("poprt")
_KEPT = (
    frozenset({"Constant", "QuantizeLinear", "DequantizeLinear", "Optional", "Loop", "Scan", "If"}) | RANDOM
)
_FLOAT8 = (
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2,
    TensorProto.FLOAT8E5M2FNUZ,
)


@register("constant_folding")
class ConstantFolding(Pass):
    """Nodes of constants become initializers. ``max_tensor_size``: bytes of the largest result (-1: any)."""

    def __init__(self, max_tensor_size: int = -1) -> None:
        if isinstance(max_tensor_size, bool) or not isinstance(max_tensor_size, int) or max_tensor_size < -1:
            raise UsageError(f"max_tensor_size is a number of bytes or -1, not {max_tensor_size!r}")
        self.max_tensor_size = max_tensor_size

    def run(self, model: ModelProto) -> ModelProto:
        owner = ModelEditor(model)
        for graph in owner.graphs():
            fold_constants(graph, self.max_tensor_size)
        return model


def fold_constants(graph: GraphEditor, most_bytes: int = -1) -> None:
    """Compute the nodes of a graph that depend on constants alone, in the order in which they stand."""
    gone = []
    for node in list(graph.nodes):
        if node.domain not in ONNX_DOMAINS or node.op_type in _KEPT or any(inner_graphs(node)):
            continue
        values = _results_of(graph, node, most_bytes)
        if values is None:
            continue
        for name, value in values.items():
            graph.hold(numpy_helper.from_array(value, name))
        gone.append(node)
    if gone:
        graph.remove(gone)
        graph.drop_dead()
        _keep_outputs(graph)


def _keep_outputs(graph: GraphEditor) -> None:
    """An inner graph gives back what a node makes: put an Identity behind a folded output."""
    for value in graph.graph.output:
        if graph.producer(value.name) is None and graph.tensor(value.name) is not None:
            held = graph.tensor(value.name)
            if held is None or held.name not in {t.name for t in graph.graph.initializer}:
                continue
            inner = graph.owner.new_name(f"{value.name}_value")
            for tensor in graph.graph.initializer:
                if tensor.name == value.name:
                    tensor.name = inner
            graph._held[inner] = graph._held.pop(value.name)
            graph.nodes.append(graph.node("Identity", [inner], value.name))
            graph.touch()


def _results_of(graph: GraphEditor, node: NodeProto, most_bytes: int) -> dict[str, np.ndarray] | None:
    """The values of a node's results; None if they are not known or too large."""
    if node.op_type in ("Shape", "Size"):
        return _shape_value(graph, node)
    if not all(graph.is_constant(name) for name in node.input if name):
        return None
    if node.op_type == "Cast" and attribute(node, "to") in (*_FLOAT8, TensorProto.STRING):
        return None
    inputs = {name: graph.constant(name) for name in node.input if name}
    if any(value is None for value in inputs.values()):
        return None
    expected = [graph.kind(name) for name in node.output if name]
    if most_bytes >= 0:
        for kind in expected:
            if kind is None or kind.sizes is None:
                return None
            width = helper.tensor_dtype_to_np_dtype(kind.element).itemsize
            if int(np.prod(kind.sizes, dtype=np.int64)) * width > most_bytes:
                return None
    return _computed(graph, node, inputs)


def _computed(graph: GraphEditor, node: NodeProto, inputs: dict[str, Any]) -> dict[str, np.ndarray] | None:
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    results = [name for name in node.output if name]
    inner = helper.make_graph(
        [node], "fold", declared, [helper.make_empty_tensor_value_info(name) for name in results]
    )
    model = helper.make_model(inner, opset_imports=graph.owner.model.opset_import, ir_version=8)
    try:
        with np.errstate(all="ignore"):
            values = ReferenceEvaluator(model).run(results, inputs)
    except Exception as error:  # ONNX's reference raises whatever NumPy does; the node stays as it is.
        _log.debug("%s %s is not folded: %s", node.op_type, node.name, error)
        return None
    told = {}
    for name, value in zip(results, values, strict=True):
        array = np.asarray(value)
        kind = graph.kind(name)
        if not isinstance(value, (np.ndarray, np.generic)) or array.dtype.kind not in "fiub":
            return None
        if kind is not None and kind.element:
            wanted = helper.tensor_dtype_to_np_dtype(kind.element)
            if array.dtype != wanted:
                return None
        told[name] = array
    return told


def _shape_value(graph: GraphEditor, node: NodeProto) -> dict[str, np.ndarray] | None:
    sizes = graph.sizes(node.input[0])
    if sizes is None:
        return None
    if node.op_type == "Size":
        return {node.output[0]: np.asarray(int(np.prod(sizes, dtype=np.int64)), np.int64)}
    start, end = attribute(node, "start", 0), attribute(node, "end")
    return {node.output[0]: np.asarray(sizes[slice(start, end)], np.int64)}


@rewrite("fold_periodic_initializer")
def _periodic_initializer(graph: GraphEditor) -> None:
    """An initializer that repeats itself along an axis becomes its period and a Tile, where that is a saving."""
    for tensor in list(graph.graph.initializer):
        count = int(np.prod(tensor.dims, dtype=np.int64))
        if count < _LEAST_PERIODIC or graph.is_input(tensor.name) or graph.is_output(tensor.name):
            continue
        value = numpy_helper.to_array(tensor)
        if value.dtype.kind not in "fiub":
            continue
        repeats = [_repeats(value, axis) for axis in range(value.ndim)]
        if max(repeats, default=1) < 2:
            continue
        small = value[tuple(slice(0, size // r) for size, r in zip(value.shape, repeats, strict=True))]
        period = graph.add_constant(small, f"{tensor.name}_period")
        times = graph.add_constant(np.asarray(repeats, np.int64), f"{tensor.name}_repeats")
        name = graph.owner.new_name(f"{tensor.name}_tiled")
        graph.rename_uses(tensor.name, name)
        graph.nodes.insert(0, graph.node("Tile", [period, times], name))
        graph.touch()
    graph.drop_unused_initializers()


_LEAST_PERIODIC = 4096
"""Elements of the smallest initializer that is worth a Tile."""


def _repeats(value: np.ndarray, axis: int) -> int:
    """How often a tensor repeats its first part along an axis: 1 if it does not."""
    size = value.shape[axis]
    for period in (p for p in range(1, size // 2 + 1) if size % p == 0):
        shape = (*value.shape[:axis], size // period, period, *value.shape[axis + 1 :])
        blocks = value.reshape(shape)
        if bool((blocks == np.take(blocks, [0], axis=axis)).all()):
            return int(size // period)
    return 1
