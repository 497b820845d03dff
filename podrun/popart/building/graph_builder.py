"""The model under a Builder: nodes, tensors and names, with shapes inferred as it grows; read from a file or bytes, and
written out.

Source of names and rules: graphcore/popart, willow/src/builder_impl.cpp.

A `GraphScope` is one graph; subgraphs are child scopes that see their parents' tensors and share their parents' names,
so that a name is unique over all of them. `BuilderModel` is the whole model.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.onnx_models.light_model import LightModel, put_beside
from podrun.onnx_models.tensor_proto import to_array, to_proto
from podrun.popart.models.onnx_inference import infer_outputs
from podrun.popart.values.exceptions import popart_exception, surfacing
from podrun.popart.values.names import UNNAMED
from podrun.popart.values.tensor_info import TensorInfo, data_type_from_onnx, info_from_type, type_proto

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto, TypeProto


_log = logging.getLogger("podrun.popart.builder")

ONNX_DOMAINS = ("", "ai.onnx")
GRAPHCORE_DOMAIN = "ai.graphcore"

_DATA_LIMIT = 4096
"""Largest constant (elements) whose value is handed to shape inference: shapes, axes and the like are small."""


class Names:
    """The names in use, and how the next free one is formed: ``Add:0``, ``Add:0/1``, ``Add:0/2``."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def reserve(self, name: str) -> None:
        """Mark a name as used."""
        self._taken.add(name)

    def unique(self, base: str) -> str:
        """``base`` if it is free, else ``base/1`` and so on. Marks the result as used."""
        name = base
        while name in self._taken:
            self._counts[base] = self._counts.get(base, 0) + 1
            name = f"{base}/{self._counts[base]}"
        self._taken.add(name)
        return name


