"""The answer to a question of capacity: partitions of services, the POD that holds them, room, cost; as JSON and as
text.

``podrun/serving/capacity/capacity.schema.json`` is the schema of the JSON. Same question and seed, same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import report_step
from podrun.costmodel.target import SYSTEMS, system
from podrun.serving.capacity.planning import (
    PlannedService,
    PlanResult,
    roomiest,
    without_a_machine,
)

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ServiceAnswer:
    """A service on its partition of ``ipus``. ``needed_ipus``: the smallest partition that holds (None: the target
    is too small). ``final``: the chosen plan with all requests; ``highest_rate`` within the objectives, with all
    machines and with one lost; ``lost``: the asked rate with one machine lost (None: no replica is left)."""

    service: PlannedService
    ipus: int
    needed_ipus: int | None
    tried: Sequence[PlanResult]
    final: PlanResult
    highest_rate: float
    lost: PlanResult | None
    lost_highest_rate: float
    curve: Sequence[PlanResult]


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """Services on a target. ``pod``: the cheapest (without prices the smallest) POD of the target's kind that holds
    all of them, None if the target is too small. ``prices``: of an hour, by POD."""

    target: str
    services: Sequence[ServiceAnswer]
    pod: str | None
    prices: Mapping[str, float]

    @property
    def holds(self) -> bool:
        """True iff the target holds all services."""
        return self.pod is not None

    def price(self, pod: str) -> float | None:
        """What an hour of a POD costs; None if nobody said."""
        return self.prices.get(pod)


def answer_capacity(
    services: Sequence[PlannedService], target: str, prices: Mapping[str, float]
) -> CapacityAnswer:
    """Find partitions of all services on a target, and the cheapest POD that holds them. Raises PodrunError."""
    pod = system(target)
    for name in prices:
        system(name)
    needs: list[tuple[int, Sequence[PlanResult]] | None] = []
    for service in services:
        report_step(f"trying partitions for {service.costs.name}", len(needs), len(services))
        needs.append(service.smallest_partition(pod.ipus))
    total = math.inf if any(need is None for need in needs) else sum(need[0] for need in needs if need)
    held = _cheapest(pod.name, total, prices) if total <= pod.ipus else None
    answers = [
        _on_partition(service, need, _share(pod.ipus, need, total, len(services)))
        for service, need in zip(services, needs, strict=True)
    ]
    return CapacityAnswer(pod.name, answers, held, prices)


def _share(ipus: int, need: tuple[int, Sequence[PlanResult]] | None, total: float, services: int) -> int:
    """IPUs of a service on the target: all if it is alone, its need times what the target has over, else an equal
    part."""
    if services == 1:
        return ipus
    if need is None or total > ipus:
        return 1 << int(math.log2(ipus / services))
    return need[0] << int(math.log2(ipus / total))


def _cheapest(target: str, ipus: float, prices: Mapping[str, float]) -> str:
    """The cheapest POD of the target's kind with so many IPUs; without prices the smallest."""
    kind = target.rstrip("0123456789")
    fitting = [
        pod
        for pod in SYSTEMS.values()
        if pod.name.rstrip("0123456789") == kind and pod.name != kind and pod.ipus >= ipus
    ]
    if not fitting:
        return target
    priced = [pod for pod in fitting if pod.name in prices]
    if priced:
        return min(priced, key=lambda pod: (prices[pod.name], pod.ipus)).name
    return min(fitting, key=lambda pod: pod.ipus).name


def _on_partition(
    service: PlannedService, need: tuple[int, Sequence[PlanResult]] | None, ipus: int
) -> ServiceAnswer:
    if ipus < service.costs.ipus_per_replica:
        raise UsageError(
            f"a replica of {service.costs.name} has {service.costs.ipus_per_replica} IPUs; {ipus} are left for it",
            hint="Name a larger --target.",
        )
    report_step(f"simulating {service.costs.name} on {ipus} IPUs")
    tried = need[1] if need and need[0] == ipus else service.tried(ipus)
    best, highest = roomiest(service, tried)
    final = service.result(best.plan, service.rate, service.demand.requests)
    fewer = without_a_machine(best.plan, service.costs.ipus_per_replica)
    lost = service.result(fewer, service.rate, service.demand.requests) if fewer.replicas > 0 else None
    return ServiceAnswer(
        service,
        ipus,
        need[0] if need else None,
        tried,
        final,
        highest,
        lost,
        service.highest_rate(fewer),
        service.curve(best.plan),
    )


def answer_json(answer: CapacityAnswer) -> dict[str, Any]:
    """The answer as values of JSON: units in key names, null for unknown or without end."""
    return {
        "schema_version": SCHEMA_VERSION,
        "target": answer.target,
        "target_ipus": system(answer.target).ipus,
        "holds": answer.holds,
        "pod": answer.pod,
        "price_per_hour": answer.price(answer.pod) if answer.pod else None,
        "services": [_service_json(one) for one in answer.services],
    }


def _service_json(one: ServiceAnswer) -> dict[str, Any]:
    demand = one.service.demand
    return {
        "model": one.service.costs.name,
        "rate_per_s": one.service.rate,
        "objectives_s": {objective.name: objective.seconds for objective in demand.objectives},
        "arrivals": demand.arrivals.label,
        "rows_per_request": demand.rows,
        "requests": demand.requests,
        "seed": demand.seed,
        "ipus": one.ipus,
        "ipus_per_replica": one.service.costs.ipus_per_replica,
        "needed_ipus": one.needed_ipus,
        "runs": [
            {"rows": run.rows, "seconds": run.seconds, "host_s": run.host_s, "tile_share": run.tile_share}
            for run in one.service.costs.runs
        ],
        "best": _result_json(one.final),
        "highest_rate_per_s": one.highest_rate,
        "without_a_machine": None if one.lost is None else _result_json(one.lost),
        "highest_rate_without_a_machine_per_s": one.lost_highest_rate,
        "tried": [_result_json(result) for result in one.tried],
        "curve": [_result_json(result) for result in one.curve],
    }


def _result_json(result: PlanResult) -> dict[str, Any]:
    carried = math.isfinite(result.ratio)
    return {
        "batch": result.plan.run.rows,
        "delay_s": result.plan.delay_s,
        "preferred_batches": list(result.plan.preferred_rows),
        "replicas": result.plan.replicas,
        "rate_per_s": result.rate,
        "latency_s": result.latency_s if carried else None,
        "mean_wait_s": result.mean_wait_s if carried else None,
        "utilisation": result.utilisation,
        "mean_rows": result.mean_rows,
        "holds": result.holds,
    }
