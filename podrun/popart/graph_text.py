"""The graph of a session for those who look inside: the IR, its JSON, and ``.dot`` files.

PopART's IR is a data structure of its own with its own passes. Here it is what a session is made from (the placed
model, its data flow and options), and its JSON is the forward graph that is computed, after pruning.

**JSON**: ``{graph: [{type, name, domain, version, inputs, outputs, attributes}]}``: operators in order after pruning,
all values strings. The main graph is ``maingraph`` unless the model names it, subgraphs stand beside it. A training
pipeline ends with its ``Stash`` and ``Restore`` operators. ``recompute`` is YES or NO (absent where the tile model
decides by peak memory: RecomputationType.Standard). Backward operators have no place in it: JAX makes them as one
function.

**Dot files**, for Graphviz: ``options.dotChecks = {"Final"}``, or POPART_DOT_CHECKS=FINAL. PopART draws its IR at five
points of its own passes. Here there is one graph, so each file that is requested shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.onnx_models.annotations import AVAILABLE_MEMORY, EXECUTION_PHASE, PIPELINE_STAGE, VIRTUAL_GRAPH
from podrun.popart.dataflow import DataFlow
from podrun.popart.device import DeviceInfo
from podrun.popart.exceptions import popart_exception
from podrun.popart.names import UNNAMED
from podrun.popart.patterns import Patterns
from podrun.popart.popart_environment import dot_checks
from podrun.popart.session_options import SessionOptions
from podrun.popart.tensor_info import InputShapeInfo, data_type_of
from podrun.runtime.building import recompute_of
from podrun.runtime.graph import Node, OperatorGraph, subgraphs
from podrun.runtime.pipelining import RESTORED, stage_count, stashed
from podrun.runtime.settings import RunSettings
from podrun.runtime.tensor_names import PREFIXES

if TYPE_CHECKING:
    from podrun.popart.session import InferenceSession


@dataclass(frozen=True, slots=True)
class Ir:
    """What `Session.getIr` returns: enough to make the session again on another device."""

    name: str
    model: bytes
    flow: DataFlow
    shapes: InputShapeInfo
    patterns: Patterns
    options: SessionOptions
    training: bool
    text: str

    def serialize(self) -> str:
        """The forward graph as JSON: graph name -> list of operators, as `Session._serializeIr` gives it."""
        return self.text


def inference_from(ir: Ir, device: DeviceInfo, name: str) -> InferenceSession:
    """`InferenceSession.fromIr`. popart_exception for an IR with a backward pass."""
    from podrun.popart.session import InferenceSession

    if not isinstance(ir, Ir):
        raise TypeError(
            f"fromIr(): incompatible function arguments. {ir!r} is no Ir: session.getIr() gives one."
        )
    if ir.training:
        raise popart_exception(
            "fromIr: the IR is that of a training session; its backward pass and updates need a TrainingSession.",
            hint="InferenceSession(model from modelToHost, dataFlow, device) runs it forward.",
        )
    return InferenceSession(ir.model, ir.flow, device, ir.shapes, ir.patterns, ir.options, name)


STASHED = PREFIXES["Stashed"]


def ir_text(
    main: OperatorGraph,
    placed: OperatorGraph,
    infos: Mapping[str, TensorSpec],
    settings: RunSettings,
    *,
    training: bool,
) -> str:
    """See the module docstring. ``placed``: the model with its places, as it was built."""
    name = "maingraph" if placed.name in ("", UNNAMED) else placed.name
    again = _recomputed(main, placed, settings) if training else {}
    found = {
        name: [_operator(node, infos, again) for node in main.nodes],
        **{
            label: [_operator(node, infos, {}) for node in graph.nodes]
            for label, graph in _below(main).items()
        },
    }
    found[name] += _stashes(placed, infos, settings, training=training)
    return json.dumps(found)


def _below(main: OperatorGraph) -> dict[str, OperatorGraph]:
    """The subgraphs of a graph, by name."""
    found: dict[str, OperatorGraph] = {}
    waiting = [main]
    while waiting:
        for node in waiting.pop().nodes:
            for graph in subgraphs(node):
                waiting.append(graph)
                found.setdefault(graph.name, graph)
    return found


def _recomputed(main: OperatorGraph, placed: OperatorGraph, settings: RunSettings) -> dict[str, str]:
    """YES or NO for each operator, by label, as far as options and annotations decide."""
    what = recompute_of(main.nodes, settings)
    last = stage_count(placed) - 1
    found = {}
    for node in main.nodes:
        by_rule = what.rule == "all" or (what.rule == "pipeline" and node.stage < last)
        yes = node.label in what.scopes or (by_rule and node.label not in what.kept)
        if yes or what.rule != "standard" or node.label in what.kept:
            found[node.label] = "YES" if yes else "NO"
    return found


def _operator(node: Node, infos: Mapping[str, TensorSpec], again: Mapping[str, str]) -> dict[str, Any]:
    attributes = {key: str(value) for key, value in node.attributes.items()} | _annotations(node)
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


def _annotations(node: Node) -> dict[str, str]:
    """Place and hints of a node under the keys that they have in ONNX models."""
    place = {
        VIRTUAL_GRAPH: node.place.ipu,
        PIPELINE_STAGE: node.place.stage,
        EXECUTION_PHASE: node.place.phase,
        AVAILABLE_MEMORY: node.hints.available_memory,
    }
    return {key: str(value) for key, value in place.items() if value is not None}


def _tensors(wanted: tuple[str, ...], infos: Mapping[str, TensorSpec]) -> list[dict[str, str]]:
    found = []
    for index, name in enumerate(wanted):
        info = infos.get(name)
        if name:
            shape = "[" + " ".join(str(dim) for dim in info.shape) + "]" if info else "[]"
            kind = data_type_of(numpy_dtype(info.dtype)).name if info else "UNDEFINED"
            found.append({"name": name, "shape": shape, "type": kind, "index": str(index)})
    return found


def _stashes(
    placed: OperatorGraph, infos: Mapping[str, TensorSpec], settings: RunSettings, *, training: bool
) -> Iterator[dict[str, Any]]:
    """What a training pipeline stashes and restores; with RecomputationType.Pipeline only the model's inputs."""
    for name, (stage, ipu) in stashed(placed, settings, training=training).items():
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


