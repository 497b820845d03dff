"""The tile report in the shape of the SDK's analysis library, for programs written for that.

``session.getReport().compilation.tiles[0].memory.total.excludingGaps`` and its like: what programs read most, under
the SDK's names. A `Report` is also the plain report (a dict), so podrun's own keys stay in reach. Each replica's IPUs
appear once; tiles are numbered through all IPUs. Gaps between variables are not modelled: ``includingGaps`` equals
``excludingGaps``.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podrun.device.target import chip
from podrun.errors import ConfigError

VERSION = "3.3.0 (podrun's tile model)"
"""What `Report.poplarVersion` says: the SDK whose names are followed."""
CATEGORIES = {
    "vertex_code": "vertexCode",
    "vertex_state": "vertexInstanceState",
    "exchange_code": "internalExchangeCode",
    "control_code": "controlCode",
}
"""Our categories of code and the SDK's names."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A report of the tile model, and the IPU it is of."""

    ipu: int
    report: Mapping[str, Any]


def _pieces(report: Mapping[str, Any]) -> tuple[tuple[_Piece, ...], tuple[_Piece, ...]]:
    """Segments of a micro-batch in the order they run, and updates.

    Raises:
        ConfigError: the report holds no tile model's report.
    """
    if "segments" in report:
        ordered = sorted(report["segments"], key=lambda segment: int(segment["cycle"]))
        segments = tuple(_Piece(int(s["ipu"]), s["report"]) for s in ordered)
        updates = tuple(_Piece(int(u["ipu"]), u["report"]) for u in report.get("update", ()))
    elif "memory" in report and "timeline" in report:
        segments, updates = (_Piece(0, report),), ()
    else:
        segments, updates = (), ()
    if not segments:
        raise ConfigError(
            "there is no tile model's report here", hint="Compile the program again with this version."
        )
    return segments, updates


class ProgramType(enum.Enum):
    """Kinds of programs that steps execute."""

    OnTileExecute = "OnTileExecute"
    DoExchange = "DoExchange"
    Sync = "Sync"


@dataclass(frozen=True, slots=True)
class Program:
    """What a step executes."""

    name: str
    type: ProgramType


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


@dataclass(frozen=True, slots=True)
class Compilation:
    """What is known before anything runs."""

    target: Target
    graph: Graph
    ipus: Sequence[Ipu]
    livenessProgramSteps: Sequence[LivenessStep]

    @property
    def tiles(self) -> list[Tile]:
        """Tiles of all IPUs in order."""
        return [tile for ipu in self.ipus for tile in ipu.tiles]


@dataclass(frozen=True, slots=True)
class Execution:
    """The modelled run of one micro-batch and the update."""

    steps: Sequence[ExecutionStep]


@dataclass(frozen=True, slots=True)
class Version:
    """A version as text."""

    string: str = field(default=VERSION)


class Report(dict[str, Any]):
    """A tile report, with the SDK's views of it. See the module docstring."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        super().__init__(report)

    @property
    def poplarVersion(self) -> Version:
        """Whose names are followed."""
        return Version()

    @functools.cached_property
    def compilation(self) -> Compilation:
        """Target, graph and memory by tile. ConfigError if the report holds no tile model's report."""
        segments, updates = _pieces(self)
        found = chip(str(segments[0].report["target"]))
        ids = range(_count(segments, updates))
        ipus = tuple(_ipu(index, [s for s in segments if s.ipu == index], found.tiles) for index in ids)
        sets = sum(entry["steps"] for stage in segments for entry in stage.report["timeline"])
        live = [
            LivenessStep(Live(int(value)))
            for stage in segments
            for value in stage.report["memory"]["by_time"]
        ]
        target = Target(
            len(ids),
            found.tiles * len(ids),
            found.tiles,
            found.tile_bytes,
            found.sram_bytes,
            found.sram_bytes * len(ids),
            found.clock_hz,
        )
        return Compilation(target, Graph(sets), ipus, live)

    @functools.cached_property
    def execution(self) -> Execution:
        """Steps of one micro-batch in order, then of the update."""
        segments, updates = _pieces(self)
        count = _count(segments, updates)
        ordered = (*segments, *updates)
        return Execution([step for stage in ordered for step in _steps(stage, count)])


def _count(segments: Sequence[_Piece], updates: Sequence[_Piece]) -> int:
    return 1 + max(piece.ipu for piece in (*segments, *updates))


def _steps(stage: _Piece, count: int) -> list[ExecutionStep]:
    kinds = {
        "sync": ProgramType.Sync,
        "exchange": ProgramType.DoExchange,
        "compute": ProgramType.OnTileExecute,
    }
    steps = []
    for entry in stage.report["timeline"]:
        for phase, kind in kinds.items():
            if entry[phase]:
                cycles = [StepOnIpu(entry[phase] if index == stage.ipu else 0) for index in range(count)]
                steps.append(ExecutionStep(Program(f"{entry['scope']}/{entry['operator']}", kind), cycles))
    return steps


def _ipu(index: int, stages: Sequence[_Piece], tiles: int) -> Ipu:
    """An IPU whose tiles hold what the fullest of its stages needs."""
    if not stages:
        empty = TileMemory(Total(0, 0), 0, 0, Categories(*(Category(0) for _ in CATEGORIES)))
        return Ipu(index, tuple(Tile(index * tiles + t, index, empty) for t in range(tiles)))
    fullest = max(stages, key=lambda stage: stage.report["memory"]["max_tile_bytes"])
    found: list[Tile] = []
    for interval in fullest.report["memory"]["by_tile"]:
        memory = _tile_memory(interval["bytes"])
        found += [Tile(index * tiles + t, index, memory) for t in range(interval["first"], interval["last"])]
    return Ipu(index, tuple(found))


def _tile_memory(content: Mapping[str, int]) -> TileMemory:
    total = sum(content.values())
    temporary = content.get("not_always_live", 0) + content.get("temporary", 0)
    categories = {name: Category(content.get(ours, 0)) for ours, name in CATEGORIES.items()}
    return TileMemory(Total(total, total), total - temporary, temporary, Categories(**categories))
