"""Inputs that PopART's own operators refuse, in its words: checked for the models of PopART sessions.

ONNX allows more than the SDK implements, and podrun computes it, for models of later opsets and through ONNX's backend
interface. But a program that runs here is meant to run on an IPU. So a session holds every operator that the SDK has
(ai.graphcore's, and ai.onnx's up to opset 11) to the SDK's limits before it is computed, and raises the SDK's messages:
programs match them. `Sdk` travels with a trace and also says where a meaning differs from ONNX's.

Rules of operators stand in `sdk_rules` (element by element, shapes, indices, losses) and `sdk_layers` (normalisation,
pooling, recurrent networks). Operators ask the functions below as they compute: shapes that values decide, and calls.

Source: PopART 3.4's operator classes and its integration tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.onnx_models.ops.registry import GRAPHCORE, ONNX
from podrun.onnx_models.ops.sdk_layers import detached_or_training
from podrun.onnx_models.ops.sdk_rules import RULES, Forms, identifier, refused, shapes_broadcast, shown
from podrun.runtime.graph import Node

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
        """`UsageError` in the SDK's words if its operator does not take these inputs and attributes."""
        rule = RULES.get((node.domain, node.op_type))
        if rule is not None:
            rule(node, forms)

    def check_training(self, nodes: Iterable[Node], differentiated: set[str]) -> None:
        """See `detached_or_training`, whose limits these are."""
        detached_or_training(nodes, differentiated, self.has)

    def unknown_value(self, node: Node, index: int) -> UsageError | None:
        """See the function `unknown_value`."""
        return unknown_value(node, index)


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
