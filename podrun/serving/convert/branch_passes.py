"""Branches: Ifs of one condition become one, an If becomes a choice of values, and what expanding leaves goes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import GraphProto, NodeProto, helper

from podrun.core.errors import UsageError
from podrun.serving.convert.graph_edit import GraphEditor
from podrun.serving.convert.graph_walk import attribute, inner_graphs, names_used, rename_in, sorted_nodes
from podrun.serving.convert.pass_manager import rewrite


def _branches(node: NodeProto) -> tuple[GraphProto, GraphProto]:
    return attribute(node, "then_branch"), attribute(node, "else_branch")


def _joined(graph: GraphEditor, a: GraphProto, b: GraphProto, prefix: str) -> GraphProto:
    """Two branches as one: nodes and outputs of both; tensors of the second get names of their own."""
    other = GraphProto()
    other.CopyFrom(b)
    _own_names(graph, other, prefix)
    both = GraphProto()
    both.CopyFrom(a)
    both.node.extend(other.node)
    both.initializer.extend(other.initializer)
    both.output.extend(other.output)
    return both


def _own_names(graph: GraphEditor, inner: GraphProto, prefix: str) -> dict[str, str]:
    """Give what a graph makes new names; returns them by the old."""
    renamed: dict[str, str] = {}
    for tensor in inner.initializer:
        renamed[tensor.name] = graph.owner.new_name(f"{prefix}_{tensor.name}")
        tensor.name = renamed[tensor.name]
    for node in inner.node:
        if node.name:
            node.name = graph.owner.new_name(f"{prefix}_{node.name}")
        for index, name in enumerate(node.output):
            if name:
                renamed[name] = graph.owner.new_name(f"{prefix}_{name}")
                node.output[index] = renamed[name]
    for node in inner.node:
        for old in set(names_used(node)) & renamed.keys():
            rename_in(node, old, renamed[old])
    for value in inner.output:
        value.name = renamed.get(value.name, value.name)
    del inner.value_info[:]
    return renamed


def _merge(graph: GraphEditor, first: NodeProto, second: NodeProto, *, swapped: bool) -> bool:
    """Let ``first`` compute ``second`` too. False where ``second`` needs what lies between them."""
    then, other = _branches(second)
    if swapped:
        then, other = other, then
    own_then, own_else = _branches(first)
    merged = helper.make_node(
        "If",
        list(first.input),
        [*first.output, *second.output],
        name=first.name,
        then_branch=_joined(graph, own_then, then, "merged"),
        else_branch=_joined(graph, own_else, other, "merged"),
    )
    nodes = [merged if node is first else node for node in graph.nodes if node is not second]
    makers = {name for node in nodes for name in node.output}
    known = {name for node in nodes for name in names_used(node)} - makers
    try:
        ordered = sorted_nodes(nodes, known)
    except UsageError:
        return False
    graph.nodes = ordered
    graph.touch()
    return True


def _merge_where(graph: GraphEditor, fits: Callable[[NodeProto, NodeProto], bool], *, swapped: bool) -> None:
    """Merge two Ifs that fit, the first before the second, until no two do."""
    while True:
        ifs = graph.onnx_nodes("If")
        pairs = ((first, second) for index, second in enumerate(ifs) for first in ifs[:index])
        if not any(fits(*pair) and _merge(graph, *pair, swapped=swapped) for pair in pairs):
            return


@rewrite("merge_if_with_same_cond")
def _same_condition(graph: GraphEditor) -> None:
    """Ifs of one condition become one, unless one needs the result of the other."""
    _merge_where(graph, lambda first, second: first.input[0] == second.input[0], swapped=False)


@rewrite("merge_variant_if")
def _opposite_condition(graph: GraphEditor) -> None:
    """An If of a condition and one of its opposite become one."""

    def negates(one: NodeProto, other: NodeProto) -> bool:
        maker = graph.made_by(one.input[0], "Not")
        return maker is not None and maker.input[0] == other.input[0]

    _merge_where(graph, lambda a, b: negates(a, b) or negates(b, a), swapped=True)


@rewrite("expand_if")
def _expand_if(graph: GraphEditor) -> None:
    """Both branches of an If are computed, and Where takes the values of one. Branches of fixed, equal shapes only."""
    for node in graph.onnx_nodes("If"):
        if not _can_choose(graph, node):
            continue
        new: list[NodeProto] = []
        results = []
        for branch in _branches(node):
            inner = GraphProto()
            inner.CopyFrom(branch)
            _own_names(graph, inner, "branch")
            graph.graph.initializer.extend(inner.initializer)
            new.extend(inner.node)
            results.append([value.name for value in inner.output])
        for output, a, b in zip(node.output, *results, strict=True):
            new.append(graph.node("Where", [node.input[0], a, b], output))
        graph.replace([node], new)


def _can_choose(graph: GraphEditor, node: NodeProto) -> bool:
    for branch in _branches(node):
        if any(op.op_type in ("Abort", "PrintTensor") or any(inner_graphs(op)) for op in branch.node):
            return False
    kinds = [[graph.kind(value.name) for value in branch.output] for branch in _branches(node)]
    return all(not (a is None or b is None or a.sizes is None or a != b) for a, b in zip(*kinds, strict=True))


@rewrite("post_expand")
def _post_expand(graph: GraphEditor) -> None:
    """An Expand goes where the operator behind it broadcasts to the same shape anyway."""
    operators = (
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Where",
        "Equal",
        "Less",
        "Greater",
        "And",
        "Or",
        "Pow",
        "Max",
        "Min",
    )
    for node in graph.onnx_nodes("Expand"):
        user = graph.sole_user(node.output[0])
        small = graph.sizes(node.input[0])
        if user is None or user.op_type not in operators or user.domain or small is None:
            continue
        others = [graph.sizes(name) for name in user.input if name != node.output[0]]
        whole = graph.sizes(user.output[0])
        if whole is None or any(size is None for size in others):
            continue
        if np.broadcast_shapes(small, *(size for size in others if size is not None)) == whole:
            graph.bypass(node)
    graph.drop_dead()
