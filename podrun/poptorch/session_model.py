"""A captured graph as the model of a session: nodes of a domain of their own, weights beside them.

Each ATen operator is one node of domain `DOMAIN`; its plain arguments are a JSON attribute, its tensors are inputs.
The session reads from the model's metadata which parameters are trained and which tensors replace buffers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from podrun.onnx_models.light_model import LightModel, put_beside
from podrun.onnx_models.ops import registry
from podrun.onnx_models.tensor_proto import to_proto
from podrun.poptorch.capture.graph import (
    Argument,
    CapturedGraph,
    DTypeArgument,
    GraphNode,
    GraphValue,
    Origin,
    Subgraph,
)
from podrun.poptorch.enums import OverlapMode
from podrun.poptorch.operators.table import find, run_node
from podrun.poptorch.session_options import STRATEGIES
from podrun.session.enums import CommGroupType, RecomputeType, VariableRetrievalMode
from podrun.session.names import (
    ALLOWED,
    AVAILABLE_MEMORY,
    EXECUTION_PHASE,
    KIND,
    PIPELINE_STAGE,
    RECOMPUTE,
    TRAINED_KEY,
    TRANSFERS_KEY,
    UPDATES_KEY,
    VARIABLE_KEY,
    VIRTUAL_GRAPH,
)

DOMAIN = "pytorch.aten"
"""Domain of nodes that are ATen operators."""
CHECKPOINT = "podrun.recomputation_checkpoint.default"
SET_MEMORY = "podrun.set_available_memory.default"
OVERLAPPED_INPUT, OVERLAPPED_OUTPUT = "podrun.overlap_input.default", "podrun.overlap_output.default"
PRINT = "podrun.print_tensor.default"
UPDATE = "podrun.update"
"""Operator that names the new value of a buffer."""
ONNX_OPSET = 13
_ELEMENT_TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int16": 5,
    "int32": 6,
    "bool": 9,
    "float16": 10,
    "bfloat16": 16,
}


@dataclass(frozen=True, slots=True)
class SessionModel:
    """A model, and the session's names of values of the graph.

    ``inputs``: name of each input by the position of its tensor among the arguments. ``outputs``: name of each value
    that forward returns, by number.
    """

    model: LightModel
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


def session_model(source: PlacedGraph, wanted: Sequence[GraphValue], name: str) -> SessionModel:
    """The nodes that ``wanted`` values and updates need, as an ONNX model."""
    from onnx import helper

    register()
    graph = source.graph
    updates = {n: v for n, v in graph.updates.items() if n in graph.parameters}
    nodes = graph.without_unused([*wanted, *updates.values()])
    places = [node.origin.placement for node in nodes]
    source = replace(source, stages=tuple(sorted({0 if p is None else p.stage for p in places})))
    names = _names(graph)
    marks = _marks(nodes)
    beside: dict[str, np.ndarray] = {}
    made = [_node(node, names, source, index) for index, node in enumerate(nodes)]
    for proto, node in zip(made, nodes, strict=True):
        proto.attribute.extend(_plan_attributes(node, source, marks))
    made += [_update(n, value, names, _place_of(value, nodes), source) for n, value in updates.items()]
    used = {name for node in made for name in node.input}
    initializers = [put_beside(beside, n, source.values[n]) for n in graph.parameters if n in used]
    initializers += [
        to_proto(names[number], data)
        for number, (_, data) in graph.constants.items()
        if names[number] in used
    ]
    inputs = [
        helper.make_tensor_value_info(names[v.number], _ELEMENT_TYPES[v.dtype], v.shape)
        for v in graph.inputs.values()
    ]
    outputs = [
        helper.make_tensor_value_info(names[v.number], _ELEMENT_TYPES[v.dtype], v.shape)
        for v in {v.number: v for v in wanted}.values()
    ]
    proto = helper.make_model(
        helper.make_graph(made, name, inputs, outputs, initializers),
        opset_imports=[
            helper.make_opsetid("", ONNX_OPSET),
            helper.make_opsetid(DOMAIN, 1),
            helper.make_opsetid("ai.graphcore", 1),
        ],
        ir_version=8,
    )
    _note(proto, TRAINED_KEY, sorted(source.trained & used))
    _note(proto, UPDATES_KEY, [_updated(n) for n in updates])
    crossing = {n: STRATEGIES[mode].name for n, mode in overlaps(graph).items()}
    transfers = {names[v.number]: crossing[v.number] for v in graph.inputs.values() if v.number in crossing}
    if transfers:
        _note(proto, TRANSFERS_KEY, transfers)
    if source.groups:
        _note(proto, VARIABLE_KEY, {n: _variable(*g) for n, g in source.groups.items() if n in used})
    return SessionModel(
        LightModel(proto, beside),
        {place: names[v.number] for place, v in graph.inputs.items()},
        {v.number: names[v.number] for v in wanted},
        names,
    )


def overlaps(graph: CapturedGraph) -> dict[int, OverlapMode]:
    """The loops that transfers overlap with, by number of the input that a mark takes or of the output that it
    gives.
    """
    found = {}
    for node in graph.nodes:
        if node.operator in (OVERLAPPED_INPUT, OVERLAPPED_OUTPUT):
            value, mode = node.arguments
            assert isinstance(value, GraphValue)
            marked = value if node.operator == OVERLAPPED_INPUT else node.results[0]
            found[marked.number] = OverlapMode(mode)
    return found


def _marks(nodes: Sequence[GraphNode]) -> dict[int, dict[str, Any]]:
    """The marks of `set_available_memory` and `recomputationCheckpoint` on the operators that made the marked tensors,
    as attributes by number of the value.
    """
    found: dict[int, dict[str, Any]] = {}
    for node in nodes:
        if node.operator not in (SET_MEMORY, CHECKPOINT):
            continue
        value, *share = node.arguments
        assert isinstance(value, GraphValue)
        said = {AVAILABLE_MEMORY: share[0]} if share else {RECOMPUTE: int(RecomputeType.Checkpoint.value)}
        found.setdefault(value.number, {}).update(said)
    return found


def _plan_attributes(
    node: GraphNode, source: PlacedGraph, marks: Mapping[int, Mapping[str, Any]]
) -> Iterator[Any]:
    """Attributes of a node for the tile model: its memory proportion, or else its IPU's, and whether its results stay
    for the backward pass.
    """
    from onnx import helper

    ipu = 0 if node.origin.placement is None else node.origin.placement.ipu
    said = {AVAILABLE_MEMORY: source.proportions[ipu]} if ipu in source.proportions else {}
    for value in node.results:
        said |= marks.get(value.number, {})
    return (helper.make_attribute(name, each) for name, each in said.items())


def _variable(kind: str, size: int, retrieval: str) -> list[int]:
    """The settings of a variable as the session reads them from the model."""
    domain = CommGroupType.Ungrouped if kind == "NoGrouping" else CommGroupType[kind]
    counted = kind in ("Consecutive", "Orthogonal")
    return [int(domain.value), size if counted else 0, int(VariableRetrievalMode[retrieval].value)]


def _note(proto: Any, key: str, value: Any) -> None:
    entry = proto.metadata_props.add()
    entry.key, entry.value = key, json.dumps(value)


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


def _place_of(value: GraphValue, nodes: Sequence[GraphNode]) -> Any:
    return next((n.origin.placement for n in nodes if value in n.results), None)


def _node(node: GraphNode, names: _Names, source: PlacedGraph, index: int) -> Any:
    from onnx import helper

    tensors: list[GraphValue] = []
    arguments = [_encoded(each, tensors) for each in node.arguments]
    keywords = {key: _encoded(each, tensors) for key, each in node.keywords.items()}
    if node.operator == PRINT:
        return _print(node, names, source)
    operator = find(node.operator)
    attributes: dict[str, Any] = {
        "arguments": json.dumps([arguments, keywords]),
        "results": json.dumps([[list(v.shape), v.dtype] for v in node.results]),
        "how": json.dumps([node.item, node.writes, node.differentiable]),
        "origin": json.dumps([node.origin.module, node.origin.line]),
        KIND: operator.kind
        if operator is not None and operator.kind
        else _camel(node.operator.split(".")[1]),
    }
    short = node.operator.removeprefix("aten.").partition(".")[0]
    path = node.origin.module.replace(".", "/") if source.scopes else ""
    return helper.make_node(
        node.operator,
        [names[v.number] for v in tensors],
        [names[v.number] for v in node.results],
        name=f"{path}/{short}:{index}" if path else f"{short}:{index}",
        domain=DOMAIN,
        **(attributes | _allowed(short, node) | _placed(node.origin.placement, source)),
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


def _allowed(short: str, node: GraphNode) -> dict[str, list[int]]:
    """The indices or labels that an operator may read from its second argument, for the session's warning."""
    first, second = (*node.arguments, None, None)[:2]
    if not (isinstance(first, GraphValue) and isinstance(second, GraphValue) and first.shape):
        return {}
    if short == "embedding":
        return {ALLOWED: [first.shape[0]]}
    if short not in _LOSSES or "float" in second.dtype:
        return {}
    ignored = node.keywords.get("ignore_index", (*node.arguments, *[_IGNORED] * 5)[4])
    return {ALLOWED: [first.shape[1 if len(first.shape) > 1 else 0], int(ignored)]}


