"""gc-monitor and gc-reset: published shapes, and what a second terminal sees."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.command_line import run_command
from podrun.core.errors import RecoveryAction
from podrun.core.fault_effects import EFFECTS
from podrun.core.ipu_states import IpuErrorState, MachineState
from podrun.core.telemetry import ATTRIBUTES, AttachedProcess, IpuReport, MachineReport
from podrun.monitor.device_listing import gc_info_command, gc_inventory_command
from podrun.monitor.device_tools import gc_monitor_command, gc_reset_command
from podrun.monitor.devices import Device, View, device_sets, diagnose_device
from podrun.monitor.monitor_tables import (
    all_tables,
    device_table,
    duration,
    fit,
    partition_headline,
    process_table,
)
from podrun.partition.state.values import IpuofConfig, PartitionInfo, PartitionState
from tests.partition.conftest import Pod

VERSIONS = {"IPUoF server": "1.11.0", "ICU firmware": "2.5.9", "IPU-M software": "2.6.0-028"}


def view(ipus: int = 4, *, attached: int = 0, gcds: int = 1, lost: bool = False) -> View:
    cluster = load_cluster("pod16")
    process = AttachedProcess(4711, "justina", "python", 1000.0, "host")
    reports = []
    for m in range(max(1, ipus // 4)):
        agent = cluster.agents[m]
        reports.append(
            MachineReport(
                agent.id,
                serial=agent.serial,
                state=MachineState.LOST if lost else MachineState.UP,
                versions=VERSIONS,
                ipus=tuple(
                    IpuReport(
                        4 * m + i, i, process=process if 4 * m + i < attached else None, clock_mhz=1330.0
                    )
                    for i in range(min(ipus, 4))
                ),
            )
        )
    info = PartitionInfo(
        "p1", "pod16", "pod16", ipus, PartitionState.ACTIVE, reconfigurable=True, num_gcds=gcds
    )
    devices = tuple(
        Device(ipu.partition_ipu, f"10.1.1.{m + 1}", 3 - ipu.ipu, report, ipu)
        for m, report in enumerate(reports)
        for ipu in report.ipus
    )
    return View(info, IpuofConfig("p1", info.state, (), {"GCD Id": "0"}), tuple(reports), devices, True)


DEVICES = """\
+---------------+---------------------------------------------------------------------------------+
|  gc-monitor   |                Partition: p1 [active] has 4 reconfigurable IPUs                 |
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+
|    IPU-M    |       Serial       |IPU-M SW|Server version|  ICU FW  | Type  | ID | IPU# |Routing|
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+
|  10.1.1.1   | 0024.0002.8203101  |...0-028|    1.11.0    |  2.5.9   | M2000 | 0  |  3   |  DNC  |
|  10.1.1.1   | 0024.0002.8203101  |...0-028|    1.11.0    |  2.5.9   | M2000 | 1  |  2   |  DNC  |
|  10.1.1.1   | 0024.0001.8203101  |...0-028|    1.11.0    |  2.5.9   | M2000 | 2  |  1   |  DNC  |
|  10.1.1.1   | 0024.0001.8203101  |...0-028|    1.11.0    |  2.5.9   | M2000 | 3  |  0   |  DNC  |
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+"""

PROCESSES = """\
+------------------------------------------------------------------------+------------------------+-----------------+
|                   Attached processes in partition p1                   |          IPU           |      Board      |
+--------+-----------------------------------------+--------+------------+----+----------+--------+--------+--------+
|  PID   |                 Command                 |  Time  |    User    | ID |  Clock   |  Temp  |  Temp  | Power  |
+--------+-----------------------------------------+--------+------------+----+----------+--------+--------+--------+
|  4711  |                 python                  |  1m3s  |  justina   | 0  | 1330MHz  |  N/A   |  N/A   |  N/A   |
|  4711  |                 python                  |  1m3s  |  justina   | 1  | 1330MHz  |  N/A   |        |        |
+--------+-----------------------------------------+--------+------------+----+----------+--------+--------+--------+"""


def test_the_device_table() -> None:
    assert device_table(view()) == DEVICES
    assert {len(line) for line in DEVICES.splitlines()} == {99}


def test_the_title_names_the_gcd_if_there_are_several() -> None:
    assert "Partition: p1 (gcd:0) [active] has 8 reconfigurable IPUs" in device_table(view(8, gcds=2))


def test_a_rule_after_each_machine() -> None:
    lines = device_table(view(8)).splitlines()
    assert len(lines) == 5 + 4 + 1 + 4 + 1
    assert lines[9] == lines[4]
    assert [line.split("|")[7].strip() for line in lines[5:9] + lines[10:14]] == [str(i) for i in range(8)]


def test_the_process_table() -> None:
    assert process_table(view(attached=2), now=1063.0) == PROCESSES
    assert {len(line) for line in PROCESSES.splitlines()} == {117}


def test_a_box_says_that_no_process_is_attached() -> None:
    lines = process_table(view()).splitlines()
    assert [len(line) for line in lines] == [100] * 3
    assert lines[1].strip("|").strip() == "No attached processes in partition p1"


def test_errors_come_with_the_remedy() -> None:
    text = all_tables([view(lost=True)])
    assert text.count("vipu-admin restart agent ipum1") == 4
    assert "Errors in partition" not in all_tables([view()])


def test_a_partition_between_states_is_no_error() -> None:
    up = view()
    coming = replace(up, info=replace(up.info, state=PartitionState.PROVISIONING))
    assert "p1 [provisioning] has" in partition_headline(coming)
    lines = all_tables([coming]).splitlines()
    assert "Errors in partition" not in all_tables([coming])
    assert lines[-2].strip("| ") == "Partition p1 is PROVISIONING: its IPUs cannot be used now"


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [("172.31.100.130", 13, "...31.100.130"), ("abc", 6, " abc  "), ("abcdef", 6, "abcdef"), ("", 3, "   ")],
)
def test_cells_are_centred_or_cut(text: str, width: int, shown: str) -> None:
    assert fit(text, width) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(10, "10s"), (63, "1m3s"), (7205, "2h0m5s"), (-1, "0s")])
def test_durations_have_hours_minutes_and_seconds(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_device_ids_of_a_reconfigurable_partition() -> None:
    sets = device_sets(4, reconfigurable=True)
    assert sets == [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)]
    assert len(device_sets(64, reconfigurable=True)) == 127
    assert device_sets(16, reconfigurable=True)[24:28] == [tuple(range(4 * i, 4 * i + 4)) for i in range(4)]
    assert device_sets(4, reconfigurable=False)[-1] == (0, 1, 2, 3)
    assert device_sets(1, reconfigurable=True) == [(0,)]


# --- commands -----------------------------------------------------------------------------------------------


def test_a_second_terminal_sees_partitions_and_processes(
    pod: Pod, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(gc_monitor_command, []) == 2
    assert "no active partition" in capsys.readouterr().err
    pod.active("p", 8, reconfigurable=True)
    pod.pool.machine("ipum2", "p").process = AttachedProcess(77, "me", "python", 1.0)
    pod.pool.machine("ipum2", "p").ipu_errors[1] = IpuErrorState.TILE_PARITY
    assert run_command(gc_monitor_command, []) == 0
    out = capsys.readouterr().out
    assert "Partition: p [active] has 8 reconfigurable IPUs" in out
    assert "Attached processes in partition p" in out
    assert "tile parity error" in out
    assert run_command(gc_monitor_command, ["--no-card-info"]) == 0
    assert "gc-monitor" not in capsys.readouterr().out
    assert run_command(gc_reset_command, ["-d", "5"]) == 0
    assert capsys.readouterr().out == "Reset IPU 5 of partition p.\n"
    assert pod.pool.machine("ipum2", "p").ipu_errors == {}
    assert run_command(gc_reset_command, ["--device-id", "99"]) == 2
    assert "no such device set id: '99'" in capsys.readouterr().err


def test_ipus_in_use_are_reset_by_force_only(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.active("p", 8)
    machine = pod.pool.machine("ipum2", "p")
    machine.process = AttachedProcess(77, "me", "train.py", 1.0)
    machine.calls.clear()
    assert run_command(gc_reset_command, ["-d", "5"]) != 0
    said = capsys.readouterr().err
    assert "partition p is in use by process 77 (train.py) of me" in said
    assert "gc-reset -d 5 --force" in said
    assert "reset_ipus" not in dict(machine.calls)
    assert run_command(gc_reset_command, ["-d", "1"]) == 0  # Its machine has no process.
    assert run_command(gc_reset_command, ["-d", "5", "--force"]) == 0
    assert ("reset_ipus", [1]) in machine.calls


def test_gc_monitor_writes_cards_and_processes_as_json(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.active("p", 8)
    pod.active("q", 4)
    pod.pool.machine("ipum1", "p").process = AttachedProcess(77, "me", "python", 1.0)
    assert run_command(gc_monitor_command, ["-j"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert 4 * len(data["cards"]) == 8
    pids = [ipu.get("PID") for card in data["cards"] for ipu in card["ipus"]]
    assert pids == [77] * 4 + [None] * 4
    assert run_command(gc_monitor_command, ["--json", "--all-partitions"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [ipu["id"] for card in data["cards"] for ipu in card["ipus"]] == list(range(12))
    assert [p["active"] for p in data["partitions"]] == [True, False]


def test_the_environment_chooses_the_active_partition(
    pod: Pod, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.active("p", 4)
    pod.active("q", 4)
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "q")
    assert run_command(gc_monitor_command, []) == 0
    assert "Partition: q [active]" in capsys.readouterr().out
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "r")
    assert run_command(gc_monitor_command, []) == 2
    assert "Partitions: p, q." in capsys.readouterr().err


def test_unknown_options_get_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(gc_monitor_command, ["--all-partition"]) == 2
    assert "--all-partitions" in capsys.readouterr().err


# --- gc-info and gc-inventory -------------------------------------------------------------------------------

LISTING = """\
Graphcore device listing:

