"""VirtualGraphMode.Auto: operators on IPUs by the tile model's cycles and by the bytes of their weights.

The model is built once without places; the compiler says what each operator costs, forward and backward, and where
to cut. Pieces are contiguous in the order of the graph, so no copy goes backwards, and any cut gives the same numbers.
A pipelined variable is on one IPU, so no cut goes between operators that share one, where that leaves enough cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.session.attributes import VIRTUAL_GRAPH
from podrun.session.exceptions import popart_exception
from podrun.session.placing.pipelining import variable_readers
from podrun.session.placing.virtual_graphs import set_attribute, without_places

if TYPE_CHECKING:
    from onnx import ModelProto

    from podrun.compiler.balance import OperatorCost
    from podrun.session.program.build import BuiltModel

Build = Callable[["ModelProto"], "BuiltModel"]
WEIGHTS_SHARE = 1 / 8
"""Of an IPU's memory: weights that never crowd it, for a gradient and two states beside each leave half of it free."""


def place_automatically(
    model: ModelProto, build: Build, ipus: int, ratios: Sequence[float], target: str, *, pipelined: bool
) -> None:
    """Give every node of ``model`` (changed in place) an IPU below ``ipus``.

    ``build`` makes a program of a model without places. ``ratios``: the share of the work that each IPU is meant to
    get (empty: equal shares). popart_exception if there are fewer operators than IPUs.
    """
    from podrun.compiler.balance import balanced_places, operator_costs
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
        # What the program does not need stays with what comes before it.
        place = next((chosen[output] for output in node.output if output in chosen), place)
        set_attribute(node, VIRTUAL_GRAPH, place)


def _sharing(model: ModelProto, labels: Sequence[str]) -> list[list[int]]:
    """Operators by number, in order, in parts such that all that read a variable are in one."""
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
