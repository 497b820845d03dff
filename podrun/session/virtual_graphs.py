"""From annotations of nodes to placement: the virtual graphs of a model, by hand, in phases or automatically; checked.

Source of the checks: graphcore/popart, willow/src/ir.cpp and transforms/auto_virtual_graph.cpp.

**VirtualGraphMode.ExecutionPhases** puts operators in phases that run one after the other, on IPUs that take turns.
Phase *p* lies on the virtual graphs *v* with ``v % stages == p % stages`` (PopART's rule; without an annotation on
``p % stages``). With two stages one IPU computes while another one gets the next phase's weights from streaming memory;
with one stage everything is on one IPU, phase after phase. What a phase leaves for the next one stays on chip; for
later phases, and for the backward pass, it goes to streaming memory where the activations' location says so.

``schedule`` is about the update: Interleaving brings each weight's optimizer state when its turn comes; with two stages
Batch and BatchClusteredIO (which differ in how copies merge, and that is not modelled) bring that of all weights of an
IPU while the other one updates its own: less time, more memory.

Operators without a phase get one in the order of the graph, so that every phase has about the same bytes of weights.
An operator is never in an earlier phase than one whose result it reads.

**VirtualGraphMode.Auto** places operators by the tile model's cycles and by the bytes of their weights. The model is
built once without places; the compiler says what each operator costs, forward and backward, and where to cut. Pieces
are contiguous in the order of the graph, so no copy goes backwards, and any cut gives the same numbers. A pipelined
variable is on one IPU, so no cut goes between operators that share one, where that leaves enough cuts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.session.enums import (
    ExecutionPhaseIOSchedule,
    ExecutionPhaseSchedule,
    RecomputeType,
    VirtualGraphMode,
)
from podrun.session.exceptions import popart_exception
from podrun.session.names import EXECUTION_PHASE, KIND, PIPELINE_STAGE, RECOMPUTE, VIRTUAL_GRAPH
from podrun.session.session_options import SessionOptions

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from podrun.compiler.cost import OperatorCost
    from podrun.compiler.program import Phases
    from podrun.session.program.build import BuiltModel

_log = logging.getLogger("podrun.popart.session")


def integer_attribute(node: NodeProto, name: str) -> int | None:
    """The value of an integer attribute; None if the node has none of that name."""
    return next((int(item.i) for item in node.attribute if item.name == name), None)


def place_attribute(node: NodeProto, name: str) -> int | None:
    """The place (virtual graph, stage) in a node's attribute; None if it has none, or -1, which means none in
    PopART.
    """
    place = integer_attribute(node, name)
    return None if place == -1 else place


def kind_of(node: NodeProto) -> str:
    """The ONNX operator as which planners treat a node: its own type, unless the node is of another domain."""
    return next((item.s.decode() for item in node.attribute if item.name == KIND), node.op_type)


def remove_attributes(node: NodeProto, *names: str) -> None:
    """Take attributes from a node, in place."""
    kept = [item for item in node.attribute if item.name not in names]
    del node.attribute[:]
    node.attribute.extend(kept)


def set_attribute(node: NodeProto, name: str, value: int) -> None:
    """Give a node an integer attribute, in place of an existing one."""
    from onnx import helper

    remove_attributes(node, name)
    node.attribute.append(helper.make_attribute(name, value))


def label(node: NodeProto) -> str:
    """The node's name for messages."""
    return f"{node.op_type} making {list(node.output)}"


def recompute_annotated(model: ModelProto) -> bool:
    """True iff a node's own annotation asks for recomputation of its outputs."""
    wanted = RecomputeType.Recompute.value
    return any(integer_attribute(node, RECOMPUTE) == wanted for node in model.graph.node)


def without_places(model: ModelProto) -> ModelProto:
    """A copy whose nodes have no IPU, no stage, no phase and no name."""
    from onnx import ModelProto

    plain = ModelProto()
    plain.CopyFrom(model)
    for node in plain.graph.node:
        remove_attributes(node, VIRTUAL_GRAPH, PIPELINE_STAGE, EXECUTION_PHASE)
        node.ClearField("name")
    return plain


