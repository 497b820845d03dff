"""Two users of one host: the calls that each may make at a server that one of them runs.

The server and its machines run in this process, as root. The others are processes with user ids of their own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podrun.core import access
from podrun.core.cluster_file import load_cluster
from podrun.core.environment import runtime_directory
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.server.access import FrontDesk
from podrun.partition.server.service import Service
from podrun.partition.server.sharing import Sharing
from podrun.partition.state.records import MachineUse
from podrun.partition.state.store import Store
from podrun.partition.state.values import Requirements
from podrun.protos import ipuof_pb2
from tests import other_users, rpc_table
from tests.other_users import ADMIN, ALICE, BOB
from tests.rpc_table import ANYBODY, HARMLESS, OWNER, TABLE

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(other_users.needs()), reason=f"needs {other_users.needs()}"),
]

CREATE = """
import json, sys
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.state.values import Requirements
with VipuClient("127.0.0.1", int(sys.argv[1]), 20) as client:
    client.create_partition(Requirements("alices", 4))
    print(json.dumps([info.owner for info in client.list_partitions()]))
"""
STRANGER = "UNAUTHENTICATED"


class _Pod:
    """A server of root's, with the partition ``alices`` of 4 IPUs."""

    def __init__(self, home: Path, *, shared: bool) -> None:
        self.home = home
        cluster = load_cluster("pod16")
        sharing = Sharing(shared, frozenset({ADMIN}) if shared else frozenset())
        self.pool = LocalMachinePool(cluster, options=sharing.machine_options())
        self.service = Service(cluster, Store(None, "pod16"), self.pool)
        self.port = self.service.start("127.0.0.1", 0, desk=FrontDesk(sharing))
        if shared:
            self.create()
        else:
            with VipuClient("127.0.0.1", self.port, 20) as client:
                client.create_partition(Requirements("alices", 4))
        assert self.service.wait_idle(60)

    @property
    def machine(self) -> str:
        """Where the partition's machine listens."""
        return self.pool.endpoints()[MachineUse("ipum1", "alices")]

    def answers(self, uid: int, how: str = "own") -> dict[str, str]:
        """The status of every call of a user."""
        told = json.dumps([f"127.0.0.1:{self.port}", self.machine, how])
        code = "from tests.rpc_table import main; main()"
        found: dict[str, str] = other_users.run(uid, self.home / str(uid), code, told)
        assert found.keys() == TABLE.keys()
        return found

    def create(self) -> None:
        """Alice makes her partition."""
        assert other_users.run(ALICE, self.home / "alice", CREATE, str(self.port)) == [str(ALICE)]


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


DENIED = {"PERMISSION_DENIED", "DENIED"}


def test_every_call_of_a_shared_server_and_its_machines(shared: _Pod) -> None:
    for user, may in (
        (BOB, {ANYBODY}),
        (ADMIN, {ANYBODY, OWNER, rpc_table.ADMIN}),
        (ALICE, {ANYBODY, OWNER}),
    ):
        if user == ALICE:
            shared.create()  # the administrator has removed her partition
            assert shared.service.wait_idle(60)
        for row, code in shared.answers(user).items():
            assert code in (HARMLESS if TABLE[row] in may else DENIED), (user, row, code)


def test_another_user_neither_removes_nor_sees_details(shared: _Pod) -> None:
    looks = """
import json, sys
from podrun.core.errors import DeniedError, ExhaustedError
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.state.values import Requirements
with VipuClient("127.0.0.1", int(sys.argv[1]), 20) as client:
    try:
        client.create_partition(Requirements("all", 16))
    except ExhaustedError as error:
        room = error.message
    reports = [report.to_json_dict() for report in client.machine_reports("alices")]
    try:
        client.remove_partition("alices")
        said = "removed"
    except DeniedError as error:
        said = error.message
    print(json.dumps([reports, said, room]))
"""
    for uid, sees in ((BOB, False), (ALICE, True)):
        reports, said, room = other_users.run(uid, shared.home / str(uid), looks, str(shared.port))
        assert bool(reports[0]["endpoint"]) is sees
        assert (said == "removed") is sees
        assert sees or f"belongs to {ALICE}, not to {BOB}" in said
        assert (f"alices (4 IPUs of {ALICE} since" in room) is not sees


