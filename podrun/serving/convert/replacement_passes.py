"""One operator in place of another: cheaper on IPUs, or known to PopART."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper

from podrun.serving.convert.graph_edit import GraphEditor
from podrun.serving.convert.graph_walk import GRAPHCORE_DOMAIN, attribute
from podrun.serving.convert.pass_manager import rewrite


def number_like(graph: GraphEditor, value: float, like: str, base: str = "number") -> str | None:
    """A scalar constant of a tensor's type; None if that is not known."""
    element = graph.element(like)
    if element is None:
        return None
    return graph.add_constant(np.asarray(value, helper.tensor_dtype_to_np_dtype(element)), base)


@rewrite("replace_castlike")
def _castlike(graph: GraphEditor) -> None:
    """CastLike becomes a Cast to the type of its second input."""
    for node in graph.onnx_nodes("CastLike"):
        element = graph.element(node.input[1])
        if element is not None:
            graph.replace([node], [graph.node("Cast", [node.input[0]], node.output[0], to=element)])


@rewrite("replace_clip_empty_inputs")
def _clip_empty(graph: GraphEditor) -> None:
    """Limits that a Clip leaves out become the least and largest number of its type."""
    for node in graph.onnx_nodes("Clip"):
        element = graph.element(node.input[0])
        if element is None or graph.owner.opset < 11:
            continue
        limits = [node.input[i] if len(node.input) > i else "" for i in (1, 2)]
        if all(limits):
            continue
        dtype = helper.tensor_dtype_to_np_dtype(element)
        told = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        for index, value in enumerate((told.min, told.max)):
            limits[index] = limits[index] or graph.add_constant(np.asarray(value, dtype), "limit")
        clip = graph.node("Clip", [node.input[0], *limits], node.output[0])
        graph.replace([node], [clip])


@rewrite("replace_consecutive_cast_with_notzero")
def _notzero(graph: GraphEditor) -> None:
    """A Cast to BOOL that is cast again becomes "not equal to 0"."""
    for node in graph.onnx_nodes("Cast"):
        inner = graph.made_by(node.input[0], "Cast")
        if (
            inner is None
            or attribute(inner, "to") != TensorProto.BOOL
            or graph.sole_user(inner.output[0]) is not node
        ):
            continue
        zero = number_like(graph, 0, inner.input[0], "zero")
        if zero is None or graph.element(inner.input[0]) == TensorProto.BOOL:
            continue
        equal = graph.node("Equal", [inner.input[0], zero])
        graph.replace([inner], [equal, graph.node("Not", [equal.output[0]], inner.output[0])])


@rewrite("replace_div_with_mul")
def _div_with_mul(graph: GraphEditor) -> None:
    """A division by constants becomes a product with their reciprocals."""
    for node in graph.onnx_nodes("Div"):
        value = graph.constant(node.input[1])
        if (
            value is None
            or value.dtype.kind != "f"
            or not value.all()
            or graph.constant(node.input[0]) is not None
        ):
            continue
        with np.errstate(all="ignore"):
            reciprocal = (1 / value.astype(np.float64)).astype(value.dtype)
        if not np.isfinite(reciprocal).all() or not reciprocal.all():
            continue
        name = graph.add_constant(reciprocal, f"{node.input[1]}_reciprocal")
        graph.replace([node], [graph.node("Mul", [node.input[0], name], node.output[0])])
    graph.drop_dead()


@rewrite("replace_erf_with_erfv2")
def _erfv2(graph: GraphEditor) -> None:
    """Erf becomes ai.graphcore.ErfV2, a polynomial that is right to 1.5e-7."""
    for node in graph.onnx_nodes("Erf"):
        new = graph.node("ErfV2", [node.input[0]], node.output[0], domain=GRAPHCORE_DOMAIN)
        graph.replace([node], [new])


