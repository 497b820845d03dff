"""VirtualGraphMode.ExecutionPhases: operators in phases that run one after the other, on IPUs that take turns.

Phase *p* lies on the virtual graphs *v* with ``v % stages == p % stages`` (PopART's rule; without an annotation on
``p % stages``). With two stages one IPU computes while another one gets the next phase's weights from streaming memory;
with one stage everything is on one IPU, phase after phase. What a phase leaves for the next one stays on chip; for
later phases, and for the backward pass, it goes to streaming memory where the activations' location says so.

``schedule`` is about the update: Interleaving brings each weight's optimizer state when its turn comes; with two stages
Batch and BatchClusteredIO (which differ in how copies merge, and that is not modelled) bring that of all weights of an
IPU while the other one updates its own: less time, more memory.

Operators without a phase get one in the order of the graph, so that every phase has about the same bytes of weights.
An operator is never in an earlier phase than one whose result it reads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from podrun.session.attributes import EXECUTION_PHASE, PIPELINE_STAGE, VIRTUAL_GRAPH
from podrun.session.enums import ExecutionPhaseIOSchedule, ExecutionPhaseSchedule
from podrun.session.exceptions import popart_exception
from podrun.session.placing.virtual_graphs import integer_attribute, label, place_attribute, set_attribute

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

    from podrun.compiler.program import Phases
    from podrun.session.options.session_options import SessionOptions


def place_phases(model: ModelProto, options: SessionOptions, ipus: int) -> None:
    """Give every node of ``model`` (changed in place) an IPU, a phase, and the number of its place.

    popart_exception for a phase that there is not, and for an IPU that cannot have its phase.
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
    """What the compiler has to know of a session's phases; None if there are none."""
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
    """A phase for each node: go on to the next one when a phase has its share of the weights' bytes."""
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
