"""Every query of the dashboard and of the alerts, asked of a real Prometheus that scrapes the exporter of a POD that is
idle, that works and that is faulty."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from podrun.monitor.dashboards import ALERTS, PANELS, rules_document, scrape_document
from podrun.monitor.exporter import make_server
from podrun.partition.client.vipu_client import VipuClient
from tests.monitor.real import RealPod

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: apt-get install prometheus"),
]
PATIENCE_S = 90.0
IPUS = 4
ONLY_WITH_ERRORS = {"Calls that fail"}
"""Panels that may be empty in a POD in which nothing has failed."""

Values = list[float]


class RunningPrometheus:
    """Prometheus with podrun's own files, but a scrape each second."""

    def __init__(self, directory: Path, exporter_port: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        scrape = dict(scrape_document())
        scrape["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        scrape["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{exporter_port}"]}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(scrape))
        (directory / scrape["rule_files"][0]).write_text(yaml.safe_dump(dict(rules_document())))
        words = [
            str(PROMETHEUS),
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        self.log = directory / "prometheus.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(words, cwd=directory, stdout=log, stderr=log)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self, query: str) -> Values:
        """The values of a query now. An error of Prometheus is raised."""
        address = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with self._opener.open(address, timeout=60) as reply:
            document = json.load(reply)
        assert document["status"] == "success", (query, document)
        return [float(one["value"][1]) for one in document["data"]["result"]]

    def until(self, query: str, holds: Callable[[Values], bool]) -> Values:
        """The values of a query once they are as wanted."""
        deadline = time.monotonic() + PATIENCE_S
        values: Values = []
        while time.monotonic() < deadline:
            try:
                values = self.ask(query)
            except OSError:  # It is starting.
                assert self._process.poll() is None, self.log.read_text()
            else:
                if holds(values):
                    return values
            threading.Event().wait(0.2)
        raise AssertionError(f"{query}: {values} after {PATIENCE_S:g} s\n{self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture
def real_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealPod]:
    for name in ("VIPU_CLI_API_HOST", "IPUOF_VIPU_API_HOST", "IPUOF_VIPU_API_PARTITION_ID"):
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(directory))
    pod = RealPod(directory, tmp_path / "cache")
    pod.active("p", IPUS, reconfigurable=True)
    yield pod
    pod.stop()


@pytest.fixture
def prometheus(real_pod: RealPod, tmp_path: Path) -> Iterator[RunningPrometheus]:
    """It scrapes the exporter of ``real_pod`` with the key, as the files of `podrun dashboards` have it."""
    (tmp_path / "exporter-key").write_text("key")
    client = VipuClient("127.0.0.1", real_pod.port, timeout=60)
    with make_server(client, "127.0.0.1", 0, "key") as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        running = RunningPrometheus(tmp_path, server.server_address[1])
        try:
            yield running
        finally:
            running.stop()
            server.shutdown()
            serving.join(30)


def ask_everything(prometheus: RunningPrometheus) -> dict[str, list[Values]]:
    """The values of the queries of each panel; those of alerts are asked too."""
    for alert in ALERTS:
        prometheus.ask(alert.query)
    return {panel.title: [prometheus.ask(query) for query, _ in panel.queries] for panel in PANELS}


def powertest(seconds: int) -> subprocess.Popen[bytes]:
    """A program that keeps all IPUs busy."""
    code = "import sys; from podrun.commands import gc_powertest; sys.exit(gc_powertest())"
    device = 2 * IPUS - 2  # The last device id: all IPUs.
    words = [sys.executable, "-c", code, "-d", str(device), "--time", str(seconds)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL)


def test_every_query_has_its_answer_in_a_pod_that_is_idle_works_and_is_faulty(
    real_pod: RealPod, prometheus: RunningPrometheus
) -> None:
    prometheus.until("count_over_time(exporter_ticks[1m])", lambda counts: bool(counts) and counts[0] >= 3)
    idle = ask_everything(prometheus)
    empty = {title for title, answers in idle.items() if not all(answers)}
    assert empty <= ONLY_WITH_ERRORS
    assert idle["IPUs in error"] == [[0]]
    assert idle["Machines that answer"] == [[1], [1]]
    assert idle["Free IPUs"] == [[12]]
    assert idle["IPUs that processes hold"] == [[0]]
    assert idle["Utilisation by partition"] == [[0]]

    work = powertest(60)
    try:
        prometheus.until("sum(ipu_attached)", lambda held: held == [IPUS])
        prometheus.until("min(podrun_ipu_utilisation_ratio)", lambda share: share[0] > 0.5)
        prometheus.until("min(rate(podrun_ipu_batches[1m]))", lambda rates: bool(rates) and rates[0] > 0)
        busy = ask_everything(prometheus)
    finally:
        work.terminate()
        work.wait(30)
    assert all(all(answers) for title, answers in busy.items() if title not in ONLY_WITH_ERRORS)
    assert busy["Power by partition (modelled)"][0][0] > 2 * idle["Power by partition (modelled)"][0][0]
    assert busy["IPUs in error"] == [[0]]

    prometheus.until("sum(ipu_attached)", lambda held: held == [0])
    real_pod.client.inject_faults("p", ["ipu:1@batch=0:tile-parity"])
    powertest(60).wait(PATIENCE_S)
    prometheus.until("sum(podrun_ipu_error)", lambda errors: errors[0] >= 1)
    faulty = ask_everything(prometheus)
    assert all(all(answers) for title, answers in faulty.items() if title not in ONLY_WITH_ERRORS)
    error = next(alert for alert in ALERTS if alert.name == "PodrunIpuError")
    assert prometheus.ask(error.query)
    prometheus.until('ALERTS{alertname="PodrunIpuError"}', bool)
