"""The cost of a traced step on one IPU, as plain data. `podrun.costmodel.report_checks` checks that report.

`cost_jaxpr` takes the step of one replica on one IPU (not the folded emulation of many) and says how many
cycles it takes, where they go and what the tiles hold. `StepParts` joins the pieces of a batch:
micro-batches, update and all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from podrun.costmodel import plan_cache
from podrun.costmodel.eight_bit import in_eight_bits
from podrun.costmodel.equations import CALL_CODE, FlatJaxpr, Plan, code_bytes
from podrun.costmodel.flatten import flatten_jaxpr
from podrun.costmodel.report_checks import SCOPES, check_planned
from podrun.costmodel.schedule import PlannedOperation, make_schedule
from podrun.costmodel.settings import PlanOptions
from podrun.costmodel.target import CHIPS, Chip
from podrun.costmodel.target import chip as find_chip
from podrun.costmodel.tile_memory import (
    ARGUMENTS,
    TILE_IMBALANCE,
    Demand,
    LiveBytes,
    measure_live_bytes,
    section,
)

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

REPORT_VERSION = 1
"""Version of the report's keys."""


def cost_jaxpr(
    closed_jaxpr: ClosedJaxpr,
    target: str | Chip,
    *,
    partials_type: str = "float32",
    available_memory_proportion: float = 0.6,
    strict: bool = False,
    repeats: int = 1,
    product_type: str | None = None,
    results_stay: bool | Sequence[bool] = True,
) -> dict[str, Any]:
    """Cost a ``jax.core.ClosedJaxpr`` on one IPU of ``target`` (a chip's or system's name, or a Chip).

    ``product_type``: cost products as if their operands had this type (``float8``). ``repeats``: how often
    the jaxpr runs in one step (accumulated micro-batches). ``results_stay``: results are held to the end
    (gradients that wait for the update), or used up as they are made; for all of them, or for each. The
    report is JSON-able: ``step`` (cycles, seconds, and cycles by cause), ``by_operator`` and ``by_scope``
    (cycles, largest first), ``memory`` (`podrun.costmodel.tile_memory.section`), ``bounds`` (primitives that
    no planner knows: count, cycles, scopes), ``target``, ``version``.

    Raises:
        InvalidOptionError: unknown target, or an impossible proportion.
        UnimplementedError: strict, and equations that no planner knows, all of them by name.
    """
    report = cost_flat(
        flatten_jaxpr(closed_jaxpr),
        target,
        PlanOptions(partials_type, available_memory_proportion, product_type=product_type),
        repeats=repeats,
        results_stay=results_stay,
    )
    if strict:
        check_planned([report["bounds"]])
    return report


def cost_flat(
    flat: FlatJaxpr,
    target: str | Chip,
    options: PlanOptions | None = None,
    *,
    repeats: int = 1,
    results_stay: bool | Sequence[bool] = True,
) -> dict[str, Any]:
    """Cost a flat jaxpr; see `cost_jaxpr`. Large ones are kept on disk (`podrun.costmodel.plan_cache`)."""
    chip = target if isinstance(target, Chip) else find_chip(target)
    chosen = options or PlanOptions()
    flat = in_eight_bits(flat, chip)

    def plan() -> dict[str, Any]:
        steps = make_schedule(chip, flat, chosen)
        return report_of(chip, steps, measure_live_bytes(flat, steps, results_stay=results_stay), repeats)

    if len(flat.equations) < plan_cache.FEWEST_EQUATIONS:
        return plan()
    facts = {name: fact.value for name, fact in chip.facts.items()}
    question = ("cost", flat, chip.name, facts, astuple(chosen), repeats, results_stay)
    report: dict[str, Any] = plan_cache.remembered(question, plan)
    return report


def leaves(steps: Sequence[PlannedOperation]) -> Iterator[PlannedOperation]:
    """Every planned step, loop bodies opened."""
    for step in steps:
        if step.body:
            yield from leaves(step.body)
        else:
            yield step


def report_of(
    chip: Chip, steps: Sequence[PlannedOperation], liveness: LiveBytes, repeats: int = 1
) -> dict[str, Any]:
    """The report of a planned schedule; see `cost_jaxpr`."""
    causes = dict.fromkeys(("compute", "exchange", "rearrange", "launch", "sync"), 0.0)
    by_family: dict[str, list[float]] = {}
    by_scope: dict[str, float] = {}
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
        "timeline": bsp_timeline(chip, steps),
        "memory": memory_report(chip, steps, liveness),
        "memory_by_scope": memory_by_scope(chip, steps, liveness),
        "code_by_scope": code_by_scope(chip, steps),
        "bounds": _bounds(chip, steps, repeats),
    }