@dataclass
class GraphScope:
    """One graph being built. ``opsets`` and ``names`` are shared over a model's scopes."""

    names: Names
    opsets: dict[str, int]
    parent: GraphScope | None = None
    name: str = UNNAMED
    nodes: list[NodeProto] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    """The inputs, and among them the tensors of outer graphs that the program named as inputs."""
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """Values of the main graph's initializers that lie beside the model (`LightModel`)."""
    infos: dict[str, TensorInfo | None] = field(default_factory=dict)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    producers: dict[str, NodeProto] = field(default_factory=dict)

    # -- looking things up ------------------------------------------------------------------------

    def find(self, tensor: str) -> GraphScope | None:
        """The scope that holds ``tensor``: this one or a parent."""
        if tensor in self.infos:
            return self
        return None if self.parent is None else self.parent.find(tensor)

    def info(self, tensor: str) -> TensorInfo | None:
        """The known type and shape of ``tensor``. popart_exception that names similar tensors if there is none of that
        name.
        """
        scope = self.find(tensor)
        if scope is None:
            raise popart_exception(
                f"{tensor!r} is not an input or output tensor. Must be one that the graph has.{self.suggestion(tensor)}"
            )
        return scope.infos[tensor]

    def suggestion(self, tensor: str) -> str:
        """The nearest names, for an error about an unknown one."""
        near = difflib.get_close_matches(tensor, self.visible(), n=3, cutoff=0.4)
        listed = near or self.visible()[-5:]
        return f" Candidates: {', '.join(repr(name) for name in listed)}." if listed else ""

    def visible(self) -> list[str]:
        """Tensors that operators of this graph may use."""
        return [*(self.parent.visible() if self.parent else ()), *self.infos]

    def constant(self, tensor: str) -> TensorProto | None:
        """The value of ``tensor`` if it is a small constant."""
        if tensor in self.constants:
            return self.constants[tensor]
        return None if self.parent is None else self.parent.constant(tensor)

    # -- adding -----------------------------------------------------------------------------------

    def add_input(self, name: str, info: TensorInfo | None) -> None:
        """A graph input (``info`` None: untyped, in a subgraph)."""
        self.inputs.append(name)
        self.arguments.append(name)
        self.infos[name] = info

    def add_initializer(self, name: str, array: np.ndarray, info: TensorInfo) -> None:
        """An input with a value; ``info`` is what one replica sees."""
        proto = (
            to_proto(name, array)
            if self.parent
            else put_beside(self.values, name, np.array(array, order="C"))
        )
        self.add_input(name, info)
        self.initializers[name] = proto
        if array.size <= _DATA_LIMIT and array.dtype.kind in "iub":
            self.constants[name] = proto

    def add_node(self, node: NodeProto, infos: Sequence[TensorInfo | None]) -> None:
        """Add a node with the known types and shapes of its outputs."""
        self.nodes.append(node)
        for output, info in zip(node.output, infos, strict=True):
            if output:
                self.infos[output] = info
                self.producers[output] = node
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            value = node.attribute[0].t
            if np.prod(value.dims, dtype=np.int64) <= _DATA_LIMIT:
                self.constants[node.output[0]] = value

    # -- inference --------------------------------------------------------------------------------

    def infer_onnx(self, node: NodeProto, version: int) -> list[TensorInfo | None]:
        """Types and shapes of an ai.onnx node's outputs by ONNX's own inference; None if it finds none, or if the
        inputs do not fit together.
        """
        from onnx import TypeProto, shape_inference

        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            return [TensorInfo(to_array(node.attribute[0].t))]
        types: dict[str, TypeProto] = {}
        data: dict[str, TensorProto] = {}
        for tensor in node.input:
            info = self.info(tensor) if tensor else None
            types[tensor] = TypeProto() if info is None else type_proto(info)
            constant = self.constant(tensor)
            if info is not None and constant is not None:
                data[tensor] = constant
        if any(attribute.HasField("g") for attribute in node.attribute):
            return self._infer_control(node)
        try:
            inferred = infer_outputs(node, version, types, data)
        except (shape_inference.InferenceError, RuntimeError, ValueError) as error:
            # PopART takes more than ONNX's inference does (negative pads, say); what it refuses, it refuses when a
            # session is made, and so do we, in its words.
            _log.debug("Nothing is known of what %s '%s' makes: %s", node.op_type, node.name, error)
            return [None] * len(node.output)
        return [info_from_type(inferred[name]) if name in inferred else None for name in node.output]

    def _infer_control(self, node: NodeProto) -> list[TensorInfo | None]:
        """Outputs of If are its branches' outputs; outputs of Loop are its loop-carried values, then stacked scan
        outputs.
        """
        bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        results = [info_from_type(output.type) for output in bodies[0].output]
        if node.op_type == "If":
            return results[: len(node.output)]
        if node.op_type == "Loop":
            carried = len(node.input) - 2
            kept = [info or None for info in results[1 : 1 + carried]]
            return [*kept, *[None] * (len(node.output) - len(kept))]
        return [None] * len(node.output)

    # -- out --------------------------------------------------------------------------------------

    def to_proto(self, inputs: Sequence[str] | None = None) -> GraphProto:
        """The graph in ONNX's form, with ``inputs`` instead of its own if given. Subgraphs list their outputs with
        types where these are known.
        """
        from onnx import GraphProto

        graph = GraphProto()
        self.into_proto(graph, inputs)
        return graph

    def into_proto(self, graph: GraphProto, inputs: Sequence[str] | None = None) -> None:
        """`to_proto` into an empty graph that is part of something greater, which saves a copy of all weights."""
        from onnx import helper

        graph.name = self.name
        graph.node.extend(self.nodes)
        graph.initializer.extend(self.initializers.values())
        input_names = self.inputs if inputs is None else inputs
        for names, field_ in ((input_names, graph.input), (self.outputs, graph.output)):
            for name in names:
                scope = self.find(name)
                info = scope.infos[name] if scope else None
                value = helper.make_empty_tensor_value_info(name)
                if info is not None:
                    value.type.CopyFrom(type_proto(info))
                field_.append(value)


