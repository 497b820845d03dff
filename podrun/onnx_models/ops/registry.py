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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from podrun.core.errors import UnimplementedError
from podrun.runtime.environment import import_jax
from podrun.runtime.graph import Node
from podrun.runtime.kept_traces import noted_names
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
_of_programs: set[tuple[str, str]] = set()
"""Operators whose functions are those of a user's program."""


def operator(
    domain: str, name: str, since: Sequence[int] = (1,), *, folds: bool = False, fixed: bool = True
) -> Callable[[F], F]:
    """Register the decorated function as operator ``name`` of ``domain`` for the versions in ``since``."""

    def register(function: F) -> F:
        versions = _table.setdefault((domain, name), {})
        if not fixed:
            _of_programs.add((domain, name))
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


def has_onnx_operator(domain: str, name: str, opset: int) -> bool:
    """Whether `find_onnx_operator` has the operator. What podrun itself has was noted by an earlier process, so that
    nothing, JAX neither, is imported to ask.
    """
    domain = domain or ONNX
    if load_onnx_operators.cache_info().currsize or (domain, name) in _of_programs:
        return find_onnx_operator(domain, name, opset) is not None
    return any(since <= opset for since in _noted_operators().get(f"{domain} {name}", ()))


@functools.cache
def _noted_operators() -> Mapping[str, Sequence[int]]:
    """The versions of podrun's own operators, by domain and name."""

    def answer() -> dict[str, list[int]]:
        own = [operator for operator in operators() if (operator.domain, operator.name) not in _of_programs]
        names = dict.fromkeys(f"{item.domain} {item.name}" for item in own)
        return {name: [o.since for o in own if f"{o.domain} {o.name}" == name] for name in names}

    return noted_names("operators of ONNX", answer, int)


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

    def meaning(self, nodes: Iterable[Node]) -> str | None:
        """See `podrun.runtime.operators.OperatorTable`: names and versions say all, but for a program's operators."""
        own = _of_programs and any((node.domain or ONNX, node.op_type) in _of_programs for node in nodes)
        return None if own else "onnx"


OPERATORS = OnnxOperators()
offer_operators(OPERATORS)
