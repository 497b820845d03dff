"""Two users of one host: what each may ask of a server that one of them runs, call by call.

The server and its machines run in this process, as root. The others are processes with user ids of their own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from podrun.core import access, identity
from podrun.core.cluster import load_cluster
from podrun.core.environment import environment, runtime_directory
from podrun.protos import ipuof_pb2, vipu_pb2
from podrun.vipu.client import VipuClient
from podrun.vipu.machine_pool import LocalMachinePool, MachineUse
from podrun.vipu.rights import RIGHTS, Right, Sharing
from podrun.vipu.service import Service
from podrun.vipu.store import Store
from podrun.vipu.types import Requirements
from tests import other_users
from tests.other_users import ADMIN, ALICE, BOB

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(other_users.needs()), reason=f"needs {other_users.needs()}"),
]

CREATE = """
import json, sys
from podrun.vipu.client import VipuClient
from podrun.vipu.types import Requirements
with VipuClient("127.0.0.1", int(sys.argv[1]), 20) as client:
    client.create_partition(Requirements("alices", 4))
    print(json.dumps([info.owner for info in client.list_partitions()]))
"""
CALLS = """
import json, sys
import grpc
from podrun.core.access import make_token, open_channel
from podrun.core.environment import environment, runtime_directory
from podrun.protos import ipuof_pb2, ipuof_pb2_grpc, vipu_pb2, vipu_pb2_grpc
from tests.test_two_users import every_call
vipu, machine, how = json.loads(sys.argv[1])
token = {"own": lambda: make_token(environment(), runtime_directory()), "none": str}[how]()
codes = {}
for where, stubs in ((vipu, vipu_pb2_grpc), (machine, ipuof_pb2_grpc)):
    with open_channel(where, (), token) as channel:
        for service, method, request, streams in every_call(stubs is vipu_pb2_grpc):
            call = getattr(getattr(stubs, service + "Stub")(channel), method)
            try:
                if streams:
                    error = next(call(iter([request]), timeout=20)).error_json
                    codes[method] = "DENIED" if "another user" in error else "OK"
                else:
                    call(request, timeout=20)
                    codes[method] = "OK"
            except grpc.RpcError as error:
                codes[method] = error.code().name
