"""ONNX's inference of types and shapes for one node, with the element types that PopART takes besides ONNX's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto, TypeProto
    from onnx.defs import OpSchema


def infer_outputs(
    node: NodeProto, version: int, types: dict[str, TypeProto], data: dict[str, TensorProto]
) -> dict[str, TypeProto]:
    """ONNX's inference for one node, without its limits on element types, which are narrower than PopART's.

    PopART takes UINT32 indices, for example: they are taken for INT32 where ONNX does not know them. So are INT64
    ones that meet INT32: what ONNX calls INT64 (ArgMax) is INT32 on the IPU. Any other type that the operator does
    not list is left to the session: the shape is inferred with one that it does.
    """
    from onnx import TensorProto, checker, defs, helper, shape_inference

    schema = defs.get_schema(node.op_type, version, "")
    opsets = [helper.make_opsetid("", version)]
    unsigned: dict[int, int] = {TensorProto.UINT32: TensorProto.INT32}
    wide: dict[int, int] = {**unsigned, TensorProto.INT64: TensorProto.INT32}
    listed = _listed_types(schema, node)
    for instead in ({}, dict.fromkeys(types, unsigned), dict.fromkeys(types, wide), listed):
        known = {}
        for name, kind in types.items():
            known[name] = type(kind)()
            known[name].CopyFrom(kind)
            element = kind.tensor_type.elem_type
            if element:
                known[name].tensor_type.elem_type = instead.get(name, {}).get(element, element)
        try:
            inferred: dict[str, TypeProto] = shape_inference.infer_node_outputs(
                schema, node, known, data, opset_imports=opsets, ir_version=4
            )
        except checker.ValidationError:
            continue
        if instead is listed:
            _restore(schema, node, types, inferred)
        return inferred
    return {}


def _listed_types(schema: OpSchema, node: NodeProto) -> dict[str, dict[int, int]]:
    """For each input, the type that replaces element types that the operator does not list: the first one that it
    lists.
    """
    from onnx import TensorProto

    kinds = {f"tensor({n.lower()})": value for n, value in TensorProto.DataType.items()}
    replacements: dict[str, dict[int, int]] = {}
    for index, name in enumerate(node.input):
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        allowed = sorted(kinds[text] for text in formal.types if text in kinds)
        if name and allowed:
            replacements[name] = {kind: allowed[0] for kind in kinds.values() if kind not in allowed}
    return replacements


def _restore(
    schema: OpSchema, node: NodeProto, types: Mapping[str, TypeProto], inferred: Mapping[str, TypeProto]
) -> None:
    """Give outputs whose type is an input's type the real type of this input, where the operator lists more
    than one.
    """
    types_by_variable = {}
    for index, name in enumerate(node.input):
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        if name and len(formal.types) > 1:
            types_by_variable[formal.type_str] = types[name]
    for index, name in enumerate(node.output):
        source = types_by_variable.get(schema.outputs[min(index, len(schema.outputs) - 1)].type_str)
        if name in inferred and source is not None:
            inferred[name].tensor_type.elem_type = source.tensor_type.elem_type
