"""A report as values: a program's time by cause, its stages on IPUs, their cost and the contents of tiles.

Every number's unit stands in its name. All of it is modelled (`podrun.costmodel`), none measured. The JSON
document of `podrun.report.document` has exactly these fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import field

from podrun.core.names import parse_scope
from podrun.core.quick_dataclass import dataclass

SCHEMA_VERSION = 1
"""Of the document that has these fields (`podrun.report.document`)."""
CAUSES = ("compute", "exchange", "rearrange", "launch", "sync")
"""Causes of cycles within a stage, in the order they are shown."""
PHASES = ("sync", "exchange", "compute")
"""The phases of a BSP step, in their order."""


@dataclass(frozen=True, slots=True)
class BspStep:
    """Consecutive BSP steps of one operator family in one named scope, cycles by phase."""

    scope: str
    operator: str
    steps: int
    sync_cycles: int
    exchange_cycles: int
    compute_cycles: int

    def cycles(self, phase: str) -> int:
        """Cycles of ``"sync"``, ``"exchange"`` or ``"compute"``."""
        return int(getattr(self, f"{phase}_cycles"))

    @property
    def total_cycles(self) -> int:
        """Cycles of all phases."""
        return self.sync_cycles + self.exchange_cycles + self.compute_cycles


@dataclass(frozen=True, slots=True)
class TileInterval:
    """Tiles ``[first_tile, end_tile)`` that hold the same, bytes by category on each of them."""

    first_tile: int
    end_tile: int
    bytes_by_category: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """On each of the tiles."""
        return sum(self.bytes_by_category.values())


@dataclass(frozen=True, slots=True)
class Content:
    """One of the largest values alive at the peak: the scope that made it, bytes on the IPU."""

    scope: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of one stage by itself, or of one IPU in all.

    ``over_time_bytes``: not-always-live bytes along the schedule (thinned by maximum). ``bytes_by_content`` adds up to
    ``total_bytes``.
    """

    always_live_bytes: int
    not_always_live_peak_bytes: int
    code_bytes_by_category: dict[str, int]
    total_bytes: int
    max_tile_bytes: int
    tile_capacity_bytes: int
    fits: bool
    by_tile: tuple[TileInterval, ...]
    over_time_bytes: tuple[int, ...]
    largest: tuple[Content, ...]
    bytes_by_content: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IpuUse:
    """The contents of one IPU of a replica, over all its stages and the update: variables, stashes, work, code."""

    ipu: int
    memory: MemoryUse


@dataclass(frozen=True, slots=True)
class Share:
    """Cycles of one execution that an operator family or a named scope takes, in ``count`` steps (0: not kept).

    A scope is as traced: ``transpose(jvp(NAME))`` is the backward work of layer NAME (`layer_of`).
    """

    name: str
    cycles: int
    count: int


@dataclass(frozen=True, slots=True)
class Bound:
    """A primitive that no planner knows: ``count`` equations, the cycles of their bound, and scopes in which some of
    them occur.
    """

    name: str
    cycles: int
    count: int
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportStage:
    """One piece of work on one IPU of a replica: a segment of a micro-batch, or the weight update.

    ``pipeline_cycle`` orders the segments of a micro-batch; with pipelining, cycle *c* of micro-batch *m* runs at
    time slot *c + m*. ``bounds``: primitives that no planner knows, costed by a bound.
    """

    name: str
    ipu: int
    pipeline_cycle: int
    sent_bytes: int
    cycles: int
    seconds: float
    flops: int
    cycles_by_cause: dict[str, int]
    operators: tuple[Share, ...]
    layers: tuple[Share, ...]
    timeline: tuple[BspStep, ...]
    memory: MemoryUse
    bounds: tuple[Bound, ...]


