"""The calls that each user may make at a shared server, without processes of other users (those are in
tests/test_two_users.py).
"""

from __future__ import annotations

import os

import pytest

from podrun.core.errors import DeniedError, ExhaustedError
from podrun.core.identity import Caller
from podrun.core.telemetry import AttachedProcess, IpuReport, MachineReport
from podrun.faults import parse_fault
from podrun.partition.server.sharing import CALLS_OF_OTHERS, RIGHTS, CallRoom, Right, Sharing
from podrun.partition.state.values import NO_USER
from podrun.protos import vipu_pb2

ALICE, BOB, ADMIN = (Caller(uid, own=False) for uid in (31003, 31004, 31005))
OWN = Caller(os.getuid(), own=True)
SHARING = Sharing(shared=True, admins=frozenset({ADMIN.uid}))


def allowed(caller: Caller, method: str, owner: int | None) -> bool:
    try:
        SHARING.check(caller, method, "p", owner)
    except DeniedError:
        return False
    return True


def test_the_table_names_calls_that_there_are() -> None:
    calls = {m.name for s in vipu_pb2.DESCRIPTOR.services_by_name.values() for m in s.methods}
    assert RIGHTS.keys() <= calls


@pytest.mark.parametrize("method", [*RIGHTS, "SomethingNew"])
def test_every_call_for_every_caller(method: str) -> None:
    right = RIGHTS.get(method, Right.ADMIN)
    assert allowed(OWN, method, ALICE.uid)
    assert allowed(ADMIN, method, ALICE.uid)
    assert allowed(ALICE, method, ALICE.uid) == (right is not Right.ADMIN)
    assert allowed(BOB, method, ALICE.uid) == (right is Right.ANYBODY)
    assert allowed(BOB, method, NO_USER) == (right is Right.ANYBODY)
    assert allowed(BOB, method, None) == (right is not Right.ADMIN)  # no such partition: said by the service


def test_reports_of_others_say_that_they_are_busy_and_nothing_more() -> None:
    process = AttachedProcess(77, "alice", "train.py --key=secret", 1.0, "host")
    report = MachineReport(
        "a",
        endpoint="127.0.0.1:1",
        pid=5,
        planned_faults=(parse_fault("ipu:0@batch=3:trap"),),
        ipus=(IpuReport(0, 0, process=process),),
    )
    assert SHARING.visible(ALICE, report, ALICE.uid) == report
    seen = SHARING.visible(BOB, report, ALICE.uid)
    assert seen.ipus[0].process is not None
    assert (seen.endpoint, seen.pid, seen.planned_faults) == ("", 0, ())
    assert "secret" not in repr(seen)
    assert "77" not in repr(seen)


def test_one_user_leaves_room_for_others() -> None:
    room = CallRoom()
    held = [room.call(BOB) for _ in range(CALLS_OF_OTHERS)]
    for each in held:
        each.__enter__()
    with pytest.raises(ExhaustedError, match="calls under way"), room.call(BOB):
        pass
    with room.call(ALICE), room.call(OWN):
        pass
    held[0].__exit__(None, None, None)
    with room.call(BOB):
        pass
