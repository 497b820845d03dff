"""A captured graph as the model of a session: a node of a domain of its own for each ATen operator.

A node holds the captured operator itself; its tensors are the node's inputs. The model states which parameters are
trained and which tensors replace buffers. What computes the operators is in `aten_table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

import numpy as np

from podrun.compiler.program import Beside
from podrun.core.errors import InternalError
from podrun.core.executable import numpy_dtype
from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.api.enums import OverlapMode
from podrun.poptorch.capture.graph import BlockPlacement, CapturedGraph, GraphNode, GraphValue
from podrun.poptorch.compile.aten_table import ATEN_OPERATORS, CAPTURED, PRINT_TENSOR, UPDATE, aten_kind
from podrun.runtime.graph import NOWHERE, Hints, Model, Node, OperatorGraph, Place, TensorType, VariableGroups

DOMAIN = "pytorch.aten"
"""Domain of nodes that are ATen operators."""
CHECKPOINT = "podrun.recomputation_checkpoint.default"
SET_MEMORY = "podrun.set_available_memory.default"
OVERLAPPED_INPUT, OVERLAPPED_OUTPUT = "podrun.overlap_input.default", "podrun.overlap_output.default"
PRINT = "podrun.print_tensor.default"


BESIDE = {
    OverlapMode.NoOverlap: Beside.NOTHING,
    OverlapMode.OverlapAccumulationLoop: Beside.MICRO_BATCHES,
    OverlapMode.OverlapDeviceIterationLoop: Beside.BATCHES,
}
"""What runs while a tensor with a mark crosses."""


@dataclass(frozen=True, slots=True)
class SessionModel:
    """A model, and the session's names of values of the graph.

    ``inputs``: name of each input by the position of its tensor among the arguments. ``outputs``: name of each value
    that forward returns, by number.
    """

    model: Model
    inputs: Mapping[int, str]
    outputs: Mapping[int, str]
    names: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class PlacedGraph:
    """The ingredients of a model: a graph, the values of parameters and buffers, and which of them are trained."""

    graph: CapturedGraph
    values: Mapping[str, np.ndarray]
    trained: frozenset[str]
    placed: bool
    """Whether nodes carry an IPU and a stage: False for a model on one IPU."""
    phased: bool = False
    scopes: bool = True
    groups: Mapping[str, tuple[str, int, str]] = field(default_factory=dict)
    """Parameters whose value differs between groups of replicas: kind, size of a group, retrieval mode."""
    stages: tuple[int, ...] = ()
    """Stages that have operators, in order: a pipeline numbers them without gaps."""
    proportions: Mapping[int, float] = field(default_factory=dict)
    """The part of the tiles' memory that a product may take for temporary data, by IPU of a replica."""


def model_of_graph(source: PlacedGraph, wanted: Sequence[GraphValue], name: str) -> SessionModel:
    """The nodes that ``wanted`` values and updates need, as a model for sessions."""
    graph = source.graph
    updates = {n: v for n, v in graph.updates.items() if n in graph.parameters}
    captured = graph.without_unused([*wanted, *updates.values()])
    places = [node.origin.placement for node in captured]
    source = replace(source, stages=tuple(sorted({0 if p is None else p.stage for p in places})))
    names = _names(graph)
    marks = _marks(captured)
    nodes = [_node(node, names, source, index, marks) for index, node in enumerate(captured)]
    nodes += [_update(n, value, names, _place_of(value, captured), source) for n, value in updates.items()]
    used = {name for node in nodes for name in node.inputs}
    initial = {n: np.asarray(source.values[n]) for n in graph.parameters if n in used}
    initial |= {names[number]: data for number, (_, data) in graph.constants.items() if names[number] in used}
    inputs = {names[v.number]: TensorType(numpy_dtype(v.dtype), v.shape) for v in graph.inputs.values()}
    crossing = {n: BESIDE[mode] for n, mode in overlaps(graph).items()}
    main = OperatorGraph(
        name,
        tuple(nodes),
        tuple(inputs),
        tuple(dict.fromkeys(names[v.number] for v in wanted)),
        initial,
        inputs,
    )
    model = Model(
        main,
        ATEN_OPERATORS,
        trained=frozenset(source.trained & used),
        updates=tuple(_updated(n) for n in updates),
        transfers={
            names[v.number]: crossing[v.number] for v in graph.inputs.values() if v.number in crossing
        },
        groups={n: _groups(*g) for n, g in source.groups.items() if n in used},
    )
    return SessionModel(
        model,
        {place: names[v.number] for place, v in graph.inputs.items()},
        {v.number: names[v.number] for v in wanted},
        names,
    )


def overlaps(graph: CapturedGraph) -> dict[int, OverlapMode]:
    """The loops that transfers overlap with, by number of the input that a mark takes or of the output that it
    gives.
    """
    modes = {}
    for node in graph.nodes:
        if node.operator in (OVERLAPPED_INPUT, OVERLAPPED_OUTPUT):
            value, mode = node.arguments
            if not isinstance(value, GraphValue):
                raise InternalError(f"{node.operator} marks what is no tensor")
            marked = value if node.operator == OVERLAPPED_INPUT else node.results[0]
            modes[marked.number] = OverlapMode(mode)
    return modes


def _marks(nodes: Sequence[GraphNode]) -> dict[int, Hints]:
    """The marks of `set_available_memory` and `recomputationCheckpoint` on the operators that made the marked tensors,
    by number of the value.
    """
    marks: dict[int, Hints] = {}
    for node in nodes:
        if node.operator not in (SET_MEMORY, CHECKPOINT):
            continue
        value, share = (*node.arguments, None)[:2]
        if not isinstance(value, GraphValue):
            raise InternalError(f"{node.operator} marks what is no tensor")
        before = marks.get(value.number, Hints())
        marks[value.number] = (
            replace(before, available_memory=float(share))
            if isinstance(share, (int, float))
            else replace(before, recompute=False)
        )
    return marks