@dataclass(frozen=True, slots=True)
class ReportOrigin:
    """Where a report comes from: the program's file, the command that ran it, when (ISO 8601, with its zone), and
    podrun's version. Empty where it is not known.
    """

    program: str = ""
    command: str = ""
    date: str = ""
    podrun_version: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """A program's modelled time and memory. ``cycles``, ``seconds`` and ``seconds_by_cause``, which adds up, are
    of one batch: one weight update, or in inference one pass of every replica, pipelined or not.

    ``samples_per_batch``: of all replicas; None if the program does not say what a sample is.
    """

    name: str
    target: str
    clock_hz: float
    replicas: int
    ipus_per_replica: int
    accumulation_factor: int
    samples_per_batch: int | None
    pipelined: bool
    cycles: int
    seconds: float
    seconds_by_cause: dict[str, float]
    stages: tuple[ReportStage, ...]
    updates: tuple[ReportStage, ...]
    ipu_memory: tuple[IpuUse, ...] = ()
    schedule: str = "grouped"
    """The order of a pipeline's work (``"grouped"``, ``"interleaved"``); without meaning if not ``pipelined``."""
    run_names: tuple[str, ...] = ()
    """What a session called its first runs; empty if there were none."""
    batches_per_run: int = 1
    """Batches of one run."""
    batches_per_pass: int = 1
    """Batches that are in the pipeline together: more than one iff a pipeline overlaps the batches of a run."""
    run_cycles: int = 0
    """Cycles of one run; 0 in reports that do not say it."""

    @property
    def cycles_per_run(self) -> int:
        """Cycles of all batches of one run, as `getCycleCount` counts them."""
        return self.run_cycles or self.cycles * self.batches_per_run

    @property
    def micro_batches_per_pass(self) -> int:
        """Micro-batches that are in the pipeline together: those of a batch, or of all batches that overlap."""
        return self.accumulation_factor * self.batches_per_pass

    @property
    def samples_per_second(self) -> float | None:
        """Modelled throughput of all replicas, host and input pipeline not counted."""
        if self.samples_per_batch is None or self.seconds <= 0:
            return None
        return self.samples_per_batch / self.seconds

    @property
    def ipus(self) -> tuple[int, ...]:
        """IPUs of a replica that have work."""
        return tuple(sorted({stage.ipu for stage in (*self.stages, *self.updates)}))

    @property
    def fits(self) -> bool:
        """True iff every IPU does."""
        return all(use.memory.fits for use in self.held())

    @property
    def bottleneck(self) -> str:
        """What takes most time of a batch: compute, exchange, sync and so on. If it is compute and several IPUs work,
        the busiest IPU and its stages are named too.
        """
        cause = max(self.seconds_by_cause, key=lambda name: self.seconds_by_cause[name])
        work: dict[int, int] = {}
        for stage in self.stages:
            work[stage.ipu] = work.get(stage.ipu, 0) + stage.cycles
        if cause != "compute" or len(work) < 2:
            return cause
        ipu = max(work, key=lambda number: work[number])
        stages = ", ".join(stage.name for stage in self.stages if stage.ipu == ipu)
        return f"{cause}, most of it on IPU {ipu} ({stages})"

    def causes(self) -> dict[str, int]:
        """Cycles of one micro-batch by cause, over all stages."""
        return {cause: sum(s.cycles_by_cause.get(cause, 0) for s in self.stages) for cause in CAUSES}

    def operators(self) -> dict[str, int]:
        """Cycles of one micro-batch by family of operations, largest first."""
        return _ranked(self.stages, lambda stage: stage.operators)

    def layers(self) -> dict[str, int]:
        """Cycles of one micro-batch by layer, forward and backward together, largest first."""
        return _ranked(self.stages, lambda stage: stage.layers, layer_of)

    def layers_both_ways(self) -> dict[str, tuple[int, int]]:
        """Forward and backward cycles of one micro-batch by layer, those that take most first."""
        cycles_of: dict[str, list[int]] = {}
        for share in (share for stage in self.stages for share in stage.layers):
            cycles_of.setdefault(layer_of(share.name), [0, 0])["transpose(" in share.name] += share.cycles
        ranked = sorted(cycles_of.items(), key=lambda item: (-sum(item[1]), numbered(item[0])))
        return {name: (forward, backward) for name, (forward, backward) in ranked}

    def bounds(self) -> tuple[Bound, ...]:
        """Primitives that no planner knew, over all stages and the update, by name."""
        by_name: dict[str, Bound] = {}
        for bound in (bound for stage in (*self.stages, *self.updates) for bound in stage.bounds):
            old = by_name.get(bound.name, Bound(bound.name, 0, 0))
            scopes = tuple(dict.fromkeys((*old.scopes, *bound.scopes)))
            by_name[bound.name] = Bound(
                bound.name, old.cycles + bound.cycles, old.count + bound.count, scopes
            )
        return tuple(by_name[name] for name in sorted(by_name))

    def held(self) -> tuple[IpuUse, ...]:
        """What each IPU holds; in reports of single functions what their fullest stage needs."""
        if self.ipu_memory:
            return self.ipu_memory
        most: dict[int, MemoryUse] = {}
        for stage in self.stages:
            if stage.ipu not in most or stage.memory.max_tile_bytes > most[stage.ipu].max_tile_bytes:
                most[stage.ipu] = stage.memory
        return tuple(IpuUse(ipu, memory) for ipu, memory in sorted(most.items()))

    def fullest(self) -> IpuUse:
        """The IPU whose tiles hold most."""
        return max(self.held(), key=lambda use: (use.memory.max_tile_bytes, -use.ipu))


def layer_of(scope: str) -> str:
    """The layer's own name in a scope: without differentiation, IPU, stage and type."""
    return parse_scope(scope).layer


def _ranked(
    stages: Iterable[ReportStage],
    shares: Callable[[ReportStage], Iterable[Share]],
    name: Callable[[str], str] = lambda name: name,
) -> dict[str, int]:
    cycles_of: dict[str, int] = {}
    for stage in stages:
        for share in shares(stage):
            key = name(share.name)
            cycles_of[key] = cycles_of.get(key, 0) + share.cycles
    return dict(sorted(cycles_of.items(), key=lambda item: (-item[1], numbered(item[0]))))


def numbered(name: str) -> list[tuple[int, str]]:
    """A key by which names are sorted as people number them: ``MatMul:0/2`` before ``MatMul:0/10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
