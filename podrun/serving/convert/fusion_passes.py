"""Several operators become one: activations, scales, normalisation behind products, slices side by side."""

from __future__ import annotations

import math

import numpy as np
from onnx import NodeProto, helper

from podrun.serving.convert.cleanup_passes import scale_and_shift
from podrun.serving.convert.graph_edit import GraphEditor
from podrun.serving.convert.graph_walk import GRAPHCORE_DOMAIN, ONNX_DOMAINS, attribute
from podrun.serving.convert.pass_manager import rewrite

CLOSE = 2e-3
"""Largest relative difference of a constant from the one of a formula: halves of models in float16 differ so."""


def constant_and_other(graph: GraphEditor, node: NodeProto | None) -> tuple[float, str] | None:
    """The number and the other operand of a binary node that has a constant of equal numbers."""
    if node is None or len(node.input) != 2:
        return None
    for side in (1, 0):
        value = graph.scalar(node.input[side])
        if value is not None:
            return value, node.input[1 - side]
    return None


def times(graph: GraphEditor, name: str) -> tuple[float, str, list[NodeProto]] | None:
    """A tensor as ``factor * other``: a Mul by a number, or a Div by one."""
    node = graph.made_by(name, "Mul", "Div")
    told = constant_and_other(graph, node)
    if node is None or told is None:
        return None
    if node.op_type == "Div":
        divisor = graph.scalar(node.input[1])
        return None if not divisor else (1 / divisor, node.input[0], [node])
    return told[0], told[1], [node]


def is_near(value: float, wanted: float) -> bool:
    """Whether a constant is that of a formula."""
    return abs(value - wanted) <= CLOSE * abs(wanted)


def _factors(graph: GraphEditor, name: str, depth: int = 4) -> tuple[float, list[str], list[NodeProto]]:
    """A product as its number, its tensors and its nodes, as deep as only it uses them."""
    node = graph.made_by(name, "Mul", "Div")
    if node is None or not depth:
        return 1.0, [name], []
    if node.op_type == "Div":
        divisor = graph.scalar(node.input[1])
        if not divisor:
            return 1.0, [name], []
        number, tensors, nodes = _factors(graph, node.input[0], depth - 1)
        return number / divisor, tensors, [node, *nodes]
    number, tensors, nodes = 1.0, [], [node]
    for side in node.input:
        value = graph.scalar(side)
        if value is not None:
            number *= value
            continue
        inner, more, below = _factors(graph, side, depth - 1)
        number, tensors, nodes = number * inner, tensors + more, nodes + below
    return number, tensors, nodes


def _gelu(graph: GraphEditor, node: NodeProto, inside: str) -> str | None:
    """x of ``node = x / 2 * (1 + inside(...))``, of which the caller checks the argument; None if it is none."""
    number, tensors, _ = _factors(graph, node.output[0])
    if not is_near(number, 0.5) or len(tensors) != 2:
        return None
    for one, x in (tensors, tensors[::-1]):
        add = graph.made_by(one, "Add")
        told = constant_and_other(graph, add)
        maker = graph.made_by(told[1], inside) if told is not None and is_near(told[0], 1.0) else None
        if maker is not None and _argument_fits(graph, maker, x):
            return x
    return None


def _argument_fits(graph: GraphEditor, maker: NodeProto, x: str) -> bool:
    if maker.op_type == "Erf":
        number, tensors, _ = _factors(graph, maker.input[0])
        return is_near(number, math.sqrt(0.5)) and tensors == [x]
    number, tensors, _ = _factors(graph, maker.input[0])
    if len(tensors) == 2 and x in tensors:  # sqrt(2 / pi) * x * (1 + 0.044715 * x * x)
        other = tensors[1] if tensors[0] == x else tensors[0]
        told = constant_and_other(graph, graph.made_by(other, "Add"))
        return is_near(number, math.sqrt(2 / math.pi)) and told is not None and _square(graph, told, x)
    if len(tensors) != 1 or not is_near(number, math.sqrt(2 / math.pi)):
        return False
    add = graph.made_by(tensors[0], "Add")
    if add is None or x not in add.input:
        return False
    number, cube, _ = _factors(graph, add.input[1] if add.input[0] == x else add.input[0])
    return is_near(number, 0.044715) and (cube == [x] * 3 or (len(cube) == 1 and _is_cube(graph, cube[0], x)))


def _square(graph: GraphEditor, told: tuple[float, str], x: str) -> bool:
    number, tensors, _ = _factors(graph, told[1])
    squared = tensors == [x, x] or (len(tensors) == 1 and _is_power(graph, tensors[0], x, 2))
    return is_near(told[0], 1.0) and is_near(number, 0.044715) and squared