def _hints(node: GraphNode, source: PlacedGraph, marks: Mapping[int, Hints]) -> Hints:
    """The memory proportion of a node, or else its IPU's, and whether its results stay for the backward pass."""
    ipu = 0 if node.origin.placement is None else node.origin.placement.ipu
    memory, recompute = source.proportions.get(ipu), None
    for value in node.results:
        mark = marks.get(value.number, Hints())
        memory = memory if mark.available_memory is None else mark.available_memory
        recompute = recompute if mark.recompute is None else mark.recompute
    return Hints(memory, recompute, _indices(node))


def _groups(kind: str, size: int, retrieval: str) -> VariableGroups:
    """The groups of replicas that share a parameter."""
    counted = kind in ("Consecutive", "Orthogonal")
    return VariableGroups("Ungrouped" if kind == "NoGrouping" else kind, size if counted else 0, retrieval)


class _Names(dict[int, str]):
    """Names of values, made when they are first needed."""

    def __missing__(self, number: int) -> str:
        self[number] = f"%{number}"
        return self[number]


def _names(graph: CapturedGraph) -> _Names:
    names = _Names({value.number: name for name, value in graph.parameters.items()})
    names.update({value.number: f"input:{place}" for place, value in graph.inputs.items()})
    names.update({number: f"constant:{number}" for number in graph.constants})
    return names


def _updated(name: str) -> str:
    return f"{name}/updated"


def _place_of(value: GraphValue, nodes: Sequence[GraphNode]) -> BlockPlacement | None:
    return next((n.origin.placement for n in nodes if value in n.results), None)


def _node(
    node: GraphNode, names: _Names, source: PlacedGraph, index: int, marks: Mapping[int, Hints]
) -> Node:
    if node.operator == PRINT:
        return _print(node, names, source)
    kind = aten_kind(node.operator) or ""
    short = node.operator.removeprefix("aten.").partition(".")[0]
    label = "Checkpoint" if node.operator == CHECKPOINT else short
    path = node.origin.module.replace(".", "/") if source.scopes else ""
    return Node(
        node.operator,
        DOMAIN,
        "/".join(part for part in (path, node.origin.scope, f"{label}:{index}") if part),
        tuple(names[v.number] for v in node.reads()),
        tuple(names[v.number] for v in node.results),
        {CAPTURED: node},
        position=node.origin.line,
        place=_placed(node.origin.placement, source),
        hints=_hints(node, source, marks),
        planned_as=kind or _camel(node.operator.split(".")[1]),
    )


_LOSSES = (
    "nll_loss",
    "nll_loss_nd",
    "nll_loss2d",
    "nll_loss_forward",
    "nll_loss2d_forward",
    "cross_entropy_loss",
)
_IGNORED = -100
"""Torch's default for ``ignore_index``, the fifth argument of these losses."""


def _indices(node: GraphNode) -> tuple[int, ...] | None:
    """The indices or labels that an operator may read from its second argument, for the session's warning."""
    first, second = (*node.arguments, None, None)[:2]
    if not (isinstance(first, GraphValue) and isinstance(second, GraphValue) and first.shape):
        return None
    short = node.operator.removeprefix("aten.").partition(".")[0]
    if short == "embedding":
        return (first.shape[0],)
    if short not in _LOSSES or "float" in second.dtype:
        return None
    ignored = node.keywords.get("ignore_index", (*node.arguments, *[_IGNORED] * 5)[4])
    classes = first.shape[1 if len(first.shape) > 1 else 0]
    return (classes, ignored if isinstance(ignored, int) else _IGNORED)


_PRINT_ATTRIBUTES = (
    *("title", "print_gradient", "summariseThreshold", "edgeItems", "maxLineWidth", "digits", "floatFormat"),
    *("separator", "openBracket", "closeBracket"),
)
"""PopART's names of what the operator of `poptorch.ipu_print_tensor` takes behind the tensor."""


def _print(node: GraphNode, names: _Names, source: PlacedGraph) -> Node:
    """PopART's PrintTensor, which the session looks for by its name."""
    value, *settings = node.arguments
    if not isinstance(value, GraphValue):
        raise InternalError(f"{PRINT} takes a tensor")
    result = names[node.results[0].number]
    return Node(
        PRINT_TENSOR,
        "ai.graphcore",
        f"print:{result}",
        (names[value.number],),
        (result,),
        dict(zip(_PRINT_ATTRIBUTES, settings, strict=True)),
        place=_placed(node.origin.placement, source),
    )


def _camel(name: str) -> str:
    """``leaky_relu`` -> ``LeakyRelu``: ONNX's name of most element-wise operators."""
    return "".join(word.capitalize() for word in name.split("_"))


def _update(
    name: str, value: GraphValue, names: _Names, place: BlockPlacement | None, source: PlacedGraph
) -> Node:
    return Node(
        UPDATE,
        DOMAIN,
        f"update:{name}",
        (name, names[value.number]),
        (_updated(name),),
        place=_placed(place, source),
        planned_as="Identity",
    )


def _placed(place: BlockPlacement | None, source: PlacedGraph) -> Place:
    if not source.placed:
        return NOWHERE
    ipu, stage, phase = (0, 0, 0) if place is None else (place.ipu, place.stage, place.phase)
    number = source.stages.index(stage) if stage in source.stages else stage
    return Place(ipu, phase=phase) if source.phased else Place(ipu, number)
