"""Reads an ONNX model into a graph in memory: nodes with Python attributes and places, initializers as NumPy arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.inliner

from podrun.core.errors import UnsupportedError, UsageError
from podrun.onnx_models.annotations import take_hints, take_place
from podrun.onnx_models.ops.registry import ONNX, has_onnx_operator
from podrun.onnx_models.tensor_proto import to_array
from podrun.runtime.graph import Node, OperatorGraph, TensorType


def read_graph(
    model: onnx.ModelProto, initial: Mapping[str, np.ndarray] = MappingProxyType({})
) -> OperatorGraph:
    """The main graph of a model. ``initial``: values of initializers whose data the model does not hold.

    Functions of the model (FunctionProto) are inlined first, and so are operators that have no function of their own
    here but that ONNX defines by a function body (FlexAttention, for example).
    Raises `UsageError` if the model imports no opset that its nodes need, `UnsupportedError` for strings.
    """
    try:
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        model = _expand(model)
        opsets = {entry.domain or ONNX: entry.version for entry in model.opset_import}
        return _read_graph(model.graph, opsets, initial)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        OverflowError,
        AttributeError,
    ) as error:
        # onnx's own readers raise these for protobufs that are well formed but make no sense
        raise UsageError(f"the model cannot be read: {error}") from error


def _expand(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in which operators that exist only as function bodies are written out."""
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    for _ in range(_MOST_LAYERS):
        bodies = sorted(_bodies(model.graph, opsets))
        if not bodies:
            break
        model = onnx.inliner.inline_selected_functions(model, bodies, inline_schema_functions=True)
    return model


_MOST_LAYERS = 4
"""Most function bodies within function bodies."""


def _bodies(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> set[tuple[str, str]]:
    operators = set()
    for node in graph.node:
        domain = "" if node.domain == ONNX else node.domain
        version = opsets.get(domain, opsets.get(node.domain, 1))
        if _has_body(domain, node.op_type, version) and not has_onnx_operator(domain, node.op_type, version):
            operators.add((domain, node.op_type))
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                operators |= _bodies(inner, opsets)
    return operators


@functools.cache
def _has_body(domain: str, op_type: str, version: int) -> bool:
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return False
    return bool(
        getattr(schema, "has_function", False) or getattr(schema, "has_context_dependent_function", False)
    )


def _read_graph(
    proto: onnx.GraphProto,
    opsets: Mapping[str, int],
    initial: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> OperatorGraph:
    initializers: dict[str, Any] = {
        t.name: initial[t.name] if t.name in initial else tensor_value(t) for t in proto.initializer
    }
    initializers.update({t.values.name: _dense(t) for t in proto.sparse_initializer})
    nodes = tuple(
        _read_node(
            n, opsets, f"node {i} of {len(proto.node)}" + (f" in graph '{proto.name}'" if proto.name else "")
        )
        for i, n in enumerate(proto.node, start=1)
    )
    types = {v.name: _tensor_type(v.type) for v in (*proto.value_info, *proto.input, *proto.output)}
    return OperatorGraph(
        name=proto.name,
        nodes=nodes,
        inputs=tuple(v.name for v in proto.input if v.name not in initializers),
        outputs=tuple(v.name for v in proto.output),
        initializers=initializers,
        types=types,
    )


def _read_node(proto: onnx.NodeProto, opsets: Mapping[str, int], position: str) -> Node:
    domain = proto.domain or ONNX
    opset = opsets.get(domain)
    if opset is None:
        if domain == ONNX:
            raise UsageError(
                f"the model imports no opset of {domain}, which {proto.op_type} ({position}) needs"
            )
        opset = 1
    attributes = dict(schema_defaults(domain, proto.op_type, opset))
    attributes.update({a.name: _attribute(a, opsets) for a in proto.attribute if not a.ref_attr_name})
    place, hints = take_place(attributes), take_hints(attributes)
    return Node(
        op_type=proto.op_type,
        domain=domain,
        name=proto.name,
        inputs=tuple(proto.input),
        outputs=tuple(proto.output),
        attributes=attributes,
        opset=opset,
        position=position,
        place=place,
        hints=hints,
    )


@functools.cache
def schema_defaults(domain: str, op_type: str, opset: int) -> Mapping[str, Any]:
    """Default attribute values of an operator, from ONNX's own schema; empty for domains that ONNX does not define."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "" if domain == ONNX else domain)
    except onnx.defs.SchemaError:
        return {}
    return {
        name: _attribute(attribute.default_value, {})
        for name, attribute in schema.attributes.items()
        if attribute.default_value.type != onnx.AttributeProto.UNDEFINED
    }


def _attribute(proto: onnx.AttributeProto, opsets: Mapping[str, int]) -> Any:
    kinds = onnx.AttributeProto
    match proto.type:
        case kinds.FLOAT:
            return proto.f
        case kinds.INT:
            return proto.i
        case kinds.STRING:
            return _text(proto.s)
        case kinds.FLOATS:
            return tuple(proto.floats)
        case kinds.INTS:
            return tuple(proto.ints)
        case kinds.STRINGS:
            return tuple(_text(s) for s in proto.strings)
        case kinds.TENSOR:
            return tensor_value(proto.t)
        case kinds.TENSORS:
            return tuple(tensor_value(t) for t in proto.tensors)
        case kinds.GRAPH:
            return _read_graph(proto.g, opsets)
        case kinds.GRAPHS:
            return tuple(_read_graph(g, opsets) for g in proto.graphs)
        case kinds.SPARSE_TENSOR:
            return _dense(proto.sparse_tensor)
        case kinds.TYPE_PROTO:
            return _tensor_type(proto.tp)
        case _:
            raise UnsupportedError(f"attribute '{proto.name}' has a type that is not computed on IPUs")


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="replace")


def tensor_value(proto: onnx.TensorProto) -> np.ndarray:
    """A tensor's value. String tensors become object arrays, which are refused when an operator uses them."""
    return to_array(proto)


def _dense(proto: onnx.SparseTensorProto) -> np.ndarray:
    """A sparse tensor written out: ``dims`` filled with 0 but for ``values`` at ``indices`` (linear or per axis)."""
    values = tensor_value(proto.values)
    indices = tensor_value(proto.indices)
    dims = tuple(proto.dims)
    dense = np.zeros(dims, values.dtype)
    if indices.ndim == 2:
        dense[tuple(indices.T)] = values
    else:
        dense.reshape(-1)[indices] = values
    return dense


def _tensor_type(proto: onnx.TypeProto) -> TensorType:
    kind = proto.WhichOneof("value")
    if kind == "sequence_type":
        inner = _tensor_type(proto.sequence_type.elem_type)
        return TensorType(inner.dtype, inner.shape, "sequence")
    if kind == "optional_type":
        inner = _tensor_type(proto.optional_type.elem_type)
        return TensorType(inner.dtype, inner.shape, "optional")
    if kind not in ("tensor_type", "sparse_tensor_type"):
        return TensorType(None, None)
    tensor = proto.tensor_type if kind == "tensor_type" else proto.sparse_tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return TensorType(dtype, None)
    shape: list[int | None] = []
    symbols: list[str] = []
    for dim in tensor.shape.dim:
        known = dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0
        shape.append(dim.dim_value if known else None)
        if not known:
            symbols.append(dim.dim_param or "?")
    return TensorType(dtype, tuple(shape), "tensor", tuple(symbols))
