"""``report.execution``: the modelled run of one batch, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podrun.report.library.partial import BY_TILE, Partial, refusing
from podrun.report.library.programs import Program


@dataclass(frozen=True, slots=True)
class Bounds:
    """Over an IPU's tiles, which the model does not tell apart in time: both the same."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class CycleInterval:
    """From when to when, in cycles since the batch began."""

    cyclesFrom: Bounds
    cyclesTo: Bounds


@dataclass(frozen=True, slots=True)
class StepOnIpu(Partial):
    """A step on one IPU: ``cycles`` modelled; 0 where the IPU has no part in it."""

    refused = refusing(
        ("tileBalance activeTileBalance", BY_TILE),
        (
            "dataIn dataOut",
            "an exchange's bytes are in its cycles; profile.stages[i].sent_bytes are those between IPUs",
        ),
    )
    cycles: int
    start: int

    @property
    def activeCycles(self) -> CycleInterval:
        """When its work begins and ends."""
        end = self.start + self.cycles
        return CycleInterval(Bounds(self.start, self.start), Bounds(end, end))

    @property
    def allCycles(self) -> CycleInterval:
        """The same: waiting is no part of a step here."""
        return self.activeCycles


@dataclass(frozen=True, slots=True)
class ExecutionStep:
    """One BSP phase of a micro-batch, on one of ``count`` IPUs of a replica; ``start`` in cycles since the batch's."""

    program: Program
    ipu: int
    count: int
    start: int
    cycles: int

    @property
    def ipus(self) -> tuple[StepOnIpu, ...]:
        """All IPUs in order."""
        return tuple(StepOnIpu(self.cycles * (i == self.ipu), self.start) for i in range(self.count))


@dataclass(frozen=True, slots=True)
class Interval:
    """Modelled microseconds from the start of the first batch."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Run:
    """One batch."""

    name: str
    microseconds: Interval
    steps: Sequence[ExecutionStep]


@dataclass(frozen=True, slots=True)
class TotalCycles:
    """Cycles of a whole execution."""

    total: int


@dataclass(frozen=True, slots=True)
class Execution(Partial):
    """The modelled run of one batch."""

    steps: Sequence[ExecutionStep]
    runs: Sequence[Run]
    totalCycles: TotalCycles