def _is_cube(graph: GraphEditor, name: str, x: str) -> bool:
    return _is_power(graph, name, x, 3)


def _is_power(graph: GraphEditor, name: str, x: str, exponent: int) -> bool:
    node = graph.made_by(name, "Pow")
    return node is not None and node.input[0] == x and graph.scalar(node.input[1]) == exponent


def _fuse_gelu(graph: GraphEditor, inside: str, operator: str) -> None:
    approximate = b"tanh" if inside == "Tanh" else b"none"
    for node in list(graph.nodes):
        if (
            node.op_type == "Gelu"
            and not node.domain
            and attribute(node, "approximate", b"none") == approximate
        ):
            graph.replace(
                [node], [graph.node(operator, list(node.input), node.output[0], domain=GRAPHCORE_DOMAIN)]
            )
            continue
        if node.op_type not in ("Mul", "Div") or node.domain not in ONNX_DOMAINS:
            continue
        x = _gelu(graph, node, inside)
        if x is not None:
            graph.replace([node], [graph.node(operator, [x], node.output[0], domain=GRAPHCORE_DOMAIN)])
            graph.drop_dead()


@rewrite("gelu_pattern")
def _gelu_pattern(graph: GraphEditor) -> None:
    """GELU by the hyperbolic tangent becomes one operator, ai.graphcore.Gelu."""
    _fuse_gelu(graph, "Tanh", "Gelu")


@rewrite("erf_gelu_pattern")
def _erf_gelu_pattern(graph: GraphEditor) -> None:
    """GELU by the error function becomes one operator, ai.graphcore.GeluErf."""
    _fuse_gelu(graph, "Erf", "GeluErf")


@rewrite("fuse_bn_into_gemm")
def _bn_into_gemm(graph: GraphEditor) -> None:
    """A BatchNormalization behind a Gemm becomes the Gemm's weights and bias."""
    for node in list(graph.nodes):
        gemm = graph.made_by(node.input[0], "Gemm") if node.op_type == "BatchNormalization" else None
        affine = scale_and_shift(graph, node) if gemm is not None else None
        if gemm is None or affine is None or graph.sole_user(gemm.output[0]) is not node:
            continue
        weight = graph.constant(gemm.input[1])
        has_bias = len(gemm.input) > 2 and bool(gemm.input[2])
        bias = graph.constant(gemm.input[2]) if has_bias else None
        if weight is None or (has_bias and bias is None):
            continue
        scale, shift = affine
        scale_of_weight = scale[:, None] if attribute(gemm, "transB", 0) else scale[None, :]
        total = np.broadcast_to(shift, scale.shape)
        if bias is not None:
            total = total + bias.astype(np.float64) * float(attribute(gemm, "beta", 1.0)) * scale
        inputs = [
            gemm.input[0],
            graph.add_constant((weight.astype(np.float64) * scale_of_weight).astype(weight.dtype), "weight"),
            graph.add_constant(total.astype(weight.dtype), "bias"),
        ]
        fused = graph.node("Gemm", inputs, node.output[0])
        fused.attribute.extend(one for one in gemm.attribute if one.name != "beta")
        graph.replace([gemm, node], [fused])
    graph.drop_dead()


@rewrite("fuse_cast_into_onehot")
def _cast_into_onehot(graph: GraphEditor) -> None:
    """A Cast behind a OneHot becomes the type of the OneHot's values."""
    for node in graph.onnx_nodes("Cast"):
        inner = graph.made_by(node.input[0], "OneHot")
        if inner is None or graph.sole_user(inner.output[0]) is not node:
            continue
        values = graph.constant(inner.input[2])
        if values is None:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(int(attribute(node, "to")))
        if not bool((values.astype(dtype).astype(np.float64) == values.astype(np.float64)).all()):
            continue
        inner.input[2] = graph.add_constant(values.astype(dtype), f"{inner.input[2]}_cast")
        graph.touch()
        graph.bypass(node)


@rewrite("fuse_mul_into_matmul")
def _mul_into_matmul(graph: GraphEditor) -> None:
    """A product with a number before or behind a MatMul of constant weights becomes part of the weights."""
    for node in graph.onnx_nodes("MatMul"):
        weight = graph.constant(node.input[1])
        if weight is None or weight.dtype.kind != "f":
            continue
        before = times(graph, node.input[0])
        if before is not None and graph.sole_user(node.input[0]) is node:
            _scale_weight(graph, node, weight, before[0])
            node.input[0] = before[1]
            graph.touch()
            weight = graph.constant(node.input[1])
        user = graph.sole_user(node.output[0])
        after = times(graph, user.output[0]) if user is not None and user.op_type in ("Mul", "Div") else None
        if user is None or after is None or weight is None or after[1] != node.output[0]:
            continue
        if graph.sizes(user.output[0]) != graph.sizes(node.output[0]):
            continue
        _scale_weight(graph, node, weight, after[0])
        graph.bypass(user, node.output[0])
    graph.drop_dead()