def _bounds(chip: Chip, steps: Sequence[PlannedOperation], repeats: int) -> dict[str, dict[str, Any]]:
    """The primitives that no planner knows: cycles, counts, and the first scopes in which they occur."""
    steps_of: dict[str, list[PlannedOperation]] = {}
    for step in leaves(steps):
        if step.plan.bound:
            steps_of.setdefault(step.primitive, []).append(step)
    return {
        name: {
            "cycles": round(sum(step.plan.cycles(chip) * repeats for step in those)),
            "count": len(those),
            "scopes": list(dict.fromkeys(step.scope for step in those if step.scope))[:SCOPES],
        }
        for name, those in sorted(steps_of.items())
    }


def bsp_timeline(chip: Chip, steps: Sequence[PlannedOperation]) -> list[dict[str, Any]]:
    """BSP steps in order, neighbours of one scope and family joined: cycles of compute, exchange (copies
    around it included) and sync (launches included), and how many steps are in it.
    """
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


def code_by_scope(chip: Chip, steps: Sequence[PlannedOperation]) -> dict[str, dict[str, int]]:
    """Bytes of vertex state, exchange and control code on the chip, by named scope. A call of outlined code is of the
    scope that it begins with.
    """
    grouped: dict[str, list[Plan]] = {}
    for step in leaves(steps):
        if step.plan.family != "view":
            grouped.setdefault(step.scope or "(no scope)", []).extend([] if step.outlined else [step.plan])
    code_of = {scope: code_bytes(chip, plans) for scope, plans in sorted(grouped.items())}
    for step in calls(steps):
        code_of[step.scope or "(no scope)"]["control_code"] += CALL_CODE * chip.tiles
    return {
        scope: {part: round(value) for part, value in code.items() if part != "vertex_code"}
        for scope, code in code_of.items()
    }


def calls(steps: Sequence[PlannedOperation]) -> Iterator[PlannedOperation]:
    """The first step of each run of steps whose code others hold: each run is a call."""
    inside = False
    for step in leaves(steps):
        if step.plan.family != "view":
            if step.outlined and not inside:
                yield step
            inside = step.outlined


def _ranked(entries: Mapping[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    return dict(sorted(entries.items(), key=lambda item: (-item[1]["cycles"], item[0])))


def memory_by_scope(
    chip: Chip, steps: Sequence[PlannedOperation], liveness: LiveBytes
) -> dict[str, dict[str, int]]:
    """Bytes on the chip: the most that is alive while a named scope works, arguments left out, and the most
    temporary data of its steps.
    """
    sizes: dict[str, dict[str, int]] = {}
    for live, step in zip(liveness.curve, steps, strict=True):
        if step.plan.family != "view":
            entry = sizes.setdefault(step.scope or "(no scope)", {"live": 0, "temporary": 0})
            entry["live"] = max(entry["live"], live)
            entry["temporary"] = max(entry["temporary"], temporary_on_chip(chip, step.plan))
    return dict(sorted(sizes.items()))


def demand_of(chip: Chip, steps: Sequence[PlannedOperation], liveness: LiveBytes) -> tuple[Demand, int]:
    """The memory that a planned schedule needs by itself, and the step at which its fullest tile is fullest."""
    plans = [step.plan for step in leaves(steps) if not step.outlined]
    code = code_bytes(chip, plans, sum(1 for _ in calls(steps)))
    held = [
        live + temporary_on_chip(chip, step.plan) for live, step in zip(liveness.curve, steps, strict=True)
    ]
    if not held:
        return Demand({ARGUMENTS: liveness.always}, 0, code=code), 0
    where = max(range(len(held)), key=held.__getitem__)
    live = liveness.curve[where]
    return Demand({ARGUMENTS: liveness.always}, live, held[where] - live, code), where


def temporary_on_chip(chip: Chip, plan: Plan) -> int:
    """Bytes of temporary data on the chip while a plan runs."""
    return round(plan.temporary_bytes * min(plan.tiles or chip.tiles, chip.tiles))


def memory_report(chip: Chip, steps: Sequence[PlannedOperation], liveness: LiveBytes) -> dict[str, Any]:
    """Bytes by content on the chip and by category on tiles; see `podrun.costmodel.tile_memory.section`."""
    demand, where = demand_of(chip, steps, liveness)
    report = section(chip, demand, largest=liveness.contents, curve=liveness.curve, peak_step=where)
    return report | {"activations_peak_bytes": liveness.peak}


__all__ = ["CHIPS", "TILE_IMBALANCE", "cost_jaxpr", "leaves", "memory_report", "report_of"]
