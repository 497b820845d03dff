"""What each IPU of a replica holds: variables, optimizer state, accumulators, streams, stashes, work and code.

The compiler's half of the memory model: it knows the program's variables and their homes, and which segment of a
micro-batch makes and reads what. `podrun.costmodel.tile_memory` adds up. Between pipeline cycles *a* and *b* a value
that an IPU makes (or gets) in *a* and reads in *b* is there for ``(b - a) // period + 1`` micro-batches at once: the
stash (``period``: cycles from one micro-batch to the next).

**Remedies.** For a program that does not fit, each change is tried against this model before a message names it. Places
of variables and recomputation can be changed as a session's options change them. A smaller micro-batch, more IPUs and
another number format change the program itself: they are named only where what they cannot make smaller would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from podrun.compiler.arenas import Memory, WeightGroup
from podrun.compiler.program import Program
from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.core.names import gradient_buffer
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.equations import merged_code
from podrun.costmodel.settings import Location
from podrun.costmodel.target import Chip
from podrun.costmodel.tile_memory import (
    ACCUMULATORS,
    CONSTANTS,
    STASH,
    STATE,
    STREAMS,
    WEIGHTS,
    Demand,
    section,
)

Report = Mapping[str, Any]
LARGEST = 16
"""Number of contents that a report names."""


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """A segment of a micro-batch on an IPU, in its pipeline cycle, with the tile model's report of it.

    ``reads``: names of parameters, inputs and what crosses. ``crossing``: what later segments read, ``anchors``: what
    goes to the host, each with its bytes. ``constants``: bytes. ``makers``: the named scope that makes what crosses.
    """

    ipu: int
    cycle: int
    report: Report
    reads: frozenset[str]
    crossing: tuple[tuple[str, int], ...]
    anchors: tuple[tuple[str, int], ...]
    constants: int
    makers: Mapping[str, str] = field(default_factory=dict)


def ipu_memory(
    program: Program,
    memory: Memory,
    works: Sequence[SegmentWork],
    updates: Mapping[int, Report],
    chip: Chip,
) -> list[dict[str, Any]]:
    """For each IPU of a replica that holds anything: ``ipu``, ``target`` and the report's ``memory`` section."""
    contents = _Contents(program, memory, works)
    entries = []
    for ipu in range(program.ipus_per_replica):
        own = [work for work in works if work.ipu == ipu]
        groups = [group for group in memory.groups if group.home == ipu]
        lasting = contents.of(ipu)
        if not own and not groups and not lasting:
            continue
        reports = [work.report for work in own]
        demand, named, curve = _at_work(program, groups, own, updates.get(ipu))
        held: dict[str, int] = {}
        for kind, name, size in lasting:
            held[kind] = held.get(kind, 0) + size
            named.append((name, size))
        demand = Demand(
            {kind: size for kind, size in held.items() if size},
            demand.activations,
            demand.temporary,
            merged_code(chip, [*reports, *([updates[ipu]] if ipu in updates else [])]),
        )
        named.sort(key=lambda item: (-item[1], item[0]))
        entry = section(chip, demand, largest=named[:LARGEST], curve=curve)
        entries.append({"ipu": ipu, "target": chip.name, "memory": entry})
    return entries


def _at_work(
    program: Program,
    groups: Sequence[WeightGroup],
    works: Sequence[SegmentWork],
    update: Report | None,
) -> tuple[Demand, list[tuple[str, int]], list[int]]:
    """The fullest moment of the IPU's work: its activations and temporary data, the live contents, and the curve."""
    extras = [_visiting(program, work) for work in works]
    moments = [
        _with_extra(_moment(work.report), "weight", extra) for work, extra in zip(works, extras, strict=True)
    ]
    curve = [
        size + extra
        for work, extra in zip(works, extras, strict=True)
        for size in work.report["memory"]["by_time"]
    ]
    if update is not None:
        extra = _update_bytes(program, groups)
        moments.append(_with_extra(_moment(update), "update", extra))
        curve += [size + extra for size in update["memory"]["by_time"]]
    if not moments:
        return Demand({}, 0), [], []
    demand, named = max(moments, key=lambda moment: moment[0].activations + moment[0].temporary)
    return demand, list(named), curve


def _with_extra(
    moment: tuple[Demand, list[tuple[str, int]]], name: str, extra: int
) -> tuple[Demand, list[tuple[str, int]]]:
    demand, named = moment
    if not extra:
        return moment
    more = Demand({}, demand.activations + extra, demand.temporary)
    return more, [*named, (name, extra)]


def _visiting(program: Program, work: SegmentWork) -> int:
    """Bytes of the largest weight that is on chip for a segment only, gathered from its shards or from streaming
    memory; one weight at a time is there whole.
    """
    where = program.locations
    return max(
        (
            parameter.spec.nbytes - _on_chip(parameter.spec, where.of(name, where.weights))
            for name, parameter in program.parameters.items()
            if name in work.reads and name not in program.unsent
        ),
        default=0,
    )


def _moment(report: Report) -> tuple[Demand, list[tuple[str, int]]]:
    """The fullest moment of one report, without its arguments, which are variables, streams or stashes."""
    memory = report["memory"]
    temporary = memory["temporary_bytes"]
    activations = memory["not_always_live_peak_bytes"] - temporary
    return Demand({}, activations, temporary), [(item["scope"], item["bytes"]) for item in memory["largest"]]


