"""The modelled time and memory of one batch: the seam between the compiler and the tile model.

The model reads the jaxpr of one replica and one micro-batch (forward and backward, not folded), cut into the
same segments as the program, and that of the update on each IPU. Here they are put in order: without
pipelining one segment after the other; with it, cycle by cycle, each as long as its slowest IPU. Copies
between neighbouring IPUs and the all-reduce over replicas take their time from the link model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from podrun.compiler import jax_internals
from podrun.compiler.abstract import abstract, buffer
from podrun.compiler.arenas import Memory, WeightGroup, scalar_dtype
from podrun.compiler.holdings import Work, ipu_memory
from podrun.compiler.pieces import TracedPiece
from podrun.compiler.placement import Placement
from podrun.compiler.program import Program, UpdateRule
from podrun.compiler.split import CROSSING_PREFIX, Segment, split
from podrun.compiler.trace import Trace, evaluate
from podrun.device.target import Chip, chip
from podrun.device.tiles.cost import cost_jaxpr
from podrun.device.tiles.links import all_reduce_seconds, neighbour_seconds
from podrun.device.tiles.recompute import recomputed
from podrun.executable import numpy_dtype


def tile_report(
    program: Program, traced: Trace, placement: Placement, memory: Memory, target: str
) -> dict[str, Any]:
    """The report of one batch, plain JSON-able data.

    ``step``: cycles and seconds, and seconds by cause (compute, copies, update, all_reduce). ``segments``:
    for each segment of a micro-batch its IPU, the cycle of the pipeline it runs in, and the tile model's
    report of it; ``update``: the same for each IPU that has weights. ``ipus``: what each IPU holds. ``pipelined``,
    ``version``.

    Raises InvalidOptionError for an unknown target.
    """
    model = chip(target)
    segments = [
        _segment_cost(program, traced, segment, placement, target)
        for segment in micro_batch_segments(program, traced, placement)
    ]
    updates = _update_reports(program, memory, target)
    causes = _micro_batches(program, segments, model)
    causes["update"] = max((report["step"]["seconds"] for report in updates.values()), default=0.0)
    causes["all_reduce"] = _all_reduce(program, memory, model)
    seconds = sum(causes.values())
    return {
        "version": 1,
        "step": {"cycles": round(seconds * model.clock_hz), "seconds": seconds, "seconds_by_cause": causes},
        "pipelined": program.pipelined,
        "segments": [
            {"ipu": s.ipu, "cycle": s.cycle, "sent_bytes": s.sent_bytes, "report": s.report} for s in segments
        ],
        "update": [{"ipu": ipu, "report": report} for ipu, report in updates.items()],
        "ipus": ipu_memory(program, memory, [s.work for s in segments], updates, model),
    }


@dataclass(frozen=True, slots=True)
class _SegmentCost:
    ipu: int
    cycle: int
    sent_bytes: int
    report: dict[str, Any]
    work: Work


def micro_batch_segments(program: Program, traced: Trace, placement: Placement) -> tuple[Segment, ...]:
    """Forward, and backward if there is a loss, of one micro-batch on one replica, as segments."""
    weights = [name for name in traced.parameters if program.parameters[name].trainable and program.update]
    names = (*traced.parameters, *traced.inputs)

    def run(*arguments: Any) -> Any:
        named = dict(zip(names, arguments[:-1], strict=True))

        def forward(chosen: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            values = evaluate(traced, [*(named | chosen).values(), arguments[-1]], {})
            return values[program.loss] if program.loss else jnp.float32(0), values

        if program.loss is None or not weights:
            return list(forward({})[1].values())
        loss, pull_back, values = jax.vjp(forward, {n: named[n] for n in weights}, has_aux=True)
        return [*values.values(), *pull_back(jnp.ones_like(loss))[0].values()]

    specs = [abstract(program.parameters[n].spec) for n in traced.parameters]
    specs += [abstract(program.inputs[n].spec) for n in traced.inputs]
    closed = jax_internals.pruned(jax.make_jaxpr(run)(*specs, buffer((2,), "uint32")))
    results = tuple(f"result:{i}" for i in range(len(closed.jaxpr.outvars)))
    closed = recomputed(closed, program.recompute, lambda equation: _place(placement, equation))
    piece = TracedPiece("micro_batch", closed, (*names, "key"), results)
    if not placement.split:
        return (Segment(0, 0, piece),)
    return split(piece, placement.spot)


def _place(placement: Placement, equation: Any) -> int | None:
    spot = placement.spot(equation)
    return None if spot is None else spot.place


def _segment_cost(
    program: Program, traced: Trace, segment: Segment, placement: Placement, target: str
) -> _SegmentCost:
    piece = segment.piece
    outputs = zip(piece.outputs, piece.jaxpr.out_avals, strict=True)
    sent = sum(a.size * a.dtype.itemsize for name, a in outputs if name.startswith(CROSSING_PREFIX))
    values = {f"result:{i}": name for i, name in enumerate(traced.outputs)}
    # Gradients wait for the update, unless accumulators take them in; all other results go elsewhere at once.
    waits = program.accumulation_factor == 1
    stay = [waits and name.startswith("result:") and name not in values for name in piece.outputs]
    report = cost_jaxpr(piece.jaxpr, target, results_stay=stay)
    anchored = {anchor.name for anchor in program.anchors}
    streams = {result: name for result, name in values.items() if name in anchored}
    ipu = placement.ipu(segment.place)
    return _SegmentCost(ipu, segment.rank, sent, report, Work(segment, ipu, segment.rank, report, streams))


def _micro_batches(program: Program, segments: Sequence[_SegmentCost], model: Chip) -> dict[str, float]:
    """Seconds of all micro-batches of a batch: computing, and copying between IPUs.

    What a segment leaves for a later one of its own IPU is counted with what it sends: an upper bound.
    """
    total = program.accumulation_factor
    compute = [segment.report["step"]["seconds"] for segment in segments]
    copies = [neighbour_seconds(model, segment.sent_bytes) for segment in segments]
    if not program.pipelined:
        return {"compute": total * sum(compute), "copies": total * sum(copies)}
    length = max(segment.cycle for segment in segments) + 1
    found = {"compute": 0.0, "copies": 0.0}
    for cycle in range(total + length - 1):
        busy: dict[int, float] = {}
        slowest_copy = 0.0
        for segment, seconds, copy in zip(segments, compute, copies, strict=True):
            if 0 <= cycle - segment.cycle < total:
                busy[segment.ipu] = busy.get(segment.ipu, 0.0) + seconds
                slowest_copy = max(slowest_copy, copy)
        found["compute"] += max(busy.values())
        found["copies"] += slowest_copy
    return found


def _update_reports(program: Program, memory: Memory, target: str) -> dict[int, dict[str, Any]]:
    """The tile model's report of the update on each IPU that has weights."""
    rule = program.update
    found = {}
    for ipu, groups in _groups_by_ipu(memory).items():
        assert rule is not None
        # New weights and state take the place of the old ones.
        found[ipu] = cost_jaxpr(_update_jaxpr(rule, groups), target, results_stay=False)
    return found


