"""Forms of operators that PopART does not take become ones that it does; attributes that it lacks are refused."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from podrun.core.errors import UnsupportedError
from podrun.serving.convert.graph_edit import GraphEditor
from podrun.serving.convert.graph_walk import attribute, graphs_within, set_attribute
from podrun.serving.convert.normalization_passes import as_product_and_sum
from podrun.serving.convert.pass_manager import Pass, register, rewrite


@rewrite("batchnorm_workaround")
def _batchnorm(graph: GraphEditor) -> None:
    """Parameters of a BatchNormalization have the type of what it normalises; one of two axes becomes a product and a
    sum, because PopART's takes three axes or more.
    """
    for node in graph.onnx_nodes("BatchNormalization"):
        sizes = graph.sizes(node.input[0])
        if sizes is not None and len(sizes) < 3:
            as_product_and_sum(graph, node)
            continue
        half = graph.element(node.input[0]) == TensorProto.FLOAT16
        for index in range(1, 5):
            value = graph.constant(node.input[index])
            wanted = np.float16 if half else np.float32
            if value is not None and value.dtype != wanted and value.dtype.kind == "f":
                node.input[index] = graph.add_constant(value.astype(wanted), f"{node.input[index]}_cast")
                graph.touch()
    graph.drop_dead()


@rewrite("cumsum_workaround")
def _cumsum(graph: GraphEditor) -> None:
    """The axis of a CumSum is a 32-bit number from 0 on."""
    for node in graph.onnx_nodes("CumSum"):
        axis, sizes = graph.constant(node.input[1]), graph.sizes(node.input[0])
        if axis is not None and sizes is not None and (axis.dtype != np.int32 or axis.reshape(-1)[0] < 0):
            place = np.asarray(int(axis.reshape(-1)[0]) % len(sizes), np.int32)
            node.input[1] = graph.add_constant(place, "axis")
            graph.touch()


@rewrite("float_ops_workaround")
def _float_ops(graph: GraphEditor) -> None:
    """Means and powers of 32-bit integers are computed in float32 and cast back."""
    for node in graph.onnx_nodes("ReduceMean", "Pow"):
        if graph.element(node.input[0]) != TensorProto.INT32:
            continue
        graph.lead_input(node, 0, "Cast", to=TensorProto.FLOAT)
        if node.op_type == "Pow" and graph.element(node.input[1]) == TensorProto.INT32:
            graph.lead_input(node, 1, "Cast", to=TensorProto.FLOAT)
        graph.lead_result(node, "Cast", to=TensorProto.INT32)


@rewrite("indices_workaround")
def _indices(graph: GraphEditor) -> None:
    """Constant places that a Gather counts from the end are counted from the front."""
    for node in graph.onnx_nodes("Gather"):
        places, sizes = graph.constant(node.input[1]), graph.sizes(node.input[0])
        if places is None or sizes is None or not bool((places < 0).any()):
            continue
        size = sizes[attribute(node, "axis", 0)]
        node.input[1] = graph.add_constant(
            np.where(places < 0, places + size, places).astype(places.dtype), "places"
        )
        graph.touch()
    graph.drop_dead()


@rewrite("onehot_workaround")
def _onehot(graph: GraphEditor) -> None:
    """The places of a OneHot are 32-bit integers, and its depth is a scalar."""
    for node in graph.onnx_nodes("OneHot"):
        if graph.element(node.input[0]) in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64):
            graph.lead_input(node, 0, "Cast", to=TensorProto.INT32)
        depth = graph.constant(node.input[1])
        if depth is not None and (depth.ndim or depth.dtype.kind == "f"):
            node.input[1] = graph.add_constant(np.asarray(int(depth.reshape(-1)[0]), np.int64), "depth")
        graph.touch()
    graph.drop_dead()


@rewrite("topk_workaround")
def _topk(graph: GraphEditor) -> None:
    """The least numbers of a TopK become the largest of the negated."""
    for node in graph.onnx_nodes("TopK"):
        kind = graph.element(node.input[0])
        if attribute(node, "largest", 1) or kind not in (TensorProto.FLOAT, TensorProto.FLOAT16):
            continue
        graph.lead_input(node, 0, "Neg")
        graph.lead_result(node, "Neg")
        set_attribute(node, "largest", 1)


@rewrite("fill_squeeze_axes")
def _squeeze_axes(graph: GraphEditor) -> None:
    """A Squeeze that names no axes names them."""
    for node in graph.onnx_nodes("Squeeze"):
        sizes = graph.sizes(node.input[0])
        if attribute(node, "axes") is not None or len(node.input) > 1 or sizes is None:
            continue
        axes = [axis for axis, size in enumerate(sizes) if size == 1]
        if graph.owner.opset >= 13:
            node.input.append(graph.add_constant(np.asarray(axes, np.int64), "axes"))
        else:
            set_attribute(node, "axes", axes)
        graph.touch()


@rewrite("remove_empty_concat_inputs")
def _empty_inputs(graph: GraphEditor) -> None:
    """Inputs of a Concat that hold nothing go."""
    for node in graph.onnx_nodes("Concat"):
        axis = attribute(node, "axis", 0)
        sizes = [graph.sizes(name) for name in node.input]
        kept = [n for n, s in zip(node.input, sizes, strict=True) if s is None or s[axis] != 0]
        if not kept or len(kept) == len(node.input):
            continue
        del node.input[:]
        node.input.extend(kept)
        graph.touch()
        if len(kept) == 1:
            graph.bypass(node)
    graph.drop_dead()


_LACKING: dict[tuple[str, str], tuple[object, ...]] = {
    ("MaxPool", "storage_order"): (0,),
    ("Constant", "sparse_value"): (None,),
    ("LSTM", "input_forget"): (0,),
    ("GRU", "layout"): (0,),
    ("RNN", "layout"): (0,),
    ("LSTM", "layout"): (0,),
    ("Resize", "exclude_outside"): (0,),
    ("Resize", "extrapolation_value"): (0.0,),
}
"""Operator and attribute -> the values that PopART takes."""


@register("check_unsupported_attribute")
class CheckUnsupportedAttribute(Pass):
    """Attributes that PopART does not have are refused by name; the model stays as it is."""

    def run(self, model: ModelProto) -> ModelProto:
        """Check the model, which stays the same. UnsupportedError naming node and attribute."""
        for graph in graphs_within(model.graph):
            for node in graph.node:
                self._check(node)
        return model

    @staticmethod
    def _check(node: NodeProto) -> None:
        for one in node.attribute:
            allowed = _LACKING.get((node.op_type, one.name))
            if allowed is not None and not node.domain and attribute(node, one.name) not in allowed:
                raise UnsupportedError(
                    f"node {node.name or node.output[0]!r}: PopART's {node.op_type} has no {one.name} other than "
                    f"{allowed[0]}",
                    hint="poprt --skip_passes check_unsupported_attribute leaves the check out.",
                )
