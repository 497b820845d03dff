"""What the exporter publishes: families of metrics from reports of machines and of the partition service.

Families and their text format are prometheus_client's. Names follow Prometheus' rules (``promtool check metrics``):
base units, ``_total`` for counters alone. Those that start with ``podrun_`` are podrun's own; the others have the names
of the V-IPU exporter's families. Unknown values are left out, never written as zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from podrun.core.ipu_states import MachineState
from podrun.core.quick_dataclass import dataclass
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
        """The families of metrics, as `prometheus_client` asks a collector for them."""
        return self.families

    def text(self) -> str:
        """Prometheus' text format, version 0.0.4."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()


def partition_families(
    partitions: Mapping[str, Mapping[str, Any]],
    reports: Iterable[MachineReport],
    ticks: int,
    *,
    dcgm_names: bool = False,
) -> Iterator[Metric]:
    """Partitions, their machines and IPUs. ``partitions``: by name, as ``vipu list partitions --format json`` has them;
    ``ticks``: how many pages were made so far. ``dcgm_names``: with names of NVIDIA's DCGM exporter, too.
    """
    # The V-IPU exporter's name, without the ending that a counter's has: so its type is left open.
    yield UnknownMetricFamily("exporter_ticks", "Times this page was made.", value=ticks)
    info = GaugeMetricFamily(
        "ipum_hardware_info", "1 for each IPU-Machine.", labels=["agent", "serial", "target"]
    )
    up = GaugeMetricFamily(
        "podrun_machine_up", "1 if the machine's process answers.", labels=["agent", "partition"]
    )
    chassis = [
        GaugeMetricFamily(name, text, labels=["agent", "partition"])
        for name, text in (
            ("chassis_power", "Watts of a machine's IPUs in the partition, by podrun's model."),
            ("chassis_temperature", "Degrees Celsius of a machine's boards, by podrun's model."),
            ("podrun_machine_report_age_seconds", "Age of what is known of the machine; 0: it answers."),
        )
    ]
    ipus = _IpuFamilies(dcgm_names)
    described: set[str] = set()
    for report in reports:
        if report.agent_id not in described:  # Partitions of one or two IPUs may share a machine.
            described.add(report.agent_id)
            info.add_metric([report.agent_id, report.serial, report.target], 1)
        up.add_metric([report.agent_id, report.partition], float(report.state is MachineState.UP))
        readings = (report.board_power_w, report.board_temperature_c, report.stale_seconds or 0.0)
        for family, value in zip(chassis, readings, strict=True):
            if value is not None:
                family.add_metric([report.agent_id, report.partition], value)
        for ipu in report.ipus:
            ipus.add(report, ipu)
    yield info
    yield up
    yield from (family for family in chassis if family.samples)
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
    """Metrics of the partition service itself."""
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


