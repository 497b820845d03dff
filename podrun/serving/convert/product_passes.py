"""Products side by side become one: MatMuls of one input, with their bias, and the experts of a mixture."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import ModelProto, NodeProto

from podrun.core.errors import UsageError
from podrun.serving.convert.fusion_passes import split_node
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import node_by_name
from podrun.serving.convert.half_passes import listed_names
from podrun.serving.convert.pass_manager import Pass, register

Pairs = list[tuple[NodeProto, NodeProto | None]]
"""MatMuls, each with the Add of its bias or None."""


def merge_products(graph: GraphEditor, pairs: Pairs, option: str) -> None:
    """MatMuls of one input become one whose result is split. UsageError where they do not share input and form."""
    products = [product for product, _ in pairs]
    adds = [add for _, add in pairs if add is not None]
    if len({product.input[0] for product in products}) != 1:
        raise UsageError(f"{option}: {_listed(products)} do not take the same input")
    weights = [_weight(graph, product, option) for product in products]
    if len({(w.shape[0], w.dtype) for w in weights}) != 1:
        raise UsageError(f"{option}: the weights of {_listed(products)} differ in rows or type")
    axis = len(graph.sizes(products[0].output[0]) or ()) - 1
    if axis < 0:
        raise UsageError(f"{option}: the shape of {products[0].output[0]!r} is not known")
    label = products[0].name
    whole = graph.add_constant(np.concatenate(weights, axis=1), f"{label}_merged_weight")
    new = [graph.node("MatMul", [products[0].input[0], whole])]
    if adds:
        biases = [_bias(graph, add, product, w.shape[1], option)
                  for (product, add), w in zip(pairs, weights, strict=True) if add is not None]  # fmt: skip
        bias = graph.add_constant(np.concatenate(biases), f"{label}_merged_bias")
        new.append(graph.node("Add", [new[0].output[0], bias]))
    last = adds or products
    outputs = [node.output[0] for node in last]
    new.append(split_node(graph, new[-1].output[0], outputs, axis, [w.shape[1] for w in weights]))
    first = min(i for i, node in enumerate(graph.nodes) if any(node is p for p in products))
    graph.nodes[first:first] = new
    graph.touch()
    graph.remove([*products, *adds])
    graph.drop_dead()


def _listed(nodes: Sequence[NodeProto]) -> str:
    return ", ".join(node.name or node.output[0] for node in nodes)


def _weight(graph: GraphEditor, product: NodeProto, option: str) -> np.ndarray:
    weight = graph.constant(product.input[1]) if product.op_type == "MatMul" else None
    if weight is None or weight.ndim != 2:
        raise UsageError(f"{option}: node {product.name!r} is no MatMul with constant weights of two axes")
    return weight


def _bias(graph: GraphEditor, add: NodeProto, product: NodeProto, width: int, option: str) -> np.ndarray:
    if product.output[0] not in add.input or graph.sole_user(product.output[0]) is not add:
        raise UsageError(f"{option}: node {add.name!r} does not add to {product.name!r} alone")
    name = add.input[1] if add.input[0] == product.output[0] else add.input[0]
    bias = graph.constant(name)
    if bias is None or bias.size not in (1, width) or bias.ndim > 1:
        raise UsageError(f"{option}: node {add.name!r} adds no constant of {width} numbers")
    return np.broadcast_to(bias.reshape(-1), (width,))


@register("merge_matmul")
class MergeMatmul(Pass):
    """Named MatMuls of one input become one. ``merge_matmul``: their names."""

    def __init__(self, merge_matmul: str | Sequence[str] = "") -> None:
        self.names = listed_names(merge_matmul, "merge_matmul")

    def run(self, model: ModelProto) -> ModelProto:
        for name in self.names:
            node_by_name(model, name, "merge_matmul")
        if len(self.names) == 1:
            raise UsageError("merge_matmul: one MatMul has nothing to be merged with")
        if self.names:
            owner = ModelEditor(model)
            by_name = {node.name: node for node in owner.main.nodes}
            merge_products(owner.main, [(by_name[name], None) for name in self.names], "merge_matmul")
            owner.commit()
        return model


@register("merge_matmul_add")
class MergeMatmulAdd(Pass):
    """Named pairs of MatMul and Add of one input become one. ``merge_matmul_add``: MatMul, Add, MatMul, Add, ..."""

    def __init__(self, merge_matmul_add: str | Sequence[str] = "") -> None:
        self.names = listed_names(merge_matmul_add, "merge_matmul_add")

    def run(self, model: ModelProto) -> ModelProto:
        if self.names:
            owner = ModelEditor(model)
            pairs = _named_pairs(owner, self.names, "merge_matmul_add", "pairs: MatMul,Add,MatMul,Add")
            merge_products(owner.main, list(pairs), "merge_matmul_add")
            owner.commit()
        return model


def _named_pairs(
    owner: ModelEditor, names: Sequence[str], option: str, what: str
) -> list[tuple[NodeProto, NodeProto]]:
    """The nodes of an even number of names, two by two. UsageError for fewer than two pairs, and unknown names."""
    if len(names) % 2 or len(names) < 4:
        raise UsageError(f"{option} takes two or more {what}")
    for name in names:
        node_by_name(owner.model, name, option)
    by_name = {node.name: node for node in owner.main.nodes}
    nodes = [by_name[name] for name in names]
    return list(zip(nodes[::2], nodes[1::2], strict=True))


@register("merge_moe")
class MergeMoe(Pass):
    """Experts of one form and one input become one batch of products. ``merge_moe``: begin and end node of each."""

    def __init__(self, merge_moe: str | Sequence[str] = "") -> None:
        self.names = listed_names(merge_moe, "merge_moe")

    def run(self, model: ModelProto) -> ModelProto:
        if self.names:
            owner = ModelEditor(model)
            ends = _named_pairs(owner, self.names, "merge_moe", "experts' begin and end: begin,end,begin,end")
            _merge_chains(owner.main, [_chain(owner.main, first, last) for first, last in ends])
            owner.commit()
        return model


_ELEMENTWISE = (
    "Relu",
    "Tanh",
    "Sigmoid",
    "Gelu",
    "GeluErf",
    "Erf",
    "Elu",
    "LeakyRelu",
    "Swish",
    "Neg",
    "Abs",
)


def _chain(graph: GraphEditor, first: NodeProto, last: NodeProto) -> list[NodeProto]:
    """The nodes of an expert, a line from its first to its last."""
    chain = [first]
    while chain[-1] is not last:
        user = graph.sole_user(chain[-1].output[0])
        if user is None:
            raise UsageError(f"merge_moe: there is no line of nodes from {first.name!r} to {last.name!r}")
        chain.append(user)
    for node in chain:
        if node.op_type not in ("MatMul", "Add", "Mul", *_ELEMENTWISE):
            raise UsageError(
                f"merge_moe: {node.name!r} is a {node.op_type}, which experts cannot be merged over"
            )
    return chain


def _merge_chains(graph: GraphEditor, chains: list[list[NodeProto]]) -> None:
    forms = {tuple(node.op_type for node in chain) for chain in chains}
    sources = {chain[0].input[0] for chain in chains}
    if len(forms) != 1 or len(sources) != 1:
        raise UsageError("merge_moe: the experts differ in their operators or their input")
    sizes = graph.sizes(sources.copy().pop())
    if sizes is None:
        raise UsageError("merge_moe: the shape of the experts' input is not known")
    rank = len(sizes)
    form = graph.add_constant(np.asarray([1, *sizes], np.int64), "one_expert")
    new = [graph.node("Reshape", [sources.pop(), form])]
    for step in zip(*chains, strict=True):
        inputs = [new[-1].output[0]]
        if len(step[0].input) > 1:
            held = [graph.constant(_other(chain_node)) for chain_node in step]
            values = [value for value in held if value is not None]
            if len(values) != len(step) or len({(v.shape, v.dtype) for v in values}) != 1:
                raise UsageError(f"merge_moe: the constants of {_listed(step)} differ in form")
            wanted = 2 if step[0].op_type == "MatMul" else rank
            lifted = [v.reshape((1,) * (max(wanted, rank) - v.ndim) + v.shape) for v in values]
            inputs.append(graph.add_constant(np.stack(lifted), f"{step[0].name}_experts"))
        node = graph.node(step[0].op_type, inputs, domain=step[0].domain)
        node.attribute.extend(step[0].attribute)
        new.append(node)
    ends = [chain[-1].output[0] for chain in chains]
    parts = [graph.owner.new_name(f"{end}_part") for end in ends]
    new.append(split_node(graph, new[-1].output[0], parts, 0, [1] * len(ends)))
    back = graph.add_constant(np.asarray(graph.sizes(ends[0]) or [-1], np.int64), "expert_shape")
    new += [graph.node("Reshape", [part, back], end) for part, end in zip(parts, ends, strict=True)]
    gone = [node for chain in chains for node in chain]
    at = min(i for i, node in enumerate(graph.nodes) if any(node is g for g in gone))
    graph.nodes[at:at] = new
    graph.touch()
    graph.remove(gone)
    graph.drop_dead()


def _other(node: NodeProto) -> str:
    return str(node.input[1])
