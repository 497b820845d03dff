"""The values of `podrun.report.analysis`: names of the SDK's analysis library (libpva), content of the tile model.

What the library has and the tile model does not know is refused by name (`NotModelledError`, an AttributeError, so
that ``hasattr`` says no); what the library does not have either is an ordinary AttributeError.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from podrun.errors import UnsupportedError

VERSION = (3, 3, 0)
"""The SDK whose names are followed."""
_VERTICES = (
    "the tile model plans operations, not vertices; tile.memory.category.vertexInstanceState has their bytes"
)
_BY_TILE = "the tile model knows the fullest tile's cycles; see execution.steps[i].ipus[j].cycles"
_CODE = "code is modelled by IPU and category; see tile.memory.category"
_ORDER = "memory over time is thinned: its points belong to no single program"


def refusing(*groups: tuple[str, str]) -> Mapping[str, str]:
    """Reasons by name, of groups of names (with blanks between them) and their reason."""
    return MappingProxyType({name: reason for names, reason in groups for name in names.split()})


class NotModelledError(UnsupportedError, AttributeError):
    """The analysis library has it; the tile model does not know it."""


class Partial:
    """Part of a class of the library's: ``refused`` has what is missing and why."""

    __slots__ = ()
    refused: ClassVar[Mapping[str, str]] = refusing()

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in self.refused:
            raise NotModelledError(
                f"{kind}.{name} is not modelled: {self.refused[name]}", hint="docs/report.md"
            )
        raise AttributeError(f"{kind!r} has no attribute {name!r}")


class IPU:
    """What is said of IPUs in general."""

    class Architecture(enum.Enum):
        """Generations of the chip."""

        Ipu1 = "Ipu1"
        Ipu2 = "Ipu2"
        Ipu21 = "Ipu21"
        Unknown = "Unknown"


class TargetType(enum.Enum):
    """What a program was compiled for. Reports of podrun always say IpuModel: nothing in them was measured."""

    Ipu = "Ipu"
    IpuModel = "IpuModel"
    Cpu = "Cpu"
    Unknown = "Unknown"


class ProgramType(enum.Enum):
    """Kinds of programs. Steps of podrun are of the first three; the others are there to be compared with."""

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
    """Derive from it, override what is of interest, and give it to a program's ``accept``."""

    def visitOnTileExecute(self, program: Program) -> None:
        """A compute set that runs on the tiles."""

    def visitDoExchange(self, program: Program) -> None:
        """An exchange between tiles."""

    def visitSync(self, program: Program) -> None:
        """A barrier."""


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
    """Nothing was measured: cycles are modelled."""

    compute: ComputeInstrumentationLevel = ComputeInstrumentationLevel.Off
    externalExchange: ExternalExchangeInstrumentationLevel = ExternalExchangeInstrumentationLevel.Off


@dataclass(frozen=True, slots=True)
class ComputeSet(Partial):
    """A compute set by its name."""

    refused = refusing(("vertices numVertices", _VERTICES), ("estimatedCyclesByTile cyclesByTile", _BY_TILE))
    name: str


@dataclass(frozen=True, slots=True)
class Program(Partial):
    """What a step executes: one phase of neighbouring BSP steps of one operator family in one scope."""

    Type: ClassVar[type[ProgramType]] = ProgramType
    refused = refusing(("estimatedCyclesByTile", _BY_TILE), ("codeBytesByTile controlCodeByTile", _CODE))
    name: str
    type: ProgramType
    _id: int

    @property
    def computeset(self) -> ComputeSet:
        """What an OnTileExecute program runs."""
        if self.type is not ProgramType.OnTileExecute:
            raise AttributeError(f"a {self.type.value} program has no compute set")
        return ComputeSet(self.name)

    @property
    def children(self) -> tuple[Program, ...]:
        """A step's program holds no others."""
        return ()

    def accept(self, visitor: ProgramVisitor) -> None:
        """Call the visitor's method for this kind of program."""
        getattr(visitor, f"visit{self.type.value}")(self)


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
        ("tileBalance activeTileBalance", _BY_TILE),
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
class Variable(Partial):
    """What is always live on an IPU, summed up by what it is; ``size`` in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Total:
    """Bytes with and without gaps."""

    includingGaps: int
    excludingGaps: int


@dataclass(frozen=True, slots=True)
class Category:
    """Bytes of one category."""

    total: int


@dataclass(frozen=True, slots=True)
class Categories(Partial):
    """Bytes of code and state on a tile."""

    refused = refusing(
        (
            "constant copyDescriptor globalExchangeCode hostExchangeCode message stack variable",
            "code is kept as vertexCode, vertexInstanceState, internalExchangeCode and controlCode",
        )
    )
    vertexCode: Category
    vertexInstanceState: Category
    internalExchangeCode: Category
    controlCode: Category


@dataclass(frozen=True, slots=True)
class TileMemory:
    """What a tile holds; ``overflowed``: bytes for which it has no room."""

    total: Total
    overflowed: Total
    alwaysLiveBytes: int
    notAlwaysLiveBytes: int
    category: Categories


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile by its number through all IPUs."""

    id: int
    ipuId: int
    memory: TileMemory