def _groups_by_ipu(memory: Memory) -> dict[int, list[WeightGroup]]:
    found: dict[int, list[WeightGroup]] = {}
    for group in memory.groups:
        found.setdefault(group.home, []).append(group)
    return dict(sorted(found.items()))


def _update_jaxpr(rule: UpdateRule, groups: Sequence[WeightGroup]) -> Any:
    """The update of every weight of the groups, on one replica."""
    weights = [(weight, group.gradient_dtype) for group in groups for weight in group.weights]

    def run(now: Any, gradients: Any, states: Any, scalars: Any) -> Any:
        return [
            rule.apply(spec.name, w, g, s, {n: scalars[n] for n in rule.scalars(spec.name)})
            for (spec, _), w, g, s in zip(weights, now, gradients, states, strict=True)
        ]

    now = [abstract(spec) for spec, _ in weights]
    gradients = [buffer(spec.shape, dtype) for spec, dtype in weights]
    states = [{p: abstract(s) for p, (s, _) in sorted(rule.state(spec).items())} for spec, _ in weights]
    names = sorted({name for spec, _ in weights for name in rule.scalars(spec.name)})
    scalars = {name: buffer((), scalar_dtype(name)) for name in names}
    return jax.make_jaxpr(run)(now, gradients, states, scalars)


def _all_reduce(program: Program, memory: Memory, model: Chip) -> float:
    """Seconds to reduce the gradients over all replicas; IPUs of a replica do theirs side by side."""
    if not memory.groups:
        return 0.0
    nbytes = [
        sum(group.size * numpy_dtype(group.gradient_dtype).itemsize for group in groups)
        for groups in _groups_by_ipu(memory).values()
    ]
    return all_reduce_seconds(model, program.replicas, max(nbytes), ipus_per_replica=program.ipus_per_replica)
