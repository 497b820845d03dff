"""Half precision: weights, inputs, outputs and what is computed become float16, but for what is kept in float32.

Constants are clipped to +-65500, and epsilons that a half cannot hold become 1e-7, each with a warning. Operators of
ONNX that do not take halves, and those that are skipped, work in float32 between casts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from podrun.core.errors import UsageError
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import attribute, graphs_within, set_attribute
from podrun.serving.convert.pass_manager import Pass, register
from podrun.serving.convert.type_rules import FLOAT_TEXT, HALF_TEXT, signature_of

_log = logging.getLogger("poprt")
LARGEST_HALF = 65500.0
LEAST_EPSILON = 1e-7
_FLOAT, _HALF = TensorProto.FLOAT, TensorProto.FLOAT16
_LEAST_HALF = 2.0**-25
"""Numbers up to this become 0 in half precision."""


def as_half(value: np.ndarray, name: str, where: str = "float_to_half") -> np.ndarray:
    """Numbers in half precision, clipped, an epsilon lifted; each with a warning."""
    clipped = np.clip(value, -LARGEST_HALF, LARGEST_HALF)
    if bool((np.abs(value) > LARGEST_HALF).any()):
        _log.warning(
            "%s: %s has values beyond +-%g; they are clipped (largest %g)",
            where, name, LARGEST_HALF, float(np.nanmax(np.abs(value))),
        )  # fmt: skip
    if value.size == 1 and 0 < abs(float(value.reshape(-1)[0])) <= _LEAST_HALF:
        _log.warning(
            "%s: %s is %g, which is 0 in half precision; it becomes %g",
            where, name, float(value.reshape(-1)[0]), LEAST_EPSILON,
        )  # fmt: skip
        clipped = np.full_like(value, np.copysign(LEAST_EPSILON, value.reshape(-1)[0]))
    half: np.ndarray = clipped.astype(np.float16)
    return half


def listed_names(text: str | Iterable[str] | None, option: str) -> list[str]:
    """Names of a list, or of words separated by commas. UsageError for anything else."""
    if text is None:
        return []
    if isinstance(text, str):
        return [word.strip() for word in text.split(",") if word.strip()]
    if not isinstance(text, (list, tuple, set, frozenset)) or not all(isinstance(word, str) for word in text):
        raise UsageError(f"{option}: names separated by commas, or a list of names, not {text!r}")
    return list(text)


class _Halving:
    """One conversion. ``keeps`` says which nodes stay in float32."""

    def __init__(self, model: ModelProto, keeps: Callable[[NodeProto], bool]) -> None:
        self.owner = ModelEditor(model)
        self.types = dict(self.owner.types)
        self.keeps = keeps
        self.wide: dict[str, str] = {}
        """Tensors that are there in float32 too, by the names of their halves."""

    def is_float(self, name: str) -> bool:
        kind = self.types.get(name)
        return kind is not None and kind.element == _FLOAT

    def run(self) -> None:
        for graph in self.owner.graphs():
            for node in list(graph.nodes):
                self._node(graph, node)
            self._constants(graph)
            graph.drop_dead()
            for value in (*graph.graph.input, *graph.graph.output):
                if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type == _FLOAT:
                    value.type.tensor_type.elem_type = _HALF
            graph.changed = True
        del self.owner.model.graph.value_info[:]

    def _node(self, graph: GraphEditor, node: NodeProto) -> None:
        told = signature_of(node, self.owner.opset)
        full = self.keeps(node)
        if told is not None and not full:
            for index, name in enumerate(node.input):
                formal = told.input(index)
                if (
                    formal is not None
                    and self.is_float(name)
                    and formal.variable
                    and HALF_TEXT not in formal.allowed
                ):
                    full = True
        for index, name in enumerate(list(node.input)):
            formal = told.input(index) if told is not None else None
            own = formal is not None and formal.allowed == {FLOAT_TEXT}
            if self.is_float(name) and (full or own):
                node.input[index] = self._full(graph, node, name)
        after = []
        for index, name in enumerate(list(node.output)):
            formal = told.output(index) if told is not None else None
            own = formal is not None and formal.allowed == {FLOAT_TEXT}
            if name and self.is_float(name) and (full or own):
                inner = self.owner.new_name(f"{name}_full")
                node.output[index] = inner
                self.wide[name] = inner
                after.append(graph.node("Cast", [inner], name, to=_HALF))
        if after:
            graph.insert_after(node, after)
        if not full:
            self._attributes(node)
        graph.touch()

    def _full(self, graph: GraphEditor, node: NodeProto, name: str) -> str:
        """A tensor in float32: a constant as it is, anything else cast."""
        if name in self.wide:
            return self.wide[name]
        value = graph.constant(name)
        if value is not None:
            return graph.add_constant(value.astype(np.float32), f"{name}_fp32")
        cast = graph.node("Cast", [name], to=_FLOAT)
        graph.insert_before(node, [cast])
        return cast.output[0]

    def _attributes(self, node: NodeProto) -> None:
        label = node.name or node.op_type
        for one in node.attribute:
            if one.name in ("to", "dtype") and one.i == _FLOAT and not node.domain:
                one.i = _HALF
            elif one.name in ("value", "sparse_value") and one.HasField("t") and one.t.data_type == _FLOAT:
                value = numpy_helper.to_array(one.t)
                one.t.CopyFrom(numpy_helper.from_array(as_half(value, label), one.t.name))
            elif one.name == "epsilon" and 0 < one.f < LEAST_EPSILON:
                _log.warning("float_to_half: epsilon of %s is %g; it becomes %g", label, one.f, LEAST_EPSILON)
                one.f = LEAST_EPSILON
        if node.op_type == "Constant":
            for key in ("value_float", "value_floats"):
                if (number := attribute(node, key)) is not None:
                    half = as_half(np.asarray(number, np.float32), label)
                    set_attribute(node, key, None)
                    set_attribute(node, "value", numpy_helper.from_array(half))
        elif (
            node.op_type in ("EyeLike", "RandomNormal", "RandomUniform") and attribute(node, "dtype") is None
        ):
            set_attribute(node, "dtype", _HALF)
        elif node.op_type == "ConstantOfShape" and attribute(node, "value") is None:
            set_attribute(node, "value", numpy_helper.from_array(np.zeros(1, np.float16)))

    def _constants(self, graph: GraphEditor) -> None:
        for tensor in graph.graph.initializer:
            if tensor.data_type == _FLOAT and tensor.name in self.types:
                half = as_half(numpy_helper.to_array(tensor), tensor.name)
                tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
        graph.drop_unused_initializers()


def _overflowing(model: ModelProto) -> set[str]:
    """Results of nodes that square numbers and sum the squares, or sum exponentials: what halves overflow in."""
    owner = ModelEditor(model)
    names: set[str] = set()
    for graph in owner.graphs():
        for node in graph.nodes:
            if node.op_type not in ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2") or node.domain:
                continue
            names.add(node.output[0])
            maker = graph.producer(node.input[0])
            square = maker is not None and (
                (maker.op_type == "Pow" and graph.scalar(maker.input[1]) == 2)
                or (maker.op_type == "Mul" and maker.input[0] == maker.input[1])
                or maker.op_type == "Exp"
            )
            if not square:
                if node.op_type in ("ReduceMean", "ReduceSum"):
                    names.discard(node.output[0])
                continue
            names.update(maker.output if maker is not None else ())
            for user in graph.consumers(node.output[0]):
                if user.op_type in ("Add", "Sqrt") and not user.domain:
                    names.update(user.output)
                    names.update(
                        name
                        for more in graph.consumers(user.output[0])
                        if more.op_type == "Sqrt"
                        for name in more.output
                    )
    return names


@register("float_to_half")
class FloatToHalf(Pass):
    """float32 becomes float16. ``skip_op_types``: operators that keep float32, names separated by commas or a list;
    ``enable_avoid_overflow_patterns``: squares and exponentials that are summed keep float32.
    """

    def __init__(
        self, skip_op_types: str | Collection[str] | None = None, enable_avoid_overflow_patterns: bool = False
    ) -> None:
        self.skip_op_types = listed_names(skip_op_types, "fp16_skip_op_types")
        self.enable_avoid_overflow_patterns = enable_avoid_overflow_patterns

    def run(self, model: ModelProto) -> ModelProto:
        present = {node.op_type for graph in graphs_within(model.graph) for node in graph.node}
        for name in self.skip_op_types:
            if name not in present:
                _log.warning("fp16_skip_op_types: the model has no operator %s", name)
        risky = _overflowing(model) if self.enable_avoid_overflow_patterns else set()
        skipped = set(self.skip_op_types)

        def keeps(node: NodeProto) -> bool:
            return node.op_type in skipped or any(name in risky for name in node.output)

        _Halving(model, keeps).run()
        return model


_PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")


@register("float_to_mixed")
class FloatToMixed(Pass):
    """Products (MatMul, Gemm, Conv) work in float16, everything else, inputs and outputs in float32."""

    def __init__(self, skip_op_types: str | Collection[str] | None = None) -> None:
        self.skip_op_types = listed_names(skip_op_types, "fp16_skip_op_types")

    def run(self, model: ModelProto) -> ModelProto:
        owner = ModelEditor(model)
        types = dict(owner.types)
        for graph in owner.graphs():
            for node in list(graph.nodes):
                if node.op_type in _PRODUCTS and not node.domain and node.op_type not in self.skip_op_types:
                    _half_product(graph, node, {n for n, kind in types.items() if kind.element == _FLOAT})
            graph.drop_dead()
        return model


def _half_product(graph: GraphEditor, node: NodeProto, floats: set[str]) -> None:
    if node.output[0] not in floats:
        return
    for index, name in enumerate(node.input):
        if name not in floats:
            continue
        value = graph.constant(name)
        if value is not None:
            node.input[index] = graph.add_constant(as_half(value, name, "float_to_mixed"), f"{name}_fp16")
        else:
            graph.lead_input(node, index, "Cast", to=_HALF)
    graph.lead_result(node, "Cast", to=_FLOAT)
