"""Walking ONNX graphs: attributes, inner graphs, the tensors that nodes use, the order of nodes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, helper

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

GRAPHCORE_DOMAIN = "ai.graphcore"
ONNX_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Element type (ONNX's number) and shape of a tensor; None for sizes, or for a whole shape, that are not known."""

    element: int
    shape: tuple[int | None, ...] | None

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The shape if all of it is known."""
        if self.shape is None or any(size is None for size in self.shape):
            return None
        return tuple(size for size in self.shape if size is not None)


def attribute(node: NodeProto, name: str, default: object = None) -> Any:
    """The value of a node's attribute, or ``default``."""
    for one in node.attribute:
        if one.name == name:
            return helper.get_attribute_value(one)
    return default


def set_attribute(node: NodeProto, name: str, value: object) -> None:
    """Set an attribute; None takes it away."""
    kept = [one for one in node.attribute if one.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))


def inner_graphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs among a node's attributes."""
    for one in node.attribute:
        if one.type == AttributeProto.GRAPH:
            yield one.g
        elif one.type == AttributeProto.GRAPHS:
            yield from one.graphs


def graphs_within(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and all graphs in it, outer ones first."""
    yield graph
    for node in graph.node:
        for inner in inner_graphs(node):
            yield from graphs_within(inner)


def names_used(node: NodeProto) -> Iterator[str]:
    """Tensors that a node uses, those of graphs around its inner graphs included."""
    yield from (name for name in node.input if name)
    for inner in inner_graphs(node):
        own = {value.name for value in inner.input} | {tensor.name for tensor in inner.initializer}
        own |= {name for other in inner.node for name in other.output}
        for other in inner.node:
            yield from (name for name in names_used(other) if name not in own)
        yield from (value.name for value in inner.output if value.name not in own)


def rename_in(node: NodeProto, old: str, new: str) -> None:
    """Let a node, and graphs in it, use ``new`` instead of ``old``."""
    for index, name in enumerate(node.input):
        if name == old:
            node.input[index] = new
    for inner in inner_graphs(node):
        if old in {value.name for value in inner.input}:
            continue
        for other in inner.node:
            rename_in(other, old, new)
        if any(value.name == old for value in inner.output):
            inner.node.append(helper.make_node("Identity", [new], [old]))


def sorted_nodes(nodes: Sequence[NodeProto], known: Iterable[str]) -> list[NodeProto]:
    """Nodes in an order in which every tensor is made before it is used; as they are where that is free.

    UsageError naming a node that waits for itself, or for a tensor that nothing makes.
    """
    ready, makers = set(known), {name for node in nodes for name in node.output if name}
    ordered: list[NodeProto] = []
    waiting = list(nodes)
    while waiting:
        left = []
        for node in waiting:
            if all(name in ready or name not in makers for name in names_used(node)):
                ordered.append(node)
                ready.update(node.output)
            else:
                left.append(node)
        if len(left) == len(waiting):
            raise UsageError(
                f"node {left[0].name or left[0].op_type!r} of the model waits for its own result"
            )
        waiting = left
    return ordered


def node_by_name(model: ModelProto, name: str, option: str) -> NodeProto:
    """The node of the main graph with a name. UsageError naming the option and names that are near."""
    names: Mapping[str, NodeProto] = {node.name: node for node in model.graph.node if node.name}
    if name in names:
        return names[name]
    near = difflib.get_close_matches(name, list(names), 3) or list(names)[:3]
    raise UsageError(
        f"{option}: the model has no node {name!r}",
        hint=f"Nodes are for example {', '.join(near)}." if near else None,
    )