Partition: p [active]
-+- Id: [0], target: [Fabric], IPU-M host: [10.1.1.1], IPU#: [3]
-+- Id: [1], target: [Fabric], IPU-M host: [10.1.1.1], IPU#: [2]
-+- Id: [2], target: [Fabric], IPU-M host: [10.1.1.1], IPU#: [1]
-+- Id: [3], target: [Fabric], IPU-M host: [10.1.1.1], IPU#: [0]
-+- Id: [4], target: [Multi IPU]
 |--- Id: [0], DNC Id: [0], IPU-M host: [10.1.1.1], IPU#: [3]
 |--- Id: [1], DNC Id: [1], IPU-M host: [10.1.1.1], IPU#: [2]
-+- Id: [5], target: [Multi IPU]
 |--- Id: [2], DNC Id: [0], IPU-M host: [10.1.1.1], IPU#: [1]
 |--- Id: [3], DNC Id: [1], IPU-M host: [10.1.1.1], IPU#: [0]
-+- Id: [6], target: [Multi IPU]
 |--- Id: [0], DNC Id: [0], IPU-M host: [10.1.1.1], IPU#: [3]
 |--- Id: [1], DNC Id: [1], IPU-M host: [10.1.1.1], IPU#: [2]
 |--- Id: [2], DNC Id: [2], IPU-M host: [10.1.1.1], IPU#: [1]
 |--- Id: [3], DNC Id: [3], IPU-M host: [10.1.1.1], IPU#: [0]
