"""A digest of a graph: equal digests mean equal functions of parameters and inputs."""

from __future__ import annotations

import dataclasses
import functools
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
        kind: type = type(value)
        if kind in _PLAIN:  # Most values of a graph are plain: looking further takes most of the time.
            self._hash.update(_plain_bytes(kind, value))
        elif isinstance(value, (tuple, list)):
            self._write("sequence", b"%d" % len(value))
            if all(type(item) in _PLAIN for item in value):
                self._hash.update(b"".join([_plain_bytes(type(item), item) for item in value]))
                return
            for item in value:
                self.add(item)
        elif isinstance(value, OperatorGraph):
            self.graph(value)
        elif isinstance(value, np.ndarray):
            self._write("array", f"{value.dtype.name}{value.shape}".encode())
            if value.dtype.kind == "O":
                self.add(value.tolist())
            else:
                # As bytes: bfloat16 and other types that NumPy does not know by itself lend no buffer.
                self._hash.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        elif (names := _field_names(kind)) is not None:
            self._write("value", kind.__name__.encode())
            for name in names:
                self.add((name, getattr(value, name)))
        elif isinstance(value, Mapping):
            self._write("mapping", b"%d" % len(value))
            for name in sorted(value, key=repr):
                self.add((name, value[name]))
        elif isinstance(value, (set, frozenset)):
            self.add(sorted(value, key=repr))
        elif isinstance(value, (bool, int, float, str, bytes, Enum, np.dtype, np.generic)):
            self._write(kind.__name__, repr(value).encode())
        else:
            raise InternalError(f"a graph holds {value!r}, of which no digest can be made")

    def _write(self, kind: str, content: bytes) -> None:
        self._hash.update(_written(kind, content))


def _written(kind: str, content: bytes) -> bytes:
    return b"%b:%d:%b" % (kind.encode(), len(content), content)


def _plain_bytes(kind: type, value: object) -> bytes:
    return _text_bytes(value) if type(value) is str else _written(kind.__name__, repr(value).encode())


@functools.lru_cache(maxsize=1 << 12)
def _text_bytes(text: str) -> bytes:
    """Names of fields, operators and tensors come again and again."""
    return _written("str", repr(text).encode())


_PLAIN = frozenset((type(None), bool, int, float, str, bytes))


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass; None for another type."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None
