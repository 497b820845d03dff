"""What the exporter publishes: families of metrics from reports of machines and of the partition service.

Families and their text format are prometheus_client's. Names follow Prometheus' rules (``promtool check metrics``):
base units, ``_total`` for counters alone. Those that start with ``podrun_`` are podrun's own; the others have the names
of the V-IPU exporter's families. Unknown values are left out, never written as zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from podrun.partition.state.values import PartitionState

if TYPE_CHECKING:
    from podrun.core.telemetry import IpuReport, MachineReport
    from podrun.partition.state.values import ServiceMetrics


HEALTHS = ("up", "suspect", "unreachable", "cordoned", "draining", "failed")
"""Of agents; see `podrun.partition.state.values.AgentInfo`."""


@dataclass(frozen=True, slots=True, eq=False)
class MetricsPage(Collector):
    """Families to print. A registry of prometheus_client's asks `collect` for them."""

    families: tuple[Metric, ...]

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self.families

    def text(self) -> str:
        """Prometheus' text format, version 0.0.4."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()


def partition_families(
    partitions: Mapping[str, Mapping[str, Any]], reports: Iterable[MachineReport], ticks: int
) -> Iterator[Metric]:
    """Partitions, their machines and IPUs. ``partitions``: by name, as ``vipu list partitions --format json`` has them;
    ``ticks``: how many pages were made so far.
    """
    # The V-IPU exporter's name, without the ending that a counter's has: so its type is left open.
    yield UnknownMetricFamily("exporter_ticks", "Times this page was made.", value=ticks)
    info = GaugeMetricFamily(
        "ipum_hardware_info", "1 for each IPU-Machine.", labels=["agent", "serial", "target"]
    )
    up = GaugeMetricFamily(
        "podrun_machine_up", "1 if the machine's process answers.", labels=["agent", "partition"]
    )
    ipus = _IpuFamilies()
    described: set[str] = set()
    for report in reports:
        if report.agent_id not in described:  # Partitions of one or two IPUs may share a machine.
            described.add(report.agent_id)
            info.add_metric([report.agent_id, report.serial, report.target], 1)
        up.add_metric([report.agent_id, report.partition], float(report.state == "up"))
        for ipu in report.ipus:
            ipus.add(report, ipu)
    yield info
    yield up
    yield from _states(partitions)
    yield from ipus.all


def _states(partitions: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "podrun_partition_state",
        "1 for the state that a partition is in, 0 for the others.",
        labels=["partition", "state"],
    )
    size = GaugeMetricFamily("podrun_partition_ipus", "IPUs of a partition.", labels=["partition"])
    for name, partition in partitions.items():
        for possible in PartitionState:
            state.add_metric([name, possible.name], float(possible.name == partition["state"]))
        size.add_metric([name], partition["size"])
    yield state
    yield size


def agent_families(agents: Mapping[str, Mapping[str, Any]], incidents: int) -> Iterator[Metric]:
    """Agents, as ``vipu-admin list agents --format json`` has them, and the errors of partitions so far."""
    health = GaugeMetricFamily("podrun_agents", "Agents by health.", labels=["health"])
    count_by_health = Counter(str(agent["health"]) for agent in agents.values())
    for name in HEALTHS:
        health.add_metric([name], count_by_health[name])
    yield health
    yield CounterMetricFamily(
        "podrun_incidents", "Partitions that went into ERROR since the exporter started.", value=incidents
    )


def service_families(service: ServiceMetrics) -> Iterator[Metric]:
    """The partition service itself."""
    calls = HistogramMetricFamily(
        "podrun_vipu_call_seconds", "Duration of calls at the partition service.", labels=["call"]
    )
    errors = CounterMetricFamily(
        "podrun_vipu_call_errors", "Calls at the partition service that failed.", labels=["call"]
    )
    for call in service.calls:
        bounds = [*(f"{bound:g}" for bound in service.bounds), "+Inf"]
        buckets = [(bound, float(n)) for bound, n in zip(bounds, (*call.within, call.count), strict=True)]
        calls.add_metric([call.name], buckets, call.seconds)
        errors.add_metric([call.name], call.errors)
    yield calls
    yield errors
    outside = 1 - service.largest_free / service.free_ipus if service.free_ipus else 0.0
    for name, text, value in (
        ("podrun_vipu_queued_requests", "Requests that wait for IPUs.", service.queued),
        ("podrun_vipu_free_ipus", "IPUs that no partition holds, on agents in service.", service.free_ipus),
        (
            "podrun_vipu_largest_free_partition",
            "IPUs of the largest partition possible now.",
            service.largest_free,
        ),
        ("podrun_vipu_fragmentation", "Share of the free IPUs outside the largest place.", outside),
        ("podrun_vipu_watchers", "Clients that watch.", service.watchers),
    ):
        yield GaugeMetricFamily(name, text, value=value)


class _IpuFamilies:
    """Families with a sample for each IPU of a partition."""

    def __init__(self) -> None:
        labels = ["partition", "ipu", "agent"]
        self._attached = GaugeMetricFamily("ipu_attached", "1 if a process holds the IPU.", labels=labels)
        self._clock = GaugeMetricFamily("ipu_tile_clk_speed", "Tile clock in MHz.", labels=labels)
        self._error = GaugeMetricFamily(
            "podrun_ipu_error", "1 if the IPU or one of its links is in error.", labels=labels
        )
        self._busy = GaugeMetricFamily(
            "podrun_ipu_utilisation_ratio",
            "Share of the last second spent computing, 0 to 1.",
            labels=labels,
        )
        self._watts = GaugeMetricFamily(
            "podrun_ipu_power_watts",
            "Power by podrun's model, from the utilisation and the clock.",
            labels=labels,
        )
        self._batches = GaugeMetricFamily(
            "podrun_ipu_batches", "Batches done since the program was loaded.", labels=labels
        )
        self.all = (self._attached, self._clock, self._error, self._busy, self._watts, self._batches)

    def add(self, report: MachineReport, ipu: IpuReport) -> None:
        """Add the samples of one IPU, without those that are unknown (None)."""
        labels = [report.partition, str(ipu.partition_ipu), report.agent_id]
        busy = ipu.utilisation_percent
        for family, value in (
            (self._attached, float(ipu.process is not None)),
            (self._clock, ipu.clock_mhz),
            (self._error, float(ipu.has_error)),
            (self._busy, None if busy is None else busy / 100),
            (self._watts, ipu.power_w),
            (self._batches, ipu.batches_done),
        ):
            if value is not None:
                family.add_metric(labels, value)
