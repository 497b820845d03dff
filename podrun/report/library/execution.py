"""``report.execution``: one modelled run, step by step, its programs; what a report says about itself and refuses.

Attributes of the analysis library that the tile model does not know are refused by name (`NotModelledError`, an
AttributeError, so that ``hasattr`` says no). Names that the library does not have either are ordinary AttributeErrors.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, overload

from podrun.core.errors import UnsupportedError
from podrun.core.quick_dataclass import dataclass

VERTICES = (
    "the tile model plans operations, not vertices; tile.memory.category.vertexInstanceState has their bytes"
)
BY_TILE = "the tile model knows the fullest tile's cycles; see execution.steps[i].ipus[j].cycles"
CODE = "code is modelled by IPU and category; see tile.memory.category"


def refusing(*groups: tuple[str, str]) -> Mapping[str, str]:
    """Reasons by attribute name, from pairs of names (separated by blanks) and a reason."""
    return MappingProxyType({name: reason for names, reason in groups for name in names.split()})


class NotModelledError(UnsupportedError, AttributeError):
    """The analysis library has it; the tile model does not know it."""


class Partial:
    """A class of the analysis library, in part: ``refused`` maps missing attributes to the reason."""

    __slots__ = ()
    refused: ClassVar[Mapping[str, str]] = refusing()

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__.removeprefix("Library")
        if name in self.refused:
            raise NotModelledError(
                f"{kind}.{name} is not modelled: {self.refused[name]}",
                hint="podrun help report says what a report has instead.",
            )
        raise AttributeError(f"{kind!r} has no attribute {name!r}")


VERSION = (3, 3, 0)
"""The SDK version whose names are used."""


class ComputeInstrumentationLevel(enum.Enum):
    """How finely compute cycles were measured."""

    Off = 0
    Vertex = 1
    Tile = 2
    Ipu = 3
    Device = 4
    Unknown = 5


class ExternalExchangeInstrumentationLevel(enum.Enum):
    """How finely exchange with the outside was measured."""

    Off = 0
    Tile = 1
    Unknown = 2


@dataclass(frozen=True, slots=True)
class InstrumentationSettings:
    """How an execution was measured, in PopVision's terms. All levels are Off: podrun models cycles."""

    compute: ComputeInstrumentationLevel = ComputeInstrumentationLevel.Off
    externalExchange: ExternalExchangeInstrumentationLevel = ExternalExchangeInstrumentationLevel.Off


@dataclass(frozen=True, slots=True)
class PoplarVersion(Partial):
    """The SDK version whose names are used."""

    refused = refusing(("packageHash", "no Poplar compiled this"))
    major: int = VERSION[0]
    minor: int = VERSION[1]
    point: int = VERSION[2]

    @property
    def string(self) -> str:
        """The version, and whose report this is."""
        return f"{self.major}.{self.minor}.{self.point} (podrun's tile model)"


@dataclass(frozen=True, slots=True)
class ReportVersion:
    """The version of podrun's own document."""

    major: int
    minor: int = 0
    point: int = 0
    isUnstableFormat: bool = False


class ProgramType(enum.Enum):
    """Kinds of programs. Steps of podrun are of the first three; the others exist so that programs can compare with
    them.
    """

    OnTileExecute = "OnTileExecute"
    DoExchange = "DoExchange"
    Sync = "Sync"
    GlobalExchange = "GlobalExchange"
    StreamCopyBegin = "StreamCopyBegin"
    StreamCopyMid = "StreamCopyMid"
    StreamCopyEnd = "StreamCopyEnd"
    OnEveryTileSwitch = "OnEveryTileSwitch"
    Sequence = "Sequence"
    Sans = "Sans"
    SyncAns = "SyncAns"
    Unknown = "Unknown"


class ProgramVisitor:
    """Base class for visitors: override the methods of interest, and give it to a program's ``accept``."""

    def visitOnTileExecute(self, program: LibraryProgram) -> None:
        """A compute set that runs on the tiles."""

    def visitDoExchange(self, program: LibraryProgram) -> None:
        """An exchange between tiles."""

    def visitSync(self, program: LibraryProgram) -> None:
        """A synchronisation of tiles or IPUs."""


