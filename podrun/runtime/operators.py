"""What an operator is to the runtime: a JAX function, and what it may ask for while it is traced.

A front end has an `OperatorTable`, which finds the function of a node. Functions are called as
``function(ctx, node, *inputs)`` with a `Context`; a `Dialect` holds operators to what a front end's SDK accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from podrun.core.errors import PodrunError, UnimplementedError
from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    import jax

    from podrun.runtime.graph import Node, OperatorGraph
    from podrun.runtime.traced_tensor import TracedTensor

OperatorFunction = Callable[..., Any]
"""``function(ctx, node, *inputs) -> array or tuple of arrays``, traceable by JAX."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A function of a table. ``since``: the version of the domain from which on it has this meaning. ``folds``: also
    computes on NumPy arrays (through ``ctx.xp``), used for shapes. ``random``: may draw random numbers.
    ``fixed``: False for a function of the user's program, whose meaning its name does not determine.
    """

    domain: str
    name: str
    since: int
    function: OperatorFunction
    folds: bool = False
    random: bool = False
    fixed: bool = True


class OperatorTable(Protocol):
    """The operators of a front end."""

    def lookup(self, node: Node) -> Operator:
        """The operator of a node. Raises `UnimplementedError`, which names operator and place, if there is none."""

    def meaning(self, nodes: Iterable[Node]) -> str | None:
        """What decides, beside the nodes and podrun's version, what the table's operators compute; None if one of them
        is a function of the user's program. Reads no operator, so that JAX need not be imported to ask.
        """


_offered: list[OperatorTable] = []


def offer_operators(table: OperatorTable) -> None:
    """Let every front end run the operators of a table by domain and name: ``poptorch.custom_op`` takes what programs
    register with PopART. A later offer replaces an earlier one.
    """
    _offered[:] = [table]


def offered_operator(node: Node) -> Operator:
    """The operator of a node in the table that is on offer. UnimplementedError if it lacks the operator, or if there is
    no table.
    """
    if not _offered:
        raise UnimplementedError(
            f"operator {node.domain}.{node.op_type} is not registered",
            hint=f'Register what it computes: podrun.popart.register_op("{node.domain}", "{node.op_type}", '
            f"{node.opset}, function).",
        )
    return _offered[0].lookup(node)


@dataclass(frozen=True, slots=True)
class Form:
    """Type and shape of an input."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, spec: TensorSpec) -> Form:
        """Type and shape of a tensor."""
        return cls(numpy_dtype(spec.dtype), spec.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def kind(self) -> str:
        """The type's name in messages: FLOAT for float32, FLOAT16, INT32."""
        return {"float32": "FLOAT"}.get(self.dtype.name, self.dtype.name.upper())

    @property
    def described(self) -> str:
        """Type and shape in messages about a program's data: ``TensorInfo(FLOAT, [2, 3])``."""
        return f"TensorInfo({self.kind}, {list(self.shape)})"

    def __str__(self) -> str:
        return f"{self.kind:<8}[{' '.join(str(d) for d in self.shape)}]"


class Dialect(Protocol):
    """What a front end's SDK makes of operators where that is narrower than, or differs from, their definition."""

    def has(self, node: Node) -> bool:
        """True iff the operator is one of the SDK's, and so bound to its rules."""

    def check(self, node: Node, forms: Sequence[Form | None]) -> None:
        """Raise `UsageError`, in the SDK's words, if the operator does not take these inputs and attributes."""

    def check_training(self, nodes: Iterable[Node], differentiated: set[str]) -> None:
        """Raise `UsageError` for operators that cannot be part of a training graph."""

    def unknown_value(self, node: Node, index: int) -> PodrunError | None:
        """The SDK's error for an input whose value is not known while compiling; None for the general one."""


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
    def shapes_only(self) -> bool:
        """True iff only types and shapes of results are read from this trace, and what operators ask for meanwhile."""

    @property
    def xp(self) -> Any:
        """``numpy`` if the operator folds and all inputs are NumPy arrays, else ``jax.numpy``."""

    @property
    def replicas(self) -> int:
        """Replicas of the whole program, which collectives in the model may span."""

    @property
    def sdk(self) -> Any:
        """The `Dialect` to which the operator is held; None where it has its general meaning."""

    @property
    def environment(self) -> Mapping[str, TracedTensor]:
        """The tensors around the node by name, those that subgraphs capture among them."""

    def key(self) -> Any:
        """A JAX random key of this node (and of this loop iteration, replica and micro-batch)."""

    def constant(self, index: int) -> np.ndarray:
        """The value of input ``index``, which must be known while tracing; refused by name otherwise."""

    def known(self, index: int) -> np.ndarray | None:
        """The value of input ``index`` if it happens to be known while tracing without fixing anything, else None."""

    def run(
        self,
        graph: OperatorGraph,
        inputs: Sequence[Any],
        iteration: int | jax.Array | None = None,
        *,
        by_name: bool = False,
    ) -> tuple[Any, ...]:
        """Run a subgraph attribute on arrays; it also sees the tensors around the node. Returns its outputs.
        ``by_name``: copies of a node in several such subgraphs draw the same random numbers.
        """

    def state_update(self, index: int, output: int) -> None:
        """Say that input ``index``, if it is a parameter, is replaced by ``output`` after each micro-batch."""

    def static(self, value: object) -> np.ndarray | None:
        """The NumPy value of an array that a subgraph returned, if known while tracing."""
