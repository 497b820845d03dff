"""Files for Grafana and Prometheus: queries name families that exist, and each alert fires on its failure alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from podrun.core.errors import ConflictError
from podrun.core.ipu_states import IpuErrorState, MachineState
from podrun.core.telemetry import AttachedProcess, MachineReport
from podrun.monitor.commands.dashboards import dashboards_verb
from podrun.monitor.dashboards import ALERTS, DASHBOARD_FILE, PANELS, RULES_FILE, SCRAPE_FILE
from podrun.monitor.metric_families import MetricsPage, agent_families, partition_families, service_families
from podrun.partition.state.codec import value_to_json
from podrun.partition.state.values import CallInfo, PartitionState, ServiceMetrics
from tests.partition.conftest import Pod

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus"
)


def write_files(directory: Path) -> Path:
    done = CliRunner().invoke(dashboards_verb, [str(directory)], standalone_mode=False)
    assert done.exception is None
    return directory


class PodPage:
    """A page of the exporter; what a failure changes in it is changed before it is printed."""

    def __init__(self, pod: Pod) -> None:
        self.partitions = {info.name: value_to_json(info) for info in pod.client.list_partitions()}
        self.reports = [self._busy(report) for report in pod.client.machine_reports()]
        self.agents = {info.agent_id: {"health": "up"} for info in pod.client.list_agents()}
        self.service = ServiceMetrics((0.001, 0.1), (CallInfo("ListAgents", 5, 0, 2.5, (1, 4)),), 0, 8, 4, 1)
        self.up = 1

    @staticmethod
    def _busy(report: MachineReport) -> MachineReport:
        process = AttachedProcess(4711, "me", "python", 1.0)
        ipus = (
            replace(ipu, utilisation_percent=37.5, clock_mhz=1330.0, power_w=76.7, process=process)
            for ipu in report.ipus
        )
        return replace(report, ipus=tuple(ipus))

    def of_machine(self, index: int, change: Callable[[MachineReport], MachineReport]) -> None:
        self.reports[index] = change(self.reports[index])

    def of_ipu(self, index: int, **changes: object) -> None:
        def change(report: MachineReport) -> MachineReport:
            first, *rest = report.ipus
            return replace(report, ipus=(replace(first, **changes), *rest))  # type: ignore[arg-type]

        self.of_machine(index, change)

    def samples(self) -> list[tuple[str, str]]:
        """Series and values, as ``promtool test rules`` takes them."""
        families = [
            *partition_families(self.partitions, self.reports, 3),
            *agent_families(self.agents, 0),
            *service_families(self.service),
        ]
        lines = MetricsPage(tuple(families)).text().splitlines()
        pairs = [line.rpartition(" ")[::2] for line in lines if not line.startswith("#")]
        labelled = [
            (re.sub(r"\{|$", '{job="podrun",' if "{" in name else '{job="podrun"}', name, count=1), value)
            for name, value in pairs
        ]
        return [*labelled, ('up{job="podrun"}', str(self.up))]


def break_nothing(page: PodPage) -> None:
    """The healthy POD."""


def lose_exporter(page: PodPage) -> None:
    page.up = 0


def break_ipu(page: PodPage) -> None:
    page.of_ipu(0, error_state=IpuErrorState.TILE_PARITY)


def lose_machine(page: PodPage) -> None:
    page.of_machine(1, lambda report: replace(report, state=MachineState.LOST))


def put_partition_in_error(page: PodPage) -> None:
    page.partitions["p"] = {**page.partitions["p"], "state": PartitionState.ERROR.name}


def lose_agent(page: PodPage) -> None:
    page.agents["ipum4"] = {"health": "unreachable"}


def throttle(page: PodPage) -> None:
    page.of_ipu(1, clock_mhz=665.0)


def stop_computing(page: PodPage) -> None:
    page.of_ipu(1, utilisation_percent=0.0)


def queue_up(page: PodPage) -> None:
    page.service = replace(page.service, queued=2)


FAILURES: dict[str, Callable[[PodPage], None]] = {
    "": break_nothing,
    "PodrunExporterDown": lose_exporter,
    "PodrunIpuError": break_ipu,
    "PodrunMachineDown": lose_machine,
    "PodrunPartitionError": put_partition_in_error,
    "PodrunAgentUnreachable": lose_agent,
    "PodrunClockThrottled": throttle,
    "PodrunIpuHeldIdle": stop_computing,
    "PodrunQueueStuck": queue_up,
}


def minutes(holds: str) -> float:
    return float(holds[:-1]) * {"s": 1 / 60, "m": 1, "h": 60}[holds[-1]]


@needs_promtool
def test_each_alert_fires_on_its_failure_within_its_time_and_on_nothing_else(
    pod: Pod, tmp_path: Path
) -> None:
    assert set(FAILURES) == {"", *(alert.name for alert in ALERTS)}
    pod.active("p", 8)
    write_files(tmp_path)
    units = []
    for meant, failure in FAILURES.items():
        page = PodPage(pod)
        failure(page)
        series = [{"series": name, "values": f"{value}x66"} for name, value in page.samples()]
        checks = []
        for alert in ALERTS:
            before = max(0, round(minutes(alert.holds)) - 1)
            moments = [(65, alert.name == meant)]
            if before and alert.name == meant:
                moments.append((before - 1, False))
            for at, fires in moments:
                query = f'count(ALERTS{{alertname="{alert.name}",alertstate="firing"}}) or vector(0)'
                checks.append(
                    {
                        "expr": query,
                        "eval_time": f"{at}m",
                        "exp_samples": [{"labels": "{}", "value": int(fires)}],
                    }
                    if not fires
                    else {
                        "expr": f'min(ALERTS{{alertname="{alert.name}",alertstate="firing"}})',
                        "eval_time": f"{at}m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                )
        units.append(
            {"name": meant or "healthy", "interval": "1m", "input_series": series, "promql_expr_test": checks}
        )
    document = {"rule_files": [RULES_FILE], "evaluation_interval": "1m", "tests": units}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(document))
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "tests.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_reads_the_files(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "exporter-key").write_text("key")
    for words in (["check", "rules", RULES_FILE], ["check", "config", SCRAPE_FILE]):
        done = subprocess.run(
            [str(PROMTOOL), *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_queries_of_panels_and_alerts_name_families_that_the_exporter_has(pod: Pod) -> None:
    pod.active("p", 8)
    names = {name.split("{")[0] for name, _ in PodPage(pod).samples()}
    queries = [query for panel in PANELS for query, _ in panel.queries] + [alert.query for alert in ALERTS]
    for query in queries:
        asked = set(re.findall(r"\b(?:podrun_|ipu_|ipum_)\w+|\bup\b", query))
        assert asked, query
        assert asked <= names, query


def test_the_dashboard_is_json_with_a_panel_for_each_query_list_on_a_grid_without_overlap(
    tmp_path: Path,
) -> None:
    document = json.loads((write_files(tmp_path) / DASHBOARD_FILE).read_text())
    assert [panel["title"] for panel in document["panels"]] == [panel.title for panel in PANELS]
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_files_that_are_there_are_kept_unless_forced(tmp_path: Path) -> None:
    write_files(tmp_path)
    done = CliRunner().invoke(dashboards_verb, [str(tmp_path)], standalone_mode=False)
    assert isinstance(done.exception, ConflictError)
    assert "--force" in (done.exception.hint or "")
    done = CliRunner().invoke(dashboards_verb, ["--force", str(tmp_path)], standalone_mode=False)
    assert done.exception is None


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    done = CliRunner().invoke(dashboards_verb, [str(tmp_path / "x")], standalone_mode=False)
    assert isinstance(done.exception, ConflictError)
