"""Every call of every protocol, by callers who are not the user who runs the server: none gets past the door.

What users of a shared server may do is in `tests.test_two_users`, against the same table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import grpc
import pytest

from podrun.core import access, identity
from podrun.core.cluster_file import load_cluster
from podrun.device.service.server import MachineServer
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.server.service import Service
from podrun.partition.server.sharing import RIGHTS
from podrun.partition.state.store import Store
from tests.proofs import greet, proof_for
from tests.rpc_table import SELF, TABLE, Call, answer, every_call

SECRET = "a-secret-of-this-user"
REFUSED = "UNAUTHENTICATED"


class Doors:
    """A partition service and a machine."""

    def __init__(self) -> None:
        cluster = load_cluster("pod16")
        self.service = Service(cluster, Store(None, "pod16"), LocalMachinePool(cluster))
        self.machine = MachineServer(token=SECRET)
        self.stopped = 0
        self.end, self.machine.stop = self.machine.stop, self._stop  # type: ignore[method-assign]
        self.service_at = f"127.0.0.1:{self.service.start('127.0.0.1', 0, SECRET)}"
        self.machine_at = self.machine.start()
        self._channels = {where: grpc.insecure_channel(where) for where in (self.service_at, self.machine_at)}

    def _stop(self) -> None:
        self.stopped += 1

    def where(self, call: Call) -> str:
        return self.machine_at if call.of_machine else self.service_at

    def ask(self, call: Call, proof: identity.Proof | None) -> str:
        metadata = () if proof is None else ((access.PROOF_KEY, proof.text),)
        return answer(self.channel(call), call, metadata)

    def channel(self, call: Call) -> grpc.Channel:
        return self._channels[self.where(call)]

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self.end()
        self.service.stop(grace=0)


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    made = Doors()
    yield made
    made.close()


def test_every_call_has_a_row() -> None:
    assert {call.row for call in every_call()} == TABLE.keys(), "say in the table who may make a new call"
    ours = {
        row.partition(".")[2]: right
        for row, right in TABLE.items()
        if not row.startswith(("Ipuof", "Machine"))
    }
    assert {name: right.value for name, right in RIGHTS.items()} == ours
    assert {row for row, right in TABLE.items() if right == SELF} >= {
        "Ipuof.JoinGroup",
        "MachineControl.Stop",
    }


Make = Callable[[Doors, Call], identity.Proof | None]


def _proof(doors: Doors, call: Call, secret: str = SECRET) -> identity.Proof:
    where = doors.where(call)
    sent = b"" if call.streams else call.request
    return proof_for(secret, call.path, where, greet(doors.channel(call), where), sent)


def _old(doors: Doors, call: Call) -> identity.Proof:
    """Of a greeting that the server does not remember, as after its restart."""
    return proof_for(SECRET, call.path, doors.where(call), ("0" * 32, "1" * 32), call.request)


def _elsewhere(doors: Doors, call: Call) -> identity.Proof:
    where = doors.service_at if call.of_machine else doors.machine_at
    nonces = greet(doors.channel(call), doors.where(call))
    return proof_for(SECRET, call.path, where, nonces, call.request)


def _of_another_call(doors: Doors, call: Call) -> identity.Proof:
    other = (
        "/podrun.vipu.v1.UserService/ListPartitions"
        if call.of_machine
        else "/podrun.ipuof.MachineControl/Telemetry"
    )
    return _proof(doors, dataclasses.replace(call, path=other))


def _of_another_request(doors: Doors, call: Call) -> identity.Proof:
    return _proof(doors, dataclasses.replace(call, request=call.request + b"x", streams=False))


def _cut(doors: Doors, call: Call) -> identity.Proof:
    proof = _proof(doors, call)
    return dataclasses.replace(proof, text=proof.text[:-1])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda doors, call: None, id="no token"),
        pytest.param(lambda doors, call: _proof(doors, call, "a-secret-of-long-ago"), id="stale token"),
        pytest.param(_old, id="old proof"),
        pytest.param(_of_another_request, id="proof for another request"),
        pytest.param(_elsewhere, id="proof for another server"),
        pytest.param(_of_another_call, id="proof for another call"),
        pytest.param(_cut, id="damaged proof"),
    ],
)
def test_nobody_else_makes_any_call(doors: Doors, make: Make) -> None:
    before = doors.stopped
    codes = {call.row: doors.ask(call, make(doors, call)) for call in every_call()}
    assert codes == dict.fromkeys(TABLE, REFUSED)
    assert doors.stopped == before


def test_a_proof_is_good_for_one_call_whatever_it_is(doors: Doors) -> None:
    for call in every_call():
        proof = _proof(doors, call)
        assert doors.ask(call, proof) not in (REFUSED, "PERMISSION_DENIED"), call.row
        assert doors.ask(call, proof) == REFUSED, call.row
    assert doors.stopped == 1
