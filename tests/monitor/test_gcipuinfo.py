"""gcipuinfo as its clients use it, and the exporter who may read its page."""

from __future__ import annotations

import datetime
import json
import os
import stat
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from podrun.core.errors import ConfigError, IpusTakenError, UsageError
from podrun.core.event_record import EVENT_FILE, EVENT_PATH, AttachedIpus, read_event_record, record_error
from podrun.core.ipu_states import IpuErrorState
from podrun.core.telemetry import AttachedProcess
from podrun.device.error_messages import machine_lost
from podrun.monitor import exporter, gcipuinfo
from podrun.monitor.exporter import make_server
from tests.partition.conftest import Pod


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcipuinfo, "_mode_in_use", [])


def test_devices_of_this_process(pod: Pod) -> None:
    pod.active("p", 8)
    info = gcipuinfo.gcipuinfo()
    assert [device["id"] for device in info.getDevices()] == [str(i) for i in range(8)]
    pod.pool.machine("ipum1", "p").process = AttachedProcess(4711, "me", "python", 1.0)
    assert not any("user process id" in device for device in info.getDevices())
    info.setUpdateMode(True)
    mine = [device for device in info.getDevices() if device.get("user process id") == "4711"]
    assert [device["id"] for device in mine] == ["0", "1", "2", "3"]
    assert float(mine[0]["clock"][:-3]) == 1330.0
    assert info.getNamedAttributeForAll(gcipuinfo.IpuPower) == ["N/A"] * 8
    assert info.getNamedAttributeForAll(gcipuinfo.LABELS["UserProcessId"])[4:] == ["N/A"] * 4
    assert json.loads(info.getDevicesAsJSON()) == info.getDevices()


def test_without_a_partition_there_are_no_devices(pod: Pod) -> None:
    assert gcipuinfo.gcipuinfo().getDevices() == []


def test_without_the_service_the_snapshot_stays(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.active("p", 1)
    info = gcipuinfo.gcipuinfo()
    monkeypatch.setenv("IPUOF_VIPU_API_HOST", "127.0.0.1")
    monkeypatch.setenv("IPUOF_VIPU_API_PORT", "1")
    assert info.updateData() is False
    assert len(info.getDevices()) == 1
    assert "no V-IPU server" in info.checkHealthOfDevices()


def test_the_two_discovery_modes_cannot_be_mixed(pod: Pod) -> None:
    pod.active("p", 4)
    pod.active("q", 4)
    info = gcipuinfo.gcipuinfo(gcipuinfo.DiscoverAllPartitionIPUs)
    assert {device["ipuof partition id"] for device in info.getDevices()} == {"p", "q"}
    with pytest.raises(UsageError, match="cannot be mixed"):
        gcipuinfo.gcipuinfo()


def test_health_names_devices_with_errors_and_machines_that_are_gone(pod: Pod) -> None:
    pod.active("p", 8)
    info = gcipuinfo.gcipuinfo()
    assert info.checkHealthOfDevices() == "{}"
    pod.pool.machine("ipum1", "p").ipu_errors[2] = IpuErrorState.TILE_PARITY
    entry = {"error": "device", "id": "2", "partition": "p", "board ipu index": "1"}
    assert json.loads(info.checkHealthOfDevices()) == {"hosts": {"10.1.1.1": [entry]}}
    pod.pool.machine("ipum2", "p").die()
    errors = json.loads(info.checkHealthOfDevices())["hosts"]["10.1.1.2"]
    assert [e["error"] for e in errors] == ["connection"] * 4


def test_the_last_error_of_a_program_is_found_as_its_event_record(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = gcipuinfo.gcipuinfo()
    assert info.getLastAppEventRecord() == {}
    here = {EVENT_PATH: str(tmp_path)}
    attached = AttachedIpus("p", range(4, 12), {4: "10.1.1.2", 8: "10.1.1.3"})
    lost = machine_lost("10.1.1.3:50052", 2, 8)
    file = record_error(
        lost, attached, environ=here, now=datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)
    )
    record = info.getLastAppEventRecord(str(tmp_path))
    assert (record["severity"], record["pid"]) == (
        "error",
        str(os.getpid()),
    )
    assert (record["timestamp"], record["partition"]) == ("2026-01-02T03:04:05.000006Z", "p")
    assert (record["specific ipus"], record["specific ipu hosts"]) == ("8, 9, 10, 11", "10.1.1.3")
    assert (record["attached ipu hosts"], record["event record path"]) == ("10.1.1.2, 10.1.1.3", str(file))
    monkeypatch.setenv(EVENT_PATH, str(tmp_path))
    assert json.loads(info.getLastAppEventRecordAsJSON()) == record


def test_an_event_replaces_those_that_are_no_worse(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, attached = {EVENT_PATH: str(tmp_path)}, AttachedIpus("p", range(4), {})
    taken = IpusTakenError("the partition was reset")
    assert record_error(taken, attached, environ={}) is None
    assert record_error(taken, attached, environ=here) is not None
    assert read_event_record(tmp_path)["severity"] == "warning"
    assert record_error(machine_lost("e:1", 0, 0), attached, environ=here) is not None
    assert record_error(taken, attached, environ=here) is None
    assert read_event_record(tmp_path)["severity"] == "error"
    (tmp_path / "file").write_text("")
    assert record_error(taken, attached, environ={EVENT_PATH: str(tmp_path / "file")}) is None
    assert "cannot be written" in caplog.text
    (tmp_path / EVENT_FILE).write_text("[]")
    with pytest.raises(ConfigError, match="holds no event record"):
        read_event_record(tmp_path)
    assert record_error(taken, attached, environ=here) is not None


def test_labels_have_the_sdks_names() -> None:
    assert gcipuinfo.IpuPower == "ipu power"
    assert gcipuinfo.label_name("ipu utilisation (session)") == "IpuUtilisationSession"
    assert vars(gcipuinfo)["AverageDieTemp"] == "average die temp"


def test_the_metrics_page_is_for_its_user_and_who_has_the_key(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = exporter.make_key(tmp_path, "a-secret-of-this-user")
    path = tmp_path / exporter.KEY_FILE
    assert path.read_text() == key + "\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert exporter.make_key(tmp_path, "another-secret-of-it") != key
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with make_server(pod.client, "127.0.0.1", 0, key) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        where = f"http://127.0.0.1:{server.server_address[1]}/metrics"
        said: list[bytes] = []

        def asked(**headers: str) -> int:
            try:
                return int(opener.open(urllib.request.Request(where, headers=headers), timeout=60).status)
            except urllib.error.HTTPError as error:
                with error:
                    said.append(error.read())
                return error.code

        try:
            assert asked() == 200, "its user, as the kernel knows"
            for stranger in (None, os.getuid() + 1):
                monkeypatch.setattr(exporter, "user_of_peer", lambda peer, here, uid=stranger: uid)
                assert asked() == asked(Authorization="Bearer wrong") == asked(Authorization=key) == 401
                assert asked(Authorization=f"Bearer {key}") == 200
        finally:
            server.shutdown()
            thread.join()
    assert all(b"exporter-key" in text for text in said)
