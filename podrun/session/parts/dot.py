"""``.dot`` files of a session's graph, for Graphviz: ``options.dotChecks = {"Final"}``, or POPART_DOT_CHECKS=FINAL.

PopART draws its IR at five points of its own passes. Here there is one graph, the forward graph after pruning, so each
file that is asked for shows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.session.environment import dot_checks
from podrun.session.exceptions import popart_exception
from podrun.session.options.session_options import SessionOptions

if TYPE_CHECKING:
    from podrun.onnx_models.lowering.graph import OperatorGraph

CHECKS = ("Fwd0", "Fwd1", "Bwd0", "PreAlias", "Final")
"""The points, in order; ``All`` is all of them."""


def write_dots(
    graph: OperatorGraph, options: SessionOptions, environ: Mapping[str, str] | None = None
) -> list[Path]:
    """Write what options and environment ask for into ``options.logDir``, and say what was written.

    popart_exception for a point that there is not, or a folder that cannot be written to.
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
    """Operators ``firstDotOp`` to ``finalDotOp`` in order as boxes, tensors as what joins them."""
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
