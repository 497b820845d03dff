"""A profile in the shape of the SDK's analysis library (libpva), for programs that read its reports.

    report = session.getReport()             # or pva.openReport("training/profile.pop")
    max(tile.memory.total.includingGaps for tile in report.compilation.tiles)
    sum(step.ipus[0].cycles for step in report.execution.steps)

Names are that library's; present is what programs read most and the tile model knows, anything else is an
AttributeError. Each IPU of a replica appears once; tiles are numbered through all of them. Gaps between variables are
not modelled: ``includingGaps`` equals ``excludingGaps``.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from podrun.device.target import chip
from podrun.report.document import load
from podrun.report.model import PHASES, BspStep, MemoryUse, Profile, Stage, layer_of
from podrun.report.pipeline import runs

VERSION = "3.3.0 (podrun's tile model)"
"""What ``report.poplarVersion.string`` says: the SDK whose names are followed."""
LASTING = ("weights", "optimizer_state", "accumulators", "streams", "stash", "constants", "arguments")
"""Contents that are always live (`podrun.device.tiles.memory.LASTING`)."""
CATEGORIES = {
    "vertex_code": "vertexCode",
    "vertex_state": "vertexInstanceState",
    "exchange_code": "internalExchangeCode",
    "control_code": "controlCode",
}
"""Our categories of code and the SDK's names."""


class ProgramVisitor:
    """Derive from it, override what is of interest, and give it to a program's ``accept``."""

    def visitOnTileExecute(self, program: Program) -> None:
        """A compute set that runs on the tiles."""

    def visitDoExchange(self, program: Program) -> None:
        """An exchange between tiles."""

    def visitSync(self, program: Program) -> None:
        """A barrier."""


class ProgramType(enum.Enum):
    """Kinds of programs that steps execute."""

    OnTileExecute = "OnTileExecute"
    DoExchange = "DoExchange"
    Sync = "Sync"


KINDS = {
    "sync": ProgramType.Sync,
    "exchange": ProgramType.DoExchange,
    "compute": ProgramType.OnTileExecute,
}
"""The kind of program of each BSP phase."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a step executes."""

    Type: ClassVar[type[ProgramType]] = ProgramType
    name: str
    type: ProgramType

    @property
    def children(self) -> tuple[Program, ...]:
        """A step's program holds no others."""
        return ()

    def accept(self, visitor: ProgramVisitor) -> None:
        """Call the visitor's method for this kind of program."""
        getattr(visitor, f"visit{self.type.value}")(self)


@dataclass(frozen=True, slots=True)
class StepOnIpu:
    """A step on one IPU: ``cycles`` modelled; 0 where the IPU waits."""

    cycles: int


@dataclass(frozen=True, slots=True)
class ExecutionStep:
    """One BSP phase of a micro-batch, ``ipus`` in order."""

    program: Program
    ipus: Sequence[StepOnIpu]


