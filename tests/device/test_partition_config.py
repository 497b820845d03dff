"""Asking the partition service: with a service of a few lines behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from podrun.core.errors import NotFoundError, PodrunError, ServiceError, UsageError
from podrun.core.layout import IpuRange
from podrun.device.connection import connect
from podrun.device.host.partition_config import sites_of
from podrun.device.host.ports import Site
from podrun.protos import vipu_pb2, vipu_pb2_grpc


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


class Service(vipu_pb2_grpc.UserServiceServicer):
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


@pytest.fixture
def environ() -> Iterator[Callable[[str], dict[str, str]]]:
    server, service = grpc.server(ThreadPoolExecutor(2)), Service()
    vipu_pb2_grpc.add_UserServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield lambda partition: {
        "IPUOF_VIPU_API_HOST": "127.0.0.1",
        "IPUOF_VIPU_API_PORT": str(port),
        "IPUOF_VIPU_API_PARTITION_ID": partition,
        "IPUOF_VIPU_API_GCD_ID": "3",
        "IPUOF_VIPU_API_TIMEOUT": "5",
    }
    server.stop(None).wait()
    assert service.first in (3, None)


def test_the_partition_that_the_environment_names(environ: Callable[[str], dict[str, str]]) -> None:
    connection = connect(environ("p"))
    assert connection.total_ipus == 8
    connection.close()


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
    with pytest.raises(ServiceError, match=r"partition service at 127\.0\.0\.1:9 gave no configuration"):
        connect({**here, "IPUOF_VIPU_API_TIMEOUT": "2"})
    with pytest.raises(UsageError, match="IPUOF_VIPU_API_PORT is 'x'"):
        connect({**here, "IPUOF_VIPU_API_PORT": "x"})


def test_machines_of_a_configuration() -> None:
    config = devices((2, "10.0.0.1:5", range(4, 8)), (1, "10.0.0.2:6", range(4)))
    assert sites_of(config) == [Site(1, "10.0.0.2:6", IpuRange(0, 4)), Site(2, "10.0.0.1:5", IpuRange(4, 4))]
    with pytest.raises(ServiceError, match="with gaps"):
        sites_of(devices((0, "10.0.0.1:5", range(2)), (0, "10.0.0.1:5", range(3, 4))))
    with pytest.raises(ServiceError, match="with gaps"):
        sites_of(devices((0, "10.0.0.1:5", range(2)), (0, "10.0.0.2:5", range(2, 4))))
