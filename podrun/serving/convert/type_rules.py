"""Element types that an operator of ONNX takes and gives, as its schema says."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx
from onnx import NodeProto

from podrun.core.quick_dataclass import dataclass
from podrun.serving.convert.graph_walk import ONNX_DOMAINS

FLOAT_TEXT = "tensor(float)"
HALF_TEXT = "tensor(float16)"
INT32_TEXT = "tensor(int32)"


@dataclass(frozen=True, slots=True)
class FormalTensor:
    """An input or output of an operator. ``variable``: the name of its type variable, empty for a type of its own;
    ``allowed``: types as ONNX writes them.
    """

    variable: str
    allowed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of an operator; the last of each stands for all further ones where it may repeat."""

    inputs: tuple[FormalTensor, ...]
    outputs: tuple[FormalTensor, ...]

    @staticmethod
    def _at(tensors: Sequence[FormalTensor], index: int) -> FormalTensor | None:
        if not tensors:
            return None
        return tensors[min(index, len(tensors) - 1)]

    def input(self, index: int) -> FormalTensor | None:
        """The formal input at a place."""
        return self._at(self.inputs, index)

    def output(self, index: int) -> FormalTensor | None:
        """The formal output at a place."""
        return self._at(self.outputs, index)


@functools.cache
def _signature(operator: str, opset: int) -> Signature | None:
    try:
        schema = onnx.defs.get_schema(operator, opset, "")
    except onnx.defs.SchemaError:
        return None
    variables = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}

    def formal(tensor: object) -> FormalTensor:
        text = str(getattr(tensor, "type_str", ""))
        if text in variables:
            return FormalTensor(text, variables[text])
        return FormalTensor("", frozenset({text}))

    return Signature(tuple(map(formal, schema.inputs)), tuple(map(formal, schema.outputs)))


def signature_of(node: NodeProto, opset: int) -> Signature | None:
    """The signature of a node's operator; None outside of ONNX's own domain, and for operators that it lacks."""
    return _signature(node.op_type, opset) if node.domain in ONNX_DOMAINS else None
