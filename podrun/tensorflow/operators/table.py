"""The table of operations: a function for each type, and the attributes that it knows.

An operation with an attribute that its function does not know is refused: an attribute that is passed over gives wrong
numbers. Functions are registered by the modules of this room (`computes`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from podrun.core.errors import UnimplementedError
from podrun.runtime.graph import Node
from podrun.runtime.operators import Operator, OperatorFunction
from podrun.tensorflow.graph.builder import DOMAIN

FAMILIES = (
    "pointwise",
    "forming",
    "picking",
    "contractions",
    "images",
    "updates",
    "branches_and_loops",
    "random",
    "ipu",
)


@dataclass(frozen=True, slots=True)
class Handler:
    """A function, the attributes that it reads, and attributes with the only values that it takes."""

    function: OperatorFunction
    attributes: frozenset[str]
    folds: bool
    random: bool


HANDLERS: dict[str, Handler] = {}


def computes(
    *types: str, attributes: str = "", folds: bool = False, random: bool = False
) -> Callable[[OperatorFunction], OperatorFunction]:
    """Register a function for operations of these types. ``attributes``: names that it knows, with spaces between."""

    def register(function: OperatorFunction) -> OperatorFunction:
        handler = Handler(function, frozenset(attributes.split()), folds, random)
        HANDLERS.update(dict.fromkeys(types, handler))
        return function

    return register


class TensorFlowOperators:
    """`podrun.runtime.operators.OperatorTable` of operations of TensorFlow."""

    def __init__(self) -> None:
        for family in FAMILIES:
            importlib.import_module(f"podrun.tensorflow.operators.{family}")

    def lookup(self, node: Node) -> Operator:
        """The function of a node. `UnimplementedError` for an unknown type, or an attribute that it does not know."""
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
        return Operator(DOMAIN, node.op_type, 1, handler.function, folds=handler.folds, random=handler.random)