def place(model: ModelProto, options: SessionOptions, ipus_per_replica: int) -> None:
    """Bring the annotations of ``model`` (changed in place) into the form that lowering reads.

    Off: all on IPU 0, so annotations go. Manual, and Auto (placed by `auto_placement` before): checked.
    Without pipelining stages become cuts. ExecutionPhases: see `phases`; with fewer than two phases it is Manual, and
    as Off where no operator has a virtual graph. popart_exception for annotations that cannot be.
    """
    nodes = list(model.graph.node)
    mode, phases = options.virtualGraphMode, options.executionPhaseSettings.phases
    if mode is VirtualGraphMode.ExecutionPhases:
        if phases > 1:
            place_phases(model, options, ipus_per_replica)
            return
        _log.warning(
            "Phased execution was enabled but only %d phases were defined. It takes 2 or more: disabling it.",
            phases,
        )
        if all(place_attribute(node, VIRTUAL_GRAPH) is None for node in nodes):
            mode = VirtualGraphMode.Off
    if mode is VirtualGraphMode.Off:
        for node in nodes:
            remove_attributes(node, VIRTUAL_GRAPH, PIPELINE_STAGE)
        return
    _check_virtual_graphs(nodes, options, ipus_per_replica)
    from podrun.session.pipelining import set_cuts, set_stages

    if options.enablePipelining:
        set_stages(nodes)
    else:
        set_cuts(nodes)


def _check_virtual_graphs(nodes: list[NodeProto], options: SessionOptions, ipus: int) -> None:
    placed = {id(node): place_attribute(node, VIRTUAL_GRAPH) for node in nodes if node.op_type != "Constant"}
    missing = [node for node in nodes if id(node) in placed and placed[id(node)] is None]
    if options.virtualGraphMode is not VirtualGraphMode.Auto and missing and len(missing) < len(placed):
        raise popart_exception(
            "Either all Ops must have their virtual graph ids set, or none must: "
            f"{len(placed) - len(missing)} have one, {label(missing[0])} has none."
        )
    if options.virtualGraphMode is VirtualGraphMode.Manual and missing and placed:
        raise popart_exception(
            "virtualGraphMode is Manual, but no operator has a virtual graph: use builder.virtualGraph(...)."
        )
    for node in nodes:
        ipu = placed.get(id(node))
        if ipu is not None and not 0 <= ipu < ipus:
            raise popart_exception(
                f"{label(node)} has been assigned to an invalid virtual graph {ipu}. numIPUs = {ipus}: each replica "
                f"has {ipus}."
            )


def place_phases(model: ModelProto, options: SessionOptions, ipus: int) -> None:
    """Give every node of ``model`` (changed in place) an IPU, a phase, and the number of its place.

    popart_exception for an unknown phase, and for an IPU that cannot have its phase.
    """
    settings = options.executionPhaseSettings
    phases, stages = max(1, settings.phases), settings.stages
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    proposed = _by_weights(model, nodes, phases)
    made: dict[str, int] = {}
    for node, proposal in zip(nodes, proposed, strict=True):
        annotated = integer_attribute(node, EXECUTION_PHASE)
        if annotated is not None and not 0 <= annotated < phases:
            raise popart_exception(
                f"[StreamingMemory] Maximum phase is {phases - 1}, but op {label(node)} has phase {annotated}.",
                hint=f"executionPhaseSettings.phases is {settings.phases}.",
            )
        phase = max(
            [proposal if annotated is None else annotated, *(made[n] for n in node.input if n in made)]
        )
        made |= dict.fromkeys(node.output, phase)
        place = _virtual_graph(node, phase, stages, ipus)
        set_attribute(node, EXECUTION_PHASE, phase)
        set_attribute(node, VIRTUAL_GRAPH, place)
        # The compiler's places are stages: one for each phase on each IPU (`podrun.compiler.segments`).
        set_attribute(node, PIPELINE_STAGE, phase * ipus + place)


def phases_of(options: SessionOptions) -> Phases | None:
    """The compiler's description of a session's phases; None if there are none."""
    from podrun.compiler.program import Phases

    settings = options.executionPhaseSettings
    if settings.phases <= 1:
        return None
    wanted = (settings.weightIOSchedule, settings.activationIOSchedule)
    turns = settings.stages > 1
    preload = turns and all(s is ExecutionPhaseIOSchedule.Preload for s in wanted)
    batched = turns and settings.schedule is not ExecutionPhaseSchedule.Interleaving
    return Phases(settings.phases, preload, batched)


