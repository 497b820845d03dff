"""A Grafana dashboard and Prometheus alerts over the exporter's families (`podrun.monitor.metric_families`).

`PANELS` and `ALERTS` are the one list of queries: the files are made from it, and tests put each query to the real
Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from podrun.core.quick_dataclass import dataclass

DASHBOARD_FILE = "podrun-pod.json"
RULES_FILE = "podrun-alerts.yml"
SCRAPE_FILE = "prometheus.yml"
GRAFANA_SCHEMA = 39
"""Version of Grafana's dashboard schema (Grafana 10 and later read it)."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel: its queries in PromQL with their legends, the unit in Grafana's words, ``stat`` or ``timeseries``."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert: a query in PromQL that has results while something is wrong, how long it must hold, what to type."""

    name: str
    query: str
    holds: str
    severity: str
    summary: str
    remedy: str


PANELS: tuple[Panel, ...] = (
    Panel("IPUs in error", (("sum(podrun_ipu_error) or vector(0)", "IPUs"),), kind="stat"),
    Panel(
        "Machines that answer",
        (('sum(podrun_machine_up{partition!=""})', "up"), ('count(podrun_machine_up{partition!=""})', "of")),
        kind="stat",
    ),
    Panel("Free IPUs", (("podrun_vipu_free_ipus", "free"),), kind="stat"),
    Panel("Requests that wait", (("podrun_vipu_queued_requests", "waiting"),), kind="stat"),
    Panel(
        "Utilisation by partition",
        (("avg by (partition) (podrun_ipu_utilisation_ratio)", "{{partition}}"),),
        unit="percentunit",
        text="Share of the last second that IPUs were at work, averaged over a partition's IPUs.",
    ),
    Panel(
        "Least and most busy IPU",
        (
            ("min by (partition) (podrun_ipu_utilisation_ratio)", "least, {{partition}}"),
            ("max by (partition) (podrun_ipu_utilisation_ratio)", "most, {{partition}}"),
        ),
        unit="percentunit",
        text="A gap that stays points to a straggler.",
    ),
    Panel(
        "Batches a second",
        (("max by (partition) (rate(podrun_ipu_batches[1m]))", "{{partition}}"),),
        text="Weight updates, or inference batches.",
    ),
    Panel("IPUs that processes hold", (("sum by (partition) (ipu_attached)", "{{partition}}"),)),
    Panel(
        "Tile clock",
        (("min by (partition) (ipu_tile_clk_speed) * 1e6", "slowest, {{partition}}"),),
        unit="hertz",
    ),
    Panel(
        "Power by partition (modelled)",
        (("sum by (partition) (podrun_ipu_power_watts)", "{{partition}}"),),
        unit="watt",
        text="By podrun's model: gc-powertest's published sample, scaled by the share of computing and by the clock.",
    ),
    Panel(
        "Partitions by state",
        (("sum by (state) (podrun_partition_state)", "{{state}}"),),
    ),
    Panel("Agents by health", (("podrun_agents", "{{health}}"),)),
    Panel(
        "IPUs: free, and the largest place",
        (("podrun_vipu_free_ipus", "free"), ("podrun_vipu_largest_free_partition", "largest place")),
        text="A large gap means fragmentation: vipu explain says who stands where.",
    ),
    Panel(
        "Calls at the partition service, 95th percentile",
        (
            (
                "histogram_quantile(0.95, sum by (le, call) (rate(podrun_vipu_call_seconds_bucket[5m])))",
                "{{call}}",
            ),
        ),
        unit="s",
    ),
    Panel(
        "Calls that fail",
        (("sum by (call) (rate(podrun_vipu_call_errors_total[5m]))", "{{call}}"),),
        unit="cps",
    ),
    Panel("Incidents", (("podrun_incidents_total", "partitions that went into ERROR"),)),
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        "PodrunExporterDown",
        'up{job="podrun"} == 0',
        "1m",
        "critical",
        "the exporter does not answer",
        "podrun exporter; podrun health",
    ),
    Alert(
        "PodrunIpuError",
        "podrun_ipu_error == 1",
        "30s",
        "critical",
        "IPU {{ $labels.ipu }} of partition {{ $labels.partition }} ({{ $labels.agent }}) is in error",
        "podrun health says which reset helps",
    ),
    Alert(
        "PodrunMachineDown",
        'podrun_machine_up{partition!=""} == 0',
        "30s",
        "critical",
        "machine {{ $labels.agent }} of partition {{ $labels.partition }} does not answer",
        "vipu-admin restart agent {{ $labels.agent }}, then vipu reset partition {{ $labels.partition }}",
    ),
    Alert(
        "PodrunPartitionError",
        'podrun_partition_state{state="ERROR"} == 1',
        "30s",
        "critical",
        "partition {{ $labels.partition }} is in ERROR",
        "podrun health; vipu reset partition {{ $labels.partition }}",
    ),
    Alert(
        "PodrunAgentUnreachable",
        'podrun_agents{health=~"unreachable|failed"} > 0',
        "1m",
        "critical",
        "{{ $value }} agents are {{ $labels.health }}",
        "vipu-admin list agents; vipu-admin restart agent NAME",
    ),
    Alert(
        "PodrunClockThrottled",
        "ipu_tile_clk_speed < on (partition) group_left () (0.99 * max by (partition) (ipu_tile_clk_speed))",
        "1m",
        "warning",
        "IPU {{ $labels.ipu }} of partition {{ $labels.partition }} runs at {{ $value }} MHz",
        "podrun health; vipu-admin drain agent {{ $labels.agent }}",
    ),
    Alert(
        "PodrunIpuHeldIdle",
        "ipu_attached == 1 and podrun_ipu_utilisation_ratio == 0",
        "30m",
        "warning",
        "a process holds IPU {{ $labels.ipu }} of partition {{ $labels.partition }} and does not compute",
        "podrun ps shows whose it is",
    ),
    Alert(
        "PodrunQueueStuck",
        "podrun_vipu_queued_requests > 0 and podrun_vipu_free_ipus > 0",
        "1h",
        "warning",
        "{{ $value }} requests have waited for an hour while IPUs are free",
        "vipu list queue shows what each waits for",
    ),
)


