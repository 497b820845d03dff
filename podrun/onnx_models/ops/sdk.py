"""Inputs that PopART's own operators refuse, in its words: checked for the models of PopART sessions.

ONNX allows more than the SDK implements, and podrun computes it, for models of later opsets and through ONNX's backend
interface. But a program that runs here is meant to run on an IPU. So a session holds every operator that the SDK has
(ai.graphcore's, and ai.onnx's up to opset 11) to the SDK's limits before it is computed, and raises the SDK's messages:
programs match them. `Sdk` travels with a trace and also says where a meaning differs from ONNX's.

Source: PopART 3.4's operator classes and its integration tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from podrun.core.errors import UsageError
from podrun.onnx_models.annotations import SERIALIZE_FACTOR, SERIALIZE_MODE
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX, lookup
from podrun.runtime.graph import Node
from podrun.runtime.operators import Form

NEWEST_OPSET = 11
"""The newest ai.onnx opset that the SDK has."""


@dataclass(frozen=True, slots=True)
class Sdk:
    """The session's options that change the meaning of operators."""

    strided_groups: bool = False
    """Group normalisation takes channels ``g, g + groups, ...`` for group g (groupNormStridedChannelGrouping)."""

    def has(self, node: Node) -> bool:
        """True iff the operator is one of the SDK's, and so bound to its rules."""
        return node.domain == GRAPHCORE or (node.domain == ONNX and node.opset <= NEWEST_OPSET)

    def check(self, node: Node, forms: Forms) -> None:
        """See the function `check_sdk_rule`."""
        check_sdk_rule(node, forms)

    def check_training(self, nodes: Iterable[Node], differentiated: set[str]) -> None:
        """See the function `detached_or_training`."""
        detached_or_training(nodes, differentiated)

    def unknown_value(self, node: Node, index: int) -> UsageError | None:
        """See the function `unknown_value`."""
        return unknown_value(node, index)


Forms = Sequence[Form | None]
ShapeCheck = Callable[[Node, Forms], None]

_rules: dict[tuple[str, str], ShapeCheck] = {}


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


def check_sdk_rule(node: Node, forms: Forms) -> None:
    """`UsageError` in the SDK's words if its operator does not take these inputs and attributes."""
    rule = _rules.get((node.domain, node.op_type))
    if rule is not None:
        rule(node, forms)


def _rule(*names: str, domain: str = ONNX) -> Callable[[ShapeCheck], ShapeCheck]:
    def register(rule: ShapeCheck) -> ShapeCheck:
        for name in names:
            _rules[domain, name] = rule
        return rule

    return register


# --- element by element, shapes --------------------------------------------------------------------------------------


def shapes_broadcast(a: Sequence[int], b: Sequence[int]) -> bool:
    """True iff shapes broadcast as NumPy's do."""
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


@_rule("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Equal", "Less", "Greater", "And", "Or")
@_rule("Atan2", "Fmod", "Remainder", domain=GRAPHCORE)
def _broadcasts(node: Node, forms: Forms) -> None:
    a, b = forms[:2]
    if a is None or b is None or node.get("broadcast"):
        return
    if not shapes_broadcast(a.shape, b.shape):
        raise refused(
            node,
            f"np broadcasting failed on '{op(node)}', frames {list(a.shape)} and {list(b.shape)} are not aligned",
        )


@_rule("MatMul")
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


@_rule("Constant")
def _constant(node: Node, forms: Forms) -> None:
    if node.get("sparse_value") is not None:
        raise refused(node, "The Constant op attribute 'sparse_value' is not supported.")


@_rule("Transpose")
def _transpose(node: Node, forms: Forms) -> None:
    x, order = forms[0], node.get("perm")
    if x is not None and order and len(order) != x.rank:
        raise refused(
            node,
            f"Rank of permutation tensor {shown(order)}, rank {len(order)} must be equal to rank of input tensor, "
            f"shape {shown(x.shape)}, rank {x.rank}.",
        )


@_rule("Subsample", domain=GRAPHCORE)
def _subsample(node: Node, forms: Forms) -> None:
    for index, stride in enumerate(node["strides"]):
        if stride == 0:
            raise refused(node, f"Strides invalid. 0 stride at index {index}")