@dataclass(frozen=True, slots=True)
class ComputeSet(Partial):
    """A compute set by its name."""

    refused = refusing(("vertices numVertices", VERTICES), ("estimatedCyclesByTile cyclesByTile", BY_TILE))
    name: str


@dataclass(frozen=True, slots=True)
class LibraryProgram(Partial):
    """What a step executes: one phase of neighbouring BSP steps of one operator family in one scope."""

    Type: ClassVar[type[ProgramType]] = ProgramType
    refused = refusing(("estimatedCyclesByTile", BY_TILE), ("codeBytesByTile controlCodeByTile", CODE))
    name: str
    type: ProgramType
    _id: int

    @property
    def computeset(self) -> ComputeSet:
        """The compute set that an OnTileExecute program runs."""
        if self.type is not ProgramType.OnTileExecute:
            raise AttributeError(f"a {self.type.value} program has no compute set")
        return ComputeSet(self.name)

    @property
    def children(self) -> tuple[LibraryProgram, ...]:
        """A step's program holds no others."""
        return ()

    def accept(self, visitor: ProgramVisitor) -> None:
        """Call the visitor's method for this kind of program."""
        getattr(visitor, f"visit{self.type.value}")(self)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds over an IPU's tiles. The model does not tell tiles apart in time, so both are the same."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class CycleInterval:
    """An interval of time, in cycles since the run began."""

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
        """Beginning and end of its work."""
        end = self.start + self.cycles
        return CycleInterval(Bounds(self.start, self.start), Bounds(end, end))

    @property
    def allCycles(self) -> CycleInterval:
        """The same as ``activeCycles``: waiting is no part of a step here."""
        return self.activeCycles


@dataclass(frozen=True, slots=True)
class ExecutionStep:
    """One BSP phase of a micro-batch, on one of ``count`` IPUs of a replica; ``start`` in cycles since the run's."""

    program: LibraryProgram
    ipu: int
    count: int
    start: int
    cycles: int

    @property
    def ipus(self) -> tuple[StepOnIpu, ...]:
        """All IPUs in order."""
        return tuple(StepOnIpu(self.cycles * (i == self.ipu), self.start) for i in range(self.count))


@dataclass(frozen=True, slots=True)
class RepeatedSteps(Sequence[ExecutionStep]):
    """The steps of ``passes`` passes that are alike, ``cycles`` after one another: made when they are asked for."""

    once: tuple[ExecutionStep, ...]
    passes: int
    cycles: int

    def __len__(self) -> int:
        return len(self.once) * self.passes

    @overload
    def __getitem__(self, index: int) -> ExecutionStep: ...

    @overload
    def __getitem__(self, index: slice) -> list[ExecutionStep]: ...

    def __getitem__(self, index: int | slice) -> ExecutionStep | list[ExecutionStep]:
        if isinstance(index, slice):
            return [self._at(number) for number in range(*index.indices(len(self)))]
        number = index + len(self) * (index < 0)
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} steps, none with index {index}")
        return self._at(number)

    def _at(self, number: int) -> ExecutionStep:
        which, place = divmod(number, len(self.once))
        step = self.once[place]
        return replace(step, start=step.start + which * self.cycles) if which else step


@dataclass(frozen=True, slots=True)
class Interval:
    """Modelled microseconds from the start of the first run."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class LibraryRun:
    """One run of the session: all its batches."""

    name: str
    microseconds: Interval
    steps: Sequence[ExecutionStep]


@dataclass(frozen=True, slots=True)
class TotalCycles:
    """Cycles of one whole run."""

    total: int


@dataclass(frozen=True, slots=True)
class Execution(Partial):
    """The modelled time of one run."""

    steps: Sequence[ExecutionStep]
    runs: Sequence[LibraryRun]
    totalCycles: TotalCycles
