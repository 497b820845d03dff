"""From annotations of nodes to placement: the virtual graphs of a model, checked.

Source of the checks: graphcore/popart, willow/src/ir.cpp and transforms/auto_virtual_graph.cpp.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from podrun.session.attributes import EXECUTION_PHASE, KIND, PIPELINE_STAGE, RECOMPUTE, VIRTUAL_GRAPH
from podrun.session.enums import RecomputeType, VirtualGraphMode
from podrun.session.exceptions import popart_exception
from podrun.session.options.session_options import SessionOptions

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_log = logging.getLogger("podrun.popart.session")


def integer_attribute(node: NodeProto, name: str) -> int | None:
    """The value of an integer attribute; None if the node has none of that name."""
    return next((int(item.i) for item in node.attribute if item.name == name), None)


def place_attribute(node: NodeProto, name: str) -> int | None:
    """The place (virtual graph, stage) that a node says it has; None if it has none, or -1, which is PopART's none."""
    place = integer_attribute(node, name)
    return None if place == -1 else place


def kind_of(node: NodeProto) -> str:
    """The operator of ONNX that planners treat a node as: itself, unless it is of another domain."""
    return next((item.s.decode() for item in node.attribute if item.name == KIND), node.op_type)


def remove_attributes(node: NodeProto, *names: str) -> None:
    """Take attributes from a node, in place."""
    kept = [item for item in node.attribute if item.name not in names]
    del node.attribute[:]
    node.attribute.extend(kept)


def set_attribute(node: NodeProto, name: str, value: int) -> None:
    """Give a node an integer attribute, in place of one that it has."""
    from onnx import helper

    remove_attributes(node, name)
    node.attribute.append(helper.make_attribute(name, value))


def label(node: NodeProto) -> str:
    """A node in messages."""
    return f"{node.op_type} making {list(node.output)}"


def recompute_annotated(model: ModelProto) -> bool:
    """True iff a node says itself that its outputs are computed again."""
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
        from podrun.session.placing.phases import place_phases

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
    from podrun.session.placing.pipelining import set_cuts, set_stages

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
