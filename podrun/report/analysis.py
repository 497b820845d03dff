"""A profile in the shape of the SDK's analysis library (libpva), for programs that read its reports.

    report = session.getReport()             # or pva.openReport("training/profile.pop")
    max(tile.memory.total.includingGaps for tile in report.compilation.tiles)
    sum(step.ipus[0].cycles for step in report.execution.steps)

Names are that library's (`podrun.report.library`). What the tile model does not know is refused by name.
Each IPU of a replica appears once; tiles are numbered through all of them. Gaps between variables are not modelled:
``includingGaps`` equals ``excludingGaps``. Copies between IPUs and from and to the host are no steps: their time is
in ``microseconds`` and ``totalCycles``, and by cause in the profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from podrun.costmodel.target import chip
from podrun.report.library.compilation import (
    IPU,
    Categories,
    Category,
    Compilation,
    Ipu,
    LibraryGraph,
    LibraryVariable,
    Live,
    LivenessStep,
    Target,
    TargetType,
    Tile,
    TileMemory,
    Total,
)
from podrun.report.library.execution import (
    Execution,
    ExecutionStep,
    Interval,
    LibraryProgram,
    LibraryRun,
    ProgramType,
    RepeatedSteps,
    TotalCycles,
)
from podrun.report.model import PHASES, MemoryUse, Profile, ReportStage, layer_of
from podrun.report.stage_runs import stage_runs

LASTING = ("weights", "optimizer_state", "accumulators", "streams", "stash", "constants", "arguments")
"""Contents that are always live (`podrun.costmodel.tile_memory.LASTING`)."""
CATEGORIES = {
    "vertex_code": "vertexCode",
    "vertex_state": "vertexInstanceState",
    "exchange_code": "internalExchangeCode",
    "control_code": "controlCode",
}
"""Our categories of code and the SDK's names."""
ARCHITECTURES = {
    "gc2": IPU.Architecture.Ipu1,
    "gc200": IPU.Architecture.Ipu2,
    "bow": IPU.Architecture.Ipu2,
    "c600": IPU.Architecture.Ipu21,
}
"""Generations of the chips that podrun models: Bow is Mk2 at a higher clock, C600 adds float8."""
KINDS = {
    "sync": ProgramType.Sync,
    "exchange": ProgramType.DoExchange,
    "compute": ProgramType.OnTileExecute,
}
"""The kind of program of each BSP phase."""


def compilation(profile: Profile) -> Compilation:
    """``report.compilation``: target, graph, programs and memory by tile."""
    count = profile.ipus_per_replica
    target = _target(profile)
    held = {use.ipu: use.memory for use in profile.held()}
    steps = sum(step.steps for stage in _in_order(profile) for step in stage.timeline)
    live = [
        LivenessStep(Live(size), stage.ipu)
        for stage in sorted(profile.stages, key=lambda stage: stage.pipeline_cycle)
        for size in stage.memory.over_time_bytes
    ]
    return Compilation(
        target,
        LibraryGraph(steps),
        tuple(_ipu(held.get(ipu), ipu, target) for ipu in range(count)),
        live,
        [program for phase in _programs(profile) for program, _ in phase],
        list(_variables(profile)),
    )


def execution(profile: Profile) -> Execution:
    """``report.execution`` of one run: its batches, each with its micro-batches in order of time and its update."""
    passes = max(1, profile.batches_per_run // profile.batches_per_pass)
    steps = RepeatedSteps(tuple(_pass_steps(profile)), passes, profile.cycles_per_run // passes)
    length = profile.cycles_per_run / profile.clock_hz * 1e6
    named = [
        LibraryRun(name, Interval(number * length, (number + 1) * length), steps)
        for number, name in enumerate(profile.run_names or (profile.name,))
    ]
    return Execution(steps, named, TotalCycles(profile.cycles_per_run))


def _pass_steps(profile: Profile) -> Iterator[ExecutionStep]:
    """The steps of the micro-batches that run together; each batch's update follows its last segment."""
    programs = dict(zip(map(id, _in_order(profile)), _programs(profile), strict=True))
    placed: list[tuple[ReportStage, int]] = []
    ends = [0] * profile.batches_per_pass
    for run in stage_runs(profile, profile.micro_batches_per_pass):
        placed.append((run.stage, run.start_cycles))
        batch = run.micro_batch // profile.accumulation_factor
        ends[batch] = max(ends[batch], run.end_cycles)
    placed += [(stage, end) for end in ends for stage in profile.updates]
    for stage, start in sorted(placed, key=lambda item: item[1]):
        for program, cycles in programs[id(stage)]:
            yield ExecutionStep(program, stage.ipu, profile.ipus_per_replica, start, cycles)
            start += cycles


def _target(profile: Profile) -> Target:
    model, ipus = chip(profile.target), profile.ipus_per_replica
    return Target(
        type=TargetType.IpuModel,
        architecture=ARCHITECTURES.get(model.base, IPU.Architecture.Unknown),
        numReplicas=profile.replicas,
        numIPUs=ipus,
        numTiles=model.tiles * ipus,
        tilesPerIpu=model.tiles,
        bytesPerTile=model.tile_bytes,
        bytesPerIpu=model.sram_bytes,
        totalMemory=model.sram_bytes * ipus,
        clockFrequency=profile.clock_hz,
    )


def _in_order(profile: Profile) -> list[ReportStage]:
    """The work of a micro-batch in order, then the updates."""
    return [*sorted(profile.stages, key=lambda stage: stage.pipeline_cycle), *profile.updates]


def _programs(profile: Profile) -> Iterator[list[tuple[LibraryProgram, int]]]:
    """For each stage and update in order, its programs and their cycles; numbered through all of them."""
    number = 0
    for stage in _in_order(profile):
        library_programs = []
        for step in stage.timeline:
            name = f"{layer_of(step.scope)}/{step.operator}"
            for phase in PHASES:
                if cycles := step.cycles(phase):
                    library_programs.append((LibraryProgram(name, KINDS[phase], number), cycles))
                    number += 1
        yield library_programs


def _variables(profile: Profile) -> Iterator[LibraryVariable]:
    for use in profile.held():
        content = use.memory.bytes_by_content
        for name in (*LASTING, *CATEGORIES):
            if size := content.get(name, 0):
                yield LibraryVariable(CATEGORIES.get(name, name), size)


def _ipu(use: MemoryUse | None, ipu: int, target: Target) -> Ipu:
    """An IPU and the contents of its tiles; empty if it has no work."""
    own_tiles: list[Tile] = []
    tiles = target.tilesPerIpu
    for interval in use.by_tile if use is not None else ():
        memory = _tile_memory(interval.bytes_by_category, target.bytesPerTile)
        own_tiles += [
            Tile(ipu * tiles + t, ipu, memory) for t in range(interval.first_tile, interval.end_tile)
        ]
    empty = _tile_memory({}, target.bytesPerTile)
    own_tiles += [Tile(ipu * tiles + t, ipu, empty) for t in range(len(own_tiles), tiles)]
    return Ipu(ipu, tuple(own_tiles))


def _tile_memory(content: Mapping[str, int], room: int) -> TileMemory:
    total = sum(content.values())
    temporary = content.get("not_always_live", 0) + content.get("temporary", 0)
    excess = max(0, total - room)
    categories = {name: Category(content.get(ours, 0)) for ours, name in CATEGORIES.items()}
    return TileMemory(
        Total(total, total), Total(excess, excess), total - temporary, temporary, Categories(**categories)
    )
