"""The test tools on real machines: what they print, which errors they find, what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.cluster import LinkTopology
from podrun.core.command_line import run_command
from podrun.core.executable import Compute, Copy
from podrun.core.layout import IpuRange
from podrun.costmodel.target import BOW, GC200
from podrun.device.connection import AttachRequest
from podrun.device.host.connecting import connect
from podrun.monitor import tool_partition, tool_programs
from podrun.monitor.gc_gwlinkstraffictest import gc_gwlinkstraffictest_command, own_ipus
from podrun.monitor.host_tools import LEGS, gc_hostsynclatencytest_command, gc_hosttraffictest_command
from podrun.monitor.link_tools import gc_iputraffictest_command, gc_links_command
from podrun.monitor.load_tools import gc_flops_command, gc_powertest_command
from podrun.monitor.tool_partition import Route, attach, find_partition, route
from podrun.monitor.tool_programs import LinkCheck
from podrun.record.events import read_parts
from podrun.record.recorder import EventRecorder, RecordedConnection
from tests.monitor.real import RealPod

VARIABLES = (
    "VIPU_CLI_API_HOST",
    "IPUOF_VIPU_API_HOST",
    "IPUOF_VIPU_API_PARTITION_ID",
    "IPUOF_VIPU_API_GCD_ID",
)


@pytest.fixture(scope="module")
def whole_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPod]:
    """A machine with a partition over it: its first IPUs fail only where a test plans it, and are reset after that."""
    directory = tmp_path_factory.mktemp("run")
    pod = RealPod(directory, tmp_path_factory.mktemp("cache"))
    pod.active("p", 4, reconfigurable=True)
    yield pod
    pod.stop()


@pytest.fixture
def pod(whole_module: RealPod, monkeypatch: pytest.MonkeyPatch) -> RealPod:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(whole_module.directory))
    return whole_module


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: exit code, standard output and error."""

    def call(command: Any, *words: str) -> tuple[int, str, str]:
        code = run_command(command, list(words))
        out, err = capsys.readouterr()
        return code, out, err

    return call


Tool = Callable[..., tuple[int, str, str]]


def test_links_carry_data_until_one_breaks(pod: RealPod, tool: Tool) -> None:
    code, out, _ = tool(gc_links_command, "-j")
    assert code == 0
    found = json.loads(out)
    assert found.pop("iteration_0")["discovery_method"] == "VIRM"
    assert found == {"requested_iterations": "1", "iterations_with_failures": "0", "overall_result": "passed"}
    pod.client.inject_faults("p", ["link:2-3@batch=0:down"])
    code, out, _ = tool(gc_links_command)
    assert code == 1
    assert "2 <-> 3    failed: IPU-Link between IPU 2 and IPU 3 went down in batch 0" in out
    assert out.count("passed") == 3
    code, out, _ = tool(gc_links_command, "-j")  # Now machines report it, and nothing is sent.
    assert code == 1
    found = json.loads(out)
    assert found["overall_result"] == found["iteration_0"]["overall_result"] == "failed"
    assert found["iteration_0"]["ipu to ipu"] == [
        {"from": "2", "to": "3", "status": "failed", "error": "IPU-Link down (PARTITION_RESET needed)"}
    ]
    pod.client.reset_partition("p")  # The other tests use the links again.
    assert pod.service.wait_idle(60)


def test_ipus_in_use_are_refused_and_released(pod: RealPod, tool: Tool) -> None:
    partition = find_partition(None, None)
    with attach(partition, IpuRange(1, 1), name="train.py"):
        for command, *words in (
            [gc_links_command],
            [gc_flops_command, "-d", "1"],
            [gc_iputraffictest_command, "--device0", "1", "--device1", "2"],
        ):
            code, _, err = tool(command, *words)
            assert code == 1
            assert f"Failed to attach to device: IPU 1 attached by process {os.getpid()} (train.py" in err
    with attach(partition, IpuRange(0, 4)):  # The tools that were refused have left nothing held.
        pass


