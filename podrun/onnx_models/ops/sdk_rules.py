"""The SDK's limits on operators that compute element by element, on shapes, indices and losses, and how rules are kept.

`RULES` is the table of all rules; those of layers stand in `podrun.onnx_models.ops.sdk_layers`. Messages print nodes
and shapes as the SDK does: programs match them.

Source: PopART 3.4's operator classes and its integration tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from podrun.core.errors import UsageError
from podrun.onnx_models.annotations import SERIALIZE_FACTOR, SERIALIZE_MODE
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, lookup
from podrun.runtime.graph import Node
from podrun.runtime.operators import Form

Forms = Sequence[Form | None]
ShapeCheck = Callable[[Node, Forms], None]

RULES: dict[tuple[str, str], ShapeCheck] = {}
"""The check of an operator's inputs and attributes, by domain and type."""


def shown(shape: Iterable[int]) -> str:
    """A shape as the SDK prints it: ``[2 3]``."""
    return f"[{' '.join(str(d) for d in shape)}]"


def op(node: Node) -> str:
    """A node as the SDK prints it: ``Op(ai.onnx.MatMul:9, inputs=[a, b], outputs=[MatMul:0])``."""
    inputs, outputs = (", ".join(name for name in names if name) for names in (node.inputs, node.outputs))
    return f"Op({identifier(node)}, inputs=[{inputs}], outputs=[{outputs}])"


def identifier(node: Node) -> str:
    """Domain, type and version: ``ai.onnx.Slice:10``."""
    return f"{node.domain}.{node.op_type}:{lookup(node).since}"


def refused(node: Node, message: str) -> UsageError:
    """The error with text ``message``; its hint says where the node stands."""
    return UsageError(message, hint=f"It is about {node.describe()}.")


def sdk_rule(*names: str, domain: str = ONNX) -> Callable[[ShapeCheck], ShapeCheck]:
    """Decorator: a function that raises `UsageError` for inputs or attributes that the SDK refuses."""

    def register(rule: ShapeCheck) -> ShapeCheck:
        for name in names:
            RULES[domain, name] = rule
        return rule

    return register


# --- element by element, shapes --------------------------------------------------------------------------------------


def shapes_broadcast(a: Sequence[int], b: Sequence[int]) -> bool:
    """True iff shapes broadcast as NumPy's do."""
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


@sdk_rule("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Equal", "Less", "Greater", "And", "Or")
@sdk_rule("Atan2", "Fmod", "Remainder", domain=GRAPHCORE)
def _broadcasts(node: Node, forms: Forms) -> None:
    a, b = forms[:2]
    if a is None or b is None or node.get("broadcast"):
        return
    if not shapes_broadcast(a.shape, b.shape):
        raise refused(
            node,
            f"np broadcasting failed on '{op(node)}', frames {list(a.shape)} and {list(b.shape)} are not aligned",
        )


@sdk_rule("MatMul")
def _matmul(node: Node, forms: Forms) -> None:
    for side, form in zip(("lhs", "rhs"), forms, strict=False):
        if form is not None and not form.shape:
            raise refused(node, f"{op(node)} doesn't support scalar tensor input as the {side} input")
    a, b = forms[:2]
    if a is not None and b is not None and a.shape[-1] != b.shape[-2 if b.rank > 1 else 0]:
        raise refused(
            node,
            f"{op(node)} contracting dimensions unequal: lhs '{node.inputs[0]}' {shown(a.shape)}, "
            f"rhs '{node.inputs[1]}' {shown(b.shape)}",
        )
    if a is not None and b is not None and min(a.rank, b.rank) > 1:
        _serialised(node, a, b)


def _serialised(node: Node, a: Form, b: Form) -> None:
    mode, factor = node.get(SERIALIZE_MODE, "none"), node.get(SERIALIZE_FACTOR, 0)
    if mode == "none":
        return
    what, size = {
        "input_channels": ("input channels dim", a.shape[-2]),
        "reducing_dim": ("reducing dimension", a.shape[-1]),
        "output_channels": ("output channels dim", b.shape[-1]),
    }[mode]
    if factor < 1 or size % factor:
        raise refused(
            node,
            f"Invalid serialisation factor {factor} for {what} {size}. {mode} dim should be a multiple of the "
            "serialisation factor",
        )


@sdk_rule("Constant")
def _constant(node: Node, forms: Forms) -> None:
    if node.get("sparse_value") is not None:
        raise refused(node, "The Constant op attribute 'sparse_value' is not supported.")


@sdk_rule("Transpose")
def _transpose(node: Node, forms: Forms) -> None:
    x, order = forms[0], node.get("perm")
    if x is not None and order and len(order) != x.rank:
        raise refused(
            node,
            f"Rank of permutation tensor {shown(order)}, rank {len(order)} must be equal to rank of input tensor, "
            f"shape {shown(x.shape)}, rank {x.rank}.",
        )


