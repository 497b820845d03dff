"""The answer to a question of capacity as a page with pictures: throughput against latency, and what was tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from podrun.report.curves import line_chart, picture_page
from podrun.serving.capacity.answer import CapacityAnswer, ServiceAnswer, answer_text
from podrun.serving.capacity.planning import PlanResult


def capacity_page(answer: CapacityAnswer) -> str:
    """The page."""
    models = ", ".join(one.service.costs.name for one in answer.services)
    parts = []
    for one in answer.services:
        parts += _pictures(one)
    parts += ["<h2>Figures</h2>", f"<pre>{escape(answer_text(answer))}</pre>"]
    return picture_page(f"Capacity of {answer.target} for {models}", parts)


def _pictures(one: ServiceAnswer) -> list[str]:
    plan, costs = one.final.plan, one.service.costs
    limits = {
        f"{goal.name} at most {goal.seconds * 1e3:g} ms": goal.seconds * 1e3
        for goal in one.service.demand.objectives
    }
    parts = [f"<h2>{escape(costs.name)}: batch {plan.run.rows} on {one.ipus} IPUs</h2>"]
    if one.curve:
        lines = {name: _points(one.curve, name) for name in ("p50", "p99")}
        parts.append(line_chart(lines, "requests a second", "ms to the answer", limits))
    runs = [(float(run.rows), run.seconds * 1e3) for run in costs.runs]
    if len(runs) > 1:
        parts += [
            f"<h2>{escape(costs.name)}: a run by its batch</h2>",
            line_chart({"run": runs}, "samples of a run", "ms of a run"),
        ]
    return parts


def _points(results: Sequence[PlanResult], name: str) -> list[tuple[float, float]]:
    return [(result.rate, result.latency_s[name] * 1e3) for result in results if math.isfinite(result.ratio)]
