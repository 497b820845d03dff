"""Editing ONNX graphs: who makes a tensor, who uses it, what it holds, what type it has.

`ModelEditor` knows what all graphs of a model share (names, types), a `GraphEditor` changes one graph. Its node list is
plain Python; `ModelEditor.commit` writes it back. Names of a graph's outputs always stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from podrun.serving.convert.graph_walk import (
    GRAPHCORE_DOMAIN,
    ONNX_DOMAINS,
    TensorKind,
    attribute,
    graphs_within,
    inner_graphs,
    names_used,
    rename_in,
)
from podrun.serving.convert.type_inference import infer_types


class ModelEditor:
    """What the graphs of a model share. ``types`` are inferred when they are first asked for."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self._types: dict[str, TensorKind] | None = None
        self.names: set[str] = set()
        for graph in graphs_within(model.graph):
            self.names |= {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
            self.names |= {tensor.name for tensor in graph.initializer}
            for node in graph.node:
                self.names |= {node.name, *node.output}
        self.main = GraphEditor(self, model.graph, None)

    @property
    def opset(self) -> int:
        """The version of ONNX's own domain."""
        return next((i.version for i in self.model.opset_import if i.domain in ONNX_DOMAINS), 1)

    def need_domain(self, domain: str = GRAPHCORE_DOMAIN, version: int = 1) -> None:
        """Let the model import a domain."""
        if all(i.domain != domain for i in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(domain, version))

    @property
    def types(self) -> dict[str, TensorKind]:
        """Types of all tensors that can be inferred."""
        if self._types is None:
            self._types = infer_types(self.model, self.main.nodes)
        return self._types

    def new_name(self, base: str) -> str:
        """A name that nothing in the model has."""
        name, count = base, 0
        while name in self.names or not name:
            count += 1
            name = f"{base}_{count}"
        self.names.add(name)
        return name

    def graphs(self) -> Iterator[GraphEditor]:
        """Editors of the main graph and of those in it, each written back before the next."""
        pending = [self.main]
        while pending:
            editor = pending.pop()
            yield editor
            editor.write_back()
            for node in editor.graph.node:
                pending += [GraphEditor(self, inner, editor) for inner in inner_graphs(node)]

    def commit(self) -> None:
        """Write the main graph's nodes back."""
        self.main.write_back()


class GraphEditor:
    """One graph while passes change it. ``nodes`` stay sorted: a tensor is made before it is used."""

    def __init__(self, owner: ModelEditor, graph: GraphProto, parent: GraphEditor | None) -> None:
        self.owner, self.graph, self.parent = owner, graph, parent
        self.nodes: list[NodeProto] = list(graph.node)
        self._held = {tensor.name: tensor for tensor in graph.initializer}
        self._index: tuple[dict[str, NodeProto], dict[str, list[NodeProto]]] | None = None
        self.changed = False

    # --- asking

    def _indexed(self) -> tuple[dict[str, NodeProto], dict[str, list[NodeProto]]]:
        if self._index is None:
            makers: dict[str, NodeProto] = {}
            users: dict[str, list[NodeProto]] = {}
            for node in self.nodes:
                makers.update((name, node) for name in node.output if name)
                for name in names_used(node):
                    users.setdefault(name, []).append(node)
            self._index = makers, users
        return self._index

    def producer(self, name: str) -> NodeProto | None:
        """The node of this graph that makes a tensor."""
        return self._indexed()[0].get(name)

    def onnx_nodes(self, *operators: str) -> list[NodeProto]:
        """ONNX's own nodes of these operators, as they are now."""
        return [n for n in self.nodes if n.op_type in operators and n.domain in ONNX_DOMAINS]

    def consumers(self, name: str) -> list[NodeProto]:
        """Nodes that use a tensor, once for each use."""
        return self._indexed()[1].get(name, [])

    def is_output(self, name: str) -> bool:
        """True iff the graph gives the tensor back."""
        return any(value.name == name for value in self.graph.output)

    def is_input(self, name: str) -> bool:
        """True iff the tensor is an input of the graph."""
        return any(value.name == name for value in self.graph.input)

    def sole_user(self, name: str) -> NodeProto | None:
        """The node that uses a tensor once, if nothing else needs it."""
        users = self.consumers(name)
        return users[0] if len(users) == 1 and not self.is_output(name) else None

    def made_by(self, name: str, *operators: str) -> NodeProto | None:
        """The producer if it is one of these operators of ONNX."""
        node = self.producer(name)
        if node is None or node.op_type not in operators or node.domain not in ONNX_DOMAINS:
            return None
        return node

    def tensor(self, name: str) -> TensorProto | None:
        """The tensor behind a constant: an initializer, or what a Constant node holds; of enclosing graphs too."""
        if name in self._held and not self.is_input(name):
            return self._held[name]
        node = self.producer(name)
        if node is not None:
            return attribute(node, "value") if node.op_type == "Constant" else None
        return self.parent.tensor(name) if self.parent is not None and not self.is_input(name) else None

    def is_constant(self, name: str) -> bool:
        """True iff a tensor's value is in the model."""
        node = self.producer(name)
        return self.tensor(name) is not None or (node is not None and node.op_type == "Constant")

    def constant(self, name: str) -> np.ndarray | None:
        """A constant's value; None for what is none, or for none of numbers."""
        held = self.tensor(name) if name else None
        if held is not None:
            return None if held.data_type == TensorProto.STRING else numpy_helper.to_array(held)
        node = self.producer(name) if name else None
        if node is None or node.op_type != "Constant":
            return None
        for key, kind in (("value_float", np.float32), ("value_int", np.int64)):
            if (value := attribute(node, key)) is not None:
                return np.asarray(value, kind)
        for key, kind in (("value_floats", np.float32), ("value_ints", np.int64)):
            if (value := attribute(node, key)) is not None:
                return np.asarray(value, kind)
        return None

    def scalar(self, name: str) -> float | None:
        """The value of a constant of one element, or of equal elements."""
        held = self.tensor(name) if name else None
        if held is not None and int(np.prod(held.dims, dtype=np.int64)) > 1 << 16:
            return None
        value = self.constant(name)
        if value is None or value.size == 0 or value.dtype.kind not in "fiub":
            return None
        first = value.reshape(-1)[0]
        return float(first) if bool((value == first).all()) else None

    def kind(self, name: str) -> TensorKind | None:
        """The type of a tensor if it is known."""
        return self.owner.types.get(name)

    def sizes(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor if all of it is known."""
        known = self.owner.types.get(name)
        return known.sizes if known is not None else None

    def element(self, name: str) -> int | None:
        """The element type of a tensor if it is known."""
        known = self.owner.types.get(name)
        return known.element if known is not None else None

    # --- changing

    def touch(self) -> None:
        """Say that nodes were changed."""
        self._index, self.changed = None, True

    def add_constant(self, value: np.ndarray, base: str) -> str:
        """Put an initializer into the graph; returns its name."""
        name = self.owner.new_name(base)
        tensor = numpy_helper.from_array(np.ascontiguousarray(value), name)
        self.graph.initializer.append(tensor)
        self._held[name] = self.graph.initializer[-1]
        self.changed = True
        if self.owner._types is not None:
            self.owner._types[name] = TensorKind(tensor.data_type, tuple(value.shape))
        return name

    def hold(self, tensor: TensorProto) -> None:
        """Put an initializer under its own name, in place of one that has it."""
        for index, held in enumerate(self.graph.initializer):
            if held.name == tensor.name:
                self.graph.initializer[index].CopyFrom(tensor)
                self._held[tensor.name] = self.graph.initializer[index]
                break
        else:
            self.graph.initializer.append(tensor)
            self._held[tensor.name] = self.graph.initializer[-1]
        self.touch()

    def node(
        self, operator: str, inputs: Sequence[str], output: str = "", *, domain: str = "", **attributes: Any
    ) -> NodeProto:
        """A new node that is not in the graph yet; without ``output`` its result gets a name."""
        name = self.owner.new_name(operator)
        result = output or self.owner.new_name(f"{name}_output")
        if domain:
            self.owner.need_domain(domain)
        return helper.make_node(operator, list(inputs), [result], name=name, domain=domain, **attributes)

    def replace(self, old: Iterable[NodeProto], new: Sequence[NodeProto]) -> None:
        """Put nodes in place of others, where the last of these stands. Places (IPU, stage) carry over."""
        gone = list(old)
        ids = {id(node) for node in gone}
        at = max(index for index, node in enumerate(self.nodes) if id(node) in ids)
        carried = [one for one in gone[-1].attribute if one.name.startswith("__")]
        for node in new:
            own = {one.name for one in node.attribute}
            node.attribute.extend(one for one in carried if one.name not in own)
        before = [node for node in self.nodes[: at + 1] if id(node) not in ids]
        self.nodes = before + list(new) + self.nodes[at + 1 :]
        self.touch()

    def insert_before(self, node: NodeProto, new: Sequence[NodeProto]) -> None:
        """Put nodes in front of another node."""
        at = next(index for index, one in enumerate(self.nodes) if one is node)
        self.nodes[at:at] = new
        self.touch()

    def insert_after(self, node: NodeProto, new: Sequence[NodeProto]) -> None:
        """Put nodes behind another node."""
        at = next(index for index, one in enumerate(self.nodes) if one is node) + 1
        self.nodes[at:at] = new
        self.touch()

    def lead_input(self, node: NodeProto, index: int, operator: str, **attributes: Any) -> None:
        """Let an input of a node go through a new operator first."""
        new = self.node(operator, [node.input[index]], **attributes)
        self.insert_before(node, [new])
        node.input[index] = new.output[0]

    def lead_result(self, node: NodeProto, operator: str, **attributes: Any) -> None:
        """Let the result of a node go through a new operator, which gives it its name."""
        inner = self.owner.new_name(f"{node.output[0]}_before_{operator.lower()}")
        new = self.node(operator, [inner], node.output[0], **attributes)
        node.output[0] = inner
        self.insert_after(node, [new])

    def remove(self, gone: Iterable[NodeProto]) -> None:
        """Take nodes out of the graph."""
        ids = {id(node) for node in gone}
        self.nodes = [node for node in self.nodes if id(node) not in ids]
        self.touch()

    def rename_uses(self, old: str, new: str) -> None:
        """Let all nodes use ``new`` instead of ``old``."""
        for node in list(self.consumers(old)):
            rename_in(node, old, new)
        self.touch()

    def rename_maker(self, old: str, like: str) -> str | None:
        """Give a tensor a new name where it is made and used; the old one is free then. None if no node makes it."""
        maker = self.producer(old)
        if maker is None:
            return None
        new = self.owner.new_name(like)
        for index, name in enumerate(maker.output):
            if name == old:
                maker.output[index] = new
        self.touch()
        self.rename_uses(old, new)
        return new

    def bypass(self, node: NodeProto, source: str = "") -> bool:
        """Take out a node that hands its input on: users read the input. False, and an Identity in its place, where
        the result is an output of the graph that cannot take its place.
        """
        source, result = source or node.input[0], node.output[0]
        if not self.is_output(result):
            self.rename_uses(result, source)
            self.remove([node])
            return True
        maker = self.producer(source)
        if maker is None or self.is_output(source):
            if node.op_type == "Identity" and not node.domain:
                return False
            self.replace([node], [self.node("Identity", [source], result)])
            return True
        for index, name in enumerate(maker.output):
            if name == source:
                maker.output[index] = result
        self.touch()
        self.remove([node])
        for user in list(self.consumers(source)):
            rename_in(user, source, result)
        self.touch()
        return True

    def drop_dead(self) -> bool:
        """Take away nodes that no output needs, and initializers that nothing uses."""
        needed = {value.name for value in self.graph.output}
        kept: list[NodeProto] = []
        for node in reversed(self.nodes):
            if any(name in needed for name in node.output) or node.op_type in KEPT_OPERATORS:
                kept.append(node)
                needed.update(names_used(node))
        dead = len(kept) != len(self.nodes)
        if dead:
            self.nodes = kept[::-1]
            self.touch()
        return self.drop_unused_initializers(needed) or dead

    def drop_unused_initializers(self, needed: set[str] | None = None) -> bool:
        """Take away initializers that nothing uses."""
        if needed is None:
            needed = {value.name for value in self.graph.output}
            for node in self.nodes:
                needed.update(names_used(node))
        gone = [i for i, tensor in enumerate(self.graph.initializer) if tensor.name not in needed]
        for index in reversed(gone):
            self._held.pop(self.graph.initializer[index].name, None)
            del self.graph.initializer[index]
        self.changed = self.changed or bool(gone)
        return bool(gone)

    def write_back(self) -> None:
        """Make the graph hold the nodes as they are."""
        if not self.changed:
            return
        copies = []
        for node in self.nodes:
            copied = NodeProto()
            copied.CopyFrom(node)
            copies.append(copied)
        del self.graph.node[:]
        self.graph.node.extend(copies)
        self.nodes = list(self.graph.node)
        self._held = {tensor.name: tensor for tensor in self.graph.initializer}
        self._index, self.changed = None, False
        self.owner._types = None


KEPT_OPERATORS = frozenset({"PrintTensor", "Abort", "CopyVarUpdate"})
"""Operators that do something besides giving a result."""