print(json.dumps(codes))
"""
STRANGER = "UNAUTHENTICATED"
HARMLESS = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "UNAVAILABLE"}
"""Answers to a caller who may ask, about what is asked for."""


def every_call(vipu: bool) -> Iterator[tuple[str, str, Any, bool]]:
    """Each call of the two protocols: service, method, a request about the partition ``alices``, whether it streams."""
    module = vipu_pb2 if vipu else ipuof_pb2
    for service in module.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            if method.name == "Stop":
                continue  # asked for last: see the test
            request = getattr(module, method.input_type.name)()
            if hasattr(request, "partition_id"):
                request.partition_id = "alices"
            if method.name == "Session":
                request = ipuof_pb2.HostRequest(attach=ipuof_pb2.AttachRequest(pid=1, user="root"))
                request.attach.job.count = request.attach.owned.count = 4
            if method.name == "RemovePartition" or (method.name == "JoinGroup"):
                continue  # changes what the calls after it are about, or waits
            yield service.name, method.name, request, bool(method.client_streaming)


class _Pod:
    """A server of root's, with the partition ``alices`` of 4 IPUs."""

    def __init__(self, home: Path, *, shared: bool) -> None:
        self.home = home
        cluster = load_cluster("pod16")
        sharing = Sharing(shared, frozenset({ADMIN}) if shared else frozenset())
        self.pool = LocalMachinePool(cluster, options=sharing.machine_options())
        self.service = Service(cluster, Store(None, "pod16"), self.pool)
        self.port = self.service.start("127.0.0.1", 0, sharing=sharing)
        if shared:
            assert other_users.run(ALICE, home / "alice", CREATE, str(self.port)) == [str(ALICE)]
        else:
            with VipuClient("127.0.0.1", self.port, 20) as client:
                client.create_partition(Requirements("alices", 4))
        assert self.service.wait_idle(20)

    @property
    def machine(self) -> str:
        """Where the partition's machine listens."""
        return self.pool.endpoints()[MachineUse("ipum1", "alices")]

    def answers(self, uid: int, how: str = "own") -> dict[str, str]:
        """The status of every call of a user."""
        told = json.dumps([f"127.0.0.1:{self.port}", self.machine, how])
        found: dict[str, str] = other_users.run(uid, self.home / str(uid), CALLS, told)
        return found


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that other users can reach."""
    path = Path(tempfile.mkdtemp(prefix="users-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def shared(home: Path) -> Iterator[_Pod]:
    pod = _Pod(home, shared=True)
    yield pod
    pod.service.stop(grace=0)


def test_every_call_of_a_shared_server_and_its_machines(shared: _Pod) -> None:
    control = {m.name for m in ipuof_pb2.DESCRIPTOR.services_by_name["MachineControl"].methods} - {"Stop"}
    bob = shared.answers(BOB)
    assert bob.keys() == {name for _, name, _, _ in [*every_call(True), *every_call(False)]}
    for method, code in bob.items():
        if method in control:
            assert code == "PERMISSION_DENIED", method
        elif method == "Session":
            assert code == "DENIED", "another user attached to the partition"
        elif RIGHTS[method] is Right.ANYBODY:
            assert code in HARMLESS, method
        else:
            assert code == "PERMISSION_DENIED", method
    alice = shared.answers(ALICE)
    for method, code in alice.items():
        if method in control or RIGHTS.get(method) is Right.ADMIN:
            assert code == "PERMISSION_DENIED", method
        else:
            assert code in HARMLESS, method
    admin = shared.answers(ADMIN)
    for method, code in admin.items():
        assert code == "PERMISSION_DENIED" if method in control else code in HARMLESS, method


def test_another_user_neither_removes_nor_sees_details(shared: _Pod) -> None:
    looks = """
import json, sys
from podrun.core.errors import DeniedError
from podrun.vipu.client import VipuClient
with VipuClient("127.0.0.1", int(sys.argv[1]), 20) as client:
    reports = [report.to_json_dict() for report in client.machine_reports("alices")]
    try:
        client.remove_partition("alices")
        said = "removed"
    except DeniedError as error:
        said = error.message
    print(json.dumps([reports, said]))
"""
    for uid, sees in ((BOB, False), (ALICE, True)):
        reports, said = other_users.run(uid, shared.home / str(uid), looks, str(shared.port))
        assert bool(reports[0]["endpoint"]) is sees
        assert (said == "removed") is sees
        assert sees or f"belongs to {ALICE}, not to {BOB}" in said


@pytest.mark.parametrize("how", ["none", "own"])
def test_a_server_that_is_not_shared_answers_nobody_else(home: Path, how: str) -> None:
    pod = _Pod(home, shared=False)
    try:
        assert set(pod.answers(BOB, how).values()) == {STRANGER}
        own = dict.fromkeys(pod.answers(0, "none").values())  # root too needs the secret, or has none to show
        assert set(own) == {STRANGER}
    finally:
        pod.service.stop(grace=0)


def test_a_stale_secret_and_a_repeated_proof_are_refused(home: Path) -> None:
    pod = _Pod(home, shared=False)
    try:
        token, where = make_known(), f"127.0.0.1:{pod.port}"
        method = "/podrun.vipu.UserService/ListPartitions"
        for secret, now, reason in (
            ("a-secret-of-long-ago", None, "does not know"),
            (token, 1.0, "clocks"),
        ):
            said = _refusal(where, identity.make_proof(secret, method, where, now))
            assert said.startswith(STRANGER)
            assert reason in said
        proof = identity.make_proof(token, method, where)
        assert _refusal(where, proof) == ""
        assert "repeats" in _refusal(where, proof)
    finally:
        pod.service.stop(grace=0)


def make_known() -> str:
    """The secret of this process's user."""
    return access.make_token(environment(), runtime_directory())


