"""Values as messages and as JSON: derived from the dataclasses, and spelled as the protocol and the commands say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from podrun.core.errors import UsageError
from podrun.faults import parse_fault
from podrun.partition.server.views import requirements_of
from podrun.partition.state.codec import from_message, to_message, value_to_json
from podrun.partition.state.values import (
    AgentInfo,
    AgentState,
    AllocationInfo,
    CallInfo,
    ClusterInfo,
    IpuofConfig,
    IpuofDevice,
    PartitionInfo,
    PartitionState,
    PartitionStatus,
    QueueInfo,
    Requirements,
    ReservationInfo,
    ServerVersion,
    ServiceMetrics,
    SyncType,
    UserInfo,
    agent_json,
)
from podrun.protos import vipu_pb2 as messages

pb: Any = messages

PARTITION = PartitionInfo(
    "p",
    "pod16",
    "all",
    8,
    PartitionState.ERROR,
    num_gcds=2,
    num_ilds=2,
    ild_routing="SWNC",
    agents=("ipum1", "ipum2"),
    error="lost",
    generation=3,
    created=5.5,
    ends=9.0,
    relocatable=True,
    owner="ada",
    holder="h:b:1:2:3",
)
AGENT = AgentInfo(
    "ipum1",
    "10.1.5.1",
    8080,
    "0024.0001",
    AgentState.UP,
    "draining",
    2.5,
    "fan",
    7.0,
    "pod16",
    1,
    4,
    partitions=("p",),
    endpoints=("127.0.0.1:4000",),
)
QUEUED = QueueInfo("q", 16, -2, "ada", 1.5, 2, ("r",), ("p",), 8.5)
DEVICE = IpuofDevice("127.0.0.1", 4000, 5, 1, 1, "ipum2", 2)
VALUES = [
    (PARTITION, pb.Partition),
    (replace(PARTITION, ends=None, error="", state=PartitionState.QUEUED), pb.Partition),
    (AGENT, pb.Agent),
    (replace(AGENT, stale_seconds=None, cluster="", deadline=0.0), pb.Agent),
    (QUEUED, pb.QueuedRequest),
    (replace(QUEUED, latest=None), pb.QueuedRequest),
    (ReservationInfo("r", ("ipum1",), 1.0, 2.0), pb.Reservation),
    (AllocationInfo("a", "pod16", ("ipum1", "ipum2")), pb.Allocation),
    (ClusterInfo("c", "gc200", 16, 2, 8, "mesh", "looped", ("ipum1", "ipum2")), pb.Cluster),
    (UserInfo("ada", "operator", ("a",), True, 5.0), pb.User),
    (PartitionStatus(PartitionState.ACTIVE, "", 4), pb.PartitionStatus),
    (ServerVersion("0.1.0", "127.0.0.1", 8090, 7), pb.GetServerVersionResponse),
    (IpuofConfig("p", PartitionState.ACTIVE, (DEVICE,), {"A": "1", "B": "2"}), pb.PartitionConfig),
    (
        ServiceMetrics((0.1, 1.0), (CallInfo("Watch", 3, 1, 0.5, (2, 3)),), 1, 8, 4, 2),
        pb.GetServiceMetricsResponse,
    ),
    (
        Requirements(
            "p",
            8,
            allocation="a",
            num_gcds=2,
            num_ilds=2,
            sync_type=SyncType.C2_COMPATIBLE,
            auto_reset=False,
            faults=(parse_fault("ipu:5@batch=17:tile-parity"),),
            limit_s=60.0,
            reservation="r",
            routing="SWNC",
            index=1,
            cluster="c",
            holder="h:b:1:2:3",
        ),
        pb.CreatePartitionRequest,
    ),
]


@pytest.mark.parametrize(
    ("value", "message"), VALUES, ids=[f"{i}-{type(value).__name__}" for i, (value, _) in enumerate(VALUES)]
)
def test_values_come_back_from_the_wire(value: Any, message: Any) -> None:
    assert (
        from_message(type(value), message.FromString(to_message(value, message).SerializeToString())) == value
    )


def test_a_partition_is_spelled_as_in_the_protocol() -> None:
    message = to_message(PARTITION, pb.Partition)
    assert message == pb.Partition(
        partition_id="p",
        cluster_id="pod16",
        allocation_id="all",
        requirements=pb.PartitionRequirements(
            size=8, num_gcds=2, sync_type=pb.ST_POD_NATIVE_DEFAULT, allocation_id="all", num_ilds=2
        ),
        status=pb.PartitionStatus(state=pb.PS_ERROR, error="lost", generation=3),
        num_ilds=2,
        ild_routing="SWNC",
        gw_routing="DEFAULT",
        agent_ids=["ipum1", "ipum2"],
        created=5.5,
        owner="ada",
        ends=9.0,
        relocatable=True,
        holder="h:b:1:2:3",
    )


def test_json_has_the_keys_that_commands_print() -> None:
    told = value_to_json(PARTITION)
    assert list(told)[:5] == ["name", "cluster", "allocation", "size", "state"]
    assert (told["state"], told["sync_type"], told["agents"]) == (
        "ERROR",
        "pod-native-default",
        ["ipum1", "ipum2"],
    )
    assert value_to_json(replace(PARTITION, error=""))["error"] is None
    assert json.dumps(value_to_json(QUEUED)) == (
        '{"id": "q", "size": 16, "priority": -2, "owner": "ada", "since_s": 1.5, "position": 2, "ahead": ["r"], '
        '"blockers": ["p"], "starts_by_s": 8.5}'
    )
    assert json.dumps(agent_json(replace(AGENT, cluster="", reason="", deadline=0.0))) == (
        '{"id": "ipum1", "host": "10.1.5.1", "port": 8080, "serial": "0024.0001", "state": "UP", '
        '"health": "draining", "stale_seconds": 2.5, "reason": null, "deadline_s": null, "cluster": null, '
        '"ild": null, "attached_ipus": 4, "num_ipus": 4, "partitions": ["p"], "endpoints": ["127.0.0.1:4000"]}'
    )
    assert json.dumps(value_to_json(VALUES[8][0])) == (
        '{"id": "c", "target": "gc200", "num_ipus": 16, "num_ilds": 2, "ipu_link_domain_size": 8, '
        '"ipu_link_topology": "mesh", "gateway_topology": "looped", "agents": ["ipum1", "ipum2"]}'
    )


def test_what_a_message_cannot_hold_or_mean_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="num-gcds -1 is out of range"):
        to_message(Requirements("p", 4, num_gcds=-1), pb.CreatePartitionRequest)
    request = pb.CreatePartitionRequest(partition_id="p", requirements=pb.PartitionRequirements(sync_type=7))
    with pytest.raises(UsageError, match="there is no sync type 7") as refused:
        requirements_of(request, 0)
    assert refused.value.hint == "There are: ST_UNSPECIFIED, ST_C2_COMPATIBLE, ST_POD_NATIVE_DEFAULT."


def test_a_request_that_leaves_all_open_gets_the_protocols_defaults() -> None:
    needs = requirements_of(pb.CreatePartitionRequest(partition_id="p"), owner=1000)
    assert needs == Requirements("p", 0, num_gcds=1, owner=1000)
