"""What `Session._serializeIr` says: a session's graphs as JSON, in the form of PopART's own.

``{graph: [{type, name, domain, version, inputs, outputs, attributes}]}``: operators in order after pruning, all values
strings. The main graph is ``maingraph`` unless the model names it, subgraphs stand beside it. A training pipeline ends
with its ``Stash`` and ``Restore`` operators. ``recompute`` is YES or NO (absent where the tile model decides by peak
memory: RecomputationType.Standard). Backward operators have no place in it: JAX makes them as one function.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from podrun.session import names
from podrun.session.attributes import PIPELINE_STAGE, RECOMPUTE, UNNAMED, VIRTUAL_GRAPH
from podrun.session.options.memory_options import recompute_of
from podrun.session.options.session_options import SessionOptions
from podrun.session.placing.pipelining import RESTORED, stage_count, stashed
from podrun.session.tensor_info import TensorInfo

STASHED = names.PREFIXES["Stashed"]

if TYPE_CHECKING:
    from onnx import ModelProto

    from podrun.onnx_models.lowering.graph import OperatorGraph
    from podrun.onnx_models.ops.registry import Node


def ir_text(
    main: OperatorGraph,
    placed: ModelProto,
    infos: Mapping[str, TensorInfo],
    options: SessionOptions,
    *,
    training: bool,
) -> str:
    """See the module docstring. ``placed``: the model with its places, as it was built."""
    name = "maingraph" if placed.graph.name in ("", UNNAMED) else placed.graph.name
    again = _recomputed(main, placed, options) if training else {}
    found = {
        name: [_operator(node, infos, again) for node in main.nodes],
        **{
            label: [_operator(node, infos, {}) for node in graph.nodes]
            for label, graph in _below(main).items()
        },
    }
    found[name] += _stashes(placed, infos, options, training=training)
    return json.dumps(found)


def _below(main: OperatorGraph) -> dict[str, OperatorGraph]:
    """The subgraphs of a graph, by name."""
    from podrun.onnx_models.lowering.graph import subgraphs

    found: dict[str, OperatorGraph] = {}
    waiting = [main]
    while waiting:
        for node in waiting.pop().nodes:
            for graph in subgraphs(node):
                waiting.append(graph)
                found.setdefault(graph.name, graph)
    return found


def _recomputed(main: OperatorGraph, placed: ModelProto, options: SessionOptions) -> dict[str, str]:
    """YES or NO for each operator, by label, as far as options and annotations say."""
    what = recompute_of(main.nodes, options)
    last = stage_count(placed) - 1
    found = {}
    for node in main.nodes:
        by_rule = what.rule == "all" or (what.rule == "pipeline" and node.get(PIPELINE_STAGE, 0) < last)
        yes = node.label in what.scopes or (by_rule and node.label not in what.kept)
        if yes or what.rule != "standard" or node.label in what.kept:
            found[node.label] = "YES" if yes else "NO"
    return found


def _operator(node: Node, infos: Mapping[str, TensorInfo], again: Mapping[str, str]) -> dict[str, Any]:
    attributes = {key: str(value) for key, value in node.attributes.items() if key != RECOMPUTE}
    if node.label in again:
        attributes["recompute"] = again[node.label]
    return {
        "type": node.op_type,
        "name": node.name,
        "domain": node.domain or "ai.onnx",
        "version": str(node.opset),
        "inputs": _tensors(node.inputs, infos),
        "outputs": _tensors(node.outputs, infos),
        "attributes": attributes,
    }


def _tensors(wanted: tuple[str, ...], infos: Mapping[str, TensorInfo]) -> list[dict[str, str]]:
    found = []
    for index, name in enumerate(wanted):
        info = infos.get(name)
        if name:
            shape = "[" + " ".join(str(dim) for dim in info.shape()) + "]" if info else "[]"
            kind = info.data_type() if info else "UNDEFINED"
            found.append({"name": name, "shape": shape, "type": kind, "index": str(index)})
    return found


def _stashes(
    placed: ModelProto, infos: Mapping[str, TensorInfo], options: SessionOptions, *, training: bool
) -> Iterator[dict[str, Any]]:
    """What a training pipeline stashes and restores (with RecomputationType.Pipeline: of the model's inputs)."""
    for name, (stage, ipu) in stashed(placed, options, training=training).items():
        (tensor,) = _tensors((name,), infos)
        ring = {"name": STASHED + name, "shape": "", "type": tensor["type"], "index": "0"}
        for kind, output in (("Stash", ring), ("Restore", {**tensor, "name": RESTORED + name})):
            yield {
                "type": kind,
                "name": "",
                "domain": "ai.graphcore",
                "version": "1",
                "inputs": [tensor],
                "outputs": [output],
                "attributes": {VIRTUAL_GRAPH: str(ipu)}
                | ({PIPELINE_STAGE: str(stage)} if kind == "Stash" else {}),
            }
