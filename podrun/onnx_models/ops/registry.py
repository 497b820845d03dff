"""ONNX's table of operators: which JAX function computes which operator, from which opset version on.

    @operator("ai.onnx", "Relu", since=(6, 13))
    def relu(ctx, node, x):
        return jnp.maximum(x, 0)

``since`` names the versions (of the operator's own history in ONNX) that the function implements; a version whose
meaning differs has a function of its own. `lookup` picks as ONNX does: the greatest version not above the opset that
the model imports.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from podrun.core.errors import UnimplementedError
from podrun.runtime.environment import import_jax
from podrun.runtime.graph import Node
from podrun.runtime.operators import Operator, OperatorFunction, offer_operators

ONNX = "ai.onnx"
GRAPHCORE = "ai.graphcore"

FAMILIES = (
    "elementwise",
    "activations",
    "creation",
    "shaping",
    "matmul",
    "conv",
    "pooling",
    "reduction",
    "training",
    "indexing",
    "normalization",
    "control",
    "sequences",
    "recurrent_layers",
    "quantization",
    "resize",
    "graphcore",
    "serving",
    "classical",
)
"""Modules of this package that register operators."""

F = TypeVar("F", bound=OperatorFunction)

RANDOM = frozenset(
    {
        *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
        *("Bernoulli", "Multinomial", "Dropout", "ShapedDropout"),
    }
)
"""Operators that may draw random numbers."""


_table: dict[tuple[str, str], dict[int, Operator]] = {}


def operator(
    domain: str, name: str, since: Sequence[int] = (1,), *, folds: bool = False, fixed: bool = True
) -> Callable[[F], F]:
    """Register the decorated function as operator ``name`` of ``domain`` for the versions in ``since``."""

    def register(function: F) -> F:
        versions = _table.setdefault((domain, name), {})
        for version in since:
            versions[version] = Operator(domain, name, version, function, folds, name in RANDOM, fixed)
        return function

    return register


@functools.cache
def load_onnx_operators() -> None:
    """Import every family, once."""
    import_jax()
    for family in FAMILIES:
        importlib.import_module(f"podrun.onnx_models.ops.{family}")


def operators() -> tuple[Operator, ...]:
    """Every registered operator and version, sorted by domain, name and version."""
    load_onnx_operators()
    return tuple(versions[v] for _, versions in sorted(_table.items()) for v in sorted(versions))


def find_onnx_operator(domain: str, name: str, opset: int) -> Operator | None:
    """The operator for a model that imports ``opset``, or None if it does not exist."""
    load_onnx_operators()
    versions = _table.get((domain or ONNX, name), {})
    usable = [v for v in versions if v <= opset]
    return versions[max(usable)] if usable else None


def lookup(node: Node) -> Operator:
    """The operator of a node. Raises `UnimplementedError` naming operator, version and place if it does not exist."""
    known = find_onnx_operator(node.domain, node.op_type, node.opset)
    if known is None and (node.domain or ONNX) not in (ONNX, "ai.onnx.ml"):
        raise UnimplementedError(
            f"operator {node.domain}.{node.op_type} is none of PopART's, and none is registered: {node.describe()}; "
            "what is compiled for the IPU cannot run here",
            hint=f'Register what it computes: podrun.popart.register_op("{node.domain}", "{node.op_type}", '
            f"{node.opset}, function); in a file of its own if the program is to stay as it is: "
            "PODRUN_CUSTOM_OPS=ops.py podrun ...",
        )
    if known is None:
        raise UnimplementedError(
            f"operator {node.domain}.{node.op_type} of opset {node.opset} is not implemented: {node.describe()}",
            hint="podrun help onnx lists the operators; register your own with podrun.popart.register_op",
        )
    return known


class OnnxOperators:
    """The table as the runtime asks it: an `podrun.runtime.operators.OperatorTable`."""

    def lookup(self, node: Node) -> Operator:
        """See the function `lookup`."""
        return lookup(node)


OPERATORS = OnnxOperators()
offer_operators(OPERATORS)
