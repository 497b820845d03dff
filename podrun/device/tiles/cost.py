"""The cost of a traced step on one IPU, as plain data.

`cost_jaxpr` takes the step of one replica on one IPU (not the folded emulation of many) and says how many
cycles it takes, where they go and what the tiles hold. `StepParts` joins the pieces of a batch:
micro-batches, update and all-reduce.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from podrun.device.target import CHIPS, Chip
from podrun.device.target import chip as find_chip
from podrun.device.tiles.code import code_bytes
from podrun.device.tiles.flatten import flatten
from podrun.device.tiles.liveness import Liveness, measure
from podrun.device.tiles.mapping import by_tile
from podrun.device.tiles.plan import Plan
from podrun.device.tiles.schedule import Options, Step, make_schedule

REPORT_VERSION = 1
"""Version of the report's keys."""
TILE_IMBALANCE = 1.06
"""Fullest tile over mean tile for programs that fill a chip. Published: 1.05 to 1.2."""


def cost_jaxpr(
    closed_jaxpr: Any,
    target: str | Chip,
    *,
    partials_type: str = "float32",
    available_memory_proportion: float = 0.6,
    strict: bool = False,
    repeats: int = 1,
    product_type: str | None = None,
    results_stay: bool = True,
) -> dict[str, Any]:
    """Cost a ``jax.core.ClosedJaxpr`` on one IPU of ``target`` (a chip's or system's name, or a Chip).

    ``product_type``: cost products as if their operands had this type (``float8``). ``repeats``: how
    often the jaxpr runs in one step (accumulated micro-batches). ``results_stay``: results are held to the
    end (accumulated gradients), or used up as they are made. The report is JSON-able: ``step`` (cycles,
    seconds, and cycles by cause), ``by_operator`` and ``by_scope`` (cycles, largest first), ``memory``
    (bytes: always live, peak of the rest, temporary, code, fullest tile, fits), ``bounds`` (primitives that
    no planner knows, with count and cycles), ``target``, ``version``.

    Raises:
        InvalidOptionError: unknown target, or an impossible proportion.
        UnimplementedError: strict, and an equation that no planner knows.
    """
    chip = target if isinstance(target, Chip) else find_chip(target)
    options = Options(partials_type, available_memory_proportion, strict, product_type=product_type)
    flat = flatten(closed_jaxpr)
    steps = make_schedule(chip, flat, options)
    return report_of(chip, steps, measure(flat, steps, results_stay=results_stay), repeats)


def leaves(steps: Sequence[Step]) -> Iterator[Step]:
    """Every planned step, loop bodies opened."""
    for step in steps:
        if step.body:
            yield from leaves(step.body)
        else:
            yield step


def report_of(chip: Chip, steps: Sequence[Step], liveness: Liveness, repeats: int = 1) -> dict[str, Any]:
    """The report of a planned schedule; see `cost_jaxpr`."""
    causes = dict.fromkeys(("compute", "exchange", "rearrange", "launch", "sync"), 0.0)
    by_family: dict[str, list[float]] = {}
    by_scope: dict[str, float] = {}
    bounds: dict[str, list[float]] = {}
    flops = 0.0
    for step in leaves(steps):
        plan = step.plan
        launch, sync = plan.overhead(chip)
        for cause, value in zip(
            causes, (plan.compute, plan.exchange, plan.rearrange, launch, sync), strict=True
        ):
            causes[cause] += value * repeats
        cycles = plan.cycles(chip) * repeats
        if plan.family != "view":
            entry = by_family.setdefault(plan.family, [0.0, 0.0])
            entry[0] += cycles
            entry[1] += 1
            scope = step.scope or "(no scope)"
            by_scope[scope] = by_scope.get(scope, 0.0) + cycles
        if plan.bound:
            bound = bounds.setdefault(step.primitive, [0.0, 0.0])
            bound[0] += cycles
            bound[1] += 1
        flops += plan.flops * repeats
    total = sum(causes.values())
    return {
        "version": REPORT_VERSION,
        "target": chip.name,
        "step": {
            "cycles": round(total),
            "seconds": total / chip.clock_hz,
            "flops": round(flops),
            "by_cause": {cause: round(value) for cause, value in causes.items()},
        },
        "by_operator": _ranked(
            {name: {"cycles": round(c), "count": int(n)} for name, (c, n) in by_family.items()}
        ),
        "by_scope": dict(sorted(((s, round(c)) for s, c in by_scope.items()), key=lambda i: (-i[1], i[0]))),
        "timeline": timeline(chip, steps),
        "memory": memory_report(chip, steps, liveness),
        "code_by_scope": code_by_scope(chip, steps),
        "bounds": {name: {"cycles": round(c), "count": int(n)} for name, (c, n) in sorted(bounds.items())},
    }


