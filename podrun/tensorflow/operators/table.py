"""The table of operations: a function for each type, and the attributes that it knows.

An operation with an attribute that its function does not know is refused: an attribute that is passed over gives wrong
numbers. Functions are registered by the modules of this room (`computes`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from podrun.core.errors import UnimplementedError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context, Operator, OperatorFunction
from podrun.tensorflow.graph.builder import DOMAIN
from podrun.tensorflow.operators.overflow import HalfPrecision

Array = Any
"""An array of JAX, or of NumPy where an operation folds: no type of either library has what both offer."""
FAMILIES = (
    "pointwise",
    "forming",
    "picking",
    "contractions",
    "backward",
    "images",
    "updates",
    "branches_and_loops",
    "random",
    "ipu",
    "recurrent",
    "linear_algebra",
    "segments",
    "special_functions",
)


@dataclass(frozen=True, slots=True)
class Handler:
    """A function, the attributes that it reads, and attributes with the only values that it takes."""

    function: OperatorFunction
    attributes: frozenset[str]
    folds: bool
    random: bool


HANDLERS: dict[str, Handler] = {}
USER_OPERATOR = "Podrun:user_op"
"""Operation that calls a function of the user's program."""


def computes(
    *types: str, attributes: str = "", folds: bool = False, random: bool = False
) -> Callable[[OperatorFunction], OperatorFunction]:
    """Register a function for operations of these types. ``attributes``: names that it knows, with spaces between."""

    def register(function: OperatorFunction) -> OperatorFunction:
        handler = Handler(function, frozenset(attributes.split()), folds, random)
        HANDLERS.update(dict.fromkeys(types, handler))
        return function

    return register


EXACT = frozenset({
    "Const", "Result", "Store", "Reshape", "Transpose", "ConcatV2", "Pack", "Unpack", "GatherV2", "Slice",
    "StridedSlice", "Squeeze", "ExpandDims", "Relu", "MaxPool", "Branch", "Loop",
    "CustomGradient", "ReadVariableOp", "Bitcast",
})  # fmt: skip
"""Operations that make no value greater than they are given, or whose parts are looked at one by one."""


_FOR_GRADIENTS = ContextVar("_FOR_GRADIENTS", default=False)
"""Whether this thread traces the forward pass of a gradient."""


@contextlib.contextmanager
def tracing_gradients() -> Iterator[None]:
    """While the operations are traced that JAX differentiates."""
    token = _FOR_GRADIENTS.set(True)
    try:
        yield
    finally:
        _FOR_GRADIENTS.reset(token)


@functools.cache
def load_table() -> None:
    """Let `HANDLERS` be complete."""
    for family in FAMILIES:
        importlib.import_module(f"podrun.tensorflow.operators.{family}")


class TensorFlowOperators:
    """`podrun.runtime.operators.OperatorTable` of operations of TensorFlow."""

    def __init__(self, nan_on_overflow: bool = False) -> None:
        self.halves = HalfPrecision(nan_on_overflow)

    def meaning(self, nodes: Iterable[Node]) -> str | None:
        """See `podrun.runtime.operators.OperatorTable`."""
        return None if any(node.op_type == USER_OPERATOR for node in nodes) else repr(self.halves)

    def lookup(self, node: Node) -> Operator:
        """The function of a node. `UnimplementedError` for an unknown type, or an attribute that it does not know."""
        load_table()
        handler = HANDLERS.get(node.op_type)
        if handler is None:
            raise UnimplementedError(
                f"{node.describe()}: podrun has no TensorFlow operation {node.op_type!r}.",
                hint="Compute it on the host, outside of the program on the IPU, or write it with other operations.",
            )
        unknown = sorted(node.attributes.keys() - handler.attributes)
        if unknown:
            raise UnimplementedError(
                f"{node.describe()}: podrun does not know the attribute {unknown[0]!r} of {node.op_type}."
            )
        fixed = node.op_type != USER_OPERATOR
        function, halves = handler.function, self.halves
        if node.op_type in EXACT:
            return Operator(DOMAIN, node.op_type, 1, function, handler.folds, handler.random, fixed)

        def run(ctx: Context, item: Node, *inputs: Array) -> Array | tuple[Array, ...]:
            if not _FOR_GRADIENTS.get():
                return halves.results(item, inputs, function(ctx, item, *inputs))
            inputs = tuple(map(halves.passed, inputs))
            results = halves.results(item, inputs, function(ctx, item, *inputs), differentiated=True)
            if isinstance(results, tuple):
                return tuple(map(halves.passed, results))
            return halves.passed(results)

        return Operator(DOMAIN, node.op_type, 1, run, handler.folds, handler.random, fixed)
