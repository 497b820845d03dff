"""8-bit precision: inputs and weights of products (Conv, MatMul, Gemm) as 8-bit floats, or weights as 8-bit integers.

The model in float16 is what they start from. Weights are stored in 8 bits; activations are cast to 8 bits and back
before each product, so its operands are exactly what an IPU's 8-bit product multiplies. The product itself is computed
in float16; the tile model of a C600 counts it as one of 8 bits (`podrun.costmodel.eight_bit`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from podrun.core.errors import UsageError
from podrun.serving.convert.float8 import Float8Format, parse_float8
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import GRAPHCORE_DOMAIN
from podrun.serving.convert.half_passes import listed_names
from podrun.serving.convert.pass_manager import Pass, register

_log = logging.getLogger("poprt")
PRODUCTS = ("Conv", "MatMul", "Gemm")

FormatsByNode = Mapping[str, Float8Format]


def product_nodes(graph: GraphEditor, skipped: Collection[str] = ()) -> list[NodeProto]:
    """Products of a graph that may be in 8 bits."""
    return [n for n in graph.nodes if n.op_type in PRODUCTS and not n.domain and n.name not in skipped]


def weight_places(graph: GraphEditor, node: NodeProto) -> list[int]:
    """Which of the two operands of a product are constants."""
    return [index for index in (0, 1) if graph.constant(node.input[index]) is not None]


@register("float_to_fp8")
class FloatToFp8(Pass):
    """Products take 8-bit floats.

    ``fp8_params``: formats and scales; ``skip_op_names``: nodes that keep their precision; ``convert_model``:
    ``"fp8"``, or ``"fp8_weight"`` for weights alone; ``fp8_input_dict`` and ``fp8_weight_dict``: formats of single
    nodes, as a `Float8Format` or ``(format, scale)``.
    """

    def __init__(
        self,
        fp8_params: str = "F143,F143,0,0",
        skip_op_names: str | Collection[str] | None = None,
        convert_model: str = "fp8",
        fp8_input_dict: Mapping[str, Any] | None = None,
        fp8_weight_dict: Mapping[str, Any] | None = None,
    ) -> None:
        self.input_format, self.weight_format = parse_float8(fp8_params)
        self.skip_op_names = listed_names(skip_op_names, "fp8_skip_op_names")
        if convert_model not in ("fp8", "fp8_weight"):
            raise UsageError(f"convert_model is 'fp8' or 'fp8_weight', not {convert_model!r}")
        self.convert_model = convert_model
        self.inputs = {name: _format_of(value) for name, value in (fp8_input_dict or {}).items()}
        self.weights = {name: _format_of(value) for name, value in (fp8_weight_dict or {}).items()}

    def run(self, model: ModelProto) -> ModelProto:
        """The changed model. UsageError for a skipped node that does not exist."""
        owner = ModelEditor(model)
        names = {node.name for graph in owner.graphs() for node in graph.nodes}
        for name in self.skip_op_names:
            if name not in names:
                raise UsageError(f"fp8_skip_op_names: the model has no node {name!r}")
        owner = ModelEditor(model)
        for graph in owner.graphs():
            for node in product_nodes(graph, self.skip_op_names):
                self._node(graph, node)
            graph.drop_dead()
        return model

    def _node(self, graph: GraphEditor, node: NodeProto) -> None:
        element = graph.element(node.output[0])
        if element not in (TensorProto.FLOAT, TensorProto.FLOAT16):
            return
        constants = weight_places(graph, node)
        for index in (0, 1):
            name = node.input[index]
            if index in constants:
                chosen = self.weights.get(node.name, self.weight_format)
                node.input[index] = self._weight(graph, node, name, chosen)
            elif self.convert_model == "fp8":
                chosen = self.inputs.get(node.name, self.input_format)
                node.input[index] = self._activation(graph, node, name, chosen)
        graph.touch()

    @staticmethod
    def _weight(graph: GraphEditor, node: NodeProto, name: str, chosen: Float8Format) -> str:
        element = graph.element(name)
        held = f"{name}_{chosen.name}_{chosen.scale}"
        if graph.tensor(held) is None:
            value = graph.constant(name)
            if value is None:
                raise UsageError(f"float_to_fp8: weight {name!r} is no constant")
            tensor = numpy_helper.from_array(chosen.stored(value), held)
            graph.owner.names.add(held)
            graph.hold(tensor)
        back = graph.node(
            "CastThenPow2Scale",
            [held, _scale(graph, chosen.scale)],
            domain=GRAPHCORE_DOMAIN,
            to=element or TensorProto.FLOAT16,
        )
        graph.insert_before(node, [back])
        return back.output[0]

    @staticmethod
    def _activation(graph: GraphEditor, node: NodeProto, name: str, chosen: Float8Format) -> str:
        small = graph.node(
            "Pow2ScaleThenCast",
            [name, _scale(graph, -chosen.scale)],
            domain=GRAPHCORE_DOMAIN,
            to=chosen.element,
        )
        back = graph.node(
            "CastThenPow2Scale",
            [small.output[0], _scale(graph, chosen.scale)],
            domain=GRAPHCORE_DOMAIN,
            to=graph.element(name) or TensorProto.FLOAT16,
        )
        graph.insert_before(node, [small, back])
        return back.output[0]


def _scale(graph: GraphEditor, scale: int) -> str:
    name = f"log2_scale_{scale}".replace("-", "minus_")
    if graph.tensor(name) is None:
        graph.owner.names.add(name)
        graph.hold(numpy_helper.from_array(np.asarray(scale, np.int32), name))
    return name


def _format_of(value: object) -> Float8Format:
    if isinstance(value, Float8Format):
        return value
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return Float8Format(str(value[0]), int(value[1]))
    raise UsageError(f"a format of 8-bit floats is (name, scale), as in ('F143', -1), not {value!r}")


@register("float_to_int8")
class FloatToInt8(Pass):
    """Weights become 8-bit integers. ``weights``: tensor name -> ``{"value": int8 array, "offset", "scale"}``; a weight
    is ``(value - offset) * scale``.
    """

    def __init__(self, weights: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.weights = dict(weights or {})

    def run(self, model: ModelProto) -> ModelProto:
        """The changed model. UsageError for a tensor that is no initializer, or values of another shape or type."""
        owner = ModelEditor(model)
        graph = owner.main
        for name, told in self.weights.items():
            tensor = graph.tensor(name)
            missing = {"value", "offset", "scale"} - set(told)
            if tensor is None or missing:
                what = f"{', '.join(sorted(missing))} of it is missing" if missing else "it is no initializer"
                raise UsageError(f"float_to_int8: {name!r}: {what}")
            value = np.asarray(told["value"])
            if value.dtype != np.int8 or list(value.shape) != list(tensor.dims):
                raise UsageError(
                    f"float_to_int8: {name!r} is {list(tensor.dims)}; its value is {value.dtype} {list(value.shape)}"
                )
            self._weight(graph, name, value, told)
        owner.commit()
        return model

    @staticmethod
    def _weight(graph: GraphEditor, name: str, value: np.ndarray, told: Mapping[str, Any]) -> None:
        held = graph.tensor(name)
        element = held.data_type if held is not None else TensorProto.FLOAT
        dtype = np.float16 if element == TensorProto.FLOAT16 else np.float32
        small = graph.add_constant(value, f"{name}_int8")
        offset = graph.add_constant(np.asarray(told["offset"], dtype), f"{name}_offset")
        scale = graph.add_constant(np.asarray(told["scale"], dtype), f"{name}_scale")
        cast = graph.node("Cast", [small], to=element)
        moved = graph.node("Sub", [cast.output[0], offset])
        scaled = graph.node("Mul", [moved.output[0], scale])
        graph.rename_uses(name, scaled.output[0])
        graph.nodes[:0] = [cast, moved, scaled]
        graph.touch()
        graph.drop_unused_initializers()
