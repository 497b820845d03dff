"""``report.compilation``: the target, and the contents of its tiles."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from podrun.core.quick_dataclass import dataclass
from podrun.report.library.execution import (
    VERTICES,
    ComputeSet,
    LibraryProgram,
    Partial,
    ProgramType,
    refusing,
)


class IPU:
    """Statements that hold for IPUs in general."""

    class Architecture(enum.Enum):
        """Generations of the chip."""

        Ipu1 = "Ipu1"
        Ipu2 = "Ipu2"
        Ipu21 = "Ipu21"
        Unknown = "Unknown"


class TargetType(enum.Enum):
    """The kind of target of a program. Reports of podrun always say IpuModel: nothing in them was measured."""

    Ipu = "Ipu"
    IpuModel = "IpuModel"
    Cpu = "Cpu"
    Unknown = "Unknown"


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


@dataclass(frozen=True, slots=True)
class LibraryGraph(Partial):
    """How many compute sets the compiled graph has; counts that podrun does not make are refused."""

    refused = refusing(
        ("numVertices numEdges", VERTICES),
        ("numVars", "variables are known by what they are; see compilation.alwaysLiveVariables"),
    )
    numComputeSets: int


@dataclass(frozen=True, slots=True)
class LibraryVariable(Partial):
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
    """Bytes of one category of memory."""

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
    """The contents of a tile; ``overflowed``: bytes for which it has no room."""

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
        ("program", "memory over time is thinned: its points belong to no single program"),
        ("alwaysLiveMemory", "it is the same at all points: compilation.alwaysLiveVariables"),
    )
    notAlwaysLiveMemory: Live
    ipu: int

    def notAlwaysLiveMemoryForIpu(self, ipu: int) -> Live:
        """The memory of this work on ``ipu``: empty for any other IPU."""
        return self.notAlwaysLiveMemory if ipu == self.ipu else Live(0)


@dataclass(frozen=True)
class Compilation(Partial):
    """The facts known before anything runs."""

    refused = refusing(
        (
            "exchanges variables loweredVariables alwaysLiveVariablesForTile loweredVariablesForTile",
            "variables and exchanges are not kept one by one; see alwaysLiveVariables and tiles[i].memory",
        ),
        ("vertexTypes", VERTICES),
    )
    target: Target
    graph: LibraryGraph
    ipus: Sequence[Ipu]
    livenessProgramSteps: Sequence[LivenessStep]
    programs: Sequence[LibraryProgram]
    alwaysLiveVariables: Sequence[LibraryVariable]

    @cached_property
    def tiles(self) -> list[Tile]:
        """Tiles of all IPUs in order."""
        return [tile for ipu in self.ipus for tile in ipu.tiles]

    @cached_property
    def computeSets(self) -> list[ComputeSet]:
        """The compute sets of all programs that compute."""
        return [program.computeset for program in self.programs if program.type is ProgramType.OnTileExecute]
