"""A captured forward pass as data: operators in order, the values between them, and what is updated.

Operators are functional: a node never changes a value. Nothing here needs torch, so a graph can be lowered,
compared and saved without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class GraphValue:
    """A tensor of the graph. ``dtype`` is the type that the IPU computes: int32 for torch.int64, float32 for
    torch.float64."""

    number: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class DTypeArgument:
    """A ``torch.dtype`` that an operator is called with, by the name of the type that the IPU computes."""

    name: str


Argument = Any
"""None, bool, int, float, str, `GraphValue`, `DTypeArgument`, `Subgraph`, or a tuple of arguments."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in the user's program an operator stands.

    ``module``: dotted name of the innermost module (``""``: the whole model). ``line``: ``file:line`` of the call.
    ``placement``: IPU, stage and phase, as the annotations give them (`podrun.poptorch.annotations`).
    """

    module: str = ""
    line: str = ""
    placement: Any = None


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operator.

    ``operator``: ATen name with overload (``aten.add.Tensor``). ``arguments`` and ``keywords``: as the dispatcher
    gave them, tensors as `GraphValue`. ``item``: which element of the operator's list of results this node gives
    (a view of ``split``). ``writes``: the node puts its second argument where the view ``operator`` of its first
    argument lies, and gives the whole. ``differentiable``: False for what runs under ``no_grad``.
    """

    operator: str
    arguments: tuple[Argument, ...]
    keywords: Mapping[str, Argument]
    results: tuple[GraphValue, ...]
    origin: Origin = field(default_factory=Origin)
    item: int | None = None
    writes: bool = False
    differentiable: bool = True

    def reads(self) -> Iterator[GraphValue]:
        """The values that the node takes, in order, repeated as often as they are taken."""
        yield from values_in((self.arguments, tuple(self.keywords.values())))


@dataclass(frozen=True, slots=True)
class Subgraph:
    """The body of a loop or of a branch: values by numbers of their own, and ``outer`` ones of the graph around it."""

    nodes: tuple[GraphNode, ...]
    inputs: tuple[GraphValue, ...]
    outer: tuple[GraphValue, ...]
    outputs: tuple[GraphValue, ...]


def values_in(argument: Argument) -> Iterator[GraphValue]:
    """The values inside a nested argument, in order."""
    if isinstance(argument, GraphValue):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for each in argument:
            yield from values_in(each)


@dataclass(slots=True)
class CapturedGraph:
    """A forward pass.

    ``inputs``: value by position of the tensor among the flattened arguments. ``parameters``: value by the name of a
    parameter or buffer. ``constants``: values whose data are known, by number. ``outputs``: leaves of what forward
    returned: a `GraphValue`, or whatever else it was. ``updates``: what replaces a parameter or buffer that forward
    writes; ``input_updates``: the same for an argument, by position.
    """

    nodes: list[GraphNode] = field(default_factory=list)
    inputs: dict[int, GraphValue] = field(default_factory=dict)
    parameters: dict[str, GraphValue] = field(default_factory=dict)
    constants: dict[int, tuple[GraphValue, np.ndarray]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    updates: dict[str, GraphValue] = field(default_factory=dict)
    input_updates: dict[int, GraphValue] = field(default_factory=dict)

    def without_unused(self, wanted: list[GraphValue]) -> list[GraphNode]:
        """The nodes that ``wanted`` values need, in order."""
        needed = {value.number for value in wanted}
        kept = []
        for node in reversed(self.nodes):
            if any(result.number in needed for result in node.results):
                kept.append(node)
                needed.update(value.number for value in node.reads())
        return kept[::-1]