def _update_bytes(program: Program, groups: Sequence[WeightGroup]) -> int:
    """Bytes that only the update needs: gradients that no accumulator holds, and state that is streamed in.

    Streamed state is there for one weight at a time, and the largest counts, unless phases batch it.
    """
    where, rule = program.locations, program.update_rule
    batched = program.phases is not None and program.phases.batched
    extra = most = 0
    for group in groups:
        for weight in (program.parameters[weight.name].spec for weight in group.weights):
            if not program.accumulates:
                extra += weight.size * numpy_dtype(group.gradient_dtype).itemsize
            streamed = 0
            for spec, _ in rule.state(weight).values():
                place = where.of(spec.name, where.optimizer_state)
                if place.streamed(spec.size):
                    streamed += place.elements(spec.size) * numpy_dtype(spec.dtype).itemsize
            most = most + streamed if batched else max(most, streamed)
    return extra + most


class _Contents:
    """Lasting contents of each IPU by kind, name and bytes."""

    def __init__(self, program: Program, memory: Memory, works: Sequence[SegmentWork]) -> None:
        self.program, self.memory, self.works = program, memory, works
        self.homes: dict[str, int] = {}
        for work in works:
            for name in work.reads & program.parameters.keys():
                self.homes.setdefault(name, work.ipu)
        for group in memory.groups:
            self.homes |= {weight.name: group.home for weight in group.weights}

    def of(self, ipu: int) -> list[tuple[str, str, int]]:
        """All contents that last on an IPU."""
        entries = [*self._variables(ipu), *self._state(ipu), *self._streams(ipu), *self._stash(ipu)]
        constants = sum(work.constants for work in self.works if work.ipu == ipu)
        entries.append((CONSTANTS, "constants", constants))
        return [entry for entry in entries if entry[2]]

    def _variables(self, ipu: int) -> Iterator[tuple[str, str, int]]:
        where = self.program.locations
        for name, parameter in sorted(self.program.parameters.items()):
            if self.homes.get(name, 0) == ipu and name not in self.program.unsent:
                yield WEIGHTS, name, _on_chip(parameter.spec, where.of(name, where.weights))

    def _state(self, ipu: int) -> Iterator[tuple[str, str, int]]:
        where, rule = self.program.locations, self.program.update
        for group in self.memory.groups:
            if group.home != ipu or rule is None:
                continue
            for weight in (self.program.parameters[weight.name].spec for weight in group.weights):
                for spec, _ in rule.state(weight).values():
                    yield STATE, spec.name, _on_chip(spec, where.of(spec.name, where.optimizer_state))
                if self.program.accumulates:
                    name = gradient_buffer(weight.name)
                    spec = TensorSpec(name, group.gradient_dtype, weight.shape)
                    yield ACCUMULATORS, name, _on_chip(spec, where.of(name, where.accumulators))

    def _streams(self, ipu: int) -> Iterator[tuple[str, str, int]]:
        """Buffers of inputs that this IPU reads from the host, and of anchors that it gives."""
        unsent = self.program.unsent
        for name, spec in sorted(self.program.inputs.items()):
            if name not in unsent and any(work.ipu == ipu and name in work.reads for work in self.works):
                yield STREAMS, name, spec.spec.nbytes
        for work in self.works:
            if work.ipu == ipu:
                yield from ((STREAMS, name, size) for name, size in work.anchors if name not in unsent)

    def _stash(self, ipu: int) -> Iterator[tuple[str, str, int]]:
        place = self.program.locations.activations
        makers = {name: scope for work in self.works for name, scope in work.makers.items()}
        for name, (size, computed_at) in self._crossing_bytes().items():
            reads = [work.cycle for work in self.works if work.ipu == ipu and name in work.reads]
            here = [cycle for at, cycle in computed_at if at == ipu]
            if not reads and not here:
                continue
            # A value from another IPU is there from the cycle after the one in which it was made.
            begin = here[0] if here else min([*reads, *(cycle + 1 for _, cycle in computed_at)])
            period = self.program.pipeline_schedule.period
            held = (max(reads, default=begin) - begin) // period + 1
            copies = min(held, self.program.accumulation_factor) if self.program.pipelined else 1
            copies -= not computed_at  # The stream's buffer holds one micro-batch of an input.
            if copies and not place.streamed(size):
                yield STASH, f"{makers.get(name) or name} x {copies}", copies * size

    def _crossing_bytes(self) -> dict[str, tuple[int, list[tuple[int, int]]]]:
        """Bytes of each value that crosses between segments, and (IPU, cycle) of its maker; inputs have none."""
        crossing: dict[str, tuple[int, list[tuple[int, int]]]] = {}
        for work in self.works:
            for name, size in work.crossing:
                crossing[name] = (size, [(work.ipu, work.cycle)])
        crossing |= {name: (item.spec.nbytes, []) for name, item in self.program.inputs.items()}
        return crossing


def _on_chip(spec: TensorSpec, place: Location) -> int:
    return int(place.on_chip(spec.size, numpy_dtype(spec.dtype).itemsize))


Works = Callable[[Program], Sequence[SegmentWork]]
"""The costed segments of a program; asked for a changed program only if its recomputation changes."""
