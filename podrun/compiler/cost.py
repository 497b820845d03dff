"""The modelled time and memory of one batch: the seam between the compiler and the tile model.

The model reads the jaxpr of one replica and one micro-batch (forward and backward, not folded), cut into the
same segments as the program, and that of the update on each IPU. `podrun.compiler.timeline` puts them in order.
Copies between neighbouring IPUs and the all-reduce over replicas take their time from the link model.

For automatic placement a front end asks `operator_costs` for an unplaced program, cuts its operators with
`balanced_places`, and builds the placed program. Any contiguous cut gives the same numbers; a balanced one is faster in
a pipeline and fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from podrun.compiler import jaxprs
from podrun.compiler.arenas import Memory
from podrun.compiler.collective_times import collective_seconds, gather_seconds, reduction_seconds
from podrun.compiler.export import TracedPiece
from podrun.compiler.forward_trace import Trace, evaluate_forward
from podrun.compiler.ipu_memory import SegmentWork, ipu_memory
from podrun.compiler.jaxprs import abstract, buffer
from podrun.compiler.memory_remedies import largest_need, remedies
from podrun.compiler.model_collectives import alone, has_exchange
from podrun.compiler.program import PipelineOrder, Program, joint
from podrun.compiler.segments import PieceSegment, Placement, split_at_places
from podrun.compiler.timeline import (
    SegmentTask,
    host_transfer_seconds,
    idle_share,
    makespan,
    seconds_by_cause,
    streamed_segment_bytes,
    streamed_update_bytes,
    streaming_seconds,
)
from podrun.compiler.update_cost import groups_by_ipu, update_reports
from podrun.core.names import CROSSING, gradient_buffer
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.cost import cost_flat
from podrun.costmodel.equations import FlatJaxpr
from podrun.costmodel.exchange import neighbour_seconds
from podrun.costmodel.flatten import flatten_jaxpr
from podrun.costmodel.recompute import recomputed
from podrun.costmodel.schedule import FlatSegment, split_flat
from podrun.costmodel.target import Chip, chip


def tile_report(
    program: Program, traced: Trace, placement: Placement, memory: Memory, target: str
) -> dict[str, Any]:
    """The report of one batch, plain JSON-able data.

    ``step``: cycles and seconds, and seconds by cause (compute, copies, streaming, update, all_reduce,
    collectives: those of the model, and sharded weights that are gathered; host: waiting for its data, in programs
    that arrange transfers). ``segments``: for each segment of a micro-batch its IPU, the cycle of the pipeline it runs
    in, and the tile model's report of it; ``update``: the same for each IPU that has weights. ``ipus``: what each IPU
    holds. ``pipelined``, and for pipelines ``pipeline``: schedule, cycles to fill, run full and flush, the share of
    time in which IPUs idle. ``version``. Of a program that does not fit also ``remedies`` and ``largest_need``.

    Raises InvalidOptionError for an unknown target.
    """
    model = chip(target)
    working = model
    if program.transfers is not None and program.transfers.io_tiles:
        working = model.with_tiles(model.tiles - program.transfers.io_tiles)
    step = _micro_batch(program, traced)
    cut = _cut(program, step, placement)

    def works(changed: Program) -> list[SegmentWork]:
        if changed.recompute == program.recompute:
            return [s.work for s in segments]
        again = _cut(changed, step, placement)
        return [_segment_cost(changed, step, s, again, placement, working).work for s in again]

    segments = [_segment_cost(program, step, segment, cut, placement, working) for segment in cut]
    updates = update_reports(program, memory, working)
    collectives = _collectives(program, traced, cut, segments, placement, model)
    tasks = _tasks(program, segments, updates, memory, collectives, model)
    causes = _seconds_by_cause(program, memory, updates, tasks, model)
    if program.transfers is not None:
        causes["host"] = host_transfer_seconds(program, traced, model, _micro_batch_seconds(program, tasks))
    seconds = sum(causes.values())
    held = ipu_memory(program, memory, [s.work for s in segments], updates, working)
    report = {
        "version": 1,
        "step": {"cycles": round(seconds * model.clock_hz), "seconds": seconds, "seconds_by_cause": causes},
        "pipelined": program.pipelined,
        "segments": [
            {"ipu": s.ipu, "cycle": s.cycle, "sent_bytes": s.sent_bytes, "report": s.report} for s in segments
        ],
        "update": [{"ipu": ipu, "report": report} for ipu, report in updates.items()],
        "ipus": held,
    }
    if not all(entry["memory"]["fits"] for entry in held):
        report["remedies"] = remedies(program, memory, works, updates, working)
        report["largest_need"] = largest_need(program, memory)
    return report | ({"pipeline": _pipeline(program, placement, tasks)} if program.pipelined else {})


def _micro_batch_seconds(program: Program, tasks: Sequence[SegmentTask]) -> float:
    return makespan(tasks, program.accumulation_factor, _schedule(program)) / program.accumulation_factor


def _schedule(program: Program) -> PipelineOrder | None:
    return program.pipeline_schedule if program.pipelined else None


def _seconds_by_cause(
    program: Program,
    memory: Memory,
    updates: Mapping[int, dict[str, Any]],
    tasks: Sequence[SegmentTask],
    model: Chip,
) -> dict[str, float]:
    """Seconds of one batch by cause, without waiting for the host's data."""
    causes = seconds_by_cause(tasks, program.accumulation_factor, _schedule(program))
    if program.updates_each_micro_batch:
        return causes
    causes["copies"] += _norm_seconds(program, updates, model)
    causes["update"] = max((report["step"]["seconds"] for report in updates.values()), default=0.0)
    streamed = _update_streaming(program, memory)
    if streamed:
        batched = program.phases is not None and program.phases.batched
        hidden = causes["update"] if batched else 0.0
        causes["streaming"] = causes.get("streaming", 0.0) + max(0.0, max(streamed.values()) - hidden)
    causes["all_reduce"] = max(reduction_seconds(program, memory, model).values(), default=0.0)
    return causes


