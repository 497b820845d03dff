"""With several services of one user on one host, tools choose one and say which, or refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from podrun.core.command_line import run_command
from podrun.monitor.device_tools import gc_monitor_command, gc_reset_command
from podrun.monitor.devices import connect_monitor
from podrun.monitor.load_tools import gc_flops_command
from podrun.partition.host.discovery import LAUNCHER, VIPU_SERVER, Registry, ServiceEntry, own_process_id
from tests.partition.conftest import Pod

ANY = ("VIPU_CLI_API_HOST", "IPUOF_VIPU_API_HOST", "IPUOF_VIPU_API_PORT", "IPUOF_VIPU_API_PARTITION_ID")


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Pod, Pod]]:
    """A vipu-server, which discovery finds first, and the service inside a podrun."""
    for name in ANY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    pair = (Pod(), Pod())
    for kind, pod in zip((VIPU_SERVER, LAUNCHER), pair, strict=True):
        Registry().publish(ServiceEntry(kind, "127.0.0.1", pod.port, own_process_id(), "pod16"))
    yield pair
    for pod in pair:
        pod.stop()


def test_reading_tools_say_which_service_they_ask(
    pods: tuple[Pod, Pod], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = pods
    first.active("p", 4)
    second.active("q", 4)
    assert run_command(gc_monitor_command, ["-j"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["partitions"][0]["name"] == "p"
    assert err.splitlines() == [
        f"note: asking 127.0.0.1:{first.port}, one of 2 services of yours: vipu-server at 127.0.0.1:{first.port} (p); "
        f"podrun at 127.0.0.1:{second.port} (q)",
        f"  To choose: --api-host 127.0.0.1 --api-port {first.port}, or the same in IPUOF_VIPU_API_HOST and _PORT",
    ]
    assert (
        run_command(gc_monitor_command, ["-j", "--api-host", "127.0.0.1", "--api-port", str(second.port)])
        == 0
    )
    out, err = capsys.readouterr()
    assert (json.loads(out)["partitions"][0]["name"], err) == ("q", "")


def test_tools_ask_the_service_that_has_the_partition(
    pods: tuple[Pod, Pod], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pods
    second.active("q", 4)
    assert run_command(gc_reset_command, ["-d", "1"]) == 0  # Only one has a partition at all.
    out, err = capsys.readouterr()
    assert out == "Reset IPU 1 of partition q.\n"
    assert f"note: asking 127.0.0.1:{second.port}" in err
    first.active("p", 4)
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "q")
    with connect_monitor() as client:
        assert client.port == second.port
    assert capsys.readouterr().err == ""  # A library says nothing.
    monkeypatch.setenv("IPUOF_VIPU_API_HOST", "127.0.0.1")
    monkeypatch.setenv("IPUOF_VIPU_API_PORT", str(first.port))
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "p")
    assert run_command(gc_reset_command, ["-d", "1"]) == 0
    assert capsys.readouterr() == ("Reset IPU 1 of partition p.\n", "")


def test_tools_that_take_ipus_refuse_to_guess_the_service(
    pods: tuple[Pod, Pod], capsys: pytest.CaptureFixture[str]
) -> None:
    for pod in pods:
        pod.active("p", 4)
    for command in (gc_reset_command, gc_flops_command):
        assert run_command(command, ["-d", "1"]) == 2
        err = capsys.readouterr().err
        assert "2 partition services of yours run here, and more than one could be meant" in err
        assert f"--api-host 127.0.0.1 --api-port {pods[0].port}" in err
    assert run_command(gc_reset_command, ["-d", "1", "--api-port", str(pods[1].port)]) == 0
    assert ("reset_ipus", [1]) in pods[1].pool.machine("ipum1", "p").calls
    assert ("reset_ipus", [1]) not in pods[0].pool.machine("ipum1", "p").calls


def test_a_service_that_does_not_answer_is_skipped(
    pods: tuple[Pod, Pod], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = pods
    second.active("q", 4)
    first.stop()
    assert run_command(gc_monitor_command, []) == 0
    out, err = capsys.readouterr()
    assert "Partition: q [active]" in out
    assert f"vipu-server at 127.0.0.1:{first.port} (does not answer)" in err
