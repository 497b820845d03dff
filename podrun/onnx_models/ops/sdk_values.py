"""What PopART's own operators refuse, in its words, of inputs whose values decide shapes (see `sdk`)."""

from __future__ import annotations

from collections.abc import Sequence

from podrun.core.errors import UsageError
from podrun.onnx_models.ops.registry import Node
from podrun.onnx_models.ops.sdk import fits, identifier, refused, shown

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
    if not fits(x, shape):
        raise refused(
            node,
            f"Expand: {shown(x)} and {shown(shape)} do not fit; corresponding dimensions must have the same value or "
            "one of them must be 1",
        )
