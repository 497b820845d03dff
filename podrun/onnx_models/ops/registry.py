"""The operator registry: which JAX function computes which operator, from which opset version on.

    @operator("ai.onnx", "Relu", since=(6, 13))
    def relu(ctx, node, x):
        return jnp.maximum(x, 0)

``since`` names the versions (of the operator's own history in ONNX) that the function implements; a
version whose
meaning differs has a function of its own. `lookup` picks as ONNX does: the greatest version not above the
opset that the model imports.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from podrun.core.errors import UnimplementedError
from podrun.session.environment import import_jax
from podrun.session.names import KIND

if TYPE_CHECKING:
    from podrun.onnx_models.ops.sdk import Sdk

ONNX = "ai.onnx"
GRAPHCORE = "ai.graphcore"
GRAPHCORE_VERSION = 1

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
    "recurrent_layers",
    "quantization",
    "resize",
    "graphcore",
    "classical",
)
"""Modules of this package that register operators."""

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of a graph. ``attributes`` are Python values (subgraphs:
    `podrun.onnx_models.lowering.graph.OperatorGraph`).

    Attributes that the model leaves out have their default from the ONNX schema; those without one are
    absent. ``opset`` is the version of ``domain`` that the model imports. An empty name among ``inputs`` or
    ``outputs`` stands for an optional one that is left out.
    """

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 1
    position: str = ""
    """The node's place, for messages: ``node 3 of 17``."""

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute's value, or ``default``."""
        return self.attributes.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    @property
    def kind(self) -> str:
        """The ONNX operator as which planners treat the node: its own, unless the node is of another domain."""
        return str(self.attributes.get(KIND, self.op_type))

    @property
    def label(self) -> str:
        """The node's name, or its first output's."""
        return self.name or next((o for o in self.outputs if o), self.op_type)

    def describe(self) -> str:
        """The node for messages: its operator, name, place and outputs."""
        name = f" '{self.name}'" if self.name else ""
        where = f" ({self.position}" if self.position else " ("
        makes = ", ".join(repr(o) for o in self.outputs if o)
        return f"{self.domain}.{self.op_type}{name}{where}{', ' if self.position else ''}making {makes})"


class Context(Protocol):
    """The services that an operator may use while it is traced."""

    @property
    def training(self) -> bool:
        """True iff the graph is differentiated: dropout drops, and so on."""

    @property
    def x64(self) -> bool:
        """True iff 64-bit types are computed as such (else integers are narrowed as on the device)."""

    @property
    def grouped(self) -> bool:
        """True iff a convolution in groups is traced as one, for a library that computes it."""

    @property
    def xp(self) -> Any:
        """``numpy`` if the operator folds and all inputs are NumPy arrays, else ``jax.numpy``."""

    @property
    def replicas(self) -> int:
        """Replicas of the whole program, which collectives in the model may span."""

    @property
    def sdk(self) -> Sdk | None:
        """Set iff the operator has the SDK's meaning where that differs from ONNX's (in a PopART session)."""

    def key(self) -> Any:
        """A JAX random key of this node (and of this loop iteration, replica and micro-batch)."""

    def constant(self, index: int) -> np.ndarray:
        """The value of input ``index``, which must be known while tracing; refused by name otherwise."""

    def known(self, index: int) -> np.ndarray | None:
        """The value of input ``index`` if it happens to be known while tracing without fixing anything,
        else None.
        """

    def run(self, graph: Any, inputs: Sequence[Any], iteration: Any = None) -> tuple[Any, ...]:
        """Run a subgraph attribute on arrays; it also sees the tensors around the node. Returns its
        outputs.
        """

    def state_update(self, index: int, output: int) -> None:
        """Say that input ``index``, if it is a parameter, is replaced by ``output`` after each
        micro-batch.
        """

    def static(self, value: Any) -> np.ndarray | None:
        """The NumPy value of an array that a subgraph returned, if known while tracing."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A registered function. ``folds``: also computes on NumPy arrays (through ``ctx.xp``), used for
    shapes.
    """

    domain: str
    name: str
    since: int
    function: Function
    folds: bool


_table: dict[tuple[str, str], dict[int, Operator]] = {}
_domains: dict[str, Function] = {}


def domain(name: str, function: Function) -> None:
    """Let one function compute every operator of a domain: ``function(ctx, node, *inputs)``."""
    _domains[name] = function


def operator(domain: str, name: str, since: Sequence[int] = (1,), *, folds: bool = False) -> Callable[[F], F]:
    """Register the decorated function as operator ``name`` of ``domain`` for the versions in ``since``."""

    def register(function: F) -> F:
        versions = _table.setdefault((domain, name), {})
        for version in since:
            versions[version] = Operator(domain, name, version, function, folds)
        return function

    return register


@functools.cache
def load() -> None:
    """Import every family, once."""
    import_jax()
    for family in FAMILIES:
        importlib.import_module(f"podrun.onnx_models.ops.{family}")


def operators() -> tuple[Operator, ...]:
    """Every registered operator and version, sorted by domain, name and version."""
    load()
    return tuple(versions[v] for _, versions in sorted(_table.items()) for v in sorted(versions))


def find(domain: str, name: str, opset: int) -> Operator | None:
    """The operator for a model that imports ``opset``, or None if it does not exist."""
    load()
    if domain in _domains:
        return Operator(domain, name, 1, _domains[domain], folds=False)
    versions = _table.get((domain or ONNX, name), {})
    usable = [v for v in versions if v <= opset]
    return versions[max(usable)] if usable else None


def lookup(node: Node) -> Operator:
    """The operator of a node. Raises `UnimplementedError` naming operator, version and place if it does not exist."""
    found = find(node.domain, node.op_type, node.opset)
    if found is None and (node.domain or ONNX) not in (ONNX, "ai.onnx.ml"):
        raise UnimplementedError(
            f"operator {node.domain}.{node.op_type} is none of PopART's, and none is registered: {node.describe()}; "
            "what is compiled for the IPU cannot run here",
            hint=f'Register what it computes: podrun.popart.register_op("{node.domain}", "{node.op_type}", '
            f"{node.opset}, function); in a file of its own if the program is to stay as it is: "
            "PODRUN_CUSTOM_OPS=ops.py podrun ...",
        )
    if found is None:
        raise UnimplementedError(
            f"operator {node.domain}.{node.op_type} of opset {node.opset} is not implemented: {node.describe()}",
            hint="docs/onnx.md lists the operators; register your own with podrun.popart.register_op",
        )
    return found
