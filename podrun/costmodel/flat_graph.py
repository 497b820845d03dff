"""A traced function as a flat list of equations on numbered values: what every planner of the cost model reads.

Calls are inlined; loops keep their body as a flat list of its own. Values are numbered; each has a `FlatTensor` (shape
and dtype name). `podrun.costmodel.flatten` makes such lists from JAX's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_WIDTHS = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
}


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """Shape and dtype of a value. 64-bit types count as 32-bit: the IPU has none."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        width = _WIDTHS.get(self.dtype)
        if width is None:
            width = 1 if self.dtype.startswith("float8") else 4
        return self.size * width


@dataclass(frozen=True, slots=True)
class Equation:
    """One primitive on numbered values. ``inputs`` holds None for literals. ``bodies`` of loops and
    branches."""

    primitive: str
    params: Mapping[str, Any]
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    operands: tuple[FlatTensor, ...]
    results: tuple[FlatTensor, ...]
    scope: str
    bodies: tuple[FlatJaxpr, ...] = ()


@dataclass(slots=True)
class FlatJaxpr:
    """Equations in order; ``arguments`` and ``results`` are value numbers, ``tensors`` says what each is."""

    arguments: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    """The results in the order of the jaxpr's, None for literals."""
    equations: list[Equation] = field(default_factory=list)
    tensors: dict[int, FlatTensor] = field(default_factory=dict)


def needed(equations: Sequence[Equation], results: Sequence[int]) -> list[Equation]:
    """The equations that some result needs: a compiler drops the others, such as derivatives that nobody reads.
    What has no result of its own is there for its effect, and stays.
    """
    wanted, kept = set(results), list[Equation]()
    for equation in reversed(equations):
        if not equation.outputs or not wanted.isdisjoint(equation.outputs):
            kept.append(equation)
            wanted.update(n for n in equation.inputs if n is not None)
    return kept[::-1]
