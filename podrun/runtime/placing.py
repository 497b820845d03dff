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
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.errors import UsageError
from podrun.runtime.graph import NOWHERE, Node, OperatorGraph
from podrun.runtime.pipelining import computing, described, variable_readers, with_cuts, with_stages
from podrun.runtime.settings import PhaseSettings, PlacedBy, RunSettings

if TYPE_CHECKING:
    from podrun.compiler.operator_balance import OperatorCost
    from podrun.compiler.program import Phases
    from podrun.runtime.building import BuiltModel

_log = logging.getLogger("podrun.runtime")


def recompute_annotated(graph: OperatorGraph) -> bool:
    """True iff a node's own annotation asks for recomputation of its outputs."""
    return any(node.hints.recompute for node in graph.nodes)


def place(graph: OperatorGraph, settings: RunSettings, ipus_per_replica: int) -> OperatorGraph:
    """The graph with the places of nodes in the form that lowering reads.

    Off: all on IPU 0, so places go. Manual, and Auto (placed by `place_automatically` before): checked.
    Without pipelining stages become cuts. ExecutionPhases: see `place_phases`; with fewer than two phases it is Manual,
    and as Off where no operator has a virtual graph. UsageError for places that cannot be.
    """
    mode, phases = settings.placement, settings.phases.phases
    if mode is PlacedBy.IN_PHASES:
        if phases > 1:
            return place_phases(graph, settings.phases, ipus_per_replica)
        _log.warning(
            "Phased execution was enabled but only %d phases were defined. It takes 2 or more: disabling it.",
            phases,
        )
        if all(node.place.ipu is None for node in graph.nodes):
            mode = PlacedBy.ONE_IPU
    if mode is PlacedBy.ONE_IPU:
        return graph.each_node(lambda node: node.at(ipu=None, stage=None))
    _check_virtual_graphs(graph.nodes, settings.placement, ipus_per_replica)
    return with_stages(graph) if settings.pipelined else with_cuts(graph)


def _check_virtual_graphs(nodes: Sequence[Node], mode: PlacedBy, ipus: int) -> None:
    placed = [node for node in nodes if node.op_type != "Constant"]
    missing = [node for node in placed if node.place.ipu is None]
    if mode is not PlacedBy.AUTOMATIC and missing and len(missing) < len(placed):
        raise UsageError(
            "Either all Ops must have their virtual graph ids set, or none must: "
            f"{len(placed) - len(missing)} have one, {described(missing[0])} has none."
        )
    if mode is PlacedBy.BY_HAND and missing and placed:
        raise UsageError(
            "virtualGraphMode is Manual, but no operator has a virtual graph: use builder.virtualGraph(...)."
        )
    for node in placed:
        ipu = node.place.ipu
        if ipu is not None and not 0 <= ipu < ipus:
            raise UsageError(
                f"{described(node)} has been assigned to an invalid virtual graph {ipu}. numIPUs = {ipus}: each "
                f"replica has {ipus}."
            )


def place_phases(graph: OperatorGraph, settings: PhaseSettings, ipus: int) -> OperatorGraph:
    """The graph whose nodes have an IPU, a phase, and the number of their place.

    UsageError for an unknown phase, and for an IPU that cannot have its phase.
    """
    phases, stages = max(1, settings.phases), settings.stages
    shares = iter(_by_weights(graph, phases))
    phase_of: dict[str, int] = {}
    placed: list[Node] = []
    for node in graph.nodes:
        if node.op_type == "Constant":
            placed.append(node)
            continue
        proposal, annotated = next(shares), node.place.phase
        if annotated is not None and not 0 <= annotated < phases:
            raise UsageError(
                f"[StreamingMemory] Maximum phase is {phases - 1}, but op {described(node)} has phase {annotated}.",
                hint=f"executionPhaseSettings.phases is {settings.phases}.",
            )
        own = proposal if annotated is None else annotated
        phase = max([own, *(phase_of[n] for n in node.inputs if n in phase_of)])
        phase_of |= dict.fromkeys(node.outputs, phase)
        ipu = _virtual_graph(node, phase, stages, ipus)
        # The compiler's places are stages: one for each phase on each IPU (`podrun.compiler.segments`).
        placed.append(node.at(ipu=ipu, phase=phase, stage=phase * ipus + ipu))
    return graph.with_nodes(placed)


