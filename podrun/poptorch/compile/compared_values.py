"""Checks of comparisons: the tiles of an IPU stop where a comparison takes a value that is no number.

The result of a comparison does not show it, so the graph gets values that do: NaN where an operand was NaN, 0
otherwise. Bodies of loops and branches hand theirs out as one more result; a loop carries it from round to round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from podrun.core.errors import InternalError
from podrun.poptorch.capture.graph import COMPARED, GraphNode, GraphValue, Origin, Subgraph

if TYPE_CHECKING:
    from podrun.poptorch.capture.graph import Argument, CapturedGraph

_COMPARISONS = frozenset(f"aten.{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_LOOP, _BRANCH = "podrun.for_loop.default", "podrun.cond.default"


def check_comparisons(graph: CapturedGraph) -> list[GraphValue]:
    """Add a check to the graph for each of its comparisons and for each loop or branch with a comparison in it. Returns
    the values of the checks.
    """
    known = [v.number for v in (*graph.inputs.values(), *graph.parameters.values())]
    numbers = itertools.count(1 + max([*known, *_numbers_in(graph.nodes), *graph.constants], default=0))
    nodes, checks = _with_checks(graph.nodes, numbers)
    graph.nodes[:] = nodes
    return checks


def _with_checks(
    nodes: Iterable[GraphNode], numbers: Iterator[int]
) -> tuple[list[GraphNode], list[GraphValue]]:
    """Nodes with checks among them, and the values of the checks."""
    checked, checks = list[GraphNode](), list[GraphValue]()
    for node in nodes:
        compared: tuple[GraphValue, ...] = ()
        if node.operator in (_LOOP, _BRANCH):
            node, compared = _control_flow(node, numbers, checked)
        checked.append(node)
        if node.operator.rpartition(".")[0] in _COMPARISONS:
            compared = tuple(v for v in node.reads() if "float" in v.dtype)
        if compared:
            checks.append(_add_check(checked, compared, numbers, node.origin))
    return checked, checks


def _add_check(
    nodes: list[GraphNode], compared: Sequence[GraphValue], numbers: Iterator[int], origin: Origin
) -> GraphValue:
    check = _scalar(numbers)
    nodes.append(GraphNode(COMPARED, tuple(compared), {}, (check,), origin, differentiable=False))
    return check


def _scalar(numbers: Iterator[int]) -> GraphValue:
    return GraphValue(next(numbers), (), "float32")


def _control_flow(
    node: GraphNode, numbers: Iterator[int], before: list[GraphNode]
) -> tuple[GraphNode, tuple[GraphValue, ...]]:
    """A loop or branch, with one more result if it compares: no number if a comparison in it took none. ``before``:
    gets the nodes that it needs.
    """
    if not any(_compares(part) for part in _bodies_of(node)):
        return node, ()
    result = _scalar(numbers)
    arguments: tuple[Argument, ...]
    if node.operator == _LOOP:
        count, body, inputs, outer = node.arguments
        if not isinstance(body, Subgraph) or not isinstance(inputs, tuple):
            raise InternalError("a loop takes a body and the body's inputs")
        start, carried = _add_check(before, (), numbers, node.origin), _scalar(numbers)
        body = _checking(body, numbers, (carried,))
        arguments = (count, replace(body, inputs=(*body.inputs, carried)), (*inputs, start), outer)
    else:
        condition, *parts = node.arguments
        arguments = (condition, *(_checking_branch(part, numbers) for part in parts))
    return replace(node, arguments=arguments, results=(*node.results, result)), (result,)


def _checking(body: Subgraph, numbers: Iterator[int], carried: Sequence[GraphValue] = ()) -> Subgraph:
    """A body with one more result: no number if a comparison in it took none, or if a ``carried`` value is none."""
    nodes, checks = _with_checks(body.nodes, numbers)
    total = _add_check(nodes, (*carried, *checks), numbers, Origin())
    return replace(body, nodes=tuple(nodes), outputs=(*body.outputs, total))


def _checking_branch(branch: Argument, numbers: Iterator[int]) -> Argument:
    """A branch (its body, the body's inputs, the outer values) with one more result."""
    if not isinstance(branch, tuple) or not isinstance(branch[0], Subgraph):
        raise InternalError("a branch begins with its body")
    return (_checking(branch[0], numbers), *branch[1:])


def _bodies_of(node: GraphNode) -> list[Subgraph]:
    branches = [part for part in node.arguments if isinstance(part, tuple)]
    parts = node.arguments if node.operator == _LOOP else [branch[0] for branch in branches]
    return [part for part in parts if isinstance(part, Subgraph)]


def _compares(body: Subgraph) -> bool:
    return any(
        node.operator.rpartition(".")[0] in _COMPARISONS
        or (node.operator in (_LOOP, _BRANCH) and any(map(_compares, _bodies_of(node))))
        for node in body.nodes
    )


def _numbers_in(nodes: Iterable[GraphNode]) -> Iterator[int]:
    """The numbers of all values that nodes and their bodies make or take."""
    for node in nodes:
        yield from (value.number for value in node.results)
        if node.operator in (_LOOP, _BRANCH):
            for body in _bodies_of(node):
                yield from (value.number for value in (*body.inputs, *body.outer))
                yield from _numbers_in(body.nodes)