_FLOAT_FORMATS = {"auto": 0, "fixed": 1, "scientific": 2, "none": 3}


def _print(node: GraphNode, names: _Names, source: PlacedGraph) -> Any:
    """PopART's PrintTensor, which the session looks for by its name."""
    from onnx import helper

    value, settings = node.arguments
    given = json.loads(settings)
    layout = {
        "title": given["title"],
        "print_gradient": int(given["print_gradient"]),
        "summariseThreshold": given["summarise_threshold"],
        "edgeItems": given["edge_items"],
        "maxLineWidth": given["max_line_width"],
        "digits": given["digits"],
        "floatFormat": _FLOAT_FORMATS[given["float_format"]],
        "separator": given["separator"],
        "openBracket": given["open_bracket"],
        "closeBracket": given["close_bracket"],
    }
    result = names[node.results[0].number]
    made = layout | _placed(node.origin.placement, source)
    return helper.make_node(
        "PrintTensor", [names[value.number]], [result], name=f"print:{result}", domain="ai.graphcore", **made
    )


def _camel(name: str) -> str:
    """``leaky_relu`` -> ``LeakyRelu``: ONNX's name of most element-wise operators."""
    return "".join(word.capitalize() for word in name.split("_"))


def _update(name: str, value: GraphValue, names: _Names, place: Any, source: PlacedGraph) -> Any:
    from onnx import helper

    attributes = {KIND: "Identity"} | _placed(place, source)
    inputs = [name, names[value.number]]
    return helper.make_node(
        UPDATE, inputs, [_updated(name)], name=f"update:{name}", domain=DOMAIN, **attributes
    )


