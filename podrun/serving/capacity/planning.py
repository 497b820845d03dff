"""Which batch, delay and partition serve a rate within its objectives, and how much is left.

A *plan* is a batch size, the delay of the batcher and a number of replicas. Each is tried by simulation; a rate
that the replicas cannot carry is not tried. Of the plans that hold all objectives the one is taken that holds them
up to the highest rate. Partitions are powers of two, as V-IPU gives them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.batching import BatchingRule
from podrun.serving.capacity.arrivals import ArrivalProcess
from podrun.serving.capacity.costs import ModelCosts, RunCost
from podrun.serving.capacity.quantities import Objective
from podrun.serving.capacity.queueing import ClientLoop, QueueOutcome, closed_loop, open_loop

WARM_UP = 0.05
"""Share of the first requests that no figure counts: they meet empty queues."""
SEARCH_REQUESTS, SEARCH_ROUNDS = 20_000, 100
"""Requests of a plan that is tried: so many, or so many full rounds of all replicas if that is more."""
DELAYS = (0.0, 0.25, 1.0)
"""Delays that are tried, in times of a run."""
CURVE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Shares of what replicas can carry at most, for the curve of throughput against latency."""
ROUNDS = 10
"""Halvings of the interval in which the highest rate lies."""


@dataclass(frozen=True, slots=True)
class BatcherChoices:
    """What the batcher may do: ``delays_s`` to try (none: `DELAYS` times a run), and ``preferred_rows``, sizes that run
    at once, as Triton's ``preferred_batch_size``."""

    delays_s: tuple[float, ...] = ()
    preferred_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceDemand:
    """What a service is asked for. ``rate``: requests a second (None: what the clients of a closed loop send, or a
    trace as it was recorded); ``rows`` of each request; ``requests``: of the final run."""

    rate: float | None
    objectives: tuple[Objective, ...]
    arrivals: ArrivalProcess
    rows: int = 1
    requests: int = 200_000
    seed: int = 1
    batcher: BatcherChoices = BatcherChoices()


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """A batch with its run, the batcher's delay, replicas, and sizes that run at once."""

    run: RunCost
    delay_s: float
    replicas: int
    preferred_rows: tuple[int, ...] = ()

    @property
    def rule(self) -> BatchingRule:
        """The rule that replicas and servers obey."""
        return BatchingRule(self.run.rows, self.delay_s, self.preferred_rows)

    def carried(self, rows: int) -> float:
        """Requests of so many rows that the replicas carry a second, at full batches."""
        return self.replicas * (self.run.rows // rows) / self.run.seconds


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan under a demand. ``latency_s`` by percentile's name; ``ratio``: the worst latency over its limit
    (infinite: the replicas cannot carry the rate); ``utilisation``: share of the replicas' time in runs."""

    plan: ServingPlan
    rate: float
    latency_s: dict[str, float]
    mean_wait_s: float
    utilisation: float
    mean_rows: float
    ratio: float

    @property
    def holds(self) -> bool:
        """True iff all objectives hold."""
        return self.ratio <= 1


def overloaded(plan: ServingPlan, rate: float) -> PlanResult:
    """The result of a plan whose replicas cannot carry the rate: its queue grows without end."""
    return PlanResult(plan, rate, {}, math.inf, 1.0, float(plan.run.rows), math.inf)


class PlannedService:
    """A model and its demand. ``name`` tells the random numbers of services apart."""

    def __init__(self, costs: ModelCosts, demand: ServiceDemand, name: str) -> None:
        self.costs, self.demand, self.name = costs, demand, name
        largest = max(run.rows for run in costs.fitting)
        if demand.rows > largest:
            raise UsageError(
                f"requests of {demand.rows} rows do not fit a batch of {costs.name}, which has {largest} at most",
                hint="Give --batch larger sizes, or divide the requests.",
            )
        for objective in demand.objectives:
            fastest = min(run.seconds for run in costs.fitting)
            if objective.seconds < fastest:
                raise UsageError(
                    f"no POD holds {objective.name}={objective.seconds * 1e3:g}ms: one run of {costs.name} takes"
                    f" {fastest * 1e3:.3g} ms",
                    hint=f"Allow more than that: --slo {objective.name}={math.ceil(fastest * 2e3)}ms",
                )

    @property
    def rate(self) -> float:
        """The asked rate; of clients that wait, the most that they can send."""
        demand = self.demand
        if demand.rate is not None:
            return demand.rate
        if demand.arrivals.kind == "trace":
            return demand.arrivals.trace_rate
        fastest = min(run.seconds for run in self.costs.fitting)
        return demand.arrivals.clients / (demand.arrivals.think_s + fastest)

    def result(self, plan: ServingPlan, rate: float, requests: int) -> PlanResult:
        """A plan under a rate, by simulation."""
        demand = self.demand
        closed = demand.arrivals.kind == "closed"
        if not closed and rate >= plan.carried(demand.rows):
            return overloaded(plan, rate)
        outcome = self.simulated(plan, rate, requests)
        percentiles = sorted({50.0, 99.0, *(objective.percentile for objective in demand.objectives)})
        latency = {f"p{percent:g}": outcome.percentile(percent, WARM_UP) for percent in percentiles}
        ratio = max((latency[one.name] / one.seconds for one in demand.objectives), default=0.0)
        served = len(outcome.latency)
        return PlanResult(
            plan,
            served / outcome.span_s if closed else rate,
            latency,
            float(outcome.wait[int(served * WARM_UP) :].mean()),
            outcome.busy_s / outcome.span_s / plan.replicas,
            served * demand.rows / outcome.runs,
            ratio,
        )

    def simulated(self, plan: ServingPlan, rate: float, requests: int) -> QueueOutcome:
        """The waiting of each request."""
        demand = self.demand
        if demand.arrivals.kind == "closed":
            loop = ClientLoop(demand.arrivals.clients, demand.arrivals.think_s, requests)
            return closed_loop(loop, plan.rule, plan.replicas, plan.run.run_seconds, demand.rows)
        times = demand.arrivals.unit_times(requests, demand.seed, self.name) / rate
        return open_loop(times, plan.rule, plan.replicas, plan.run.run_seconds, demand.rows)

    def plans(self, ipus: int) -> Iterator[ServingPlan]:
        """The plans of this service for a partition of so many IPUs."""
        replicas = ipus // self.costs.ipus_per_replica
        choices = self.demand.batcher
        for run in self.costs.fitting:
            if run.rows >= self.demand.rows:
                delays = choices.delays_s or [share * run.seconds for share in DELAYS]
                preferred = tuple(rows for rows in choices.preferred_rows if rows <= run.rows)
                for delay in delays if run.rows > self.demand.rows else delays[:1]:
                    yield ServingPlan(run, delay, replicas, preferred)

    def tried(self, ipus: int) -> list[PlanResult]:
        """The plans for a partition, tried."""
        return [self.result(plan, self.rate, self._few(plan)) for plan in self.plans(ipus)]

    def _few(self, plan: ServingPlan) -> int:
        rounds = SEARCH_ROUNDS * plan.replicas * (plan.run.rows // self.demand.rows)
        return min(max(SEARCH_REQUESTS, rounds), self.demand.requests)

    def smallest_partition(self, most: int) -> tuple[int, list[PlanResult]] | None:
        """The smallest partition that holds the objectives, with the plans that were tried on it; None: not even
        ``most``."""
        for ipus in partition_sizes(self.costs.ipus_per_replica, most):
            results = self.tried(ipus)
            if best_result(results).holds:
                return ipus, results
        return None

    def highest_rate(self, plan: ServingPlan) -> float:
        """The highest rate that a plan holds, to a part in 2^10 of what its replicas carry; 0 if it holds none."""
        if plan.replicas < 1:
            return 0.0
        few = self._few(plan)
        if self.demand.arrivals.kind == "closed":
            return self.result(plan, self.rate, few).rate
        low, high = 0.0, plan.carried(self.demand.rows)
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.result(plan, middle, few).holds else (low, middle)
        return low

    def curve(self, plan: ServingPlan) -> list[PlanResult]:
        """Throughput against latency, at shares of what the plan's replicas carry."""
        if self.demand.arrivals.kind == "closed":
            return []
        few = self._few(plan)
        return [self.result(plan, share * plan.carried(self.demand.rows), few) for share in CURVE]


def partition_sizes(least: int, most: int) -> Iterator[int]:
    """Powers of two from ``least`` to ``most``."""
    size = 1 << max(0, least - 1).bit_length()
    while size <= most:
        yield size
        size *= 2


def best_result(results: Sequence[PlanResult]) -> PlanResult:
    """The result with the most room below its limits; of plans that carry too little the one that carries most."""
    least = min(result.ratio for result in results)
    if math.isinf(least):
        return max(results, key=lambda result: result.plan.carried(1))
    return next(result for result in results if result.ratio == least)


def roomiest(service: PlannedService, results: Sequence[PlanResult]) -> tuple[PlanResult, float]:
    """The result whose plan holds the objectives up to the highest rate, and that rate; 0 where none holds.

    Plans that carry less than another one holds are passed over."""
    best, highest = best_result(results), 0.0
    rows = service.demand.rows
    for result in sorted(results, key=lambda result: -result.plan.carried(rows)):
        if result.holds and result.plan.carried(rows) > highest:
            rate = service.highest_rate(result.plan)
            if rate > highest:
                best, highest = result, rate
    return best, highest


def without_a_machine(plan: ServingPlan, ipus_per_replica: int) -> ServingPlan:
    """The plan when one machine is lost with all replicas that have an IPU of it."""
    return replace(plan, replicas=plan.replicas - max(1, IPUS_PER_MACHINE // ipus_per_replica))