CHECKS = ("Fwd0", "Fwd1", "Bwd0", "PreAlias", "Final")
"""The points, in order; ``All`` is all of them."""


def write_dots(
    graph: OperatorGraph, options: SessionOptions, environ: Mapping[str, str] | None = None
) -> list[Path]:
    """Write the dot files that options and environment ask for into ``options.logDir``, and report what was written.

    popart_exception for an unknown check, or a folder that cannot be written to.
    """
    wanted = _wanted([*options.dotChecks, *dot_checks(environ)])
    folder = Path(options.logDir or ".")
    paths = [folder / f"{check.lower()}.dot" for check in wanted]
    if not paths:
        return []
    text = to_dot(graph, options)
    try:
        for path in paths:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise popart_exception(
            f"The graph cannot be written to {str(folder)!r}: {error.strerror}.", hint="SessionOptions.logDir"
        ) from error
    return paths


def _wanted(names: list[str]) -> list[str]:
    known = {check.lower(): check for check in (*CHECKS, "All")}
    for name in names:
        if name.lower() not in known:
            raise popart_exception(
                f"Unrecognised dot check {name!r}: it is one of {', '.join((*CHECKS, 'All'))}."
            )
    chosen = {known[name.lower()] for name in names}
    return [check for check in CHECKS if check in chosen or "All" in chosen]


def to_dot(graph: OperatorGraph, options: SessionOptions) -> str:
    """Operators ``firstDotOp`` to ``finalDotOp`` in order as boxes, tensors as the edges between them."""
    lines = [f"digraph {json.dumps(graph.name)} {{"]
    for number, node in enumerate(graph.nodes[options.firstDotOp : options.finalDotOp], options.firstDotOp):
        label = f"{number}.{node.op_type}"
        if options.dotOpNames and node.name:
            label += f" ({node.name})"
        box = json.dumps(f"op{number}")
        lines.append(f"{box} [shape=box, label={json.dumps(label)}];")
        lines += [f"{json.dumps(tensor)} -> {box};" for tensor in node.inputs if tensor]
        lines += [f"{box} -> {json.dumps(tensor)};" for tensor in node.outputs if tensor]
    return "\n".join([*lines, "}", ""])
