"""The forward graph of a program for those who look inside: as JSON, and as ``.dot`` files.

**JSON**: ``{graph: [{type, name, domain, version, inputs, outputs, attributes}]}``: operators in order after pruning,
all values strings, without spaces between them. The main graph is ``maingraph`` unless the model names it, subgraphs
stand beside it. What a training pipeline stashes and restores stands behind them, then the updates of variables.
``recompute`` is YES or NO (absent where the tile model decides by peak memory: `Recomputation.STANDARD`). Backward
operators have no place in it: JAX makes them as one function.

**Dot files**, for Graphviz, at points of the SDK's passes (`CHECKS`). Here there is one graph, so each file that is
requested shows it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.errors import UsageError
from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.environment import dot_checks
from podrun.runtime.graph import Node, OperatorGraph, subgraphs
from podrun.runtime.pipelining import RESTORED, stage_count, stashed
from podrun.runtime.planning import recompute_of
from podrun.runtime.settings import RunSettings
from podrun.runtime.tensor_names import PREFIXES
from podrun.runtime.words import NEUTRAL

if TYPE_CHECKING:
    from podrun.runtime.building import BuiltModel

VIRTUAL_GRAPH = "__ipu_number"
"""The IPU of a replica; -1: none."""
PIPELINE_STAGE = "__pipeline_stage"
"""The stage of a pipeline; -1: none."""
EXECUTION_PHASE = "__execution_phase"
"""The phase of phased execution."""
AVAILABLE_MEMORY = "__available_memory"
"""The part of the tiles' memory that a product may take for temporary data."""

STASHED = PREFIXES["Stashed"]


def graph_json(
    built: BuiltModel,
    placed: OperatorGraph,
    settings: RunSettings,
    *,
    training: bool,
    unnamed: Collection[str] = ("",),
) -> str:
    """The forward graph of a program as JSON. ``placed``: the model with its places, as it was given. ``unnamed``:
    names that stand for none.
    """
    main, infos = built.lowered.graph, built.infos
    name = "maingraph" if placed.name in unnamed else placed.name
    again = _recomputed(main, placed, settings) if training else {}
    texts = {
        name: [_operator(node, infos, again) for node in main.nodes],
        **{
            label: [_operator(node, infos, {}) for node in graph.nodes]
            for label, graph in _below(main).items()
        },
    }
    texts[name] += _stashes(placed, infos, settings, training=training)
    texts[name] += _updates(built)
    return json.dumps(texts, separators=(",", ":"))


def _updates(built: BuiltModel) -> Iterator[dict[str, Any]]:
    """The update of each trained variable, as the SDK's operators."""
    rule = built.rule
    if rule is None:
        return
    for name in (key for key, parameter in built.program.parameters.items() if parameter.trainable):
        (tensor,) = _tensors((name,), built.infos)
        for kind in rule.operators(name):
            yield {
                "type": kind,
                "name": "",
                "domain": "ai.graphcore",
                "version": "1",
                "inputs": [tensor],
                "outputs": [{**tensor, "name": PREFIXES["UpdatedVar"] + name}],
                "attributes": {"recompute": "NO"},
            }


def _below(main: OperatorGraph) -> dict[str, OperatorGraph]:
    """The subgraphs of a graph, by name."""
    below: dict[str, OperatorGraph] = {}
    waiting = [main]
    while waiting:
        for node in waiting.pop().nodes:
            for graph in subgraphs(node):
                waiting.append(graph)
                below.setdefault(graph.name, graph)
    return below


def _recomputed(main: OperatorGraph, placed: OperatorGraph, settings: RunSettings) -> dict[str, str]:
    """YES or NO for each operator, by label, as far as options and annotations decide."""
    what = recompute_of(main.nodes, settings)
    last = stage_count(placed) - 1
    texts = {}
    for node in main.nodes:
        by_rule = what.rule == "all" or (what.rule == "pipeline" and node.stage < last)
        yes = node.label in what.scopes or (by_rule and node.label not in what.kept)
        if yes or what.rule != "standard" or node.label in what.kept:
            texts[node.label] = "YES" if yes else "NO"
    return texts


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
    tensors = []
    for index, name in enumerate(wanted):
        info = infos.get(name)
        if name:
            shape = "[" + " ".join(str(dim) for dim in info.shape) + "]" if info else "[]"
            kind = _type_name(info) if info else "UNDEFINED"
            tensors.append({"name": name, "shape": shape, "type": kind, "index": str(index)})
    return tensors


_TYPE_NAMES = {
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "float8_e4m3fnuz": "FLOAT8_143",
    "float8_e5m2fnuz": "FLOAT8_152",
    "object": "STRING",
}
"""Names of types that are not NumPy's in capitals."""


def _type_name(spec: TensorSpec) -> str:
    name = numpy_dtype(spec.dtype).name
    return _TYPE_NAMES.get(name, name.upper())


def _stashes(
    placed: OperatorGraph, infos: Mapping[str, TensorSpec], settings: RunSettings, *, training: bool
) -> Iterator[dict[str, Any]]:
    """What a training pipeline stashes and restores; with `Recomputation.PIPELINE` only the model's inputs."""
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


@dataclass(frozen=True, slots=True)
class Drawing:
    """What to draw: the graph at ``checks``, into files in ``folder``, operators ``first`` to ``last`` (exclusive).
    ``named``: with the operators' names. ``folder_option``: what names the folder, for messages.
    """

    checks: tuple[str, ...] = ()
    folder: str = "."
    first: int = 0
    last: int = 10000
    named: bool = False
    folder_option: str = NEUTRAL.folder_option


def write_dots(
    graph: OperatorGraph, drawing: Drawing, environ: Mapping[str, str] | None = None
) -> list[Path]:
    """Write the dot files that ``drawing`` and the environment ask for, and return their paths.

    UsageError for an unknown check, or a folder that cannot be written to.
    """
    folder = Path(drawing.folder)
    paths = [folder / f"{check.lower()}.dot" for check in _points([*drawing.checks, *dot_checks(environ)])]
    if not paths:
        return []
    text = to_dot(graph, drawing)
    try:
        for path in paths:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"The graph cannot be written to {str(folder)!r}: {error.strerror}.", hint=drawing.folder_option
        ) from error
    return paths


def _points(names: list[str]) -> list[str]:
    known = {check.lower(): check for check in (*CHECKS, "All")}
    for name in names:
        if name.lower() not in known:
            raise UsageError(f"Unrecognised dot check {name!r}: it is one of {', '.join((*CHECKS, 'All'))}.")
    chosen = {known[name.lower()] for name in names}
    return [check for check in CHECKS if check in chosen or "All" in chosen]


def to_dot(graph: OperatorGraph, drawing: Drawing) -> str:
    """Operators in order as boxes, tensors as the edges between them."""
    lines = [f"digraph {json.dumps(graph.name)} {{"]
    for number, node in enumerate(graph.nodes[drawing.first : drawing.last], drawing.first):
        label = f"{number}.{node.op_type}"
        if drawing.named and node.name:
            label += f" ({node.name})"
        box = json.dumps(f"op{number}")
        lines.append(f"{box} [shape=box, label={json.dumps(label)}];")
        lines += [f"{json.dumps(tensor)} -> {box};" for tensor in node.inputs if tensor]
        lines += [f"{box} -> {json.dumps(tensor)};" for tensor in node.outputs if tensor]
    return "\n".join([*lines, "}", ""])