@rewrite("replace_gemm_with_matmul")
def _gemm_with_matmul(graph: GraphEditor) -> None:
    """A Gemm becomes a MatMul, and an Add where it has a bias."""
    for node in graph.onnx_nodes("Gemm"):
        alpha, beta = float(attribute(node, "alpha", 1.0)), float(attribute(node, "beta", 1.0))
        new: list[NodeProto] = []
        operands = [_operand(graph, node, index, new) for index in (0, 1)]
        bias = node.input[2] if len(node.input) > 2 and node.input[2] else ""
        parts: list[tuple[str, float]] = [("", alpha), *([(bias, beta)] if bias else [])]
        results = []
        for name, factor in parts:
            if not name:
                new.append(graph.node("MatMul", operands))
                name = new[-1].output[0]
            if factor != 1.0:
                number = number_like(graph, factor, node.input[0], "factor")
                if number is None:
                    break
                new.append(graph.node("Mul", [name, number]))
                name = new[-1].output[0]
            results.append(name)
        if len(results) != len(parts):
            continue
        if bias:
            new.append(graph.node("Add", results))
        new[-1].output[0] = node.output[0]
        graph.replace([node], new)
    graph.drop_dead()


def _operand(graph: GraphEditor, node: NodeProto, index: int, new: list[NodeProto]) -> str:
    name = node.input[index]
    if not attribute(node, ("transA", "transB")[index], 0):
        return str(name)
    value = graph.constant(name)
    if value is not None:
        return graph.add_constant(np.ascontiguousarray(value.T), f"{name}_transposed")
    new.append(graph.node("Transpose", [name], perm=[1, 0]))
    return str(new[-1].output[0])


@rewrite("replace_half_reducemean")
def _half_reducemean(graph: GraphEditor) -> None:
    """ReduceMean of half precision becomes a sum of the numbers times the reciprocal of their count."""
    for node in graph.onnx_nodes("ReduceMean"):
        sizes = graph.sizes(node.input[0])
        if graph.element(node.input[0]) != TensorProto.FLOAT16 or sizes is None:
            continue
        axes = attribute(node, "axes")
        if axes is None and len(node.input) > 1 and node.input[1]:
            axes = graph.constant(node.input[1])
            if axes is None:
                continue
        counted = range(len(sizes)) if axes is None else [int(a) % len(sizes) for a in axes]
        count = int(np.prod([sizes[a] for a in counted], dtype=np.int64))
        number = number_like(graph, 1 / max(count, 1), node.input[0], "reciprocal")
        if number is None or attribute(node, "noop_with_empty_axes", 0):
            continue
        scaled = graph.node("Mul", [node.input[0], number])
        inputs, told = [scaled.output[0]], {"keepdims": attribute(node, "keepdims", 1)}
        if axes is not None and graph.owner.opset >= 13:
            inputs.append(graph.add_constant(np.asarray(axes, np.int64), "axes"))
        elif axes is not None:
            told["axes"] = list(axes)
        graph.replace([node], [scaled, graph.node("ReduceSum", inputs, node.output[0], **told)])


@rewrite("replace_hardswish")
def _hardswish(graph: GraphEditor) -> None:
    """HardSwish becomes x times HardSigmoid(x) with slope 1/6."""
    for node in graph.onnx_nodes("HardSwish"):
        gate = graph.node("HardSigmoid", [node.input[0]], alpha=1 / 6, beta=0.5)
        graph.replace([node], [gate, graph.node("Mul", [node.input[0], gate.output[0]], node.output[0])])


@rewrite("replace_isinf")
def _isinf(graph: GraphEditor) -> None:
    """IsInf becomes a comparison with infinity."""
    for node in graph.onnx_nodes("IsInf"):
        positive, negative = attribute(node, "detect_positive", 1), attribute(node, "detect_negative", 1)
        limit = number_like(graph, -np.inf if not positive else np.inf, node.input[0], "infinity")
        if limit is None or not (positive or negative):
            continue
        new, source = [], node.input[0]
        if positive and negative:
            new.append(graph.node("Abs", [source]))
            source = new[0].output[0]
        new.append(graph.node("Equal", [source, limit], node.output[0]))
        graph.replace([node], new)


