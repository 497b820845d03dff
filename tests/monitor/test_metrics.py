"""The exporter's page as Prometheus reads it: samples, and the rules for names that ``promtool check metrics`` has."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from podrun.core.ipu_states import IpuErrorState
from podrun.core.telemetry import AttachedProcess, MachineReport
from podrun.monitor.exporter import make_server
from podrun.monitor.metric_families import MetricsPage, agent_families, partition_families, service_families
from podrun.partition.state.codec import value_to_json
from podrun.partition.state.values import CallInfo, ServiceMetrics
from tests.partition.conftest import Pod

SAMPLE = re.compile(r'[a-z_]+(\{([a-z_]+="(\\.|[^"\\])*",?)+\})? -?[0-9.e+-]+')
NO_BASE_UNITS = re.compile(
    r"_(percent|percentage|milliseconds|ms|microseconds|us|minutes|hours|kilobytes|megabytes|mb|kb|kib|mib|bits)(_|$)"
)


def test_the_metrics_page(pod: Pod) -> None:
    pod.active("p", 8)
    pod.pool.machine("ipum1", "p").process = AttachedProcess(4711, "me", "python", 1.0)
    pod.pool.machine("ipum2", "p").ipu_errors[0] = IpuErrorState.TILE_PARITY
    with make_server(pod.client, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        where = f"http://127.0.0.1:{server.server_address[1]}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            page = opener.open(f"{where}/metrics", timeout=60).read().decode()
            with pytest.raises(urllib.error.HTTPError):
                opener.open(f"{where}/other", timeout=60)
        finally:
            server.shutdown()
            thread.join()
    lines = page.splitlines()
    for line in lines:
        assert line.startswith("# ") or SAMPLE.fullmatch(line), line
    assert "exporter_ticks 1.0" in lines
    assert 'ipu_attached{agent="ipum1",ipu="0",partition="p"} 1.0' in lines
    assert 'ipu_attached{agent="ipum2",ipu="4",partition="p"} 0.0' in lines
    assert 'podrun_ipu_error{agent="ipum2",ipu="4",partition="p"} 1.0' in lines
    assert 'podrun_partition_state{partition="p",state="ACTIVE"} 1.0' in lines
    assert sum(line.startswith("ipum_hardware_info{") for line in lines) == 4
    assert "podrun_ipu_utilisation_ratio{" not in page  # Unknown here, so left out.


def test_every_sample_of_the_metrics_page_is_unique_and_its_labels_stay(pod: Pod) -> None:
    def samples() -> list[str]:
        told = {info.name: value_to_json(info) for info in pod.client.list_partitions()}
        page = MetricsPage(tuple(partition_families(told, pod.client.machine_reports(), 1))).text()
        return [line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")]

    pod.active("p", 1)
    pod.active("q", 1)
    before = samples()
    assert len(set(before)) == len(before)
    pod.pool.machine("ipum1", "p").ipu_errors[0] = IpuErrorState.TILE_PARITY
    pod.client.power_cycle_agent("ipum1")
    assert pod.client.get_partition("p").state.name == "ERROR"
    assert samples() == before


def complete_page(pod: Pod) -> str:
    """A page with a sample of every family."""
    pod.active("p", 8)
    told = {info.name: value_to_json(info) for info in pod.client.list_partitions()}

    def busy(report: MachineReport) -> MachineReport:
        return replace(
            report, ipus=tuple(replace(ipu, utilisation_percent=37.5, power_w=76.7) for ipu in report.ipus)
        )

    service = ServiceMetrics((0.001, 0.1), (CallInfo('odd "name"\\', 5, 1, 2.5, (1, 4)),), 0, 8, 4, 1)
    families = [
        *partition_families(told, map(busy, pod.client.machine_reports()), 3),
        *agent_families({"a": {"health": "up"}}, 2),
        *service_families(service),
    ]
    assert all(family.samples for family in families)
    return MetricsPage(tuple(families)).text()


def test_names_of_metrics_follow_the_rules_of_prometheus(pod: Pod) -> None:
    """https://prometheus.io/docs/practices/naming: what promtool looks at, checked where there is none."""
    page = complete_page(pod)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    told = dict(re.findall(r"^# HELP (\S+) (.+)$", page, re.MULTILINE))
    assert len(kinds) >= 18
    assert told.keys() == kinds.keys()
    for name, kind in kinds.items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert not name.endswith(("_count", "_sum", "_bucket", "_info_total")), name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
        assert not NO_BASE_UNITS.search(name), name
        assert kind not in name.split("_"), name
        assert told[name].endswith("."), name


def test_promtool_has_no_complaint(pod: Pod) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=complete_page(pod), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_histogram_counts_all_calls_and_labels_are_escaped(pod: Pod) -> None:
    lines = complete_page(pod).splitlines()
    label = 'call="odd \\"name\\"\\\\"'
    assert f'podrun_vipu_call_seconds_bucket{{{label},le="0.1"}} 4.0' in lines
    assert f'podrun_vipu_call_seconds_bucket{{{label},le="+Inf"}} 5.0' in lines
    assert f"podrun_vipu_call_seconds_count{{{label}}} 5.0" in lines
    assert f"podrun_vipu_call_seconds_sum{{{label}}} 2.5" in lines
    assert f"podrun_vipu_call_errors_total{{{label}}} 1.0" in lines


def test_names_of_dcgm_are_there_if_they_are_asked_for(pod: Pod) -> None:
    pod.active("p", 4)
    report = pod.client.machine_reports("p")[0]
    busy = replace(
        report.ipus[0], utilisation_percent=40.0, compute_percent=25.0, sync_percent=15.0, link_bytes=7
    )

    def page(**names: bool) -> list[str]:
        families = partition_families({}, [replace(report, ipus=(busy,), board_power_w=90.0)], 1, **names)
        return MetricsPage(tuple(families)).text().splitlines()

    labels = 'agent="ipum1",ipu="0",partition="p"'
    assert f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} 40.0" in page(dcgm_names=True)
    lines = page()
    assert not any("DCGM" in line for line in lines)
    assert f'podrun_ipu_activity_ratio{{activity="compute",{labels}}} 0.25' in lines
    assert not any('activity="link"' in line for line in lines)  # Unknown.
    assert f"podrun_ipu_link_sent_bytes_total{{{labels}}} 7.0" in lines
    assert 'chassis_power{agent="ipum1",partition="p"} 90.0' in lines
