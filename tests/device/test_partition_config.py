"""Asking the partition service, played by a service of a few lines."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from podrun.core.errors import ConfigError, NotFoundError, PodrunError, ServiceError, UsageError
from podrun.core.layout import IpuRange
from podrun.device.connection import Connection
from podrun.device.host.connecting import config_files, connect
from podrun.device.host.partition_config import connect_partition
from podrun.device.host.ports import Site
from podrun.device.host.stale_files import sites_of
from podrun.protos import vipu_pb2
from podrun.protos.services import add_to_server


def devices(*machines: tuple[int, str, range]) -> vipu_pb2.PartitionConfig:
    config = vipu_pb2.PartitionConfig(partition_id="p", state="ACTIVE")
    for machine, endpoint, ipus in machines:
        ip, _, port = endpoint.partition(":")
        for slot, ipu in enumerate(ipus):
            config.devices.append(
                vipu_pb2.IpuofDevice(
                    ip=ip, server_port=int(port), partition_ipu=ipu, machine=machine, ipu=slot
                )
            )
    return config


class Service:
    first: int | None = None
    """The GCD asked for first."""

    def GetPartitionIpuofConfig(
        self, request: vipu_pb2.GetPartitionIpuofConfigRequest, context: grpc.ServicerContext
    ) -> vipu_pb2.GetPartitionIpuofConfigResponse:
        if request.partition_id == "none":
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no partition none")
        if request.partition_id == "empty":
            config = vipu_pb2.PartitionConfig(state="REMOVING")
        else:
            mine = request.gcd_id.id == 3
            config = (
                devices((0, "127.0.0.1:7", range(4)), (1, "127.0.0.1:8", range(4, 8))) if mine else devices()
            )
        if self.first is None:
            self.first = request.gcd_id.id
        return vipu_pb2.GetPartitionIpuofConfigResponse(ipuof_config=config)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments without PODRUN_RUNTIME_DIR mean a folder of the test, not that of this host's user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def environ() -> Iterator[Callable[[str], dict[str, str]]]:
    server, service = grpc.server(ThreadPoolExecutor(2)), Service()
    add_to_server(vipu_pb2, "UserService", service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield lambda partition: {
        "IPUOF_VIPU_API_HOST": "127.0.0.1",
        "IPUOF_VIPU_API_PORT": str(port),
        "IPUOF_VIPU_API_PARTITION_ID": partition,
        "IPUOF_VIPU_API_GCD_ID": "3",
        "IPUOF_VIPU_API_TIMEOUT": "60",
    }
    server.stop(None).wait()
    assert service.first in (3, None)


def test_the_partition_that_the_environment_names(environ: Callable[[str], dict[str, str]]) -> None:
    connection = connect(environ("p"))
    assert connection.total_ipus == 8
    connection.close()


@pytest.mark.parametrize(
    "planned",
    [
        {"PODRUN_FAULTS": "ipu:0@batch=3:overflow disk:0@during=checkpoint-write:full"},
        {
            "GCDA_OPTIONS": '{"simulateSOCError.errorList": "IPUSOFTERR", "simulateSOCError.triggerCount": "3"}'
        },
    ],
)
def test_faults_that_could_not_strike_in_a_partition_are_refused(
    environ: Callable[[str], dict[str, str]], planned: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(
        UsageError, match=r"^ipu:0@batch=\d+:\S+: planned for .* uses partition p$"
    ) as refused:
        connect(environ("p") | planned)
    assert "podrun inject" in str(refused.value.hint)
    file = write(tmp_path / "own.conf", 0, 0, 1)
    with pytest.raises(UsageError, match=r"uses the partition of .*own\.conf"):
        connect({"IPUOF_CONFIG_PATH": str(file)} | planned)
    connect(environ("p") | planned | {"PODRUN_LAUNCH_ID": "1"}).close()
    connect(environ("p") | {"PODRUN_FAULTS": "disk:0@during=checkpoint-write:full"}).close()


@pytest.mark.parametrize(
    ("partition", "kind", "message"),
    [("none", NotFoundError, "no partition none"), ("empty", ServiceError, "partition empty is REMOVING")],
)
def test_partitions_that_cannot_be_used(
    environ: Callable[[str], dict[str, str]], partition: str, kind: type[PodrunError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        connect(environ(partition))


def test_no_service_and_bad_numbers() -> None:
    here = {
        "IPUOF_VIPU_API_HOST": "127.0.0.1",
        "IPUOF_VIPU_API_PARTITION_ID": "p",
        "IPUOF_VIPU_API_PORT": "9",
    }
    with pytest.raises(ServiceError, match=r"127\.0\.0\.1:9 gave no configuration .* nobody answers there"):
        connect({**here, "IPUOF_VIPU_API_TIMEOUT": "2"})
    with pytest.raises(UsageError, match="IPUOF_VIPU_API_PORT is 'x'"):
        connect({**here, "IPUOF_VIPU_API_PORT": "x"})


def test_an_instance_of_a_launch_lets_its_server_start_again(silent_port: int) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    add_to_server(vipu_pb2, "UserService", Service(), server)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            assert server.add_insecure_port(f"127.0.0.1:{silent_port}") == silent_port
            server.start()

    here = {
        "IPUOF_VIPU_API_HOST": "127.0.0.1",
        "IPUOF_VIPU_API_PARTITION_ID": "p",
        "IPUOF_VIPU_API_PORT": str(silent_port),
        "IPUOF_VIPU_API_GCD_ID": "3",
        "PODRUN_LAUNCH_ID": "l",
    }
    try:
        connection = connect_partition(here, sleep)
        assert connection.total_ipus == 8
        connection.close()
        assert waits
    finally:
        server.stop(None).wait()


def test_machines_of_a_configuration() -> None:
    config = devices((2, "10.0.0.1:5", range(4, 8)), (1, "10.0.0.2:6", range(4)))
    assert sites_of(config) == [Site(1, "10.0.0.2:6", IpuRange(0, 4)), Site(2, "10.0.0.1:5", IpuRange(4, 4))]
    with pytest.raises(ServiceError, match="with gaps"):
        sites_of(devices((0, "10.0.0.1:5", range(2)), (0, "10.0.0.1:5", range(3, 4))))
    with pytest.raises(ServiceError, match="with gaps"):
        sites_of(devices((0, "10.0.0.1:5", range(2)), (0, "10.0.0.2:5", range(2, 4))))


DEVICE = {
    "ip": "127.0.0.1",
    "server_port": 1,
    "partition_ipu": 0,
    "machine": 0,
    "ipu": 0,
    "agent_id": "ipum1",
}


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Somebody listens where `write` says that machines are."""
    with socket.create_server(("127.0.0.1", 0)) as machine:
        monkeypatch.setitem(DEVICE, "server_port", machine.getsockname()[1])
        yield