def _by_weights(model: ModelProto, nodes: list[NodeProto], phases: int) -> list[int]:
    """A phase for each node: the next phase begins when a phase has its share of the weights' bytes."""
    from onnx import helper

    sizes = {
        tensor.name: math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in model.graph.initializer
    }
    costs = [sum(sizes.get(name, 0) for name in dict.fromkeys(node.input)) for node in nodes]
    share = sum(costs) / phases
    found, phase, held = [], 0, 0
    for cost in costs:
        if held > 0 and held + cost > share and phase < phases - 1:
            phase, held = phase + 1, 0
        held += cost
        found.append(phase)
    return found


def _virtual_graph(node: NodeProto, phase: int, stages: int, ipus: int) -> int:
    annotated = place_attribute(node, VIRTUAL_GRAPH)
    place = phase % stages if annotated is None else annotated
    if not 0 <= place < ipus:
        raise popart_exception(
            f"{label(node)} is assigned to an invalid virtual graph {place}: each replica has {ipus} IPUs, and "
            f"executionPhaseSettings.stages is {stages}.",
            hint=f"Give each replica at least {stages} IPUs, or set stages to 1.",
        )
    if place % stages != phase % stages:
        raise popart_exception(
            f"Op {label(node)} has inconsistent execution phase {phase} and virtual graph ID {place}: with {stages} "
            f"stages phase {phase} lies on virtual graphs {phase % stages}, {phase % stages + stages} ..."
        )
    return place


Build = Callable[["ModelProto"], "BuiltModel"]
WEIGHTS_SHARE = 1 / 8
"""Share of an IPU's memory that weights may have without crowding it: with a gradient and two states beside each
weight, half of the memory stays free.
"""


def place_automatically(
    model: ModelProto, build: Build, ipus: int, ratios: Sequence[float], target: str, *, pipelined: bool
) -> None:
    """Give every node of ``model`` (changed in place) an IPU below ``ipus``.

    ``build`` makes a program of a model without places. ``ratios``: the share of the work that each IPU is meant to
    get (empty: equal shares). popart_exception if there are fewer operators than IPUs.
    """
    from podrun.compiler.cost import balanced_places, operator_costs
    from podrun.costmodel.target import chip

    counted = [node for node in model.graph.node if node.op_type != "Constant"]
    if len(counted) < ipus:
        raise _too_few(ipus, len(counted))
    built = build(without_places(model))
    # Scopes are first outputs, which are unique; names of nodes need not be.
    labels = [node.label for node in built.lowered.graph.nodes if node.op_type != "Constant"]
    costs = operator_costs(built.program, labels, target=target)
    if len(costs) < ipus:
        raise _too_few(ipus, len(costs))
    room = int(chip(target).tiles * chip(target).tile_bytes * WEIGHTS_SHARE)
    parts = _sharing(model, labels) if pipelined else []
    if len(parts) < ipus:
        parts = [[index] for index in range(len(labels))]
    found = balanced_places(
        [_sum(costs, part) for part in parts], ratios or [1 / ipus] * ipus, room_bytes=room
    )
    chosen = {labels[i]: place for part, place in zip(parts, found, strict=True) for i in part}
    place = 0
    for node in counted:
        # An operator that the program does not need stays with the one before it.
        place = next((chosen[output] for output in node.output if output in chosen), place)
        set_attribute(node, VIRTUAL_GRAPH, place)


def _sharing(model: ModelProto, labels: Sequence[str]) -> list[list[int]]:
    """Operators by number, in order, in parts such that all readers of a variable are in one part."""
    from podrun.session.pipelining import variable_readers

    order = {label: index for index, label in enumerate(labels)}
    last = list(range(len(labels)))
    for nodes in variable_readers(model).values():
        readers = [order[name] for node in nodes for name in node.output if name in order]
        if readers:
            last[min(readers)] = max(last[min(readers)], *readers)
    parts: list[list[int]] = []
    end = -1
    for index, until in enumerate(last):
        if index > end:
            parts.append([])
        parts[-1].append(index)
        end = max(end, until)
    return parts


def _sum(costs: Sequence[OperatorCost], part: Sequence[int]) -> OperatorCost:
    own = [costs[index] for index in part]
    cycles, size = sum(cost.cycles for cost in own), sum(cost.parameter_bytes for cost in own)
    return replace(own[0], cycles=cycles, parameter_bytes=size)


def _too_few(ipus: int, operators: int) -> popart_exception:
    return popart_exception(
        f"[AutoVirtualGraph] Couldn't find enough splits for {ipus} IPUs: the graph has {operators} operators.",
        hint="Give each replica fewer IPUs.",
    )
