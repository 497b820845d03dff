"""Element types that IPUs do not have: 64-bit integers and doubles; and inputs and outputs of 8 bits."""

from __future__ import annotations

import logging

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from podrun.core.errors import UsageError
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import attribute, graphs_within, set_attribute
from podrun.serving.convert.pass_manager import Pass, register, rewrite
from podrun.serving.convert.type_inference import infer_types
from podrun.serving.convert.type_rules import INT32_TEXT, signature_of

_log = logging.getLogger("poprt")
_INT64, _INT32 = TensorProto.INT64, TensorProto.INT32


def in_32_bits(value: np.ndarray, name: str) -> np.ndarray:
    """64-bit integers in 32 bits; what does not fit becomes the nearest that does, with a warning."""
    limits = np.iinfo(np.int32)
    clipped = np.clip(value, limits.min, limits.max)
    far = clipped != value
    if bool(far.any()) and not bool(
        np.isin(value[far], (np.iinfo(np.int64).max, np.iinfo(np.int64).min)).all()
    ):
        _log.warning("%s: numbers beyond 32 bits become the nearest of 32 bits", name)
    small: np.ndarray = clipped.astype(np.int32)
    return small


@register("int64_to_int32")
class Int64ToInt32(Pass):
    """Inputs, outputs and what is computed of 64-bit integers have 32 bits wherever ONNX's operators take them so.

    Operands that ONNX wants in 64 bits (shapes, axes) keep them: their values are known when the model is compiled.
    """

    def run(self, model: ModelProto) -> ModelProto:
        owner = ModelEditor(model)
        self._types = dict(owner.types)
        self._narrow: set[str] = set()
        for value in model.graph.input:
            if self._is_wide(value.name) and value.name not in {t.name for t in model.graph.initializer}:
                value.type.tensor_type.elem_type = _INT32
                self._narrow.add(value.name)
        self._graph(owner.main)
        for value in model.graph.output:
            self._output(owner.main, value)
        owner.commit()
        for value in (v for g in graphs_within(model.graph) for v in list(g.value_info)):
            if value.name in self._narrow:
                value.type.tensor_type.elem_type = _INT32
        return model

    def _is_wide(self, name: str) -> bool:
        kind = self._types.get(name)
        return kind is not None and kind.element == _INT64 and name not in self._narrow

    def _graph(self, graph: GraphEditor) -> None:
        for node in list(graph.nodes):
            if node.op_type == "Cast" and not node.domain and attribute(node, "to") == _INT64:
                set_attribute(node, "to", _INT32)
                self._narrow.update(node.output)
                continue
            self._node(graph, node)

    def _node(self, graph: GraphEditor, node: NodeProto) -> None:
        told = signature_of(node, graph.owner.opset)
        has_graphs = any(a.type in (a.GRAPH, a.GRAPHS) for a in node.attribute)
        variables = set()
        for index, name in enumerate(node.input):
            formal = told.input(index) if told is not None else None
            if (
                name in self._narrow
                and formal is not None
                and INT32_TEXT in formal.allowed
                and not has_graphs
            ):
                variables.add(formal.variable)
        for index, name in enumerate(node.input):
            formal = told.input(index) if told is not None else None
            takes = formal is not None and formal.variable in variables and bool(formal.variable)
            if name in self._narrow and not takes and not (told is None and not has_graphs):
                node.input[index] = self._cast(graph, node, name, _INT64)
            elif takes and self._is_wide(name):
                node.input[index] = self._as_narrow(graph, node, name)
        if has_graphs:
            self._widen_captured(graph, node)
        for index, name in enumerate(node.output):
            formal = told.output(index) if told is not None else None
            if formal is not None and formal.variable in variables and self._is_wide(name):
                self._narrow.add(name)
        graph.touch()

    def _widen_captured(self, graph: GraphEditor, node: NodeProto) -> None:
        """What inner graphs take from outside keeps the type that they were written for."""
        from podrun.serving.convert.graph_walk import names_used, rename_in

        for name in set(names_used(node)) & self._narrow:
            if name not in node.input:
                rename_in(node, name, self._cast(graph, node, name, _INT64))

    def _as_narrow(self, graph: GraphEditor, node: NodeProto, name: str) -> str:
        value = graph.constant(name)
        if value is not None:
            small = graph.add_constant(in_32_bits(value, name), f"{name}_int32")
            self._narrow.add(small)
            return small
        return self._cast(graph, node, name, _INT32)

    def _cast(self, graph: GraphEditor, node: NodeProto, name: str, to: int) -> str:
        cast = graph.node("Cast", [name], to=to)
        graph.insert_before(node, [cast])
        if to == _INT32:
            self._narrow.add(cast.output[0])
        return cast.output[0]

    def _output(self, graph: GraphEditor, value: ValueInfoProto) -> None:
        if self._is_wide(value.name):
            inner = graph.rename_maker(value.name, f"{value.name}_int64")
            if inner is None:
                return
            graph.nodes.append(graph.node("Cast", [inner], value.name, to=_INT32))
            graph.touch()
            self._narrow.add(value.name)
        if value.name in self._narrow:
            value.type.tensor_type.elem_type = _INT32


