"""What steps execute: ``compilation.programs``, and ``program`` of every step."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from podrun.report.library.partial import BY_TILE, CODE, VERTICES, Partial, refusing


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


@dataclass(frozen=True, slots=True)
class ComputeSet(Partial):
    """A compute set by its name."""

    refused = refusing(("vertices numVertices", VERTICES), ("estimatedCyclesByTile cyclesByTile", BY_TILE))
    name: str


@dataclass(frozen=True, slots=True)
class Program(Partial):
    """What a step executes: one phase of neighbouring BSP steps of one operator family in one scope."""

    Type: ClassVar[type[ProgramType]] = ProgramType
    refused = refusing(("estimatedCyclesByTile", BY_TILE), ("codeBytesByTile controlCodeByTile", CODE))
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
