"""Equations, the input of every planner of the cost model, and plans, their output.

A traced function is a flat list of equations on numbered values (`FlatJaxpr`): calls are inlined, and loops keep their
body as a flat list of its own. Each value has a `FlatTensor` (shape and dtype name). `podrun.costmodel.flatten` makes
such lists from JAX's.

A `Plan` has cycles by cause and bytes by tile. Bytes of code (vertex code, vertex state, exchange code, control code)
follow from how many vertices, exchange fragments and compute sets the plans hold; the constants are few, and each says
where it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.exchange import launch_cycles, sync_cycles
from podrun.costmodel.target import Chip


@dataclass(frozen=True, slots=True)
class Plan:
    """The cost of one equation on the tiles of one IPU.

    ``compute``, ``exchange`` and ``rearrange`` are cycles of the slowest tile. ``compute_sets`` and
    ``exchanges`` count BSP steps, each with its barrier. ``temporary_bytes``: on the fullest tile while it
    runs. ``vertices`` and ``fragments`` (per tile) size vertex state and exchange code. ``share``: part of the
    result that the fullest tile holds (0: spread evenly). ``bound``: no planner knew the equation.
    """

    family: str
    compute: float = 0.0
    exchange: float = 0.0
    rearrange: float = 0.0
    compute_sets: int = 0
    exchanges: int = 0
    flops: float = 0.0
    temporary_bytes: float = 0.0
    tiles: int = 0
    vertices: float = 0.0
    fragments: float = 0.0
    detail: str = ""
    share: float = 0.0
    bound: bool = False

    def overhead(self, chip: Chip) -> tuple[float, float]:
        """Cycles of launches and of barriers: one barrier before each exchange, compute sets without one fuse."""
        return self.compute_sets * launch_cycles(chip), max(self.exchanges, 0) * sync_cycles(chip)

    def cycles(self, chip: Chip) -> float:
        """All cycles of one execution."""
        return self.compute + self.exchange + self.rearrange + sum(self.overhead(chip))

    def repeated(self, times: float) -> Plan:
        """The plan of ``times`` executions in a row: cycles and steps scale, memory and code do not."""
        return replace(
            self,
            compute=self.compute * times,
            exchange=self.exchange * times,
            rearrange=self.rearrange * times,
            compute_sets=round(self.compute_sets * times),
            exchanges=round(self.exchanges * times),
            flops=self.flops * times,
        )


RUNTIME_CODE = 2048
"""Bytes of runtime and supervisor code on each tile. Assumed: part of the 8 KiB seen on GC2 in 2018."""
FAMILY_CODE = 1024
"""Bytes of vertex code for each family of operations in use. Derived: 5 to 6 KB per tile for BERT's set."""
VERTEX_STATE = 28
"""Bytes of state, edge pointers and run instruction per vertex. Derived: memory reports of BERT's layers
(`benchmarks/data/measurements.json`)."""
FRAGMENT_CODE = 8
"""Bytes of exchange code per fragment. Derived: two timed control words."""
CONTROL_CODE = 15
"""Bytes of control code per compute set or exchange on each tile. Derived: 0.9 KB per BERT layer."""
REPEATED = 0.33
"""Share of its exchange code that an equation needs again when one just like it came before. Derived:
BERT's first layer holds 3.7 MB, each later one 1.0 MB."""


CALL_CODE = 2 * CONTROL_CODE
"""Bytes of control code on each tile of a call of outlined code: a copy of what it reads, and the jump. Assumed."""


def code_bytes(chip: Chip, plans: Sequence[Plan], calls: int = 0) -> dict[str, float]:
    """Bytes on the whole chip by category, of a program that holds ``plans`` once each and calls what it holds
    ``calls`` times more.
    """
    families = {plan.family for plan in plans if plan.family not in ("view", "loop")}
    state = sum(plan.vertices * plan.tiles for plan in plans) * VERTEX_STATE
    seen: set[tuple[str, str, int]] = set()
    fragments = 0.0
    for plan in plans:
        key = (plan.family, plan.detail, plan.tiles)
        fragments += plan.fragments * plan.tiles * (REPEATED if key in seen else 1.0)
        seen.add(key)
    phases = sum(1 for plan in plans if plan.exchanges)
    sets = sum(1 for plan in plans if plan.compute_sets)
    return {
        "vertex_code": vertex_code_bytes(chip, families),
        "vertex_state": state,
        "exchange_code": fragments * FRAGMENT_CODE,
        "control_code": float(chip.tiles * (CONTROL_CODE * (sets + phases) + CALL_CODE * calls)),
    }


def vertex_code_bytes(chip: Chip, families: Collection[str]) -> float:
    """Bytes on the chip of the runtime's code and that of the vertices of some families."""
    return float(chip.tiles * (RUNTIME_CODE + FAMILY_CODE * len(families)))


def merged_code(chip: Chip, reports: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Bytes on the chip by category, of all the programs of one IPU together: they share vertex code."""
    families: set[str] = set()
    sizes: dict[str, float] = {}
    for report in reports:
        families |= set(report["by_operator"])
        for category, size in report["memory"]["code"].items():
            sizes[category] = sizes.get(category, 0.0) + size
    return sizes | {"vertex_code": vertex_code_bytes(chip, families)} if sizes else {}


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
    branches. ``outlined``: it runs the code of an equation just like it (`podrun.costmodel.recompute`)."""

    primitive: str
    params: Mapping[str, Any]
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    operands: tuple[FlatTensor, ...]
    results: tuple[FlatTensor, ...]
    scope: str
    bodies: tuple[FlatJaxpr, ...] = ()
    outlined: bool = False


@dataclass(slots=True)
class FlatJaxpr:
    """Equations in order; ``arguments`` and ``results`` are value numbers, ``tensors`` describes each value."""

    arguments: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    """The results in the order of the jaxpr's, None for literals."""
    equations: list[Equation] = field(default_factory=list)
    tensors: dict[int, FlatTensor] = field(default_factory=dict)


def needed(equations: Sequence[Equation], results: Sequence[int]) -> list[Equation]:
    """The equations that some result needs: a compiler drops the others, such as derivatives that nobody reads.

    An equation without results exists for its effect, and stays.
    """
    wanted, kept = set(results), list[Equation]()
    for equation in reversed(equations):
        if not equation.outputs or not wanted.isdisjoint(equation.outputs):
            kept.append(equation)
            wanted.update(n for n in equation.inputs if n is not None)
    return kept[::-1]