def timeline(chip: Chip, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """BSP steps in order, neighbours of one scope and family joined: cycles of compute, exchange (copies around
    it included) and sync (launches included), and how many steps are in it."""
    entries: list[dict[str, Any]] = []
    for step in leaves(steps):
        plan = step.plan
        if plan.family == "view":
            continue
        launch, sync = plan.overhead(chip)
        last = entries[-1] if entries else None
        if last is None or last["scope"] != step.scope or last["operator"] != plan.family:
            last = {"scope": step.scope, "operator": plan.family, "steps": 0}
            last |= {"compute": 0, "exchange": 0, "sync": 0}
            entries.append(last)
        last["steps"] += 1
        last["compute"] += round(plan.compute)
        last["exchange"] += round(plan.exchange + plan.rearrange)
        last["sync"] += round(launch + sync)
    return entries


def code_by_scope(chip: Chip, steps: Sequence[Step]) -> dict[str, dict[str, int]]:
    """Bytes of vertex state, exchange and control code on the chip, by named scope."""
    grouped: dict[str, list[Plan]] = {}
    for step in leaves(steps):
        if step.plan.family != "view":
            grouped.setdefault(step.scope or "(no scope)", []).append(step.plan)
    return {
        scope: {
            part: round(value) for part, value in code_bytes(chip, plans).items() if part != "vertex_code"
        }
        for scope, plans in sorted(grouped.items())
    }


def _ranked(entries: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    return dict(sorted(entries.items(), key=lambda item: (-item[1]["cycles"], item[0])))


def memory_report(chip: Chip, steps: Sequence[Step], liveness: Liveness) -> dict[str, Any]:
    """Bytes by category: on the chip, and on the fullest tile."""
    plans = [step.plan for step in leaves(steps)]
    code = code_bytes(chip, plans)
    peak, where = 0.0, liveness.peak_step
    for index, (bytes_live, step) in enumerate(zip(liveness.curve, steps, strict=True)):
        held = bytes_live + step.plan.temporary_bytes * min(step.plan.tiles or chip.tiles, chip.tiles)
        if held > peak:
            peak, where = held, index
    total = liveness.always + peak + sum(code.values())
    busiest = steps[where].plan if steps else None
    live = liveness.curve[where] if steps else 0
    intervals = by_tile(chip, plans, liveness.always, live, busiest, code["vertex_code"])
    fullest = total / chip.tiles * TILE_IMBALANCE
    return {
        "always_live_bytes": liveness.always,
        "not_always_live_peak_bytes": round(peak),
        "activations_peak_bytes": liveness.peak,
        "temporary_bytes": round(max((plan.temporary_bytes for plan in plans), default=0.0)),
        "code": {name: round(value) for name, value in code.items()},
        "total_bytes": round(total),
        "max_tile_bytes": round(fullest),
        "tile_bytes": chip.tile_bytes,
        "fits": fullest <= chip.tile_bytes,
        "peak_step": where,
        "by_tile": [
            {
                "first": interval.first,
                "last": interval.last,
                "bytes": {name: round(size) for name, size in sorted(interval.content.items())},
            }
            for interval in intervals
        ],
        "by_time": _thinned(liveness.curve),
        "largest": [{"scope": scope, "bytes": size} for scope, size in liveness.contents],
    }


TIME_POINTS = 256
"""Most points of the liveness curve that a report keeps."""


def _thinned(curve: Sequence[int]) -> list[int]:
    """The curve, or the largest value of each of `TIME_POINTS` equal parts of it."""
    if len(curve) <= TIME_POINTS:
        return list(curve)
    edges = [index * len(curve) // TIME_POINTS for index in range(TIME_POINTS + 1)]
    return [max(curve[first:last]) for first, last in itertools.pairwise(edges)]


__all__ = ["CHIPS", "cost_jaxpr", "leaves", "memory_report", "report_of"]
