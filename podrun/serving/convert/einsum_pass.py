"""Einsum of two tensors as one MatMul between transposes and reshapes."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from podrun.core.quick_dataclass import dataclass
from podrun.serving.convert.graph_edit import GraphEditor
from podrun.serving.convert.graph_walk import attribute
from podrun.serving.convert.pass_manager import rewrite


@dataclass(frozen=True, slots=True)
class _Letters:
    """Axes of a product: in both and in the result, of the left, of the right, summed over."""

    batch: str
    left: str
    right: str
    summed: str
    result: str


def _letters(equation: str) -> tuple[str, str, _Letters] | None:
    """Both operands' axes and their kinds; None for an equation that is no product of two tensors."""
    text = equation.replace(" ", "")
    sides, arrow, result = text.partition("->")
    operands = sides.split(",")
    if "." in text or len(operands) != 2 or any(len(set(o)) != len(o) for o in operands):
        return None
    a, b = operands
    if not arrow:
        result = "".join(sorted(c for c in set(a + b) if (a + b).count(c) == 1))
    shared = [c for c in a if c in b]
    kinds = _Letters(
        "".join(c for c in shared if c in result),
        "".join(c for c in a if c not in b),
        "".join(c for c in b if c not in a),
        "".join(c for c in shared if c not in result),
        result,
    )
    if set(kinds.left + kinds.right) - set(result) or len(set(result)) != len(result):
        return None
    return a, b, kinds


@rewrite("replace_einsum_with_matmul")
def _einsum_with_matmul(graph: GraphEditor) -> None:
    """Einsum of two tensors becomes a MatMul, with Transpose and Reshape where its axes lie otherwise."""
    for node in graph.onnx_nodes("Einsum"):
        told = _letters(attribute(node, "equation", b"").decode()) if len(node.input) == 2 else None
        shapes = [graph.sizes(name) for name in node.input]
        if told is None or shapes[0] is None or shapes[1] is None:
            continue
        a, b, kinds = told
        sizes = dict(zip(a, shapes[0], strict=True)) | dict(zip(b, shapes[1], strict=True))
        if any(s != sizes[c] for c, s in (*zip(a, shapes[0], strict=True), *zip(b, shapes[1], strict=True))):
            continue  # A size of 1 that is broadcast.
        graph.replace([node], _as_product(graph, node, (a, b), kinds, sizes))
    graph.drop_dead()


def _as_product(
    graph: GraphEditor, node: NodeProto, letters: tuple[str, str], kinds: _Letters, sizes: dict[str, int]
) -> list[NodeProto]:
    new: list[NodeProto] = []

    def count(axes: str) -> int:
        return int(np.prod([sizes[c] for c in axes], dtype=np.int64))

    def laid_out(name: str, have: str, want: str, form: list[int]) -> str:
        if have != want:
            new.append(graph.node("Transpose", [name], perm=[have.index(c) for c in want]))
            name = new[-1].output[0]
        if [sizes[c] for c in want] != form:
            shape = graph.add_constant(np.asarray(form, np.int64), "form")
            new.append(graph.node("Reshape", [name, shape]))
            name = new[-1].output[0]
        return name

    batch = [count(kinds.batch)] if kinds.batch else []
    rows, columns, depth = count(kinds.left), count(kinds.right), count(kinds.summed)
    left = laid_out(node.input[0], letters[0], kinds.batch + kinds.left + kinds.summed, [*batch, rows, depth])
    right = laid_out(
        node.input[1], letters[1], kinds.batch + kinds.summed + kinds.right, [*batch, depth, columns]
    )
    new.append(graph.node("MatMul", [left, right]))
    now = kinds.batch + kinds.left + kinds.right
    name = new[-1].output[0]
    if [sizes[c] for c in now] != [*batch, rows, columns]:
        shape = graph.add_constant(np.asarray([sizes[c] for c in now], np.int64), "form")
        new.append(graph.node("Reshape", [name, shape]))
        name = new[-1].output[0]
    if now != kinds.result:
        new.append(graph.node("Transpose", [name], perm=[now.index(c) for c in kinds.result]))
    new[-1].output[0] = node.output[0]
    return new