@dataclass(frozen=True, slots=True)
class Ipu:
    """An IPU and its tiles."""

    id: int
    tiles: Sequence[Tile]


@dataclass(frozen=True, slots=True)
class Live(Partial):
    """Bytes live on the chip."""

    refused = refusing(
        ("variables", "only the largest at the peak are kept: profile.stages[i].memory.largest")
    )
    bytes: int


@dataclass(frozen=True, slots=True)
class LivenessStep(Partial):
    """Not-always-live memory of a stage's work at one point of it, on the stage's IPU."""

    refused = refusing(
        ("program", _ORDER),
        ("alwaysLiveMemory", "it is the same at all points: compilation.alwaysLiveVariables"),
    )
    notAlwaysLiveMemory: Live
    ipu: int

    def notAlwaysLiveMemoryForIpu(self, ipu: int) -> Live:
        """What this work holds on ``ipu``: nothing, if it is another's."""
        return self.notAlwaysLiveMemory if ipu == self.ipu else Live(0)


@dataclass(frozen=True, slots=True)
class Graph(Partial):
    """Sizes of the graph."""

    refused = refusing(
        ("numVertices numEdges", _VERTICES),
        ("numVars", "variables are known by what they are; see compilation.alwaysLiveVariables"),
    )
    numComputeSets: int


@dataclass(frozen=True, slots=True)
class Target(Partial):
    """The modelled system: one replica's IPUs, of which there are ``numReplicas``."""

    Type: ClassVar[type[TargetType]] = TargetType
    refused = refusing(("relativeSyncDelayByTile", "barriers are modelled by their length, not by tile"))
    type: TargetType
    architecture: IPU.Architecture
    numReplicas: int
    numIPUs: int
    numTiles: int
    tilesPerIpu: int
    bytesPerTile: int
    bytesPerIpu: int
    totalMemory: int
    clockFrequency: float

    @property
    def bytesPerIPU(self) -> int:
        """The same as ``bytesPerIpu``."""
        return self.bytesPerIpu

    @property
    def ipusPerReplica(self) -> int:
        """The same as ``numIPUs``: a report shows one replica."""
        return self.numIPUs

    @property
    def tilesPerReplica(self) -> int:
        """The same as ``numTiles``."""
        return self.numTiles

    @property
    def memoryPerReplica(self) -> int:
        """Bytes; the same as ``totalMemory``."""
        return self.totalMemory


@dataclass(frozen=True)
class Compilation(Partial):
    """What is known before anything runs."""

    refused = refusing(
        (
            "exchanges variables loweredVariables alwaysLiveVariablesForTile loweredVariablesForTile",
            "variables and exchanges are not kept one by one; see alwaysLiveVariables and tiles[i].memory",
        ),
        ("vertexTypes", _VERTICES),
    )
    target: Target
    graph: Graph
    ipus: Sequence[Ipu]
    livenessProgramSteps: Sequence[LivenessStep]
    programs: Sequence[Program]
    alwaysLiveVariables: Sequence[Variable]

    @cached_property
    def tiles(self) -> list[Tile]:
        """Tiles of all IPUs in order."""
        return [tile for ipu in self.ipus for tile in ipu.tiles]

    @cached_property
    def computeSets(self) -> list[ComputeSet]:
        """Those of all programs that compute."""
        return [program.computeset for program in self.programs if program.type is ProgramType.OnTileExecute]


@dataclass(frozen=True, slots=True)
class Execution(Partial):
    """The modelled run of one batch."""

    steps: Sequence[ExecutionStep]
    runs: Sequence[Run]
    totalCycles: TotalCycles


@dataclass(frozen=True, slots=True)
class PoplarVersion(Partial):
    """The SDK whose names are followed."""

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
