"""Malformed and impossible requests are refused in time, with a status that says whose fault it is."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podrun.core.access import make_token
from podrun.core.environment import environment, runtime_directory
from podrun.core.proven_channel import open_channel
from podrun.partition.state.codec import ERROR_METADATA_KEY
from podrun.protos import vipu_pb2
from podrun.protos.services import stub_of
from tests.partition.conftest import Pod

pb: Any = vipu_pb2
MOST = (1 << 32) - 1
CALLERS_FAULT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Raw:
    """The service's stubs, without the checks of `VipuClient`."""

    def __init__(self, port: int) -> None:
        self.channel = open_channel(f"127.0.0.1:{port}", (), make_token(environment(), runtime_directory()))
        self.user = stub_of(vipu_pb2, "UserService", self.channel)
        self.admin = stub_of(vipu_pb2, "AdminService", self.channel)

    def refused(self, method: Callable[..., Any], request: Any) -> tuple[grpc.StatusCode, dict[str, Any]]:
        """The status, and podrun's own error beside it."""
        with pytest.raises(grpc.RpcError) as caught:
            method(request, timeout=60)
        metadata = dict(caught.value.trailing_metadata() or ())
        return caught.value.code(), json.loads(metadata.get(ERROR_METADATA_KEY, "{}"))

    def create(self, name: str = "p", faults: tuple[str, ...] = (), **needs: Any) -> Any:
        return pb.CreatePartitionRequest(
            partition_id=name, requirements=pb.PartitionRequirements(**needs), faults=faults
        )


@pytest.fixture
def raw(pod16: Pod) -> Iterator[Raw]:
    stubs = Raw(pod16.port)
    with stubs.channel:
        yield stubs


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("p", {"size": MOST}),
        ("p", {"size": 1 << 31}),
        ("p", {"size": 0}),
        ("p", {"size": 4, "num_gcds": MOST}),
        ("p", {"size": 4, "num_ilds": MOST}),
        ("p", {"size": 4, "sync_type": 77}),
        ("p", {"size": 4, "allocation_id": "x" * 1_000_000}),
        ("", {"size": 4}),
        ("../../etc", {"size": 4}),
        ("a\0b", {"size": 4}),
        ("a\nb", {"size": 4}),
        ("x" * 1_000_000, {"size": 4}),
        ("名" * 400_000, {"size": 4}),
    ],
)
def test_impossible_partitions_are_refused(raw: Raw, name: str, needs: dict[str, Any]) -> None:
    for faults in ((), ("ipu:0@batch=1:tile-parity",)):
        code, said = raw.refused(raw.user.CreatePartition, raw.create(name, faults, **needs))
        assert code in CALLERS_FAULT
        assert said["message"]
        assert said["hint"]
        assert len(said["message"]) < 1000
    assert list(raw.user.ListPartitions(pb.ListPartitionsRequest()).partitions) == []


def test_unknown_names_and_numbers_are_refused(raw: Raw, pod16: Pod) -> None:
    pod16.active("p", 4)
    long = "y" * 500_000
    asked = [
        (raw.user.GetPartition, pb.GetPartitionRequest(partition_id=long)),
        (raw.user.RemovePartition, pb.RemovePartitionRequest(partition_id="\x1b[31mp")),
        (raw.user.ListMachineReports, pb.ListMachineReportsRequest(partition_id=long)),
        (
            raw.user.GetPartitionIpuofConfig,
            pb.GetPartitionIpuofConfigRequest(partition_id="p", gcd_id=pb.GcdId(id=MOST)),
        ),
        (raw.user.ResetIpus, pb.ResetIpusRequest(partition_id="p", partition_ipus=[0, MOST])),
        (raw.user.ResetIpus, pb.ResetIpusRequest(partition_id="p", partition_ipus=range(200_000))),
        (raw.admin.PowerCycleAgent, pb.PowerCycleAgentRequest(agent_id=long)),
        (raw.admin.RestartAgent, pb.RestartAgentRequest(agent_id="")),
        (
            raw.admin.CreateAllocation,
            pb.CreateAllocationRequest(
                allocation=pb.Allocation(id="a", spec=pb.AllocationSpec(agent_ids=[long]))
            ),
        ),
        (raw.admin.InjectFaults, pb.InjectFaultsRequest(partition_id="p", faults=[long])),
        (raw.admin.InjectFaults, pb.InjectFaultsRequest(partition_id="p", faults=["x"] * 100_000)),
    ]
    for method, request in asked:
        code, said = raw.refused(method, request)
        assert code in CALLERS_FAULT, (request.DESCRIPTOR.name, code)
        assert said["message"], request.DESCRIPTOR.name
        assert len(said["message"] + (said["hint"] or "")) < 2000
    assert pod16.client.get_partition("p").state.name == "ACTIVE"


def test_an_oversized_request_is_refused(raw: Raw) -> None:
    huge = pb.InjectFaultsRequest(partition_id="p", faults=["x" * (1 << 20)] * 17)
    code, _ = raw.refused(raw.admin.InjectFaults, huge)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(
        [
            f"/podrun.vipu.v1.{service}/{method.name}"
            for service, found in pb.DESCRIPTOR.services_by_name.items()
            for method in found.methods
            if not method.server_streaming  # Such a call has no end.
        ]
    ),
    data=st.binary(max_size=200),
)
def test_malformed_messages_are_refused(raw: Raw, pod16: Pod, method: str, data: bytes) -> None:
    """Whatever bytes arrive, an answer or a status comes back, and the service goes on with its books straight."""
    call = raw.channel.unary_unary(method).future(data, timeout=60)
    if call.code() is grpc.StatusCode.INTERNAL:  # What gRPC itself answers to what is no message.
        assert "deserializing" in call.details()
    else:
        assert call.code() in CALLERS_FAULT | {grpc.StatusCode.OK}
    pod16.service._allocator.validate_state()


@pytest.mark.parametrize("turns", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_the_state_holds_together_after_many_clients_at_once(pod16: Pod, turns: int) -> None:
    """Create, reset, break and remove from eight connections: refusals are the caller's fault, never the server's."""
    codes: set[grpc.StatusCode] = set()

    def pester(index: int) -> None:
        stubs = Raw(pod16.port)
        with stubs.channel:
            for turn in range(turns):
                name = f"p{(index + turn) % 5}"
                for method, request in (
                    (stubs.user.CreatePartition, stubs.create(name, size=1 << (turn % 4))),
                    (stubs.user.ResetPartition, pb.ResetPartitionRequest(partition_id=name)),
                    (stubs.admin.RestartAgent, pb.RestartAgentRequest(agent_id=f"ipum{turn % 4 + 1}")),
                    (stubs.user.GetPartition, pb.GetPartitionRequest(partition_id=name)),
                    (stubs.user.RemovePartition, pb.RemovePartitionRequest(partition_id=name)),
                ):
                    try:
                        method(request, timeout=60)
                    except grpc.RpcError as error:
                        codes.add(error.code())  # type: ignore[attr-defined]

    threads = [threading.Thread(target=pester, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert codes <= CALLERS_FAULT, codes
    assert pod16.service.wait_idle(60)
    pod16.service._allocator.validate_state()
    for info in pod16.client.list_partitions():
        pod16.client.remove_partition(info.name)
    assert pod16.service.wait_idle(60)
    pod16.active("whole", 16)