def dashboard_json() -> str:
    """The dashboard as Grafana imports it. The data source is chosen at the import."""
    panels = [_panel(number, panel) for number, panel in enumerate(PANELS)]
    document = {
        "title": "podrun: POD",
        "uid": "podrun-pod",
        "schemaVersion": GRAFANA_SCHEMA,
        "tags": ["podrun", "ipu"],
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
            ]
        },
        "panels": panels,
    }
    return json.dumps(document, indent=2) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    """A panel on Grafana's grid of 24 columns: four stats in the first row, then two panels a row."""
    stats = sum(one.kind == "stat" for one in PANELS)
    if number < stats:
        grid = {"x": 6 * number, "y": 0, "w": 6, "h": 4}
    else:
        row, column = divmod(number - stats, 2)
        grid = {"x": 12 * column, "y": 4 + 8 * row, "w": 12, "h": 8}
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": grid,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend, "datasource": source}
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def rules_document() -> Mapping[str, Any]:
    """The alerts as a rule file of Prometheus holds them."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.query,
            "for": alert.holds,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "remedy": alert.remedy},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "podrun", "rules": rules}]}


def scrape_document() -> Mapping[str, Any]:
    """A configuration of Prometheus that scrapes the exporter of this host and reads the alerts."""
    return {
        "global": {"scrape_interval": "10s", "evaluation_interval": "10s"},
        "rule_files": [RULES_FILE],
        "scrape_configs": [
            {
                "job_name": "podrun",
                "authorization": {"credentials_file": "exporter-key"},
                "static_configs": [{"targets": ["127.0.0.1:2112"]}],
            }
        ],
    }
