"""Changes that are told to those who watch, figures of calls, gRPC's health checks and reflection."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from podrun.core.access import make_token
from podrun.core.environment import environment, runtime_directory
from podrun.core.errors import ExhaustedError, UsageError
from podrun.core.proven_channel import open_channel
from podrun.partition.server.event_log import KEPT, SYNCED, WATCHERS, CallMeter, Change, EventLog, Mirror
from podrun.partition.state.values import PartitionState, Requirements, WatchedChange

from .conftest import Pod

MakePod = Callable[..., Pod]


def told(log: EventLog, token: str, count: int, kinds: tuple[str, ...] = ()) -> list[Change]:
    return list(itertools.islice(log.watch(token, kinds, lambda: True, 0.01), count))


def test_a_watcher_is_told_what_is_there_and_then_what_changes() -> None:
    there = {"p": "1"}
    log = EventLog(lambda: [("partition", name, text, "") for name, text in there.items()], clock=lambda: 5.0)
    stream = log.watch("", (), lambda: True, 0.01)
    assert [(c.kind, c.name, c.text, c.initial) for c in itertools.islice(stream, 2)] == [
        ("partition", "p", "1", True),
        (SYNCED, "", "", False),
    ]
    log.add("partition", "q", "2")
    log.add("incident", "q", "x")
    change = next(stream)
    assert (change.kind, change.name, change.text, change.time) == ("partition", "q", "2", 5.0)
    token = log.token(change)
    stream.close()  # type: ignore[attr-defined]
    assert log.watchers == 0
    log.add("partition", "q", "")
    assert [(c.kind, c.text) for c in told(log, token, 2)] == [("incident", "x"), ("partition", "")]
    assert [c.name for c in told(log, token, 1, ("incident",))] == ["q"]


def test_a_mirror_knows_what_is_there() -> None:
    mirror = Mirror()
    mirror.take("partition", "p", {"size": 1}, initial=True)
    assert (mirror.synced, mirror.all("partition")) == (False, {})
    mirror.take(SYNCED, "", None, initial=False)
    mirror.take("partition", "q", {"size": 2}, initial=False)
    mirror.take("incident", "q", {"error": "x"}, initial=False)
    assert (mirror.synced, mirror.incidents, list(mirror.all("partition"))) == (True, 1, ["p", "q"])
    mirror.take("partition", "p", None, initial=False)
    assert mirror.all("partition") == {"q": {"size": 2}}
    mirror.take("partition", "r", {"size": 4}, initial=True)  # The stream begins anew.
    mirror.take(SYNCED, "", None, initial=False)
    assert list(mirror.all("partition")) == ["r"]


@pytest.mark.parametrize("token", ["", "another.3", "x", "{id}.99999", "{id}.-1", "{id}.0"])
def test_a_token_of_a_place_that_is_not_known_begins_anew(token: str) -> None:
    log = EventLog(lambda: [("partition", "p", "1", "")])
    for number in range(KEPT + 10):
        log.add("machine", str(number), "{}")
    own = log.token(Change(0, "", "", "", 0.0)).partition(".")[0]
    first = told(log, token.replace("{id}", own), 2)
    assert [change.kind for change in first] == ["partition", SYNCED]
    assert first[1].number == KEPT + 10


def test_a_watcher_that_is_too_slow_begins_anew() -> None:
    log = EventLog(lambda: [("partition", "p", "1", "")])
    stream = log.watch("", (), lambda: True, 0.01)
    assert [change.kind for change in itertools.islice(stream, 2)] == ["partition", SYNCED]
    for number in range(KEPT + 1):
        log.add("machine", str(number), "{}")
    assert [change.kind for change in itertools.islice(stream, 2)] == ["partition", SYNCED]


def test_only_so_many_watch_and_only_what_there_is() -> None:
    log = EventLog(list)
    streams: list[Iterator[Change]] = [log.watch("", (), lambda: True) for _ in range(WATCHERS)]
    assert {next(stream).kind for stream in streams} == {SYNCED}
    with pytest.raises(ExhaustedError, match="32 clients watch"):
        next(log.watch("", (), lambda: True))
    with pytest.raises(UsageError, match="nothing of kind 'weather' can be watched"):
        next(log.watch("", ["weather"], lambda: True))
    log.close()
    assert list(streams[0]) == []


def test_changes_of_a_pod(pod16: Pod) -> None:
    stream = pod16.client.watch()
    first: list[WatchedChange] = []
    for change in stream:
        first.append(change)
        if change.kind == SYNCED:
            break
    assert [c.name for c in first if c.kind == "machine"] == ["ipum1", "ipum2", "ipum3", "ipum4"]
    pod16.active("p", 4)
    states = []
    for change in stream:
        if change.kind == "partition":
            assert change.value is not None
            states.append(change.value["state"])
            if states[-1] == "ACTIVE":
                token = change.token
                break
    assert states == ["PENDING", "PROVISIONING", "ACTIVE"]
    pod16.pool.machine("ipum1", "p").die()
    assert pod16.client.wait_for_state("p", {PartitionState.ERROR}, 60)
    kinds = [(c.kind, c.name) for c in itertools.islice(pod16.client.watch(token=token), 2)]
    assert kinds == [("incident", "p"), ("partition", "p")]


def test_clusters_allocations_and_reservations_are_watched(pod16: Pod) -> None:
    stream = pod16.client.watch(["cluster", "allocation", "reservation"])
    first = list(itertools.takewhile(lambda change: change.kind != SYNCED, stream))
    assert [(change.kind, change.name) for change in first] == [("cluster", "pod16"), ("allocation", "pod16")]
    pod16.client.create_reservation("keep", ["ipum1"], begin_in_s=0, for_s=60)
    pod16.client.remove_allocation("pod16")
    pod16.client.remove_reservation("keep")
    told = [(c.kind, c.name, c.value is None) for c in itertools.islice(stream, 3)]
    assert told == [
        ("reservation", "keep", False),
        ("allocation", "pod16", True),
        ("reservation", "keep", True),
    ]


def test_figures_of_the_service(pod16: Pod) -> None:
    pod16.active("p", 4)
    with pytest.raises(UsageError):
        pod16.client.create_partition(Requirements("q", 3))
    found = pod16.client.service_metrics()
    calls = {call.name: call for call in found.calls}
    assert (calls["CreatePartition"].count, calls["CreatePartition"].errors) == (2, 1)
    assert calls["CreatePartition"].within[-1] == 2
    assert (found.queued, found.free_ipus, found.largest_free) == (0, 12, 8)


def test_durations_are_counted_in_classes() -> None:
    meter = CallMeter()
    for seconds in (0.0005, 0.001, 0.002, 99.0):
        meter.note("A", seconds, failed=seconds > 1)
    ((name, figures),) = meter.all()
    assert (name, figures.count, figures.errors, figures.within) == ("A", 4, 1, [2, 3, 3, 3, 3, 3, 3, 3, 3])


def test_health_is_told_to_everybody_and_the_rest_to_who_may(pod16: Pod) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{pod16.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", "podrun.vipu.v1.UserService"):
            reply = check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        listing = channel.unary_unary("/podrun.vipu.v1.UserService/ListPartitions")
        with pytest.raises(grpc.RpcError) as caught:
            listing(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def test_reflection_names_the_services(pod16: Pod) -> None:
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    token = make_token(environment(), runtime_directory())
    with open_channel(f"127.0.0.1:{pod16.port}", (), token) as channel:
        names = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {"podrun.vipu.v1.UserService", "podrun.vipu.v1.AdminService", "grpc.health.v1.Health"} <= names