@register("double_to_float")
class DoubleToFloat(Pass):
    """Doubles are floats: weights, inputs, outputs, and what is computed of them."""

    def run(self, model: ModelProto) -> ModelProto:
        for graph in graphs_within(model.graph):
            self._graph(graph)
        return model

    @staticmethod
    def _graph(graph: GraphProto) -> None:
        for tensor in graph.initializer:
            _to_float(tensor)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type == TensorProto.DOUBLE:
                value.type.tensor_type.elem_type = TensorProto.FLOAT
        for node in graph.node:
            for one in node.attribute:
                if one.name in ("to", "dtype") and one.i == TensorProto.DOUBLE:
                    one.i = TensorProto.FLOAT
                if one.HasField("t"):
                    _to_float(one.t)


def _to_float(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.DOUBLE:
        with np.errstate(over="ignore"):
            value = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


@rewrite("remove_input_cast", main_only=True)
def _remove_input_cast(graph: GraphEditor) -> None:
    """An input that is only cast has the cast's type: the host casts."""
    held = {tensor.name for tensor in graph.graph.initializer}
    for value in graph.graph.input:
        users = graph.consumers(value.name)
        kinds = {attribute(node, "to") for node in users if node.op_type == "Cast" and not node.domain}
        if value.name in held or not users or graph.is_output(value.name) or len(kinds) != 1:
            continue
        if any(node.op_type != "Cast" for node in users) or any(
            map(graph.is_output, (n.output[0] for n in users))
        ):
            continue
        for node in list(users):
            graph.bypass(node)
        value.type.tensor_type.elem_type = int(kinds.pop())


_NORMALISING = ("Sub", "Add", "Mul", "Div", "BatchNormalization", "NormalizeImage", "InstanceNormalization")


@register("eight_bits_io")
class EightBitsIo(Pass):
    """Images of four axes come in, and go out, in 8 bits: inputs are cast behind the host, outputs are rounded and
    limited to 0 to 255. UsageError for an image input that no normalising operator follows: its numbers would not be
    those of the bytes.
    """

    def run(self, model: ModelProto) -> ModelProto:
        owner = ModelEditor(model)
        types = infer_types(model)
        held = {tensor.name for tensor in model.graph.initializer}
        changed = 0
        for value in model.graph.input:
            kind = types.get(value.name)
            if (
                value.name in held
                or kind is None
                or len(kind.shape or ()) != 4
                or not _is_float(kind.element)
            ):
                continue
            self._input(owner.main, value, kind.element)
            changed += 1
        if not changed:
            raise UsageError("eightbitsio: the model has no input of four axes of floating point numbers")
        for value in model.graph.output:
            kind = types.get(value.name)
            if kind is not None and len(kind.shape or ()) == 4 and _is_float(kind.element):
                self._output(owner.main, value, kind.element)
        owner.commit()
        return model

    @staticmethod
    def _input(graph: GraphEditor, value: ValueInfoProto, element: int) -> None:
        users = graph.consumers(value.name)
        if any(node.op_type not in (*_NORMALISING, "Cast", "Transpose") for node in users):
            raise UsageError(
                f"eightbitsio: input {value.name!r} goes into {users[0].op_type}, which does not normalise it",
                hint="Put the normalisation of the image (Sub, Div) into the model.",
            )
        cast = graph.node("Cast", [value.name], to=element)
        graph.rename_uses(value.name, cast.output[0])
        graph.nodes.insert(0, cast)
        graph.touch()
        value.type.tensor_type.elem_type = TensorProto.UINT8

    @staticmethod
    def _output(graph: GraphEditor, value: ValueInfoProto, element: int) -> None:
        inner = graph.rename_maker(value.name, f"{value.name}_real")
        if inner is None:
            return
        dtype = helper.tensor_dtype_to_np_dtype(element)
        low, high = (graph.add_constant(np.asarray(v, dtype), "byte_limit") for v in (0, 255))
        largest = graph.node("Max", [inner, low])
        least = graph.node("Min", [largest.output[0], high])
        rounded = graph.node("Round", [least.output[0]])
        graph.nodes += [largest, least, rounded]
        graph.nodes.append(graph.node("Cast", [rounded.output[0]], value.name, to=TensorProto.UINT8))
        graph.touch()
        value.type.tensor_type.elem_type = TensorProto.UINT8


def _is_float(element: int) -> bool:
    return element in (TensorProto.FLOAT, TensorProto.FLOAT16)
