"""Attention: one product for queries, keys and values, scales moved, sizes padded, rotary embeddings."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from podrun.core.errors import UsageError
from podrun.serving.convert.fusion_passes import constant_and_other, times
from podrun.serving.convert.graph_edit import GraphEditor
from podrun.serving.convert.graph_walk import attribute
from podrun.serving.convert.pass_manager import rewrite
from podrun.serving.convert.product_passes import Pairs, merge_products
from podrun.serving.convert.replacement_passes import number_like


def _with_bias(graph: GraphEditor, product: NodeProto) -> tuple[NodeProto, NodeProto | None]:
    user = graph.sole_user(product.output[0])
    if user is not None and user.op_type == "Add" and not user.domain:
        other = [name for name in user.input if name != product.output[0]]
        bias = graph.constant(other[0]) if other else None
        if bias is not None and bias.ndim == 1:
            return product, user
    return product, None


def scores_of(graph: GraphEditor) -> list[NodeProto]:
    """Products of two computed tensors that lead to a Softmax."""
    scores = []
    for node in graph.onnx_nodes("MatMul"):
        if any(graph.constant(name) is not None for name in node.input):
            continue
        user = graph.sole_user(node.output[0])
        while user is not None and user.op_type in ("Mul", "Div", "Add", "Where", "Cast"):
            user = graph.sole_user(user.output[0])
        if user is not None and user.op_type in ("Softmax", "SoftmaxV2"):
            scores.append(node)
    return scores


@rewrite("fused_attention")
def _fused_attention(graph: GraphEditor) -> None:
    """The products that make queries, keys and values of one tensor become one, which is split."""
    if not scores_of(graph):
        return
    for source in dict.fromkeys(node.input[0] for node in graph.onnx_nodes("MatMul")):
        products = [n for n in graph.consumers(source) if n.op_type == "MatMul" and n.input[0] == source]
        weights = [graph.constant(node.input[1]) for node in products]
        alike = {(w.shape, w.dtype) for w in weights if w is not None and w.ndim == 2}
        if len(products) != 3 or len(alike) != 1 or any(w is None for w in weights):
            continue
        pairs: Pairs = [_with_bias(graph, node) for node in products]
        biased = [add is not None for _, add in pairs]
        if not all(biased):
            pairs = [(product, None) for product, _ in pairs]
        try:
            merge_products(graph, pairs, "fused_attention")
        except UsageError:
            continue  # A form that cannot be merged stays as it is.


@rewrite("pre_scale")
def _pre_scale(graph: GraphEditor) -> None:
    """Scores divided by the root of the head's size: queries are scaled first, which keeps halves small."""
    for score in scores_of(graph):
        user = graph.sole_user(score.output[0])
        told = times(graph, user.output[0]) if user is not None and user.op_type in ("Mul", "Div") else None
        if user is None or told is None or told[1] != score.output[0] or not 0 < abs(told[0]) < 1:
            continue
        factor = number_like(graph, told[0], score.input[0], "scale")
        if factor is None:
            continue
        scaled = graph.node("Mul", [score.input[0], factor])
        graph.insert_before(score, [scaled])
        score.input[0] = scaled.output[0]
        graph.touch()
        graph.bypass(user, score.output[0])
    graph.drop_dead()


PADDED = 16
"""Sizes that products of half precision work in."""


@rewrite("attention_padding")
def _attention_padding(graph: GraphEditor) -> None:
    """Heads of a size that is no multiple of 16 are padded with zeros before queries and keys are multiplied."""
    for score in scores_of(graph):
        a, b = graph.sizes(score.input[0]), graph.sizes(score.input[1])
        if a is None or b is None or len(a) < 2 or len(b) < 2 or a[-1] % PADDED == 0:
            continue
        missing = -a[-1] % PADDED
        new = []
        for index, (sizes, axis) in enumerate(((a, len(a) - 1), (b, len(b) - 2))):
            zeros = number_like(graph, 0, score.input[index])
            if zeros is None:
                break
            shape = [missing if i == axis else size for i, size in enumerate(sizes)]
            held = graph.constant(zeros)
            block = graph.add_constant(np.zeros(shape, np.float32 if held is None else held.dtype), "padding")
            new.append(graph.node("Concat", [score.input[index], block], axis=axis))
        if len(new) == 2:
            graph.insert_before(score, new)
            score.input[0], score.input[1] = (node.output[0] for node in new)
            graph.touch()
    graph.drop_dead()


@rewrite("matmul_rotary_embedding")
def _rotary(graph: GraphEditor) -> None:
    """The half turn of a rotary embedding, (-second half, first half), becomes a product with a constant matrix."""
    for node in graph.onnx_nodes("Concat"):
        x = _half_turn(graph, node)
        sizes = graph.sizes(x) if x else None
        if x is None or sizes is None:
            continue
        half = sizes[-1] // 2
        turn = np.zeros((2 * half, 2 * half), np.float32)
        turn[np.arange(half, 2 * half), np.arange(half)] = -1
        turn[np.arange(half), np.arange(half, 2 * half)] = 1
        like = number_like(graph, 0, x)
        held = graph.constant(like) if like else None
        if held is None:
            continue
        matrix = graph.add_constant(turn.astype(held.dtype), "half_turn")
        graph.replace([node], [graph.node("MatMul", [x, matrix], node.output[0])])
    graph.drop_dead()


def _half_turn(graph: GraphEditor, node: NodeProto) -> str | None:
    """x of Concat(-x[half:], x[:half]) over the last axis."""
    sizes = graph.sizes(node.output[0])
    if sizes is None or len(node.input) != 2 or sizes[-1] % 2:
        return None
    if attribute(node, "axis") not in (-1, len(sizes) - 1):
        return None
    negative = graph.made_by(node.input[0], "Neg", "Mul")
    if negative is None:
        return None
    if negative.op_type == "Mul":
        told = constant_and_other(graph, negative)
        if told is None or told[0] != -1:
            return None
        second = told[1]
    else:
        second = negative.input[0]
    first = node.input[1]
    split = graph.made_by(second, "Split")
    if split is not None:
        halves = list(split.output) == [first, second] and graph.sizes(first) == graph.sizes(second)
        axis = attribute(split, "axis", 0) in (-1, len(sizes) - 1)
        return str(split.input[0]) if halves and axis else None
    return _sliced_halves(graph, first, second, sizes)


def _sliced_halves(graph: GraphEditor, first: str, second: str, sizes: tuple[int, ...]) -> str | None:
    from podrun.serving.convert.fusion_passes import slice_cut

    cuts = [graph.made_by(name, "Slice") for name in (first, second)]
    if cuts[0] is None or cuts[1] is None or cuts[0].input[0] != cuts[1].input[0]:
        return None
    x, half = str(cuts[0].input[0]), sizes[-1] // 2
    if graph.sizes(x) != sizes:
        return None
    told = [slice_cut(graph, cut, sizes) for cut in cuts if cut is not None]
    last = len(sizes) - 1
    return x if told == [(last, 0, half), (last, half, 2 * half)] else None
