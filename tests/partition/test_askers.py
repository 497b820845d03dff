"""What callers learn of the partitions of others from answers and refusals, and what they can do to them meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from podrun.core.errors import ExistsError, PodrunError
from podrun.core.identity import Caller
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.server import calls as server_calls
from podrun.partition.server.access import FrontDesk
from podrun.partition.server.grpc_admin import AdminServicer
from podrun.partition.server.grpc_service import UserServicer
from podrun.partition.server.sharing import RIGHTS, Right, Sharing
from podrun.partition.state.accounts import Account, Role
from podrun.partition.state.values import Requirements
from podrun.protos import vipu_pb2

from .conftest import Pod

MakePod = Callable[..., Pod]
pb: Any = vipu_pb2

ALLOCATION, PARTITION, QUEUED, RESERVATION = THEIRS = ("qqqqa1", "qqqqb1", "qqqqc1", "qqqqd1")
"""Names of the other allocation and of things in it."""
LATER = "service:vipu@during=RemovePartition:slow,seconds=9"
NOTHING = "qqqqz9"
"""A name of nothing; as near to the caller's own names as the others are."""


@pytest.fixture
def divided(make_pod: MakePod) -> Iterator[tuple[Pod, VipuClient]]:
    """A server with two allocations, and a client of an operator of the second."""
    pod = make_pod(secure=True)
    assert pod.desk.accounts is not None
    root = pod.desk.accounts.create(Account("root", Role.ADMIN, may_inject=True))
    with VipuClient("127.0.0.1", pod.port, timeout=60, account=("root", root)) as client:
        client.remove_allocation("pod16")
        client.create_allocation(ALLOCATION, ["ipum1", "ipum2"])
        client.create_allocation("mine", ["ipum3", "ipum4"])
        client.create_reservation(RESERVATION, ["ipum1"], begin_in_s=1e9, for_s=1e6)
        client.create_partition(Requirements(PARTITION, 4, allocation=ALLOCATION))  # on ipum2
        client.create_partition(Requirements("own-part", 8, allocation="mine"))
        assert pod.service.wait_idle(60)
        client.create_partition(Requirements(QUEUED, 8, allocation=ALLOCATION), wait=True, priority=5)
        client.create_partition(Requirements("own-wait", 8, allocation="mine"), wait=True)
    key = pod.desk.accounts.create(Account("op", Role.OPERATOR, ("mine",), may_inject=True))
    with VipuClient("127.0.0.1", pod.port, timeout=60, account=("op", key)) as client:
        yield pod, client


def calls() -> dict[str, Any]:
    """The descriptor of each call that is answered once, by name."""
    services = vipu_pb2.DESCRIPTOR.services_by_name.values()
    return {m.name: m for s in services for m in s.methods if not m.server_streaming}


def ask(client: VipuClient, method: str, request: Any) -> str:
    """The answer to a call, whatever it is, as text."""
    stub = getattr(client._user, method, None) or getattr(client._admin, method)
    try:
        return f"OK {client._call(stub, request)}"
    except PodrunError as error:
        return json.dumps([type(error).__name__, error.message, error.hint])


def filled(method: str) -> Any:
    """A request that could be carried out but for the name that a test puts in."""
    request = getattr(pb, calls()[method].input_type.name)()
    if method == "CreatePartition":
        request.partition_id, request.requirements.size = "own-new", 8
    if method == "CreateReservation":
        request.agent_ids.append("ipum3")
        request.begin_in_seconds, request.for_seconds = 2e9, 1.0
    return request


def text_fields(request: Any) -> Iterator[tuple[Any, str]]:
    """Each field of text in a request, with the message that holds it."""
    for described in request.DESCRIPTOR.fields:
        if described.is_repeated:
            continue
        if described.type == described.TYPE_STRING:
            yield request, described.name
        elif described.type == described.TYPE_MESSAGE:
            yield from text_fields(getattr(request, described.name))


@pytest.mark.sample(9)
@pytest.mark.parametrize("method", sorted(calls()))
def test_names_of_others_are_to_a_caller_names_of_nothing(
    divided: tuple[Pod, VipuClient], method: str
) -> None:
    _, client = divided
    for index in range(len(list(text_fields(filled(method))))):
        answers = set()
        for name in (NOTHING, *THEIRS):
            request = filled(method)
            holder, field = list(text_fields(request))[index]
            setattr(holder, field, name)
            said = ask(client, method, request)
            answers.add(said.replace(name, "NAME"))
            assert not [other for other in THEIRS if other in said.replace(name, "")], (field, said)
        if method.removeprefix("Create").lower() + "_id" == field:  # A name is taken, and no more is said.
            answers.discard('["ExistsError", "the name NAME is not available", "Choose another name."]')
        assert len(answers) <= 1, (field, answers)