_IPU_LABELS = ("partition", "ipu", "agent")
_IPU_GAUGES: tuple[tuple[str, str, Callable[[IpuReport], float | None]], ...] = (
    ("ipu_attached", "1 if a process holds the IPU.", lambda ipu: float(ipu.process is not None)),
    ("ipu_tile_clk_speed", "Tile clock in MHz.", lambda ipu: ipu.clock_mhz),
    ("gcipuinfo_clock_frequency", "Tile clock in MHz.", lambda ipu: ipu.clock_mhz),
    (
        "podrun_ipu_error",
        "1 if the IPU or one of its links is in error.",
        lambda ipu: float(ipu.has_error),
    ),
    (
        "podrun_ipu_utilisation_ratio",
        "Share of the last second at work by podrun's model, 0 to 1.",
        lambda ipu: _ratio(ipu.utilisation_percent),
    ),
    ("podrun_ipu_power_watts", "Power by podrun's model.", lambda ipu: ipu.power_w),
    (
        "podrun_ipu_temperature_celsius",
        "Temperature of the die by podrun's model.",
        lambda ipu: ipu.die_temperature_c,
    ),
    (
        "podrun_ipu_tile_memory_ratio",
        "Share of its memory that the fullest tile of the loaded program uses.",
        lambda ipu: (
            ipu.tile_bytes / ipu.tile_capacity_bytes
            if ipu.tile_bytes is not None and ipu.tile_capacity_bytes
            else None
        ),
    ),
    ("podrun_ipu_batches", "Batches done since the program was loaded.", lambda ipu: ipu.batches_done),
    ("podrun_ipu_links_down", "IPU-Links of the IPU that are down.", lambda ipu: len(ipu.links_down)),
)
"""Families with a sample for each IPU of a partition: name, help text, value (None: unknown)."""
_DCGM_GAUGES: tuple[tuple[str, str, Callable[[IpuReport], float | None]], ...] = (
    (
        "DCGM_FI_DEV_GPU_UTIL",
        "As podrun_ipu_utilisation_ratio, in percent.",
        lambda ipu: ipu.utilisation_percent,
    ),
    ("DCGM_FI_DEV_POWER_USAGE", "As podrun_ipu_power_watts.", lambda ipu: ipu.power_w),
    ("DCGM_FI_DEV_GPU_TEMP", "As podrun_ipu_temperature_celsius.", lambda ipu: ipu.die_temperature_c),
    ("DCGM_FI_DEV_SM_CLOCK", "As ipu_tile_clk_speed.", lambda ipu: ipu.clock_mhz),
)
"""The same under the names of NVIDIA's DCGM exporter, for dashboards that expect them."""
_IPU_COUNTERS: tuple[tuple[str, str, Callable[[IpuReport], float | None]], ...] = (
    (
        "podrun_ipu_link_sent_bytes",
        "Bytes sent on IPU-Links by podrun's model, since the machine joined the partition.",
        lambda ipu: ipu.link_bytes,
    ),
    (
        "podrun_ipu_host_link_bytes",
        "Bytes between IPU and host by podrun's model, since the machine joined the partition.",
        lambda ipu: ipu.host_bytes,
    ),
    ("podrun_ipu_parity_errors", "Parity errors, corrected or not.", lambda ipu: ipu.parity_errors),
    (
        "podrun_ipu_link_correctable_errors",
        "Packets that degraded IPU-Links sent again.",
        lambda ipu: ipu.link_correctable_errors,
    ),
)
_OPEN_FAMILIES: tuple[tuple[str, str, Callable[[IpuReport], float | None]], ...] = (
    (
        "ipu_link_err_cnt",
        "As podrun_ipu_link_correctable_errors_total.",
        lambda ipu: ipu.link_correctable_errors,
    ),
)
"""Counters under names of the V-IPU exporter's, which have no counter's ending: their type is left open."""


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


class _IpuFamilies:
    """The families above, and the parts of the utilisation."""

    def __init__(self, dcgm_names: bool) -> None:
        kinds: tuple[tuple[type[Metric], Any], ...] = (
            (GaugeMetricFamily, (*_IPU_GAUGES, *(_DCGM_GAUGES if dcgm_names else ()))),
            (CounterMetricFamily, _IPU_COUNTERS),
            (UnknownMetricFamily, _OPEN_FAMILIES),
        )
        self._values = [
            (kind(name, text, labels=_IPU_LABELS), value)  # type: ignore[call-arg]
            for kind, rows in kinds
            for name, text, value in rows
        ]
        self._parts = GaugeMetricFamily(
            "podrun_ipu_activity_ratio",
            "Share of the last second by podrun's model, by what the IPU does.",
            labels=(*_IPU_LABELS, "activity"),
        )

    @property
    def all(self) -> Iterator[Metric]:
        """The families of which something is known."""
        families = [*(family for family, _ in self._values), self._parts]
        yield from (family for family in families if family.samples)

    def add(self, report: MachineReport, ipu: IpuReport) -> None:
        """Add the samples of one IPU, without those that are unknown (None)."""
        labels = [report.partition, str(ipu.partition_ipu), report.agent_id]
        for family, value_of in self._values:
            value = value_of(ipu)
            if value is not None:
                family.add_metric(labels, value)  # type: ignore[attr-defined]
        for name, percent in ipu.shares.items():
            self._parts.add_metric([*labels, name], percent / 100)
