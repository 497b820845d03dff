"""An ONNX graph as plain values (nodes with Python attributes, initializers as NumPy arrays), and the tensors of a run.

A tensor of a running graph is held twice where possible. *Traced* is a JAX array, usually a tracer. *Known* is its
NumPy value, worked out only if an operator asks for it: the target of a Reshape, the axes of a reduction. The
initializers and inputs that a known value rests on are remembered by name as its *origins*. `TooWide` stands for
integers that do not fit the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnx.inliner

from podrun.core.errors import InternalError, UnsupportedError, UsageError
from podrun.onnx_models.ops.common import device_dtype
from podrun.onnx_models.ops.registry import ONNX, Node, find
from podrun.onnx_models.ops.sdk import Form
from podrun.onnx_models.tensor_proto import to_array

NO_ORIGINS: frozenset[str] = frozenset()
UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class TooWide:
    """Stands for a traced value whose integers do not fit the device. Operators may have it as an input if they only
    use the value while tracing (the ends of a Slice); computing with it is refused in the words kept here.
    """

    reason: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class TracedTensor:
    """One tensor of a running graph: its traced value, its known value if there is one, and its origins.

    Sequences are tuples of arrays, an empty optional is None; both are traced values.
    """

    __slots__ = ("_known", "_traced", "_work", "name", "origins", "x64")

    def __init__(
        self,
        name: str,
        x64: bool,
        traced: Any = UNKNOWN,
        known: Any = UNKNOWN,
        work: Callable[[], Any] | None = None,
        origins: frozenset[str] = NO_ORIGINS,
    ) -> None:
        self.name = name
        self.x64 = x64
        self.origins = origins
        self._traced = traced
        self._known = known
        self._work = work
        concrete = isinstance(traced, (np.ndarray, jax.Array)) and not isinstance(traced, jax.core.Tracer)
        if known is UNKNOWN and work is None and concrete:
            self._known = np.asarray(traced)

    @property
    def is_known(self) -> bool:
        """True iff `known` can be computed."""
        return self._known is not UNKNOWN or self._work is not None

    @property
    def at_hand(self) -> bool:
        """True iff the value is a constant of the program: known, and independent of anything that may change."""
        return self._known is not UNKNOWN and not self.origins and isinstance(self._known, np.ndarray)

    @property
    def known(self) -> Any:
        """The NumPy value, with 64-bit types. Only if `is_known`."""
        if self._known is UNKNOWN:
            if self._work is None:
                raise InternalError(f"the value of tensor '{self.name}' is not known while tracing")
            self._known, self._work = self._work(), None
        return self._known

    @property
    def traced(self) -> Any:
        """The JAX value, of device type."""
        if self._traced is UNKNOWN:
            self._traced = lift(self._known, self.name, self.x64)
        return self._traced

    @property
    def form(self) -> Form | None:
        """Type and shape; None for sequences and empty optionals."""
        value = self._known if self._traced is UNKNOWN else self._traced
        if value is UNKNOWN or value is None or isinstance(value, (tuple, list)):
            return None
        return Form(np.dtype(value.dtype), tuple(value.shape))

    @property
    def operand(self) -> Any:
        """`traced`, or `TooWide` if the value does not fit the device."""
        if self._traced is UNKNOWN and isinstance(self._known, np.ndarray):
            reason = misfit(self._known, self.name, self.x64)
            if reason:
                return TooWide(reason, self._known.shape, self._known.dtype)
        return self.traced


def lift(value: Any, name: str, x64: bool) -> Any:
    """A NumPy value (or sequence) as JAX values of device type. Refuses strings, and integers that do not
    fit.
    """
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return tuple(lift(v, name, x64) for v in value)
    return jnp.asarray(to_device(np.asarray(value), name, x64))


def to_device(value: np.ndarray, name: str, x64: bool) -> np.ndarray:
    """The array in its device type: INT64 as INT32. Raises `UnsupportedError` if a value does not fit or
    is a string.
    """
    if value.dtype.kind in "OUS":
        raise UnsupportedError(f"tensor '{name}' holds strings, which are not computed on IPUs")
    try:
        dtype = device_dtype(value.dtype, x64)
    except UnsupportedError as error:
        raise UnsupportedError(f"tensor '{name}': {error}") from None
    reason = misfit(value, name, x64)
    if reason:
        raise UnsupportedError(reason)
    return value.astype(dtype, copy=False)


def misfit(value: np.ndarray, name: str, x64: bool) -> str | None:
    """Why an integer array does not fit its device type, or None if it does."""
    if value.dtype.kind not in "iu":
        return None
    dtype = device_dtype(value.dtype, x64)
    if dtype == value.dtype:
        return None
    bounds = np.iinfo(dtype)
    if value.size and (value.max() > bounds.max or value.min() < bounds.min):
        worst = value.max() if value.max() > bounds.max else value.min()
        return f"tensor '{name}' holds {worst}, which does not fit {dtype.name.upper()} on the device"
    return None


@dataclass(frozen=True, slots=True)
class TensorType:
    """Declared type of a graph input or output.

    ``shape`` is None if the rank is unknown; a dimension is None if it has no number. ``kind`` is ``tensor``,
    ``sequence``, ``optional`` or ``sparse``; for the others than tensors dtype and shape are those inside,
    if any.
    """

    dtype: np.dtype[Any] | None
    shape: tuple[int | None, ...] | None
    kind: str = "tensor"
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """A graph or subgraph. ``inputs`` are the fed ones; initializers that are also inputs are left out."""

    name: str
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initializers: Mapping[str, Any]
    types: Mapping[str, TensorType]
    opsets: Mapping[str, int]

    def captures(self) -> set[str]:
        """Outer names that this graph or its subgraphs use."""
        known = {*self.inputs, *self.initializers}
        free: set[str] = set()
        for node in self.nodes:
            free |= ({i for i in node.inputs if i} | captured(node)) - known
            known |= set(node.outputs)
        return free | (set(self.outputs) - known)


def subgraphs(node: Node) -> Iterator[OperatorGraph]:
    """The graphs among a node's attributes."""
    for value in node.attributes.values():
        if isinstance(value, OperatorGraph):
            yield value
        elif isinstance(value, tuple):
            yield from (v for v in value if isinstance(v, OperatorGraph))


def captured(node: Node) -> set[str]:
    """The names outside that a node's subgraphs read."""
    return {name for graph in subgraphs(node) for name in graph.captures()}


def read_model(
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
    found = set()
    for node in graph.node:
        domain = "" if node.domain == ONNX else node.domain
        version = opsets.get(domain, opsets.get(node.domain, 1))
        if find(domain, node.op_type, version) is None and _has_body(domain, node.op_type, version):
            found.add((domain, node.op_type))
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                found |= _bodies(inner, opsets)
    return found


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
        opsets=opsets,
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
    return Node(
        op_type=proto.op_type,
        domain=domain,
        name=proto.name,
        inputs=tuple(proto.input),
        outputs=tuple(proto.output),
        attributes=attributes,
        opset=opset,
        position=position,
    )


@functools.cache
def schema_defaults(domain: str, op_type: str, opset: int) -> Mapping[str, Any]:
    """Default attribute values of an operator, from ONNX's own schema; empty for domains that ONNX does
    not define.
    """
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
    """A sparse tensor written out: ``dims`` filled with 0 but for ``values`` at ``indices`` (linear or per
    axis).
    """
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
