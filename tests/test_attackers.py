"""Small attackers on a shared host, with user ids of their own, against what others run there at that moment."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.server.access import FrontDesk
from podrun.partition.server.service import Service
from podrun.partition.server.sharing import Sharing
from podrun.partition.state.store import Store
from tests import other_users
from tests.other_users import ALICE, BOB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(bool(other_users.needs()), reason=f"needs {other_users.needs()}"),
]
SMALL = str(other_users.ROOT / "tests/system/programs/small.py")
SECRET = "weights-of-nobody-else"


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that other users can reach."""
    path = Path(tempfile.mkdtemp(prefix="users-"))
    path.chmod(0o755)
    yield path
    rmtree(path, ignore_errors=True)


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server of root's that all users share; it and its machines run in this process."""
    cluster, sharing = load_cluster("pod16"), Sharing(shared=True)
    pool = LocalMachinePool(cluster, options=sharing.machine_options())
    service = Service(cluster, Store(None, "pod16"), pool)
    yield service.start("127.0.0.1", 0, desk=FrontDesk(sharing))
    service.stop(grace=0)


@contextmanager
def attacker(home: Path, code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program of Bob's: it prints a line when it has begun, and what it got as JSON when its input ends."""
    with subprocess.Popen(
        other_users.words(BOB, sys.executable, "-c", code, *arguments),
        env=other_users.variables(home / "bob", BOB), cwd=other_users.ROOT,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as bob:  # fmt: skip
        assert bob.stdout is not None
        assert bob.stdout.readline() == "begun\n"
        yield bob


def what_it_got(bob: subprocess.Popen[str]) -> dict[str, int]:
    """The attacker's own count."""
    out, _ = bob.communicate("\n", timeout=30)
    counts: dict[str, int] = json.loads(out)
    return counts


CREATES = """
import json, sys
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.state.values import PartitionState, Requirements
with VipuClient("127.0.0.1", int(sys.argv[1]), 20) as client:
    for _ in range(40):
        client.create_partition(Requirements("alices", 4))
        client.wait_for_state("alices", {PartitionState.ACTIVE}, 60)
        client.remove_partition("alices")
        client.wait_for_state("alices", {PartitionState.REMOVED}, 60)
print(json.dumps("each of them was hers until she removed it"))
"""
REMOVES = """
import collections, json, sys, threading
from podrun.core.errors import PodrunError
from podrun.partition.client.vipu_client import VipuClient
over, counts = threading.Event(), collections.Counter()
def attack():
    with VipuClient("127.0.0.1", int(sys.argv[1]), 20) as client:
        while not over.is_set():
            try:
                client.remove_partition("alices", force=True)
                counts["removed"] += 1
            except PodrunError as error:
                counts[type(error).__name__] += 1
threads = [threading.Thread(target=attack) for _ in range(3)]
for thread in threads: thread.start()
print("begun", flush=True)
sys.stdin.readline()
over.set()
for thread in threads: thread.join()
print(json.dumps(counts))
"""


def test_nobody_else_removes_a_partition_while_it_is_made(home: Path, port: int) -> None:
    """Between its creation and its owner's name there is no moment."""
    with attacker(home, REMOVES, str(port)) as bob:
        said = other_users.run(ALICE, home / "alice", CREATES, str(port), timeout=120)
        got = what_it_got(bob)
    assert said == "each of them was hers until she removed it"
    assert got.get("removed", 0) == 0
    assert got["DeniedError"] > 20
    assert got["NotFoundError"] > 20


CONNECTS_FIRST = """
import json, socket, sys, threading, time
over, counts = threading.Event(), {"connected": 0, "descriptors": 0, "bytes": 0}
def attack():
    tried = set()
    while not over.is_set():
        names = [line.split()[-1] for line in open("/proc/net/unix") if "@podrun-" in line]
        for name in set(names) - tried:
            one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            one.settimeout(2)
            try:
                one.connect("\\0" + name[1:])
            except OSError:
                continue
            tried.add(name)
            counts["connected"] += 1
            try:
                data, fds, _, _ = socket.recv_fds(one, 64, 4)
                counts["descriptors"] += len(fds)
                counts["bytes"] += len(data)
            except OSError:
                pass
thread = threading.Thread(target=attack)
thread.start()
print("begun", flush=True)
sys.stdin.readline()
over.set()
thread.join()
print(json.dumps(counts))
"""
TRAINS = """
import json, os, runpy, sys, time
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.state.values import PartitionState, Requirements
port = int(sys.argv[1])
with VipuClient("127.0.0.1", port, 20) as client:
    client.create_partition(Requirements("alices", 4))
    client.wait_for_state("alices", {PartitionState.ACTIVE}, 60)
names = {"HOST": "127.0.0.1", "PORT": str(port), "PARTITION_ID": "alices"}
os.environ.update({f"IPUOF_VIPU_API_{name}": value for name, value in names.items()})
import podrun.compat
sys.path.insert(0, os.path.dirname(podrun.compat.__file__))
from podrun.device.service.handover import MemorySender
connects = MemorySender._connect
MemorySender._connect = lambda *asked: (time.sleep(0.5), connects(*asked))[1]  # As on a busy host: Bob is faster.
sys.argv = ["small.py", "30"]
runpy.run_path(os.environ["SMALL"], run_name="__main__")
print(json.dumps("trained"))
"""


def test_who_connects_first_to_a_programs_memory_gets_nothing(
    home: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A job of Alice's on machines of root's; Bob reads the names of their sockets and is faster."""
    with attacker(home, CONNECTS_FIRST) as bob:
        said = other_users.run(ALICE, home / "alice", TRAINS, str(port), env={"SMALL": SMALL}, timeout=120)
        got = what_it_got(bob)
    assert said == "trained"
    assert got["connected"] > 0, "Bob was too slow to be a test"
    assert (got["descriptors"], got["bytes"]) == (0, 0)
    assert f"a process of {BOB} was refused the shared memory of a process of {ALICE}" in caplog.text


class _Recorder:
    """Listens where a machine or a server is expected, answers as HTTP/2 does, proves nothing, keeps what it hears."""

    def __init__(self) -> None:
        self.heard = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=[connection], daemon=True).start()

    def _listen(self, connection: socket.socket) -> None:
        with connection:
            connection.sendall(b"\0\0\0\4\0\0\0\0\0")  # Empty settings: the other side may send requests.
            with suppress(OSError):
                while data := connection.recv(1 << 16):
                    self.heard += data

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def recorder() -> Iterator[_Recorder]:
    made = _Recorder()
    yield made
    made.close()


@pytest.mark.parametrize("what", ["machine", "server"])
def test_a_program_tells_nothing_to_who_proves_nothing(home: Path, recorder: _Recorder, what: str) -> None:
    """A port that an IPUoF file or a variable names has another listener since."""
    devices = [
        {
            "ip": "127.0.0.1",
            "server_port": recorder.port,
            "machine": 0,
            "partition_ipu": n,
            "agent_id": "ipum1",
        }
        for n in range(4)
    ]
    file = home / "p_ipuof.conf"
    file.write_text(json.dumps({"devices": devices}))
    address = {"HOST": "127.0.0.1", "PORT": str(recorder.port), "PARTITION_ID": "p", "TIMEOUT": "10"}
    more = {f"IPUOF_VIPU_API_{name}": value for name, value in address.items()}
    if what == "machine":
        more = {"IPUOF_CONFIG_PATH": str(file)}
    done = subprocess.run(
        [sys.executable, "-m", "podrun.compat", SMALL, "3"],
        env=other_users.variables(home / "own", 0, **more, MARK=SECRET),
        cwd=home, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert recorder.heard.startswith(b"PRI * HTTP/2.0"), done.stderr
    assert len(recorder.heard) < 4096, "a greeting, and signs of life of the connection"
    for told in (b"small.py", b"l1loss", b"AttachRequest", SECRET.encode(), str(Path.home()).encode() + b"/"):
        assert told not in recorder.heard
    last = done.stderr.splitlines()[-2:]
    assert any(word in " ".join(last) for word in ("prove", "answer", "unreachable")), done.stderr