def phases_of(settings: RunSettings) -> Phases | None:
    """The compiler's description of phased execution; None if there are no phases."""
    from podrun.compiler.program import Phases

    phases = settings.phases
    if settings.placement is not PlacedBy.IN_PHASES or phases.phases < 2:
        return None
    turns = phases.stages > 1
    return Phases(phases.phases, turns and phases.preload, turns and phases.batched)


def _by_weights(graph: OperatorGraph, phases: int) -> list[int]:
    """A phase for each node: the next phase begins when a phase has its share of the weights' bytes."""
    sizes = {name: value.nbytes for name, value in graph.initializers.items()}
    costs = [sum(sizes.get(name, 0) for name in dict.fromkeys(node.inputs)) for node in computing(graph)]
    share = sum(costs) / phases
    chosen, phase, held = [], 0, 0
    for cost in costs:
        if held > 0 and held + cost > share and phase < phases - 1:
            phase, held = phase + 1, 0
        held += cost
        chosen.append(phase)
    return chosen


def _virtual_graph(node: Node, phase: int, stages: int, ipus: int) -> int:
    place = phase % stages if node.place.ipu is None else node.place.ipu
    if not 0 <= place < ipus:
        raise UsageError(
            f"{described(node)} is assigned to an invalid virtual graph {place}: each replica has {ipus} IPUs, and "
            f"executionPhaseSettings.stages is {stages}.",
            hint=f"Give each replica at least {stages} IPUs, or set stages to 1.",
        )
    if place % stages != phase % stages:
        raise UsageError(
            f"Op {described(node)} has inconsistent execution phase {phase} and virtual graph ID {place}: with "
            f"{stages} stages phase {phase} lies on virtual graphs {phase % stages}, {phase % stages + stages} ..."
        )
    return place


Build = Callable[[OperatorGraph], "BuiltModel"]
WEIGHTS_SHARE = 1 / 8
"""Share of an IPU's memory that weights may have without crowding it: with a gradient and two states beside each
weight, half of the memory stays free.
"""


def place_automatically(
    graph: OperatorGraph, build: Build, ipus: int, ratios: Sequence[float], target: str, *, pipelined: bool
) -> OperatorGraph:
    """The graph whose nodes have an IPU below ``ipus``.

    ``build`` makes a program of a graph without places. ``ratios``: the share of the work that each IPU is meant to
    get (empty: equal shares). UsageError if there are fewer operators than IPUs.
    """
    from podrun.compiler.operator_balance import balanced_places, operator_costs
    from podrun.costmodel.target import chip

    if len(computing(graph)) < ipus:
        raise _too_few(ipus, len(computing(graph)))
    # Scopes are first outputs, which are unique; names of nodes need not be.
    plain = graph.each_node(lambda node: replace(node, place=NOWHERE, name=""))
    built = build(plain)
    labels = [node.label for node in built.lowered.graph.nodes if node.op_type != "Constant"]
    costs = operator_costs(built.program, labels, target=target)
    if len(costs) < ipus:
        raise _too_few(ipus, len(costs))
    room = int(chip(target).tiles * chip(target).tile_bytes * WEIGHTS_SHARE)
    parts = _sharing(graph, labels) if pipelined else []
    if len(parts) < ipus:
        parts = [[index] for index in range(len(labels))]
    places = balanced_places(
        [_sum(costs, part) for part in parts], ratios or [1 / ipus] * ipus, room_bytes=room
    )
    chosen = {labels[i]: place for part, place in zip(parts, places, strict=True) for i in part}
    placed, place = [], 0
    for node in graph.nodes:
        if node.op_type == "Constant":
            placed.append(node)
            continue
        # An operator that the program does not need stays with the one before it.
        place = next((chosen[output] for output in node.outputs if output in chosen), place)
        placed.append(node.at(ipu=place))
    return graph.with_nodes(placed)


def _sharing(graph: OperatorGraph, labels: Sequence[str]) -> list[list[int]]:
    """Operators by number, in order, in parts such that all readers of a variable are in one part."""
    order = {label: index for index, label in enumerate(labels)}
    last = list(range(len(labels)))
    for nodes in variable_readers(graph).values():
        readers = [order[name] for node in nodes for name in node.outputs if name in order]
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


def _too_few(ipus: int, operators: int) -> UsageError:
    return UsageError(
        f"[AutoVirtualGraph] Couldn't find enough splits for {ipus} IPUs: the graph has {operators} operators.",
        hint="Give each replica fewer IPUs.",
    )