def test_a_broken_ipu_is_named(
    pod: RealPod, tool: Tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pod.client.inject_faults("p", ["ipu:3@batch=0:exchange-error"])
    code, _, err = tool(gc_hostsynclatencytest_command, "-d", "3", "--mark-count", "3")
    assert code == 1
    assert "Exchange error on IPU 3 in batch 0" in err
    # Only the process that met the error may load again without a reset: this is another one.
    with monkeypatch.context() as patched:
        patched.setattr(tool_partition.os, "getpid", os.getppid)
        code, _, err = tool(gc_hosttraffictest_command, "-d", "3")
    assert code == 1
    assert "IPU 3 cannot be used (IPU_RESET needed): Exchange error" in err
    # A recorded program that is refused tells of it once, with what is broken as a value.
    notes = EventRecorder(tmp_path / f"instance-0.0.{os.getpid()}.jsonl", "instance 0", 0)
    recorded = RecordedConnection(connect(find_partition(None, None).environ), notes)
    other = AttachRequest(IpuRange(3, 1), IpuRange(3, 1), os.getppid(), "tester", "train.py")
    assert recorded.try_attach(other) == recorded.try_attach(other) is not None
    recorded.close()
    notes.close()
    (refused,) = [timed.event for timed in read_parts(tmp_path)]
    assert (refused.kind, refused.data["where"], refused.data["action"]) == ("refused", "ipu 3", "IPU_RESET")
    assert refused.data["cause"]["ipus"] == [3]
    pod.client.reset_ipus("p", [3])
    assert tool(gc_hostsynclatencytest_command, "-d", "3", "--mark-count", "3")[0] == 0


def test_traffic_between_two_ipus(pod: RealPod, tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_partition, "STREAM_TILES", 1)
    code, out, _ = tool(gc_iputraffictest_command, "--device0", "2", "--device1", "3", "-i", "2", "-j")
    assert code == 0
    found = json.loads(out)["tile_to_tile"]
    assert found["boards"]["0024.0001.8203101"]["device_ids"] == ["2", "3"]
    assert (found["device0"], found["device1"], found["errors"], found["power"]) == ("2", "3", "0", "N/A")
    assert found["kbytes_transferred"] == str(2 * 64 * 2)
    seconds = 2 * tool_partition.route_seconds(GC200, Route("IPU-Link", 1), 64 * 1024)
    assert float(found["duration_sec"]) == pytest.approx(seconds, abs=1e-9)
    assert float(found["gbps"]) == pytest.approx(2 * 2 * 64 * 1024 * 8 / seconds / 1e9, rel=1e-5)


def test_gc_hostsynclatencytest_counts_its_syncs(pod: RealPod, tool: Tool) -> None:
    code, out, _ = tool(gc_hostsynclatencytest_command, "-j", "--mark-count", "7", "-i", "2")
    found = json.loads(out)
    assert (code, found["emulated_syncs"], found["result"]) == (0, "14", "pass")
    assert (found["mark_count"], found["delay_cycles"], found["num_delays"]) == ("7", "5", "32")
    assert float(found["emulated_sync_us"]) > 0
    assert found["modelled"] == ["time_to_sync_us"]


def test_gc_flops_computes_right_values_and_their_rate(
    pod: RealPod, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_programs, "PASSES", 3)
    monkeypatch.setattr(tool_programs, "ROWS", 1)
    code, out, _ = tool(gc_flops_command, "-d", "2", "-p", "FP32")
    assert code == 0
    assert "Flops per IPU (FP32): " in out
    assert "IPU clock speed: 1330 MHz" in out
    assert "every value right" in out

    products = tool_programs.products

    def computed_twice(*arguments: Any) -> Any:
        right = products(*arguments)
        (*before, store) = right.instructions[0]
        again = (*before, Copy("out:y", "in:x"), Compute("products"), store)
        return replace(right, instructions=(again,))

    monkeypatch.setattr(tool_programs, "products", computed_twice)
    code, out, _ = tool(gc_flops_command, "-d", "2", "-p", "FP32", "-j")
    found = json.loads(out)
    assert (code, found["result"]) == (1, "fail")
    assert int(found["wrong_values"]["2"]) > 1000


def test_wrong_words_are_found(pod: RealPod) -> None:
    partition = find_partition(None, None)
    with attach(partition, IpuRange(0, 2)) as connection:
        test = LinkCheck(partition, connection, IpuRange(0, 2), [(0, 1)], 16 * 1024, 1e-6)
        assert sum(progress.iterations for progress in test.run(3)) == 3
        assert test.errors() == [0]
        wrong = connection.read_variables(["payload:0:1"])["payload:0:1"]
        wrong[7:9] += np.uint32(1)
        connection.write_variables({"payload:0:1": wrong})
        assert test.errors() == [2]


def test_impossible_tests_are_refused(pod: RealPod, tool: Tool) -> None:
    for words, said in (
        ([gc_flops_command, "--fp", "FP8"], "Colossus Mk2 GC200 does not compute in FP8"),
        ([gc_flops_command, "-d", "70"], "no such device set id: '70'"),
        ([gc_iputraffictest_command, "--device0", "4"], "device 4 is no single IPU"),
        (
            [gc_iputraffictest_command, "--device0", "1", "--device1", "1"],
            "traffic within one IPU is not emulated",
        ),
        ([gc_iputraffictest_command, "--forever", "-j"], "--forever has no end"),
        ([gc_iputraffictest_command, "--all-links", "--device0", "1"], "--all-links takes no devices"),
        ([gc_hosttraffictest_command, "-d", "4"], "device 4 has 2 IPUs"),
        ([gc_gwlinkstraffictest_command], "it uses no GW-Links"),
    ):
        code, _, err = tool(*words)
        assert code == 2
        assert said in err


# --- models ---------------------------------------------------------------------------------------------------


def test_modelled_times_against_published_samples() -> None:
    nbytes = tool_partition.STREAM_BYTES * tool_partition.STREAM_TILES
    both_ways = (
        2 * nbytes * 8 / tool_partition.route_seconds(GC200, route(2, 3, 4, LinkTopology.MESH), nbytes) / 1e9
    )
    assert both_ways == pytest.approx(423.312, rel=0.015)
    rows = tool_programs.ROWS * tool_programs.PASSES
    cycles = 2 * tool_partition.streamed_product_cycles(BOW, "float32", rows)
    tera = 2 * rows * 16 * 16 * BOW.tiles / (cycles / BOW.clock_hz) / 1e12
    assert tera == pytest.approx(87.1078, rel=0.002)
    tiles = 32 * 4096 * 8 / tool_partition.tile_round_seconds() / 1e9
    for published in (30.0491, 26.4098, 24.6293, 26.8986):
        assert tiles == pytest.approx(published, rel=0.11)
    for direction, speeds in (("from", (23.4624, 21.7526)), ("to", (56.4874, 40.2489))):
        for published in speeds:
            assert tool_partition.host_rate(direction) * 8 / 1e9 == pytest.approx(published, rel=0.19)
    assert tool_partition.sync_train_seconds(GC200, 4095, 5, 32) == pytest.approx(1485e-6)


@pytest.mark.parametrize(
    ("ends", "topology", "way"),
    [
        ((0, 1), LinkTopology.MESH, Route("IPU-Link", 1, rung=True)),
        ((0, 2), LinkTopology.MESH, Route("IPU-Link", 1)),
        ((0, 15), LinkTopology.MESH, Route("IPU-Link", 8)),
        ((0, 15), LinkTopology.TORUS, Route("IPU-Link", 2)),
        ((3, 20), LinkTopology.MESH, Route("GW-Link", 1)),
    ],
)
def test_routes_between_ipus_are_the_shortest_and_the_same_both_ways(
    ends: tuple[int, int], topology: LinkTopology, way: Route
) -> None:
    assert route(*ends, 16, topology) == way
    assert route(*ends[::-1], 16, topology) == way


def test_the_mixing_matrix_is_its_own_inverse() -> None:
    w = tool_programs.mixing_matrix(3)
    assert np.array_equal(w @ w, np.eye(16))
    assert set(np.unique(np.abs(w))) == {0.25}


# --- longer ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_host_traffic(pod: RealPod, tool: Tool) -> None:
    code, out, _ = tool(gc_hosttraffictest_command, "-j")
    found = json.loads(out)
    assert code == 0
    assert found["configuration"]["tiles_per_ipu"] == "32"
    assert set(found["repeat_0"]) == {leg.name for leg in LEGS}
    for test in found["repeat_0"].values():
        assert test["tile_data_transferred_bytes"] == "13107200000"
        assert (test["errors"], test["emulated_host_bytes"]) == ("0", str(16 << 20))


@pytest.mark.slow
def test_gc_powertest_shows_power_and_temperature_of_an_idle_ipu(pod: RealPod, tool: Tool) -> None:
    code, out, _ = tool(gc_powertest_command, "-d", "1", "--time", "0", "--interval", "0")
    assert code == 0
    assert out.splitlines()[-1].startswith("0001: 124.00W 048.25W T172.25W 030C")  # As warm as after idling.
    assert " 1330MHz " in out.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.system
def test_a_second_terminal_sees_the_load_and_ctrl_c_ends_it(pod: RealPod) -> None:
    tool = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # Ours may ignore it.
        "from podrun.commands import gc_powertest; gc_powertest()"
    )
    process = subprocess.Popen([sys.executable, "-c", tool, "-d", "1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert any(line.startswith("0001: 124.00W") for line in process.stdout)
        ipu = pod.client.machine_reports("p")[0].ipus[1]
        assert ipu.process is not None
        assert (ipu.process.pid, ipu.process.command) == (process.pid, "gc-powertest -d 1")
        assert (ipu.utilisation_percent or 0) > 10
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 0
    with attach(find_partition(None, None), IpuRange(0, 4)):
        pass


@pytest.mark.slow
def test_gateway_links_by_gcd(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tool: Tool
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    pod = RealPod(tmp_path, tmp_path_factory.mktemp("cache"), "pod128")
    try:
        pod.active("p", 8, num_gcds=2, num_ilds=2)
        code, out, _ = tool(gc_gwlinkstraffictest_command, "-j")
        assert (code, json.loads(out)["overall_result"]) == (0, "passed")
        monkeypatch.setenv("IPUOF_VIPU_API_GCD_ID", "1")
        assert own_ipus(find_partition(None, None)) == IpuRange(4, 4)
        code, _, err = tool(gc_gwlinkstraffictest_command, "--timeout", "1")
        assert code == 1
        assert "still waiting for host sync after: " in err
        assert "Missing: the first machine of IPUs 0-7 has loaded nothing" in err
        assert "IPUOF_VIPU_API_GCD_ID=0 gc-gwlinkstraffictest &" in err
        config = tmp_path / "p_gcd0_ipuof.conf"
        config.write_text('IPUoF configuration of partition p, GCD 0:\n{"attributes": {"GCD Id": "0"}}')
        monkeypatch.setenv("IPUOF_CONFIG_PATH", str(config))
        assert own_ipus(find_partition(None, None)) == IpuRange(0, 4)
        config.write_text("{}")
        code, _, err = tool(gc_gwlinkstraffictest_command)
        assert code == 2
        assert "says no GCD" in err
        monkeypatch.delenv("IPUOF_CONFIG_PATH")
        monkeypatch.setenv("IPUOF_VIPU_API_GCD_ID", "2")
        assert "has GCDs 0 to 1" in tool(gc_gwlinkstraffictest_command)[2]
        monkeypatch.delenv("IPUOF_VIPU_API_GCD_ID")
        code, out, _ = tool(gc_iputraffictest_command, "--device0", "1", "--device1", "6", "-i", "3", "-j")
        assert json.loads(out)["tile_to_tile"]["link"] == "GW-Link"
    finally:
        pod.stop()