@_rule("Reverse", domain=GRAPHCORE)
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


@_rule(*(f"Reduce{kind}" for kind in _REDUCTIONS))
@_rule("ReduceMedian", domain=GRAPHCORE)
def _reduction(node: Node, forms: Forms) -> None:
    x = forms[0]
    if x is None:
        return
    for axis in node.get("axes") or ():
        if not -x.rank <= axis < max(x.rank, 1):
            raise refused(node, f"Axis {axis} is out of acceptable range [{-x.rank}, {x.rank - 1}]")


# --- indices, losses, randomness -------------------------------------------------------------------------------------


@_rule("ScatterReduce", "GroupedScatterReduce", domain=GRAPHCORE)
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


@_rule("Nll", domain=GRAPHCORE)
def _nll(node: Node, forms: Forms) -> None:
    probabilities, labels = forms[:2]
    if probabilities is None or labels is None or labels.shape == probabilities.shape[:-1]:
        return
    raise refused(
        node,
        f"The label tensor ({labels}) must have shape {shown(probabilities.shape[:-1])} to match all but the final "
        f"dimension of the probabilities tensor ({probabilities})",
    )


@_rule("Dropout")
@_rule("ShapedDropout", domain=GRAPHCORE)
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


# --- normalisation, pooling ------------------------------------------------------------------------------------------


@_rule("BatchNormalization")
@_rule("BatchNormalization", domain=GRAPHCORE)
def _batch_normalization(node: Node, forms: Forms) -> None:
    x = forms[0]
    if x is None:
        return
    if x.rank < 3:
        raise refused(node, f"batch norm requires X to have a rank >= 3.  x has rank {x.rank}")
    spatial = node.get("spatial", 1)
    expected = (x.shape[1],) if spatial else x.shape[1:]
    what = "dimension 1" if spatial else "all but the first dimension"
    for name, form in zip(("scale", "B", "mean", "var"), forms[1:5], strict=False):
        if form is not None and form.shape != expected:
            raise refused(
                node,
                f"expected shape of batch norm input tensor {name} ({shown(form.shape)}) to be {shown(expected)} to "
                f"match {what} of X ({shown(x.shape)})",
            )


def detached_or_training(nodes: Iterable[Node], differentiated: set[str]) -> None:
    """`UsageError` for a batch normalisation by given statistics that a gradient would have to go through."""
    for node in nodes:
        if node.op_type != "BatchNormalization" or node.get("training_mode") or len(_made(node)) > 1:
            continue
        if node.outputs[0] in differentiated and Sdk().has(node):
            raise UsageError(
                f"{op(node)} has one output: it normalises by given statistics, while the model is trained. To use "
                "the BatchNorm Op in inference mode during training, it has to be detached first.",
                hint="Give it 5 outputs (GraphTransformer.prepareNodesForTraining does it for a whole model), or put "
                "aiGraphcore.detach behind it.",
            )


def _made(node: Node) -> list[str]:
    return [name for name in node.outputs if name]


@_rule("AveragePool")
def _average_pool(node: Node, forms: Forms) -> None:
    if node.get("count_include_pad", 0):
        raise refused(node, "`count_include_pad` is not supported")


@_rule("MaxPool")
def _max_pool(node: Node, forms: Forms) -> None:
    if any(d != 1 for d in node.get("dilations") or ()):
        raise refused(node, "Dilations of value other than 1 are currently not supported.")


# --- recurrent networks ----------------------------------------------------------------------------------------------

_SUPPORTED = {"RNN": 1, "GRU": 2, "LSTM": 3}
"""Supported activations of a direction."""
_ONNX_DEFAULTS = {"RNN": ("Tanh", "Tanh")}
"""ONNX's default for both directions, if the model names none."""
_ACTIVATIONS = frozenset({"sigmoid", "relu", "tanh", "gelu", "softmax", "hardsigmoid"})