@sdk_rule("Subsample", domain=GRAPHCORE)
def _subsample(node: Node, forms: Forms) -> None:
    for index, stride in enumerate(node["strides"]):
        if stride == 0:
            raise refused(node, f"Strides invalid. 0 stride at index {index}")


@sdk_rule("Reverse", domain=GRAPHCORE)
def _reverse(node: Node, forms: Forms) -> None:
    x, dimensions = forms[0], node["dimensions"]
    for index, dimension in enumerate(dimensions):
        if dimension < 0:
            why = f"invalid dimension '{dimension}'. Only positive dimensions are supported"
        elif dimension in dimensions[:index]:
            why = f"Dimension {dimension} appears multiple times"
        elif x is not None and dimension >= x.rank:
            why = f"invalid dimension '{dimension}' for input tensor of rank {x.rank}"
        else:
            continue
        raise refused(node, f"{op(node)}: {why}")


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


@sdk_rule(*(f"Reduce{kind}" for kind in _REDUCTIONS))
@sdk_rule("ReduceMedian", domain=GRAPHCORE)
def _reduction(node: Node, forms: Forms) -> None:
    x = forms[0]
    if x is None:
        return
    for axis in node.get("axes") or ():
        if not -x.rank <= axis < max(x.rank, 1):
            raise refused(node, f"Axis {axis} is out of acceptable range [{-x.rank}, {x.rank - 1}]")


# --- indices, losses, randomness -------------------------------------------------------------------------------------


@sdk_rule("ScatterReduce", "GroupedScatterReduce", domain=GRAPHCORE)
def _scatter_reduce(node: Node, forms: Forms) -> None:
    data, indices = forms[0], forms[1]
    if node["axis_size"] < 1:
        raise refused(node, f"ScatterReduceOp axis_size = {node['axis_size']} is not valid: must be > 0.")
    if data is None or indices is None:
        return
    axis = node.get("axis", -1)
    if not -data.rank <= axis < data.rank:
        raise refused(
            node,
            f"ScatterReduceOp::setup axis = {axis} is outside the acceptable range [{-data.rank}, {data.rank - 1}]",
        )
    if data.shape != indices.shape:
        groups = int(node.op_type == "GroupedScatterReduce")
        _expands(node, indices.shape, data.shape, axis % data.rank, groups)


def _expands(node: Node, indices: tuple[int, ...], data: tuple[int, ...], axis: int, groups: int) -> None:
    """Indices of another shape than the data's are a vector along the axis, with axes of size 1 around it."""
    if len(indices) > len(data):
        raise refused(
            node,
            f"Invalid rank for indices input. Indices rank {len(indices)} must be <= data input rank {len(data)}.",
        )
    wide = indices
    if len(indices) - groups == 1:
        wide = (*wide[:groups], *(1,) * (axis - groups), *wide[groups:])
    wide += (1,) * (len(data) - len(wide))
    if any(i not in (1, d) for i, d in zip(wide, data, strict=True)):
        raise refused(
            node, f"Failed to expand 'indices' shape {shown(indices)} to match 'data' shape {shown(data)}."
        )
    long = [a for a, size in enumerate(wide) if size != 1 and a >= groups]
    if node.get("enable_index_broadcast", 1) and long not in ([], [axis]):
        raise refused(node, "Partial broadcasting of indices is not currently supported.")


@sdk_rule("Nll", domain=GRAPHCORE)
def _nll(node: Node, forms: Forms) -> None:
    probabilities, labels = forms[:2]
    if probabilities is None or labels is None or labels.shape == probabilities.shape[:-1]:
        return
    raise refused(
        node,
        f"The label tensor ({labels}) must have shape {shown(probabilities.shape[:-1])} to match all but the final "
        f"dimension of the probabilities tensor ({probabilities})",
    )


@sdk_rule("Dropout")
@sdk_rule("ShapedDropout", domain=GRAPHCORE)
def _dropout(node: Node, forms: Forms) -> None:
    ratio = float(np.float32(node.get("ratio", 0.5)))
    if not 0 <= ratio < 1:
        raise refused(
            node,
            f"{node.op_type} ratio value {ratio:.6g} is not valid. Please use a value in the interval [0,1)",
        )
    x, shape = forms[0], node.get("shape")
    if x is None or node.op_type != "ShapedDropout":
        return
    if len(shape) > x.rank or not all(
        s in (1, d) for s, d in zip(reversed(shape), reversed(x.shape), strict=False)
    ):
        raise refused(
            node,
            "ShapedDropout: incompatible input tensor and dropout shape. "
            f"{shown(shape)} does not broadcast to {shown(x.shape)}.",
        )
