"""A profile in the shape of the SDK's analysis library (libpva), for programs that read its reports.

    report = session.getReport()
    max(tile.memory.total.includingGaps for tile in report.compilation.tiles)
    sum(step.ipus[0].cycles for step in report.execution.steps)

Names are that library's. Present is what the tile model knows: tiles and their bytes, the target, the number of
compute sets, steps with cycles by IPU. Anything else is an AttributeError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from podrun.device.target import chip
from podrun.report.model import Profile, Stage, layer_of
from podrun.report.pipeline import runs


@dataclass(frozen=True, slots=True)
class Bytes:
    """The tile model places no gaps, so both are the same."""

    includingGaps: int
    excludingGaps: int


@dataclass(frozen=True, slots=True)
class TileMemory:
    """What a tile holds."""

    total: Bytes


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of the replica: ``id`` counts through its IPUs."""

    id: int
    ipu: int
    memory: TileMemory


@dataclass(frozen=True, slots=True)
class Target:
    """What a replica runs on. ``clockFrequency`` in Hz."""

    numIPUs: int
    tilesPerIpu: int
    numTiles: int
    bytesPerTile: int
    clockFrequency: float


@dataclass(frozen=True, slots=True)
class Graph:
    """Sizes of the compiled graph."""

    numComputeSets: int


@dataclass(frozen=True, slots=True)
class Compilation:
    """What compiling found."""

    target: Target
    tiles: tuple[Tile, ...]
    graph: Graph


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The program of a step."""

    name: str


@dataclass(frozen=True, slots=True)
class StepOnIpu:
    """What a step takes on one IPU; 0 where another one works."""

    id: int
    cycles: int


@dataclass(frozen=True, slots=True)
class Step:
    """Neighbouring BSP steps of one layer; ``ipus`` for each IPU of the replica."""

    program: StepProgram
    ipus: tuple[StepOnIpu, ...]


@dataclass(frozen=True, slots=True)
class Execution:
    """The modelled execution of one batch."""

    steps: tuple[Step, ...]


def compilation(profile: Profile) -> Compilation:
    """``report.compilation``."""
    model = chip(profile.target)
    ipus = profile.ipus_per_replica
    target = Target(ipus, model.tiles, ipus * model.tiles, model.tile_bytes, profile.clock_hz)
    tiles = tuple(tile for ipu in range(ipus) for tile in _tiles(profile, ipu, model.tiles))
    steps = (step for stage in (*profile.stages, *profile.updates) for step in stage.timeline)
    return Compilation(target, tiles, Graph(sum(step.steps for step in steps)))


def _tiles(profile: Profile, ipu: int, count: int) -> Iterator[Tile]:
    """Tiles of an IPU, as its stage that needs most holds them; empty ones where no stage is."""
    stages = [stage for stage in profile.stages if stage.ipu == ipu]
    intervals = max(stages, key=lambda stage: stage.memory.max_tile_bytes).memory.by_tile if stages else ()
    sizes = [0] * count
    for interval in intervals:
        width = interval.end_tile - interval.first_tile
        sizes[interval.first_tile : interval.end_tile] = [interval.total_bytes] * width
    for index, size in enumerate(sizes):
        yield Tile(ipu * count + index, ipu, TileMemory(Bytes(size, size)))


def execution(profile: Profile) -> Execution:
    """``report.execution``: every micro-batch of a batch in order of time, then the update."""
    found: list[Step] = []
    cached: dict[int, tuple[Step, ...]] = {}
    for run in runs(profile, profile.accumulation_factor):
        key = id(run.stage)
        cached.setdefault(key, tuple(_steps(profile, run.stage)))
        found += cached[key]
    for stage in profile.updates:
        found += _steps(profile, stage)
    return Execution(tuple(found))


def _steps(profile: Profile, stage: Stage) -> Iterator[Step]:
    for step in stage.timeline:
        name = f"{layer_of(step.scope)}/{step.operator}"
        cycles = step.total_cycles
        ipus = range(profile.ipus_per_replica)
        yield Step(StepProgram(name), tuple(StepOnIpu(i, cycles if i == stage.ipu else 0) for i in ipus))