@dataclass(frozen=True, slots=True)
class _SegmentCost:
    ipu: int
    cycle: int
    sent_bytes: int
    kept_bytes: int
    report: dict[str, Any]
    work: SegmentWork
    gradients: frozenset[str]
    """The weights whose gradients the segment makes."""


def micro_batch_segments(program: Program, traced: Trace, placement: Placement) -> tuple[PieceSegment, ...]:
    """Forward, and backward if there is a loss, of one micro-batch on one replica, as segments of the trace."""
    closed, names, _ = _traced_step(program, traced)
    results = tuple(f"result:{i}" for i in range(len(closed.jaxpr.outvars)))
    piece = TracedPiece("micro_batch", closed, names, results)
    return split_at_places(piece, placement.spot) if placement.split else (PieceSegment(0, 0, piece),)


def _traced_step(program: Program, traced: Trace) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """Forward, and backward if there is a loss: the jaxpr, its arguments' names, its results' names. The trace itself
    where nothing is differentiated, rounded or exchanged.
    """
    weights = [name for name in traced.parameters if program.parameters[name].trainable and program.update]
    names = (*traced.parameters, *traced.inputs)
    differentiated = program.loss is not None and bool(weights)
    if not (differentiated or traced.stochastic or has_exchange(traced.jaxpr.jaxpr)):
        return traced.jaxpr, (*names, "key"), traced.outputs

    def run(*arguments: object) -> Any:
        named = dict(zip(names, arguments[:-1], strict=True))

        def forward(chosen: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            values = evaluate_forward(traced, [*(named | chosen).values(), arguments[-1]], {}, alone)
            return values[program.loss] if program.loss else jnp.float32(0), values

        if not differentiated:
            return list(forward({})[1].values())
        loss, pull_back, values = jax.vjp(forward, {n: named[n] for n in weights}, has_aux=True)
        return [*values.values(), *pull_back(jnp.ones_like(loss))[0].values()]

    specs = [abstract(program.parameters[n].spec) for n in traced.parameters]
    specs += [abstract(program.inputs[n].spec) for n in traced.inputs]
    closed = jaxprs.pruned(jax.make_jaxpr(run)(*specs, buffer((2,), "uint32")))
    gradients = (gradient_buffer(n) for n in weights) if program.loss is not None else ()
    return closed, (*names, "key"), (*traced.outputs, *gradients)


@dataclass(frozen=True, slots=True)
class _Step:
    """One micro-batch in the library's form, recomputation not yet in it: names of arguments by number, of results in
    order (gradients by that of their accumulators)."""

    flat: FlatJaxpr
    arguments: Mapping[int, str]
    results: tuple[str, ...]

    def name(self, number: int) -> str:
        """An argument's own name; a value that crosses between segments is named by its number."""
        return self.arguments.get(number, f"{CROSSING}{number}")


def _micro_batch(program: Program, traced: Trace) -> _Step:
    closed, names, results = _traced_step(program, traced)
    flat = flatten_jaxpr(closed)
    return _Step(flat, dict(zip(flat.arguments, names, strict=True)), results)


def _cut(program: Program, step: _Step, placement: Placement) -> tuple[FlatSegment, ...]:
    """The micro-batch, with recomputation, cut by places."""

    def place(scope: str) -> int | None:
        spot = placement.spot_of(scope)
        return None if spot is None else spot.place

    flat = recomputed(step.flat, program.recompute, place)
    return split_flat(flat, placement.spot_of) if placement.split else (FlatSegment(0, 0, flat, ()),)


def _segment_cost(
    program: Program,
    step: _Step,
    segment: FlatSegment,
    segments: Sequence[FlatSegment],
    placement: Placement,
    target: Chip,
) -> _SegmentCost:
    sent, kept = _sent_bytes(segment, segments, placement)
    results = dict(zip(step.flat.outputs, step.results, strict=True))
    gradients = {gradient_buffer(name) for name in program.parameters}
    # Gradients wait for the update, unless accumulators take them in; all other results leave at once.
    waits = not program.accumulates
    flat = segment.flat
    stay = [waits and results.get(number) in gradients for number in flat.outputs]
    report = cost_flat(flat, target, program.plans, results_stay=stay)
    anchored = {anchor.name for anchor in program.anchors}
    outputs = [n for n in flat.outputs if n is not None]
    streams = [
        (results[n], flat.tensors[n].nbytes) for n in dict.fromkeys(outputs) if results.get(n) in anchored
    ]
    ipu = placement.ipu(segment.place)
    scopes = {number: equation.scope for equation in flat.equations for number in equation.outputs}
    work = SegmentWork(
        ipu,
        segment.rank,
        report,
        frozenset(step.name(n) for n in flat.arguments),
        tuple((step.name(n), flat.tensors[n].nbytes) for n in segment.crossing),
        tuple(streams),
        sum(flat.tensors[n].nbytes for n in flat.constants),
        {step.name(n): scopes.get(n, "") for n in segment.crossing},
    )
    made_here = {results.get(n) for n in outputs}
    weights = frozenset(name for name in program.parameters if gradient_buffer(name) in made_here)
    return _SegmentCost(ipu, segment.rank, sent, kept, report, work, weights)


def _sent_bytes(
    segment: FlatSegment, segments: Sequence[FlatSegment], placement: Placement
) -> tuple[int, int]:
    """Bytes that a segment sends to other IPUs (once to each) and leaves for later segments of its own IPU."""
    ipu = placement.ipu(segment.place)
    sent = kept = 0
    for number in segment.crossing:
        readers = {placement.ipu(s.place) for s in segments if number in s.flat.arguments}
        size = segment.flat.tensors[number].nbytes
        sent += size * len(readers - {ipu})
        kept += size * (ipu in readers)
    return sent, kept


def _collectives(
    program: Program,
    traced: Trace,
    cut: Sequence[FlatSegment],
    segments: Sequence[_SegmentCost],
    placement: Placement,
    model: Chip,
) -> list[float]:
    """Seconds of each segment's collectives between replicas: forward in the first segment of their place, backward in
    the last; and of the gathering of what it reads."""
    seconds = [gather_seconds(program, segment.work, model) for segment in segments]
    for equation, forward, backward in collective_seconds(program, traced, model):
        spot = placement.spot(equation) if placement.split else None
        own = [k for k, segment in enumerate(cut) if spot is None or segment.place == spot.place] or [0]
        seconds[own[0]] += forward
        seconds[own[-1]] += backward
    return seconds


def _tasks(
    program: Program,
    segments: Sequence[_SegmentCost],
    updates: Mapping[int, Any],
    memory: Memory,
    collectives: Sequence[float],
    model: Chip,
) -> list[SegmentTask]:
    """The segments as tasks of the timeline. Links carry what goes to other IPUs; a pipeline also writes its stash and
    reads it back, at the rate at which tiles copy their own memory. Weights that change with each micro-batch do so
    behind the last work of their IPU.
    """
    copy_rate = model.tiles * model.store_bytes * model.clock_hz
    last = {segment.ipu: place for place, segment in enumerate(segments)}
    reductions = reduction_seconds(program, memory, model)
    moved = streamed_segment_bytes(program, [s.work for s in segments], [s.gradients for s in segments])
    at_once = (
        len({s.ipu for s, nbytes in zip(segments, moved, strict=True) if nbytes}) if program.pipelined else 1
    )
    tasks = []
    for place, segment in enumerate(segments):
        early = program.updates_each_micro_batch and last[segment.ipu] == place and segment.ipu in updates
        tasks.append(
            SegmentTask(
                segment.ipu,
                segment.cycle if program.pipelined else place,
                segment.report["step"]["seconds"],
                neighbour_seconds(model, segment.sent_bytes)
                + program.pipelined * 2 * segment.kept_bytes / copy_rate,
                streaming_seconds(program, moved[place], at_once),
                updates[segment.ipu]["step"]["seconds"] if early else 0.0,
                reductions.get(segment.ipu, 0.0) if early else 0.0,
                collectives[place],
                preload=program.phases is not None and program.phases.preload,
            )
        )
    return tasks


def _update_streaming(program: Program, memory: Memory) -> dict[int, float]:
    """Seconds that the update of each IPU of a replica waits for streaming memory; the IPUs share it."""
    moved = {ipu: streamed_update_bytes(program, groups) for ipu, groups in groups_by_ipu(memory).items()}
    at_once = sum(bool(nbytes) for nbytes in moved.values())
    return {ipu: streaming_seconds(program, nbytes, at_once) for ipu, nbytes in moved.items() if nbytes}


def _pipeline(program: Program, placement: Placement, tasks: Sequence[SegmentTask]) -> dict[str, Any]:
    """The shape of a pipeline: cycles to fill, run full and flush, and the bubble."""
    schedule = program.pipeline_schedule
    filling = max(task.cycle for task in tasks)
    total = program.accumulation_factor
    return {
        "schedule": schedule.value,
        "period": schedule.period,
        "stages": len(placement.stages),
        "fill_cycles": filling,
        "main_cycles": max(0, schedule.period * (total - 1) + 1 - filling),
        "flush_cycles": filling,
        "idle_share": idle_share(tasks, total, schedule),
    }


def _norm_seconds(program: Program, updates: Mapping[int, Any], model: Chip) -> float:
    """Seconds in which parts of norms go from all IPUs with weights to one of them, and the factor back."""
    together = program.update is not None and joint(program.update) is not None
    return 2 * neighbour_seconds(model, 4) if together and len(updates) > 1 else 0.0