def _scale_weight(graph: GraphEditor, node: NodeProto, weight: np.ndarray, factor: float) -> None:
    scaled = (weight.astype(np.float64) * factor).astype(weight.dtype)
    node.input[1] = graph.add_constant(scaled, f"{node.input[1]}_scaled")
    graph.touch()


@rewrite("compress_pattern")
def _compress_pattern(graph: GraphEditor) -> None:
    """Compress by a constant condition becomes a Gather of the places that it keeps."""
    for node in graph.onnx_nodes("Compress"):
        condition = graph.constant(node.input[1])
        if condition is None:
            continue
        places = graph.add_constant(np.flatnonzero(condition).astype(np.int64), f"{node.output[0]}_kept")
        axis = attribute(node, "axis")
        source, new = node.input[0], []
        if axis is None:
            flat = graph.add_constant(np.asarray([-1], np.int64), "flat")
            new.append(graph.node("Reshape", [source, flat]))
            source = new[-1].output[0]
        new.append(graph.node("Gather", [source, places], node.output[0], axis=axis or 0))
        graph.replace([node], new)
    graph.drop_dead()


@rewrite("merge_multi_slice")
def _multi_slice(graph: GraphEditor) -> None:
    """Slices that cut a tensor into neighbouring parts along one axis become one Split."""
    for source in dict.fromkeys(n.input[0] for n in graph.nodes if n.op_type == "Slice" and not n.domain):
        cuts: dict[int, list[tuple[int, int, NodeProto]]] = {}
        sizes = graph.sizes(source)
        for node in graph.consumers(source):
            cut = (
                slice_cut(graph, node, sizes) if node.op_type == "Slice" and node.input[0] == source else None
            )
            if cut is not None:
                cuts.setdefault(cut[0], []).append((cut[1], cut[2], node))
        for axis, parts in cuts.items():
            parts.sort(key=lambda part: part[:2])
            ends = [0, *(end for _, end, _ in parts)]
            whole = sizes is not None and ends[-1] == sizes[axis]
            if len(parts) < 2 or not whole or any(p[0] != e for p, e in zip(parts, ends, strict=False)):
                continue
            _split_instead(graph, source, axis, parts)


def slice_cut(
    graph: GraphEditor, node: NodeProto, sizes: tuple[int, ...] | None
) -> tuple[int, int, int] | None:
    """Axis, begin and end of a Slice along one axis with step 1."""
    if sizes is None:
        return None
    if len(node.input) < 3:
        starts, ends, axes = (attribute(node, key) for key in ("starts", "ends", "axes"))
        steps: object = None
    else:
        held = [graph.constant(name) if name else None for name in node.input[1:5]]
        held += [None] * (4 - len(held))
        starts, ends, axes, steps = held
    if starts is None or ends is None or len(starts) != 1 or axes is None:
        return None
    if steps is not None and list(np.asarray(steps)) != [1]:
        return None
    axis = int(axes[0]) % len(sizes)
    begin, end, _ = slice(int(starts[0]), int(ends[0])).indices(sizes[axis])
    return axis, begin, end


def _split_instead(
    graph: GraphEditor, source: str, axis: int, parts: list[tuple[int, int, NodeProto]]
) -> None:
    lengths = [end - begin for begin, end, _ in parts]
    nodes = [node for *_, node in parts]
    first = min(
        range(len(graph.nodes)), key=lambda i: i if any(graph.nodes[i] is n for n in nodes) else 1 << 60
    )
    split = split_node(graph, source, [node.output[0] for node in nodes], axis, lengths)
    graph.nodes.insert(first, split)
    graph.touch()
    graph.remove(nodes)


def split_node(
    graph: GraphEditor, source: str, outputs: list[str], axis: int, lengths: list[int]
) -> NodeProto:
    """A Split in the form of the model's opset."""
    if graph.owner.opset >= 13:
        sizes = graph.add_constant(np.asarray(lengths, np.int64), "split_sizes")
        node = graph.node("Split", [source, sizes], axis=axis)
    else:
        node = graph.node("Split", [source], axis=axis, split=lengths)
    del node.output[:]
    node.output.extend(outputs)
    return node
