"""Files of partitions that are gone are passed over; a later partition on the same machine is never used by them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from podrun.core.errors import ConfigError, TakenBy
from podrun.device.host import stale_files
from podrun.device.host.connecting import config_files, connect
from podrun.device.service.control import MachineControl
from podrun.device.service.server import MachineServer

SECRET = "5" * 64


@pytest.fixture
def machine() -> Iterator[tuple[MachineServer, MachineControl]]:
    server = MachineServer(agent_id="ipum1", token=SECRET)
    control = MachineControl(server.start(), token=SECRET)
    yield server, control
    control.close()
    server.stop()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(stale_files, "_told", set())
    return {"HOME": str(tmp_path), "PODRUN_RUNTIME_DIR": str(tmp_path), "PODRUN_TOKEN": SECRET}


def write(home: dict[str, str], name: str, endpoint: str, epoch: str = "", gcd: int = 0) -> Path:
    host, _, port = endpoint.rpartition(":")
    devices = [
        {"ip": host, "server_port": int(port), "partition_ipu": ipu, "machine": 0, "ipu": ipu}
        for ipu in range(4)
    ]
    attributes = {"GCD Id": str(gcd)}
    if epoch:
        attributes |= {"Epoch": epoch, "Partition": name, "Service": epoch.partition("/")[0]}
    path = Path(home["HOME"], f".ipuof.conf.d/{name}_ipuof.conf")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"devices": devices, "attributes": attributes}))
    return path


def configure(control: MachineControl, endpoint: str, partition: str, epoch: str) -> None:
    control.configure(partition=partition, first_ipu=0, machine_index=0, endpoints=[endpoint], epoch=epoch)


def test_a_file_is_used_for_as_long_as_its_partition_lives(
    machine: tuple[MachineServer, MachineControl], home: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    server, control = machine
    path = write(home, "p", server.endpoint, "svc/1.000000")
    configure(control, server.endpoint, "p", "svc/1.000000")
    assert config_files(home) == (path,)
    control.power_cycle()
    assert config_files(home) == (path,)  # The partition is there, and has to be reset.
    assert capfd.readouterr().err == ""
    for partition, epoch, why in [
        ("p", "svc/2.000000", "works for a later partition p"),
        ("q", "svc/3.000000", "works for partition q now"),
    ]:
        configure(control, server.endpoint, partition, epoch)
        stale_files._told.clear()
        for _ in range(2):
            assert config_files(home) == ()
        (line,) = capfd.readouterr().err.splitlines()
        assert f"p_ipuof.conf: partition p is gone: the machine at {server.endpoint} {why}" in line
        assert line.endswith(f"(rm {path})")
        named = {**home, "IPUOF_CONFIG_PATH": str(path)}
        with pytest.raises(ConfigError, match=rf"p_ipuof.conf is out of date: .* {why}"):
            connect(named)
    control.power_cycle(TakenBy.REMOVAL)
    stale_files._told.clear()
    assert config_files(home) == ()
    assert "is in no partition" in capfd.readouterr().err


def test_of_several_files_those_that_hold_are_used_and_one_line_names_the_others(
    machine: tuple[MachineServer, MachineControl],
    home: dict[str, str],
    silent_port: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    server, control = machine
    configure(control, server.endpoint, "p", "svc/1.000000")
    nobody = f"127.0.0.1:{silent_port}"
    first = write(home, "p", server.endpoint, "svc/1.000000")
    own = write(home, "hand-written", server.endpoint, gcd=1)
    stale = [write(home, "a", nobody, "other/1.000000"), write(home, "b", nobody)]
    broken = Path(home["HOME"], ".ipuof.conf.d/z.conf")
    broken.write_text("{}")
    assert config_files(home) == (own, first, broken)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.count("no machine listens at") == 2
    assert line.endswith(f"(rm {stale[0]} {stale[1]})")


def test_a_machine_of_another_user_is_passed_over(
    machine: tuple[MachineServer, MachineControl], home: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    server, control = machine
    configure(control, server.endpoint, "p", "svc/1.000000")
    write(home, "p", server.endpoint, "svc/1.000000")
    assert config_files({**home, "PODRUN_TOKEN": "6" * 64}) == ()
    assert "no machine of this user's (UNAUTHENTICATED)" in capfd.readouterr().err