def test_a_name_that_is_taken_is_not_available_and_no_more(divided: tuple[Pod, VipuClient]) -> None:
    _, client = divided
    for name in (PARTITION, QUEUED):
        for wait in (False, True):
            with pytest.raises(ExistsError) as caught:
                client.create_partition(Requirements(name, 1), wait=wait)
            assert caught.value.message == f"the name {name} is not available"
            assert caught.value.hint == "Choose another name."


def test_refusals_and_lists_name_only_what_the_caller_sees(divided: tuple[Pod, VipuClient]) -> None:
    _, client = divided
    assert [(entry.name, entry.position, entry.ahead) for entry in client.list_queue()] == [
        ("own-wait", 1, ())
    ]
    full = pb.CreatePartitionRequest(partition_id="new")
    full.requirements.size = 8
    said = [ask(client, "CreatePartition", full)]
    reserve = pb.CreateReservationRequest(reservation_id="r", agent_ids=["ipum1"], for_seconds=2e9)
    said.append(ask(client, "CreateReservation", reserve))
    reserve.agent_ids[:] = ["ipum3"]
    said.append(ask(client, "CreateReservation", reserve))
    said += [ask(client, name, filled(name)) for name in calls() if name.startswith("List")]
    assert "partitions in the way: own-part" in said[0]
    assert "agent ipum1 is in no allocation of op" in said[1]
    assert "own-part" in said[2]
    assert not [(name, text) for name in THEIRS for text in said if name in text]


def test_faults_of_a_refused_creation_strike_nobody(divided: tuple[Pod, VipuClient]) -> None:
    pod, client = divided
    request = pb.CreatePartitionRequest(partition_id=PARTITION, faults=[LATER])
    request.requirements.size = 4
    assert "not available" in ask(client, "CreatePartition", request)
    assert pod.service.request_faults.planned(PARTITION) == ()


# --- a partition that is made between the check of a call and the call ------------------------------------------

ALICE, BOB = (Caller(uid, own=False) for uid in (31003, 31004))


class Refused(Exception):
    pass


class Context:
    """The context of a call that ``caller`` makes."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    def abort(self, code: Any, message: str) -> None:
        raise Refused(code.name, message)


@pytest.mark.parametrize("method", sorted(name for name, right in RIGHTS.items() if right is Right.OWNER))
@pytest.mark.parametrize("waits", [False, True], ids=["active", "queued"])
def test_a_partition_made_meanwhile_is_its_owners_from_the_first_moment(
    make_pod: MakePod, monkeypatch: pytest.MonkeyPatch, method: str, waits: bool
) -> None:
    pod = make_pod()
    monkeypatch.setattr(server_calls, "caller_of", lambda context: context.caller)
    kind = UserServicer if hasattr(UserServicer, method) else AdminServicer
    servicer = kind(pod.service, FrontDesk(sharing=Sharing(shared=True)))
    if waits:
        pod.service.create(Requirements("all", 16))
        assert pod.service.wait_idle(60)
    admitted = servicer.admit

    def admit(name: str, request: Any, context: Any) -> Caller:
        caller = admitted(name, request, context)
        pod.service.create(Requirements("p", 4, owner=ALICE.uid), wait=waits)
        assert pod.service.wait_idle(60)
        return caller

    monkeypatch.setattr(servicer, "admit", admit)
    request = getattr(pb, f"{method}Request")(partition_id="p")
    if method == "RemovePartition":
        request.force = True
    with pytest.raises(Refused) as caught:
        getattr(servicer, method)(request, Context(BOB))
    allowed = ("PERMISSION_DENIED", "NOT_FOUND") if waits else ("PERMISSION_DENIED",)
    assert caught.value.args[0] in allowed, caught.value.args
    after = pod.service.partition("p")
    assert after.generation == (0 if waits else 1)


def test_a_partition_made_while_machines_report_is_not_told(
    make_pod: MakePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = make_pod()
    monkeypatch.setattr(server_calls, "caller_of", lambda context: context.caller)
    servicer = UserServicer(pod.service, FrontDesk(sharing=Sharing(shared=True)))
    reports = pod.service.machine_reports

    def create_first(*args: Any, **options: Any) -> Any:
        pod.service.create(Requirements("p", 4, owner=ALICE.uid))
        assert pod.service.wait_idle(60)
        return reports(*args, **options)

    monkeypatch.setattr(pod.service, "machine_reports", create_first)
    reply = servicer.ListMachineReports(pb.ListMachineReportsRequest(), Context(BOB))
    told = [json.loads(text) for text in reply.reports_json]
    of_alice = [report for report in told if report["partition"] == "p"]
    assert of_alice
    assert {report["endpoint"] for report in of_alice} == {""}