@dataclass(frozen=True, slots=True)
class Interval:
    """Modelled microseconds from the start of the batch."""

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
class ComputeSet:
    """A compute set by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """What is always live on an IPU, summed up by what it is."""

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
class Categories:
    """Bytes of code and state on a tile."""

    vertexCode: Category
    vertexInstanceState: Category
    internalExchangeCode: Category
    controlCode: Category


@dataclass(frozen=True, slots=True)
class TileMemory:
    """What a tile holds."""

    total: Total
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
class Live:
    """Bytes live on the chip."""

    bytes: int


@dataclass(frozen=True, slots=True)
class LivenessStep:
    """Not-always-live memory at one point of the program."""

    notAlwaysLiveMemory: Live


@dataclass(frozen=True, slots=True)
class Graph:
    """Sizes of the graph."""

    numComputeSets: int


@dataclass(frozen=True, slots=True)
class Target:
    """The modelled system."""

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


@dataclass(frozen=True, slots=True)
class Compilation:
    """What is known before anything runs."""

    target: Target
    graph: Graph
    ipus: Sequence[Ipu]
    livenessProgramSteps: Sequence[LivenessStep]
    computeSets: Sequence[ComputeSet]
    alwaysLiveVariables: Sequence[Variable]

    @property
    def tiles(self) -> list[Tile]:
        """Tiles of all IPUs in order."""
        return [tile for ipu in self.ipus for tile in ipu.tiles]


@dataclass(frozen=True, slots=True)
class Execution:
    """The modelled run of one batch."""

    steps: Sequence[ExecutionStep]
    runs: Sequence[Run]
    totalCycles: TotalCycles


@dataclass(frozen=True, slots=True)
class Version:
    """A version as text."""

    string: str = VERSION


def compilation(profile: Profile) -> Compilation:
    """``report.compilation``: target, graph and memory by tile."""
    model = chip(profile.target)
    count = profile.ipus_per_replica
    held = {use.ipu: use.memory for use in profile.held()}
    ipus = tuple(_ipu(held.get(ipu), ipu, model.tiles) for ipu in range(count))
    steps = [step for stage in (*profile.stages, *profile.updates) for step in stage.timeline]
    live = [LivenessStep(Live(size)) for stage in _in_order(profile) for size in stage.memory.over_time_bytes]
    target = Target(
        count,
        model.tiles * count,
        model.tiles,
        model.tile_bytes,
        model.sram_bytes,
        model.sram_bytes * count,
        profile.clock_hz,
    )
    names = [ComputeSet(_name(step)) for step in steps if step.compute_cycles]
    return Compilation(
        target, Graph(sum(step.steps for step in steps)), ipus, live, names, list(_variables(profile))
    )


def _variables(profile: Profile) -> Iterator[Variable]:
    for use in profile.held():
        for name in LASTING:
            if size := use.memory.bytes_by_content.get(name, 0):
                yield Variable(name, size)


def execution(profile: Profile) -> Execution:
    """``report.execution``: every micro-batch of a batch in order of time, then the update."""
    kinds: dict[int, list[ExecutionStep]] = {}
    found: list[ExecutionStep] = []
    for stage in (*(run.stage for run in runs(profile, profile.accumulation_factor)), *profile.updates):
        if id(stage) not in kinds:
            kinds[id(stage)] = list(_steps(stage, profile.ipus_per_replica))
        found += kinds[id(stage)]
    length = profile.seconds * 1e6
    named = [
        Run(name, Interval(number * length, (number + 1) * length), found)
        for number, name in enumerate(profile.run_names or (profile.name,))
    ]
    return Execution(found, named, TotalCycles(profile.cycles))


class Report:
    """What ``pva.openReport`` gives: `compilation` and `execution` of a profile, each worked out once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.poplarVersion = Version()

    @cached_property
    def compilation(self) -> Compilation:
        """What is known before anything runs."""
        return compilation(self.profile)

    @cached_property
    def execution(self) -> Execution:
        """The modelled run of one batch."""
        return execution(self.profile)


def open_report(path: str | os.PathLike[str], debug: str | os.PathLike[str] = "") -> Report:
    """The report in a ``profile.pop`` (or ``profile.json``) that podrun wrote: JSON, whatever its name says.

    ``debug``: the SDK's debug information, of which podrun has none; ignored.

    Raises:
        ConfigError: there is no such file, or it is no report of podrun's (the SDK's own are in another format).
    """
    return Report(load(Path(path)))


def _name(step: BspStep) -> str:
    return f"{layer_of(step.scope)}/{step.operator}"


def _in_order(profile: Profile) -> list[Stage]:
    return sorted(profile.stages, key=lambda stage: stage.pipeline_cycle)


def _steps(stage: Stage, ipus: int) -> Iterator[ExecutionStep]:
    for step in stage.timeline:
        name = _name(step)
        for phase in PHASES:
            if cycles := step.cycles(phase):
                each = [StepOnIpu(cycles if ipu == stage.ipu else 0) for ipu in range(ipus)]
                yield ExecutionStep(Program(name, KINDS[phase]), each)


def _ipu(use: MemoryUse | None, ipu: int, tiles: int) -> Ipu:
    """An IPU and what its tiles hold; nothing where it has no work."""
    found: list[Tile] = []
    for interval in use.by_tile if use is not None else ():
        memory = _tile_memory(interval.bytes_by_category)
        found += [Tile(ipu * tiles + t, ipu, memory) for t in range(interval.first_tile, interval.end_tile)]
    empty = _tile_memory({})
    found += [Tile(ipu * tiles + t, ipu, empty) for t in range(len(found), tiles)]
    return Ipu(ipu, tuple(found))


def _tile_memory(content: Mapping[str, int]) -> TileMemory:
    total = sum(content.values())
    temporary = content.get("not_always_live", 0) + content.get("temporary", 0)
    categories = {name: Category(content.get(ours, 0)) for ours, name in CATEGORIES.items()}
    return TileMemory(Total(total, total), total - temporary, temporary, Categories(**categories))