@rewrite("replace_nonzero")
def _nonzero(graph: GraphEditor) -> None:
    """NonZero of a vector of which the model states that it finds one place becomes an ArgMax."""
    stated = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
              for v in (*graph.graph.value_info, *graph.graph.output)}  # fmt: skip
    for node in graph.onnx_nodes("NonZero"):
        if stated.get(node.output[0]) != [1, 1] or len(graph.sizes(node.input[0]) or ()) != 1:
            continue
        zero = number_like(graph, 0, node.input[0], "zero")
        if zero is None:
            continue
        equal = graph.node("Equal", [node.input[0], zero])
        other = graph.node("Not", [equal.output[0]])
        whole = graph.node("Cast", [other.output[0]], to=TensorProto.FLOAT)
        place = graph.node("ArgMax", [whole.output[0]], axis=0, keepdims=1)
        form = graph.add_constant(np.asarray([1, 1], np.int64), "form")
        last = graph.node("Reshape", [place.output[0], form], node.output[0])
        graph.replace([node], [equal, other, whole, place, last])


@rewrite("replace_pow")
def _pow(graph: GraphEditor) -> None:
    """Powers of 1, 2, 3, 0.5, -1 and -0.5 become products, roots and reciprocals."""
    for node in graph.onnx_nodes("Pow"):
        x, y, exponent = node.input[0], node.output[0], graph.scalar(node.input[1])
        kind = graph.kind(x)
        if exponent is None or kind is None or kind.element not in (TensorProto.FLOAT, TensorProto.FLOAT16):
            continue
        held = graph.tensor(node.input[1])
        if held is None or len(held.dims) > len(kind.shape or ()) or int(np.prod(held.dims)) != 1:
            continue
        new: list[NodeProto] = []
        if exponent == 1:
            new = [graph.node("Identity", [x], y)]
        elif exponent == 2:
            new = [graph.node("Mul", [x, x], y)]
        elif exponent == 3:
            square = graph.node("Mul", [x, x])
            new = [square, graph.node("Mul", [square.output[0], x], y)]
        elif exponent == 0.5:
            new = [graph.node("Sqrt", [x], y)]
        elif exponent == -1:
            new = [graph.node("Reciprocal", [x], y)]
        elif exponent == -0.5:
            root = graph.node("Sqrt", [x])
            new = [root, graph.node("Reciprocal", [root.output[0]], y)]
        if new:
            graph.replace([node], new)
    graph.drop_dead()


@rewrite("replace_round")
def _round(graph: GraphEditor) -> None:
    """Round, half to even, by Floor: for chips whose own rounding takes halves away from zero."""
    for node in graph.onnx_nodes("Round"):
        element = graph.element(node.input[0])
        half, two = (number_like(graph, v, node.input[0]) for v in (0.5, 2.0))
        if element is None or half is None or two is None:
            continue
        low = graph.node("Floor", [node.input[0]])
        rest = graph.node("Sub", [node.input[0], low.output[0]])
        above = graph.node("Greater", [rest.output[0], half])
        tie = graph.node("Equal", [rest.output[0], half])
        ratio = graph.node("Div", [low.output[0], two])
        whole = graph.node("Floor", [ratio.output[0]])
        odd = graph.node("Greater", [ratio.output[0], whole.output[0]])
        tied = graph.node("And", [tie.output[0], odd.output[0]])
        up = graph.node("Or", [above.output[0], tied.output[0]])
        step = graph.node("Cast", [up.output[0]], to=element)
        last = graph.node("Add", [low.output[0], step.output[0]], node.output[0])
        graph.replace([node], [low, rest, above, tie, ratio, whole, odd, tied, up, step, last])


@rewrite("replace_softmax")
def _softmax(graph: GraphEditor) -> None:
    """Softmax over a last axis of odd size becomes ai.graphcore.SoftmaxV2."""
    for node in graph.onnx_nodes("Softmax"):
        sizes = graph.sizes(node.input[0])
        axis = attribute(node, "axis", -1 if graph.owner.opset >= 13 else 1)
        if sizes and axis in (-1, len(sizes) - 1) and sizes[-1] % 2:
            new = graph.node("SoftmaxV2", [node.input[0]], node.output[0], domain=GRAPHCORE_DOMAIN, axis=-1)
            graph.replace([node], [new])
