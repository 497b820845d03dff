"""Products in parts: what a MatMul needs of memory at a time, for more code and time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, NodeProto

from podrun.core.errors import UsageError
from podrun.onnx_models.annotations import SERIALIZE_FACTOR, SERIALIZE_MODE, SERIALIZE_PRECISION
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import node_by_name, set_attribute
from podrun.serving.convert.pass_manager import Pass, register

MODES = ("input_channels", "output_channels", "reducing_dim", "none")


def factor_of(text: str, option: str) -> int:
    """A number of parts. UsageError if it is none."""
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{option}: {text!r} is no number of parts", hint="As in NODE=4.")
    return int(text)


@register("serialize_matmul")
class SerializeMatmul(Pass):
    """MatMuls are computed in slices. ``serialize_matmul``: node -> ``FACTOR[/MODE[/KEEP]]``."""

    def __init__(self, serialize_matmul: Mapping[str, str] | None = None) -> None:
        self.wanted = dict(serialize_matmul or {})

    def run(self, model: ModelProto) -> ModelProto:
        for name, text in self.wanted.items():
            node = node_by_name(model, name, "serialize_matmul")
            words = str(text).split("/")
            factor = factor_of(words[0], f"serialize_matmul {name}")
            mode = words[1] if len(words) > 1 else "output_channels"
            keep = words[2] if len(words) > 2 else "False"
            if node.op_type != "MatMul":
                raise UsageError(f"serialize_matmul: node {name!r} is a {node.op_type}, no MatMul")
            if mode not in MODES or keep not in ("True", "False") or len(words) > 3:
                raise UsageError(
                    f"serialize_matmul {name}={text}: a factor, a mode ({', '.join(MODES)}), and True or False",
                    hint=f"As in {name}=4/output_channels/False.",
                )
            self._check(model, node, factor, mode)
            set_attribute(node, SERIALIZE_MODE, mode)
            set_attribute(node, SERIALIZE_FACTOR, factor)
            set_attribute(node, SERIALIZE_PRECISION, int(keep == "True"))
        return model

    @staticmethod
    def _check(model: ModelProto, node: NodeProto, factor: int, mode: str) -> None:
        graph = ModelEditor(model).main
        a, b = graph.sizes(node.input[0]), graph.sizes(node.input[1])
        if mode == "none" or a is None or b is None:
            return
        size = {
            "input_channels": a[-2] if len(a) > 1 else 1,
            "output_channels": b[-1],
            "reducing_dim": a[-1],
        }[mode]
        if size % factor:
            raise UsageError(
                f"serialize_matmul: {size} {mode} of node {node.name!r} do not divide by {factor}"
            )


@register("serialize_matmul_add")
class SerializeMatmulAdd(Pass):
    """A MatMul and its Add become several over parts of the last axis: ``MATMUL/ADD`` -> number of parts."""

    def __init__(self, serialize_matmul_add: Mapping[str, str] | None = None) -> None:
        self.wanted = dict(serialize_matmul_add or {})

    def run(self, model: ModelProto) -> ModelProto:
        for names, text in self.wanted.items():
            product, slash, add = names.partition("/")
            if not slash:
                raise UsageError(
                    f"serialize_matmul_add: {names!r} names no MatMul and Add", hint="MATMUL/ADD=4"
                )
            for name in (product, add):
                node_by_name(model, name, "serialize_matmul_add")
            factor = factor_of(str(text), f"serialize_matmul_add {names}")
            owner = ModelEditor(model)
            by_name = {node.name: node for node in owner.main.nodes}
            self._split(owner.main, by_name[product], by_name[add], factor)
            owner.commit()
        return model

    @staticmethod
    def _split(graph: GraphEditor, product: NodeProto, add: NodeProto, factor: int) -> None:
        weight = graph.constant(product.input[1])
        other = [name for name in add.input if name != product.output[0]]
        bias = graph.constant(other[0]) if len(other) == 1 else None
        if product.op_type != "MatMul" or weight is None or bias is None or add.op_type != "Add":
            raise UsageError(
                f"serialize_matmul_add: {product.name!r} and {add.name!r} are no MatMul and Add of constants"
            )
        if weight.shape[-1] % factor or bias.shape[-1:] != weight.shape[-1:]:
            raise UsageError(
                f"serialize_matmul_add: the last axis of {product.name!r}, {weight.shape[-1]}, "
                f"does not divide by {factor}"
            )
        new, parts = [], []
        pieces = zip(np.split(weight, factor, -1), np.split(bias, factor, -1), strict=True)
        for index, (columns, numbers) in enumerate(pieces):
            w = graph.add_constant(columns, f"{product.name}_part_{index}")
            b = graph.add_constant(numbers, f"{add.name}_part_{index}")
            new.append(graph.node("MatMul", [product.input[0], w]))
            new.append(graph.node("Add", [new[-1].output[0], b]))
            parts.append(new[-1].output[0])
        new.append(graph.node("Concat", parts, add.output[0], axis=-1))
        graph.replace([product, add], new)
        graph.drop_dead()