def _refusal(where: str, proof: identity.Proof) -> str:
    """What a server says to a proof; empty if it takes it."""
    with grpc.insecure_channel(where) as channel:
        call = channel.unary_unary("/podrun.vipu.UserService/ListPartitions")
        try:
            call(b"", timeout=10, metadata=((access.PROOF_KEY, proof.text),))
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"
    return ""


def test_the_secret_lies_where_no_other_user_reads_it(home: Path) -> None:
    directory = home / "run"
    assert len(access.make_token({}, runtime_directory({"PODRUN_RUNTIME_DIR": str(directory)}))) == 64
    bob = ["setpriv", "--reuid", str(BOB), "--regid", str(BOB), "--clear-groups", "cat", directory / "token"]
    read = subprocess.run(bob, capture_output=True, text=True, timeout=20, check=False)
    assert read.returncode != 0
    assert "Permission denied" in read.stderr


ATTACK_MEMORY = """
import json, sys
import grpc
from podrun.protos import ipuof_pb2 as pb, ipuof_pb2_grpc as stubs
from podrun.vipu.client import VipuClient
from podrun.vipu.types import PartitionState, Requirements
port, programs = int(sys.argv[1]), sys.argv[2]
with VipuClient("127.0.0.1", port, 20) as client:
    client.create_partition(Requirements("bobs", 4))
    client.wait_for_state("bobs", {PartitionState.ACTIVE}, 20)
    device = client.ipuof_config("bobs").devices[0]
job = pb.IpuRange(first=0, count=4)
requests = [pb.HostRequest(attach=pb.AttachRequest(job=job, owned=job, pid=1, hands_memory_over=True))]
tensor = pb.Tensor(name="w", dtype="float32", shape=[4, 1])
requests += [
    pb.HostRequest(write=pb.WriteRequest(region=pb.Region(number=n, size=4096), tensors=[tensor])) for n in range(3)
]
with grpc.insecure_channel(f"{device.ip}:{device.server_port}") as channel:
    replies = list(stubs.IpuofStub(channel).Session(iter(requests), timeout=60))
print(json.dumps([json.loads(r.error_json)["message"] if r.error_json else "" for r in replies]))
"""


def test_a_machine_opens_nothing_because_another_user_says_its_number(
    shared: _Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podrun.device.service.handover.PATIENCE_S", 0.2)
    assert not {"pid", "fd", "inode"} & {field.name for field in ipuof_pb2.Region.DESCRIPTOR.fields}
    attached, *written = other_users.run(BOB, shared.home / "bob", ATTACK_MEMORY, str(shared.port), "")
    assert attached == ""
    assert len(written) == 3
    assert all("was not handed over" in said for said in written)


SILENT = """
import json, queue, sys
import grpc
from podrun.protos import ipuof_pb2_grpc as stubs
codes, calls, channels = {}, [], []
for n in range(300):
    if n % 50 == 0:
        channels.append(grpc.insecure_channel(sys.argv[1], options=[("grpc.use_local_subchannel_pool", 1)]))
    calls.append(stubs.IpuofStub(channels[-1]).Session(iter(queue.SimpleQueue().get, None), timeout=60))
for call in calls:
    name = call.code().name
    codes[name] = codes.get(name, 0) + 1
print(json.dumps(codes))
"""


def test_silent_sessions_of_another_user_take_no_thread(home: Path) -> None:
    pod = _Pod(home, shared=False)
    try:
        assert other_users.run(BOB, home / "bob", SILENT, pod.machine) == {STRANGER: 300}
        with VipuClient("127.0.0.1", pod.port, 20) as client:
            assert client.machine_reports("alices")[0].state == "up"
    finally:
        pod.service.stop(grace=0)