@_rule(*_SUPPORTED)
def _recurrent(node: Node, forms: Forms) -> None:
    for name in ("activation_alpha", "activation_beta"):
        if node.get(name):
            raise refused(node, f"Attribute `{name}' of {op(node)} is not supported")
    if "clip" in node.attributes:
        raise refused(node, f"Attribute `clip' of {op(node)} is not supported")
    if node.get("input_forget"):
        raise refused(node, f"Attribute `input_forget' of {op(node)} must be set to 0")
    if node.get("direction", "forward") != "forward":
        raise refused(node, f"{op(node)} only supports `forward' direction")
    stated = node.attributes.get("activations")
    if stated is not None and tuple(stated) != _ONNX_DEFAULTS.get(node.op_type):
        _activations(node, stated)
    if len(node.inputs) > 7 and node.inputs[7]:
        raise refused(node, "Popart does not support peephole connections")
    recurrence, size = forms[2] if len(forms) > 2 else None, node.get("hidden_size")
    if recurrence is not None and size is not None and size != recurrence.shape[-1]:
        raise refused(
            node,
            f"{node.op_type}Op hidden_size attribute, {size}, does not match calculated hidden size, "
            f"{recurrence.shape[-1]}.",
        )


def _activations(node: Node, stated: Sequence[str]) -> None:
    for name in stated:
        if name.lower() not in _ACTIVATIONS:
            raise refused(node, f"Activation type '{name}' is not supported for {op(node)}")
    count = _SUPPORTED[node.op_type]
    if len(stated) != count:
        plural = "activation" if count == 1 else "activations"
        raise refused(node, f"{op(node)} only supports {count} {plural}, {len(stated)} were specified")


def called(node: Node, inputs: int, outputs: int) -> None:
    """`UsageError` if a Call gives or takes another number of tensors than its subgraph, which has ``inputs`` and
    ``outputs``."""
    for what, here, there in (("inputs", len(node.inputs), inputs), ("outputs", len(node.outputs), outputs)):
        if here != there:
            raise refused(
                node,
                f"For CallOp '{node.name}', number of {what} ({here}) does not match that of the callee subgraph "
                f"({there})",
            )


NEEDED = {
    ("Slice", 1): "starts",
    ("Slice", 2): "ends",
    ("Slice", 3): "axes",
    ("Slice", 4): "steps",
    ("Reshape", 1): "shape",
    ("Expand", 1): "shape",
    ("TopK", 1): "K",
    ("Resize", 1): "scales",
    ("OneHot", 1): "depth",
    ("ConstantOfShape", 0): "input",
    ("Upsample", 1): "scales",
}
"""Inputs whose values decide shapes, by operator and index: their names in the SDK's messages."""


def unknown_value(node: Node, index: int) -> UsageError | None:
    """The SDK's error for an input whose value decides a shape and is not known, or None if it has no words for it."""
    tensor = node.inputs[index]
    if node.op_type == "Tile":
        return refused(node, f"Tile: the repeats tensor '{tensor}' must be of type Constant")
    name = NEEDED.get((node.op_type, index))
    if name is None:
        return None
    return refused(
        node,
        f"Need the value of the {identifier(node)} input '{name}' to determine the output shape, but was unable "
        f"because [Tensor::getDataViaGraphTraversal] Could not work out tensor data for {tensor}.",
    )


def reshaped(node: Node, shape: Sequence[int]) -> None:
    """`UsageError` if the target of a Reshape has more than one unknown dimension."""
    if list(shape).count(-1) > 1:
        raise refused(
            node,
            f"shape input to ReshapeOp can only use -1 to specify one unknown dimension, not {shown(shape)}",
        )


def tiled(node: Node, repeats: Sequence[int], rank: int) -> None:
    """`UsageError` if the repeats of a Tile do not fit."""
    if any(r < 0 for r in repeats):
        raise refused(
            node,
            f"Tile: repeats {shown(repeats)}. Values must be non-negative in each shape dimension",
        )
    if len(repeats) != rank:
        raise refused(
            node,
            f"Tile: the repeats tensor {shown(repeats)} should have one element for each dimension of the data tensor",
        )


def expanded(node: Node, x: Sequence[int], shape: Sequence[int]) -> None:
    """`UsageError` if a tensor does not broadcast with the target of an Expand."""
    if not shapes_broadcast(x, shape):
        raise refused(
            node,
            f"Expand: {shown(x)} and {shown(shape)} do not fit; corresponding dimensions must have the same value or "
            "one of them must be 1",
        )