def scope_from_graph(graph: GraphProto, opsets: dict[str, int], known: Mapping[str, Any]) -> GraphScope:
    """A scope that continues a loaded graph; ``known`` holds inferred infos of its tensors."""
    scope = GraphScope(Names(), opsets, name=graph.name or UNNAMED)
    for value in graph.input:
        scope.add_input(value.name, info_from_type(value.type))
    for initializer in graph.initializer:
        scope.initializers[initializer.name] = initializer
        if initializer.name not in scope.infos:
            scope.infos[initializer.name] = known.get(initializer.name)
        if np.prod(initializer.dims, dtype=np.int64) <= _DATA_LIMIT and not initializer.external_data:
            scope.constants[initializer.name] = initializer
    for node in graph.node:
        scope.add_node(node, [known.get(output) for output in node.output])
    scope.outputs = [value.name for value in graph.output]
    for value in graph.output:
        if scope.infos.get(value.name) is None:
            scope.infos[value.name] = info_from_type(value.type)
    for name in scope.infos:
        scope.names.reserve(name)
    return scope


DEFAULT_OPSET = 10
OPSETS = range(6, 12)
"""Opsets that have an ``aiOnnxOpsetN`` property in PopART."""


@surfacing
class BuilderModel:
    """The part of a builder that makes models."""

    _scope: GraphScope
    _metadata: dict[str, Any]

    def _subgraph_proto(self, called: bool = False) -> GraphProto:
        """A subgraph in ONNX's form. ``called``: in the form for a Call, where tensors of outer graphs are arguments
        like others.
        """
        return self._scope.to_proto(self._scope.arguments if called else None)

    def _model(self) -> LightModel:
        from onnx import ModelProto, helper

        opsets = {"": DEFAULT_OPSET, **self._scope.opsets}
        model = ModelProto(
            ir_version=3 if opsets[""] <= 8 else _ir_version(opsets[""]), producer_name="podrun"
        )
        self._scope.into_proto(model.graph)
        model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in opsets.items())
        if self._metadata:
            helper.set_model_props(model, {key: json.dumps(value) for key, value in self._metadata.items()})
        return LightModel(model, self._scope.values)

    def getModelProto(self) -> bytes:
        """The model as bytes, which the sessions take."""
        return self._model().to_bytes()

    def saveModelProto(self, filename: str) -> None:
        """Write the model, which a session checks when it reads it. Data in other files lie beside it."""
        Path(filename).write_bytes(self.getModelProto())

    def saveInitializersExternally(self, ids: Sequence[str], filename: str) -> None:
        """Move values of variables out of the model into ``filename``, whose folder must exist."""
        from podrun.popart.models.transformer import move_initializers

        move_initializers(self._scope.initializers, self._scope.values, ids, filename)


def _ir_version(opset: int) -> int:
    """PopART writes 4 for its opsets from 9 on; later opsets get the oldest IR version that knows them."""
    from onnx import helper

    if opset in OPSETS:
        return 4
    versions = {row[2]: row[1] for row in helper.VERSION_TABLE}
    return max(4, int(versions.get(opset, 4)))


def continued_model(source: str | bytes | os.PathLike[str]) -> GraphScope:
    """A scope that continues the model in a file or in bytes."""
    from onnx import shape_inference

    from podrun.popart.models.loader import read_light_model

    light = read_light_model(source)
    model = light.proto
    opsets = {
        ("" if entry.domain == "ai.onnx" else entry.domain): entry.version for entry in model.opset_import
    }
    inferred = shape_inference.infer_shapes(model)
    known = {value.name: info_from_type(value.type) for value in inferred.graph.value_info}
    for initializer in model.graph.initializer:
        known[initializer.name] = TensorInfo(
            data_type_from_onnx(initializer.data_type), [int(dim) for dim in initializer.dims]
        )
    scope = scope_from_graph(model.graph, opsets, known)
    scope.values.update(light.values)
    return scope