def test_a_server_that_is_not_shared_answers_nobody_else(home: Path) -> None:
    pod = _Pod(home, shared=False)
    try:
        assert set(pod.answers(BOB).values()) == {STRANGER}
        assert set(pod.answers(0, "none").values()) == {STRANGER}, "root too has to show the secret"
    finally:
        pod.service.stop(grace=0)


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
from podrun.protos import ipuof_pb2 as pb
from podrun.protos.services import stub_of
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.state.values import PartitionState, Requirements
port, programs = int(sys.argv[1]), sys.argv[2]
with VipuClient("127.0.0.1", port, 20) as client:
    client.create_partition(Requirements("bobs", 4))
    client.wait_for_state("bobs", {PartitionState.ACTIVE}, 60)
    device = client.ipuof_config("bobs").devices[0]
job = pb.IpuRange(first=0, count=4)
requests = [pb.HostRequest(attach=pb.AttachRequest(job=job, owned=job, pid=1, hands_memory_over=True))]
tensor = pb.Tensor(name="w", dtype="float32", shape=[4, 1])
requests += [
    pb.HostRequest(write=pb.WriteRequest(region=pb.Region(number=n, size=4096), tensors=[tensor])) for n in range(3)
]
with grpc.insecure_channel(f"{device.ip}:{device.server_port}") as channel:
    replies = list(stub_of(pb, "Ipuof", channel).Session(iter(requests), timeout=60))
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


BOBS_MACHINE = """
import sys
from podrun.device.service.server import MachineServer
server = MachineServer(token="a-secret-that-bob-knows")
print(server.start(), flush=True)
sys.stdin.readline()
server.stop()
"""


def test_a_file_of_long_ago_attaches_no_program_to_another_users_machine(home: Path) -> None:
    """The port that it names is Bob's now: what root's program would write there stays at home."""
    from podrun.core.errors import UnrecoverableRuntimeError
    from podrun.core.layout import IpuRange
    from podrun.device.connection import AttachRequest
    from podrun.device.host.partition_config import connect_files

    words = other_users.words(BOB, sys.executable, "-c", BOBS_MACHINE)
    with subprocess.Popen(
        words,
        env=other_users.variables(home / "bob", BOB),
        cwd=other_users.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as bob:
        assert bob.stdout is not None
        host, port = bob.stdout.readline().strip().split(":")
        devices = [
            {"ip": host, "server_port": int(port), "machine": 0, "partition_ipu": n, "agent_id": "ipum1"}
            for n in range(4)
        ]
        file = home / "p_ipuof.conf"
        file.write_text(json.dumps({"devices": devices}))
        environ = {"IPUOF_CONFIG_PATH": str(file), "PODRUN_RUNTIME_DIR": str(home / "run")}
        connection = connect_files(environ, [file])
        try:
            ipus = IpuRange(0, 4)
            with pytest.raises(UnrecoverableRuntimeError, match=f"not this user's: it is run by {BOB}"):
                connection.try_attach(AttachRequest(ipus, ipus, 1, "root", "train.py", ""))
        finally:
            connection.close()
            bob.communicate("\n", timeout=60)


SILENT = """
import json, queue, sys
import grpc
from podrun.protos import ipuof_pb2 as pb
from podrun.protos.services import stub_of
codes, calls, channels = {}, [], []
for n in range(300):
    if n % 50 == 0:
        channels.append(grpc.insecure_channel(sys.argv[1], options=[("grpc.use_local_subchannel_pool", 1)]))
    calls.append(stub_of(pb, "Ipuof", channels[-1]).Session(iter(queue.SimpleQueue().get, None), timeout=60))
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
