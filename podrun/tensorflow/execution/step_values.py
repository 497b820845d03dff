"""What a step takes and gives as arrays of the host, and which steps the host computes itself in the SDK.

The SDK counts reports and events of programs that it compiled. A step that the host computes there is still a program
here, so that its numbers are an IPU's; only what tells of it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from podrun.runtime.graph import Node

MOVES = frozenset({"Const", "Result", "Store"})
"""Operations of a step that computes nothing."""
_ELEMENTWISE = frozenset({
    "Abs", "Add", "AddV2", "AssignAddVariableOp", "AssignSubVariableOp", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor", "Cast", "Ceil", "Cos", "Div", "Equal", "Exp",
    "Expm1", "Floor", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Invert", "IsFinite", "LeftShift", "Less",
    "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mul", "Neg",
    "NotEqual", "Pow", "RealDiv", "RightShift", "Round", "Rsqrt", "Select", "SelectV2", "Sign", "Sin", "Sqrt",
    "Square", "Sub", "Tanh",
})  # fmt: skip
"""Operations whose results are scalars where all inputs are."""


def needs_no_engine(nodes: Sequence[Node], values: Mapping[str, np.ndarray]) -> bool:
    """Whether the SDK runs a step without queues on the host: nothing is computed, or only scalars element by element.

    It compiles no engine then, so that there are no reports and no events. ``values``: what the step takes, by name.
    Source: Graphcore's tests of such graphs (scalar_elementwise_graph_test).
    """
    kinds = {node.op_type for node in nodes}
    if kinds <= MOVES:
        return True
    constants = (np.shape(node["value"]) for node in nodes if node.op_type == "Const")
    scalars = all(shape == () for shape in (*map(np.shape, values.values()), *constants))
    return scalars and kinds <= MOVES | _ELEMENTWISE


def rows_of_replicas(value: np.ndarray, replicas: int, shape: Sequence[int]) -> np.ndarray:
    """A result as an array with a row of ``shape`` for each replica of this process, also where it is empty."""
    return value.reshape(-1 if value.size else replicas, *shape)


def elements_of_replicas(value: np.ndarray, replicas: int, shape: Sequence[int]) -> np.ndarray:
    """What iterations gave to an outfeed, ``[iterations, replicas, *shape]``, also where it is empty."""
    rows = math.prod(value.shape[: max(value.ndim - len(shape), 0)])
    return value.reshape(-1 if value.size else max(rows // replicas, 1), replicas, *shape)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two contiguous arrays of one type and shape hold the same bits."""
    left, right = (array.reshape(-1).view(np.uint8) for array in (one, other))
    words = left.size // 8 * 8
    return np.array_equal(left[:words].view(np.uint64), right[:words].view(np.uint64)) and np.array_equal(
        left[words:], right[words:]
    )


_TAKEN_OVER = 64
"""TensorFlow uses an array of the host as it lies if its memory begins at a multiple of so many bytes, and may write to
it later; it copies any other.
"""


def not_taken_over(value: np.ndarray) -> np.ndarray:
    """``value``, or a copy where TensorFlow would write to its memory."""
    return np.array(value) if value.ctypes.data % _TAKEN_OVER == 0 else value