"""


def test_the_list_of_devices(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.active("p", 4, reconfigurable=True)
    assert run_command(gc_info_command, ["--list-devices"]) == 0
    assert capsys.readouterr().out == LISTING
    pod.active("q", 2)
    assert run_command(gc_info_command, ["-l", "--all-partitions"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(LISTING.partition("-+- Id: [4]")[0])
    assert "Multi IPU" not in out
    assert "\nPartition: q\n-+- Id: [4], target: [Fabric], IPU-M host: [10.1.1.2], IPU#: [3]\n" in out


def test_no_id_means_two_devices(
    pod: Pod, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.active("p", 4, reconfigurable=True)
    pod.active("q", 4, reconfigurable=True)
    assert run_command(gc_info_command, ["-l", "--all-partitions"]) == 0
    ids = re.findall(r"-\+- Id: \[(\d+)\]", capsys.readouterr().out)
    assert ids == [str(number) for number in range(8)]
    for machine in ("ipum1", "ipum2"):
        pod.pool.machine(machine, "p" if machine == "ipum1" else "q").calls.clear()
    assert run_command(gc_reset_command, ["-d", "4"]) == 2
    said = capsys.readouterr().err
    assert "device 4 can mean IPU 0 of partition q, or a device of p" in said
    assert "export IPUOF_VIPU_API_PARTITION_ID=q" in said
    assert pod.pool.machine("ipum1", "p").calls == []
    assert run_command(gc_reset_command, ["-d", "3"]) == 0
    assert ("reset_ipus", [3]) in pod.pool.machine("ipum1", "p").calls
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "q")
    assert run_command(gc_reset_command, ["-d", "4"]) == 0
    assert ("reset_ipus", [0, 1]) in pod.pool.machine("ipum2", "q").calls


def test_gc_info_lists_the_attributes_of_a_device(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.active("p", 4, reconfigurable=True)
    pod.pool.machine("ipum1", "p").process = AttachedProcess(77, "me", "python", 1637621208.0)
    assert run_command(gc_info_command, ["-d", "1", "--device-info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["Device Info:", "  id: 1", "  target: Fabric"]
    assert lines[3:] == sorted(lines[3:], key=lambda line: line.split(":")[0])
    for line in (
        "remote buffers supported: 1",
        "ipu error state: no errors",
        "user process id: 77",
        "ipu power: N/A",
    ):
        assert f"  {line}" in lines
    assert "  process start time: 20211122T224648Z" in lines
    assert run_command(gc_info_command, ["-d", "6", "-i"]) == 0
    assert "  target: Multi IPU" in capsys.readouterr().out
    for options, answer in (("--ipu-arch", "ipu2"), ("--tile-clock-speed", "1330MHz"), ("--ipu-count", "4")):
        assert run_command(gc_info_command, [options]) == 0
        assert capsys.readouterr().out == f"{answer}\n"
    assert run_command(gc_info_command, ["-d", "7", "-i"]) == 2


def test_gc_inventory_lists_every_ipu_with_text_values(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.active("p", 4)
    assert run_command(gc_inventory_command, ["-j"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert [device["id"] for device in devices] == ["0", "1", "2", "3"]
    assert all(isinstance(value, str) for device in devices for value in device.values())
    assert int(devices[0]["hexoatt total size (bytes)"]) + int(devices[0]["hexopt total size (bytes)"]) == (
        (32 << 30) - (8 << 20)
    )
    assert {key for device in devices for key in device} <= {attribute.key for attribute in ATTRIBUTES}
    assert run_command(gc_inventory_command, []) == 0
    assert capsys.readouterr().out.count("Device:\n") == 4


def test_registers_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(gc_info_command, ["--tile-status", "-"]) == 2
    assert "--tile-status reads registers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "action", "links", "shown"),
    [
        (
            IpuErrorState.TILE_PARITY,
            RecoveryAction.IPU_RESET,
            (),
            ("tile parity error", RecoveryAction.IPU_RESET, "IPU_RESET: gc-reset -d 2"),
        ),
        (
            IpuErrorState.NO_ERRORS,
            None,
            (3,),
            ("link down to 3", RecoveryAction.PARTITION_RESET, "vipu reset partition p"),
        ),
        (
            IpuErrorState.UNRECOVERABLE,
            None,
            (),
            ("unrecoverable error", None, "vipu-admin restart agent ipum1"),
        ),
        (IpuErrorState.TILE_EXCEPTION, None, (), ("tile exception", None, "see the application's error")),
    ],
)
def test_every_kind_of_fault_has_a_remedy(
    state: IpuErrorState,
    action: RecoveryAction | None,
    links: tuple[int, ...],
    shown: tuple[str, RecoveryAction | None, str],
) -> None:
    ipu = IpuReport(2, 2, error_state=state, recovery_action=action, links_down=links)
    machine = MachineReport(agent_id="ipum1", partition="p", ipus=(ipu,))
    diagnosis = diagnose_device("p", Device(2, "10.1.1.1", 1, machine, ipu))
    assert diagnosis is not None
    assert (diagnosis.state, diagnosis.action) == shown[:2]
    assert shown[2] in diagnosis.remedy


def test_the_state_of_a_machine_to_replace_is_that_of_its_fault() -> None:
    assert EFFECTS["machine", "unrecoverable"].state is IpuErrorState.UNRECOVERABLE
