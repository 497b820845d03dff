"""A model in memory: operators with their places, initial values, and what a front end states about variables.

Nothing here is serialised: attributes are Python values, initial values NumPy arrays. Graphs do not change; passes
return new ones (`OperatorGraph.with_nodes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.compiler.program import Beside
    from podrun.runtime.operators import OperatorTable


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator runs. None: not stated.

    ``ipu``: of a replica. ``stage``: of a pipeline. ``phase``: of phased execution. ``cut``: in a model that is not
    pipelined, the stage that the operator would have, so that both compute the same pieces.
    """

    ipu: int | None = None
    stage: int | None = None
    phase: int | None = None
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class Hints:
    """What a program says of one operator beside its meaning. None: nothing.

    ``available_memory``: the part of the tiles' memory that a product may take for temporary data. ``recompute``: True
    to compute the results again in the backward pass, False to keep them. ``indices``: of an operator that reads labels
    or indices from its second input, how many there are, and for labels the one that is ignored.
    """

    available_memory: float | None = None
    recompute: bool | None = None
    indices: tuple[int, ...] | None = None


NOWHERE = Place()
NO_HINTS = Hints()


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of a graph. ``attributes`` are Python values, subgraphs are `OperatorGraph`.

    ``opset`` is the version of ``domain`` that the model uses. An empty name among ``inputs`` or ``outputs`` stands for
    an optional one that is left out.
    """

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 1
    position: str = ""
    """The node's place, for messages: ``node 3 of 17``."""
    place: Place = NOWHERE
    hints: Hints = NO_HINTS
    planned_as: str = ""
    """The ONNX operator as which planners treat the node; empty for its own type."""

    def get(self, name: str, default: object = None) -> Any:
        """The attribute's value, or ``default``."""
        return self.attributes.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    @property
    def kind(self) -> str:
        """The operator as which planners, recomputation and the tile model treat the node."""
        return self.planned_as or self.op_type

    @property
    def label(self) -> str:
        """The node's name, or its first output's."""
        return self.name or next((o for o in self.outputs if o), self.op_type)

    @property
    def ipu(self) -> int:
        """The IPU of the replica that computes the node."""
        return self.place.ipu or 0

    @property
    def stage(self) -> int:
        """The pipeline stage of the node."""
        return self.place.stage or 0

    def at(self, **place: int | None) -> Node:
        """The node with parts of its place changed."""
        return replace(self, place=replace(self.place, **place))

    def describe(self) -> str:
        """The node for messages: its operator, name, place and outputs."""
        name = f" '{self.name}'" if self.name else ""
        where = f" ({self.position}" if self.position else " ("
        makes = ", ".join(repr(o) for o in self.outputs if o)
        return f"{self.domain}.{self.op_type}{name}{where}{', ' if self.position else ''}making {makes})"


@dataclass(frozen=True, slots=True)
class TensorType:
    """Declared type of a graph input or output.

    ``shape`` is None if the rank is unknown; a dimension is None if it has no number. ``kind`` is ``tensor``,
    ``sequence``, ``optional`` or ``sparse``; for the others than tensors dtype and shape are those inside, if any.
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

    def with_nodes(self, nodes: Sequence[Node]) -> OperatorGraph:
        """The graph with other nodes."""
        return replace(self, nodes=tuple(nodes))

    def each_node(self, change: Callable[[Node], Node]) -> OperatorGraph:
        """The graph with each node changed."""
        return replace(self, nodes=tuple(change(node) for node in self.nodes))

    def tensors(self) -> set[str]:
        """The names of inputs, initializers and results of nodes."""
        return {*self.inputs, *self.initializers, *(o for node in self.nodes for o in node.outputs if o)}

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


def all_nodes(graph: OperatorGraph) -> Iterator[Node]:
    """The nodes of a graph and of the graphs inside it."""
    for node in graph.nodes:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


def captured(node: Node) -> set[str]:
    """The names outside that a node's subgraphs read."""
    return {name for graph in subgraphs(node) for name in graph.captures()}


def reads(node: Node) -> set[str]:
    """The tensors that a node reads, those that its subgraphs take from outside among them."""
    return {i for i in node.inputs if i} | captured(node)


def prune(graph: OperatorGraph, wanted: Sequence[str]) -> OperatorGraph:
    """The graph with only the nodes, inputs and initializers that ``wanted`` needs. `UsageError` for unknown names."""
    makers: dict[str, Node] = {o: node for node in graph.nodes for o in node.outputs if o}
    sources = {*graph.inputs, *graph.initializers}
    for name in wanted:
        if name not in makers and name not in sources:
            raise UsageError(
                f"tensor '{name}' is asked for, but the graph '{graph.name}' has none of that name"
            )
    needed: set[str] = set()
    queue = list(wanted)
    while queue:
        name = queue.pop()
        if not name or name in needed:
            continue
        needed.add(name)
        if name in makers:
            queue.extend(reads(makers[name]))
    return replace(
        graph,
        nodes=tuple(n for n in graph.nodes if any(o in needed for o in n.outputs)),
        initializers={n: v for n, v in graph.initializers.items() if n in needed},
    )


@dataclass(frozen=True, slots=True)
class VariableGroups:
    """Which replicas share the value of a variable, and which copies the host reads.

    ``kind``: ``All``, ``Consecutive``, ``Orthogonal`` or ``Ungrouped``; ``size``: replicas in a group, where the kind
    does not say. ``retrieval``: ``OnePerGroup``, ``AllReplicas`` or ``AllReduceReplicas``.
    """

    kind: str
    size: int
    retrieval: str

    def stride_and_size(self, replicas: int) -> tuple[int, int]:
        """The distance between members of a group, and their number. UsageError for groups that do not divide the
        replicas.
        """
        if self.kind == "All":
            return 1, replicas
        if self.kind == "Ungrouped":
            return 1, 1
        if self.size < 1 or replicas % self.size:
            raise UsageError(f"A group of {self.size} replicas does not divide the {replicas} replicas.")
        return (1 if self.kind == "Consecutive" else replicas // self.size), self.size

    def count(self, replicas: int) -> int:
        """The number of groups."""
        return replicas // self.stride_and_size(replicas)[1]


@dataclass(frozen=True, slots=True)
class Model:
    """What a front end hands over to be run.

    ``operators``: the functions of the graph's operators. ``trained``: the variables that are trained (None: all
    floating-point ones that lead to the loss). ``updates``: tensors that replace variables after each micro-batch,
    whether or not anything reads them. ``stepped``: the variables among those replaced that are the same on all
    replicas, because the graph is a whole training step (`podrun.runtime.own_steps`). ``shared``: those of
    which the front end knows that all replicas write equal values, so that a machine holds one copy. ``broadcast``:
    inputs of which every replica gets the whole. ``transfers``: what runs while an input crosses. ``groups``: variables
    that groups of replicas keep for themselves.
    """

    graph: OperatorGraph
    operators: OperatorTable
    trained: frozenset[str] | None = None
    updates: tuple[str, ...] = ()
    stepped: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    broadcast: frozenset[str] = frozenset()
    transfers: Mapping[str, Beside] = field(default_factory=dict)
    groups: Mapping[str, VariableGroups] = field(default_factory=dict)

    def with_graph(self, graph: OperatorGraph) -> Model:
        """The model with another graph."""
        return replace(self, graph=graph)

    def with_values(self, values: Mapping[str, np.ndarray]) -> Model:
        """The model with other initial values; initializers that ``values`` does not name keep theirs."""
        initial = {name: values.get(name, value) for name, value in self.graph.initializers.items()}
        return self.with_graph(replace(self.graph, initializers=initial))
