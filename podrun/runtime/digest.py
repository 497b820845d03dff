"""A digest of a graph: equal digests mean equal functions of parameters and inputs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping
from enum import Enum

import numpy as np

from podrun.core.errors import InternalError
from podrun.runtime.graph import Node, OperatorGraph


class GraphDigest:
    """Takes values in, one after the other, with their types and lengths, so that no two sequences look alike."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def hexdigest(self) -> str:
        """The digest of what was added."""
        return self._hash.hexdigest()

    def graph(self, graph: OperatorGraph, without_values: Collection[str] = ()) -> None:
        """Add a graph. ``without_values``: initializers of which only the name, type and shape count."""
        self.add((graph.name, graph.inputs, graph.outputs))
        self.add(
            {name: (t.dtype, t.shape, t.kind) for name, t in graph.types.items() if name in graph.inputs}
        )
        for name, value in graph.initializers.items():
            self.add((name, (value.dtype, value.shape) if name in without_values else value))
        for node in graph.nodes:
            self._node(node)

    def _node(self, node: Node) -> None:
        self.add((node.op_type, node.domain, node.opset, node.name, node.inputs, node.outputs))
        self.add((node.place, node.hints, node.planned_as))
        self.add(node.attributes)

    def add(self, value: object) -> None:
        """Add a value: a number, text, array, type, enum, dataclass, subgraph, or a collection of these."""
        if isinstance(value, OperatorGraph):
            self.graph(value)
        elif isinstance(value, np.ndarray):
            self._write("array", f"{value.dtype.name}{value.shape}".encode())
            if value.dtype.kind == "O":
                self.add(value.tolist())
            else:
                self._hash.update(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._write("value", type(value).__name__.encode())
            for item in dataclasses.fields(value):
                self.add((item.name, getattr(value, item.name)))
        elif isinstance(value, Mapping):
            self._write("mapping", str(len(value)).encode())
            for name in sorted(value, key=repr):
                self.add((name, value[name]))
        elif isinstance(value, (tuple, list)):
            self._write("sequence", str(len(value)).encode())
            for item in value:
                self.add(item)
        elif isinstance(value, (set, frozenset)):
            self.add(sorted(value, key=repr))
        elif value is None or isinstance(value, (bool, int, float, str, bytes, Enum, np.dtype, np.generic)):
            self._write(type(value).__name__, repr(value).encode())
        else:
            raise InternalError(f"a graph holds {value!r}, of which no digest can be made")

    def _write(self, kind: str, content: bytes) -> None:
        self._hash.update(f"{kind}:{len(content)}:".encode())
        self._hash.update(content)
