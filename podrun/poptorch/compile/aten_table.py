"""The table of captured operators, as the runtime asks for it, and what is known of operators without computing any.

What computes them (`podrun.poptorch.operators`) imports JAX, so it is imported when a model is traced. Which operators
there are, and as which ones planners know them, was noted by an earlier process: a program whose traces and compiled
programs are kept waits for no JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from podrun.poptorch.capture.graph import CUSTOM, GraphNode, Subgraph
from podrun.runtime.graph import Node
from podrun.runtime.kept_traces import noted_names
from podrun.runtime.operators import Context, Operator, OperatorFunction

if TYPE_CHECKING:
    from jax import Array

UPDATE = "podrun.update"
"""Operator that names the new value of a buffer."""
CAPTURED = "captured"
"""Attribute of a node: the `GraphNode` that it stands for."""


@functools.cache
def _kinds() -> Mapping[str, Sequence[str]]:
    def answer() -> dict[str, list[str]]:
        from podrun.poptorch.operators.table import all_operators

        return {name: [operator.kind] for name, operator in all_operators().items()}

    return noted_names("operators of ATen", answer, str)


def aten_kind(name: str) -> str | None:
    """The ONNX operator as which planners know an ATen operator (``aten.add.Tensor``): empty for an element-wise one,
    None if IPUs do not have it. As `podrun.poptorch.operators.table.find` looks it up.
    """
    namespace, _, rest = name.partition(".")
    names = (rest, rest.partition(".")[0]) if namespace == "aten" else (name,)
    return next((_kinds()[item][0] for item in names if item in _kinds()), None)


def supported(name: str) -> bool:
    """Whether IPUs have an ATen operator."""
    return aten_kind(name) is not None


def _run(ctx: Context, node: Node, *tensors: Array) -> tuple[Array, ...]:
    """One captured operator."""
    from podrun.poptorch.operators.table import run_aten

    captured: GraphNode = node[CAPTURED]
    values = {value.number: tensor for value, tensor in zip(captured.reads(), tensors, strict=True)}
    return run_aten(captured, values, ctx.key, ctx.training)


def _run_update(ctx: Context, node: Node, old: Array, new: Array) -> tuple[Array, ...]:
    ctx.state_update(0, 0)
    return (new.astype(old.dtype),)


def _run_print(ctx: Context, node: Node, value: Array) -> Array:
    return value


PRINT_TENSOR = "PrintTensor"
_FUNCTIONS: Mapping[str, OperatorFunction] = {UPDATE: _run_update, PRINT_TENSOR: _run_print}


class AtenOperators:
    """The captured operators as the runtime asks for them: an `podrun.runtime.operators.OperatorTable`."""

    def lookup(self, node: Node) -> Operator:
        """The function of a node. What the table of ATen operators lacks is refused when it runs."""
        return Operator(node.domain, node.op_type, 1, _FUNCTIONS.get(node.op_type, _run))

    def meaning(self, nodes: Iterable[Node]) -> str | None:
        """See `podrun.runtime.operators.OperatorTable`: captured nodes say all, but for custom operators."""
        captured = (node[CAPTURED] for node in nodes if CAPTURED in node.attributes)
        return None if any(map(_is_custom, captured)) else "aten"


def _is_custom(argument: object) -> bool:
    """Whether a captured operator, or one of the graphs that it runs, calls a function that was registered."""
    if isinstance(argument, GraphNode):
        return argument.operator == CUSTOM or _is_custom((argument.arguments, (*argument.keywords.values(),)))
    if isinstance(argument, Subgraph):
        return any(map(_is_custom, argument.nodes))
    return isinstance(argument, tuple) and any(map(_is_custom, argument))


ATEN_OPERATORS = AtenOperators()
