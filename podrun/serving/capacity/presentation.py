"""The answer to a question of capacity for people: as text, and as a page with throughput against latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from podrun.core.terminal import fields, text_table
from podrun.report.curves import line_chart, picture_page
from podrun.serving.capacity.answer import CapacityAnswer, ServiceAnswer
from podrun.serving.capacity.planning import PlanResult


def answer_text(answer: CapacityAnswer) -> str:
    """The answer as text for people."""
    parts = [_verdict(answer)]
    for one in answer.services:
        parts += ["", _service_text(one, answer)]
    return "\n".join(parts) + "\n"


def _verdict(answer: CapacityAnswer) -> str:
    many = "the service" if len(answer.services) == 1 else f"all {len(answer.services)} services"
    if answer.pod is None:
        return f"{answer.target} does not hold {many}. Name a larger --target, or allow more with --slo."
    price = answer.price(answer.pod)
    cost = "" if price is None else f" ({price:g} an hour)"
    kind = "cheapest" if answer.prices else "smallest"
    return f"{answer.target} holds {many}. The {kind} POD that does: {answer.pod}{cost}."


def _service_text(one: ServiceAnswer, answer: CapacityAnswer) -> str:
    service, final = one.service, one.final
    demand = service.demand
    asked = ", ".join(f"{goal.name} {_ms(goal.seconds)}" for goal in demand.objectives) or "no limit"
    pairs = [
        ("model", f"{service.costs.name}, {service.costs.ipus_per_replica} IPUs a replica"),
        ("asked", f"{service.rate:,.0f} requests/s ({demand.arrivals.label}), {asked}"),
        ("partition", f"{one.ipus} IPUs, {final.plan.replicas} replicas" + _needs(one)),
        ("best", f"batch {final.plan.run.rows}, delay {_ms(final.plan.delay_s)}"),
        ("answered", _latencies(final)),
        ("up to", f"{one.highest_rate:,.0f} requests/s within the limits"),
        ("one machine lost", _lost(one)),
    ]
    if (price := answer.price(answer.target)) is not None and len(answer.services) == 1:
        pairs.append(
            ("cost", f"{price / (service.rate * 3.6e3) * 1e6:.3g} a million requests on {answer.target}")
        )
    head = ("batch", "delay", "run", "carried/s", "p50", "p99", "busy", "holds")
    return fields(pairs) + "\n\n" + text_table(head, [_row(result, demand.rows) for result in one.tried])


def _needs(one: ServiceAnswer) -> str:
    return "" if one.needed_ipus in (None, one.ipus) else f" ({one.needed_ipus} IPUs would do)"


def _latencies(result: PlanResult) -> str:
    if math.isinf(result.ratio):
        return f"never: the replicas carry {result.plan.carried(1):,.0f} rows/s"
    told = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in result.latency_s.items())
    return f"{told}; {result.utilisation:.0%} busy, {result.mean_rows:.1f} rows a run"


def _lost(one: ServiceAnswer) -> str:
    if one.lost is None:
        return "nothing is served"
    if math.isinf(one.lost.ratio):
        return f"too slow; up to {one.lost_highest_rate:,.0f} requests/s"
    holds = "holds" if one.lost.holds else "does not hold"
    return f"{holds}: {_latencies(one.lost)}; up to {one.lost_highest_rate:,.0f} requests/s"


def _row(result: PlanResult, rows: int) -> tuple[str, ...]:
    plan = result.plan
    known = math.isfinite(result.ratio)
    return (
        str(plan.run.rows),
        _ms(plan.delay_s),
        _ms(plan.run.seconds),
        f"{plan.carried(rows):,.0f}",
        _ms(result.latency_s["p50"]) if known else "-",
        _ms(result.latency_s["p99"]) if known else "-",
        f"{result.utilisation:.0%}" if known else "over",
        "yes" if result.holds else "no",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def capacity_page(answer: CapacityAnswer) -> str:
    """The answer as a page of HTML."""
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