def _placed(place: Any, source: PlacedGraph) -> dict[str, Any]:
    if not source.placed:
        return {}
    ipu, stage, phase = (0, 0, 0) if place is None else (place.ipu, place.stage, place.phase)
    number = source.stages.index(stage) if stage in source.stages else stage
    return {VIRTUAL_GRAPH: ipu} | ({EXECUTION_PHASE: phase} if source.phased else {PIPELINE_STAGE: number})


def _encoded(argument: Argument, tensors: list[GraphValue] | None) -> Any:
    """An argument in JSON's form. A value is its place among ``tensors``; inside a body (None) its own number."""
    if isinstance(argument, Subgraph):
        return {"body": _encoded_body(argument)}
    if isinstance(argument, GraphValue) and tensors is None:
        return {"tensor": [argument.number, list(argument.shape), argument.dtype]}
    if isinstance(argument, GraphValue):
        assert tensors is not None
        tensors.append(argument)
        return {"tensor": [len(tensors) - 1, list(argument.shape), argument.dtype]}
    if isinstance(argument, (tuple, list)):
        return [_encoded(each, tensors) for each in argument]
    if isinstance(argument, DTypeArgument):
        return {"dtype": argument.name}
    if isinstance(argument, float):
        return {"float": argument.hex()}
    return argument


def _encoded_body(body: Subgraph) -> Any:
    nodes = [
        [
            node.operator,
            _encoded(
                (node.arguments, list(node.keywords), tuple(node.keywords.values()), node.results), None
            ),
            [node.item, node.writes, node.differentiable, node.origin.module, node.origin.line],
        ]
        for node in body.nodes
    ]
    return [nodes, _encoded((body.inputs, body.outer, body.outputs), None)]


def _decoded_body(body: Any) -> Subgraph:
    nodes = []
    for operator, parts, (item, writes, differentiable, module, line) in body[0]:
        arguments, names, values, results = _decoded(parts)
        keywords = dict(zip(names, values, strict=True))
        origin = Origin(module, line)
        nodes.append(GraphNode(operator, arguments, keywords, results, origin, item, writes, differentiable))
    return Subgraph(tuple(nodes), *_decoded(body[1]))


def _decoded(argument: Any) -> Argument:
    if isinstance(argument, list):
        return tuple(_decoded(each) for each in argument)
    if not isinstance(argument, dict):
        return argument
    if "body" in argument:
        return _decoded_body(argument["body"])
    if "tensor" in argument:
        number, shape, dtype = argument["tensor"]
        return GraphValue(number, tuple(shape), dtype)
    return DTypeArgument(argument["dtype"]) if "dtype" in argument else float.fromhex(argument["float"])


@functools.cache
def _read_node(operator: str, arguments: str, results: str, how: str, origin: str) -> GraphNode:
    positional, keywords = json.loads(arguments)
    item, writes, differentiable = json.loads(how)
    return GraphNode(
        operator,
        tuple(_decoded(each) for each in positional),
        {key: _decoded(each) for key, each in keywords.items()},
        tuple(
            GraphValue(-1 - i, tuple(shape), dtype) for i, (shape, dtype) in enumerate(json.loads(results))
        ),
        Origin(*json.loads(origin)),
        item,
        writes,
        differentiable,
    )


def run_operator(ctx: Any, node: Any, *tensors: Any) -> tuple[Any, ...]:
    """One node of domain `DOMAIN`, as the session's registry of operators calls it."""
    if node.op_type == UPDATE:
        ctx.state_update(0, 0)
        return (tensors[1].astype(tensors[0].dtype),)
    read = _read_node(node.op_type, *(node[key] for key in ("arguments", "results", "how", "origin")))
    return run_node(read, dict(enumerate(tensors)), ctx.key, ctx.training)


@functools.cache
def register() -> None:
    """Let the session's registry know the domain. Idempotent."""
    registry.domain(DOMAIN, run_operator)


def names_of_updates(graph: CapturedGraph, buffers: Collection[str]) -> list[str]:
    """Buffers that forward writes."""
    return [name for name in graph.updates if name in buffers]