def write(path: Path, gcd: int, *ipus: int) -> Path:
    devices = [{**DEVICE, "partition_ipu": ipu, "ipu": ipu % 4, "machine": ipu // 4} for ipu in ipus]
    text = json.dumps({"devices": devices, "attributes": {"GCD Id": str(gcd)}})
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"IPUoF configuration of partition p, GCD {gcd}:\n{text}\n")
    return path


@pytest.mark.usefixtures("listening")
def test_files_say_where_ipus_are(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "PODRUN_RUNTIME_DIR": str(tmp_path)}
    assert config_files(home) == ()
    first = write(tmp_path / ".ipuof.conf.d/p_gcd0_ipuof.conf", 0, 0, 1, 2, 3)
    assert config_files(home) == (first,)
    with connected(home) as connection:
        assert connection.total_ipus == 4
    write(tmp_path / ".ipuof.conf.d/p_gcd1_ipuof.conf", 1, 4, 5, 6, 7)
    with connected({**home, "IPUOF_VIPU_API_GCD_ID": "1"}) as connection:
        assert connection.total_ipus == 8
    elsewhere = write(tmp_path / "own.conf", 3, 0, 1)
    with connected({**home, "IPUOF_CONFIG_PATH": str(elsewhere)}) as connection:
        assert connection.total_ipus == 2
    named = {**home, "IPUOF_VIPU_API_HOST": "127.0.0.1", "IPUOF_VIPU_API_PARTITION_ID": "p"}
    assert config_files({**named, "IPUOF_CONFIG_PATH": str(elsewhere)}) == ()


def test_a_file_that_is_out_of_date_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "p_ipuof.conf", 0, 0, 1, 2, 3)
    with pytest.raises(
        ConfigError, match=r"p_ipuof.conf is out of date: no machine listens at 127.0.0.1:1 \("
    ) as caught:
        connect({"IPUOF_CONFIG_PATH": str(path), "PODRUN_RUNTIME_DIR": str(tmp_path)})
    assert f"rm {path}" in str(caught.value.hint)


@contextmanager
def connected(environ: dict[str, str]) -> Iterator[Connection]:
    connection = connect(environ)
    yield connection
    connection.close()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "substring not found"),
        ("{}", "it has no 'devices'"),
        ('{"devices": []}', "it names no IPUs"),
        ('{"devices": [7]}', "no attribute"),
        ('{"devices": [{"ip": 7}]}', "bad argument"),
        (
            '{"devices": [{"partition_ipu": 0, "machine": 0}, {"partition_ipu": 2, "machine": 0}]}',
            "with gaps",
        ),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "a.conf").write_text(text)
    with pytest.raises(ConfigError, match="is no IPUoF configuration") as caught:
        connect({"IPUOF_CONFIG_PATH": str(tmp_path / "a.conf"), "PODRUN_RUNTIME_DIR": str(tmp_path)})
    assert why in caught.value.message
    assert "vipu get partition NAME --ipuof-configs" in str(caught.value.hint)


@pytest.mark.usefixtures("listening")
def test_two_files_of_one_gcd_are_refused(tmp_path: Path) -> None:
    for name in ("p", "q"):
        write(tmp_path / f".ipuof.conf.d/{name}_ipuof.conf", 0, 0, 1)
    with pytest.raises(ConfigError, match="describes GCD 0, and so does another") as caught:
        connect({"HOME": str(tmp_path), "PODRUN_RUNTIME_DIR": str(tmp_path)})
    assert "IPUOF_CONFIG_PATH" in str(caught.value.hint)
