"""Two hosts in network namespaces of their own: servers, machines and groups take a member of the other host, and
nobody who knows no secret, another one, or repeats what a member has said."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.namespaces import CHECKOUT, NamespaceHost, needs, two_hosts

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(needs()), reason=f"needs {needs()}"),
]
SECRET = "a-secret-that-both-hosts-know"

SERVE = """
import json, sys
from podrun.collectives import create
from podrun.core.cluster import load_cluster
from podrun.device.service.server import MachineServer
from podrun.vipu.machine_pool import LocalMachinePool
from podrun.vipu.service import Service
from podrun.vipu.store import Store
address, secret = sys.argv[1:]
cluster = load_cluster("pod16")
service = Service(cluster, Store(None, "pod16"), LocalMachinePool(cluster))
port = service.start(address, 0, secret)
machine = MachineServer(token=secret).start(address)
group, token = create(2, address=address, timeout=20)
print(json.dumps([f"{address}:{port}", machine, token]), flush=True)
if sys.stdin.readline().strip() == "barrier":
    group.barrier()
group.close()
service.stop(grace=0)
"""
ASK = """
import json, sys
import grpc
from podrun.collectives import join
from podrun.core import identity
from podrun.core.access import PROOF_KEY
from podrun.core.errors import PodrunError
service, machine, token, secrets = json.loads(sys.argv[1])
calls = {service: "/podrun.vipu.UserService/ListPartitions", machine: "/podrun.ipuof.MachineControl/Telemetry"}

def ask(where, proof):
    with grpc.insecure_channel(where) as channel:
        try:
            call = channel.unary_unary(calls[where])
            call(b"", timeout=10, metadata=() if proof is None else ((PROOF_KEY, proof.text),))
            return "taken"
        except grpc.RpcError as error:
            return error.code().name

said = {}
for name, secret in secrets.items():
    said[name] = [ask(w, identity.make_proof(secret, m, w) if secret else None) for w, m in calls.items()]
proofs = {w: identity.make_proof(secrets["right"], m, w) for w, m in calls.items()}
said["repeated"] = [answer for w in calls for answer in (ask(w, proofs[w]), ask(w, proofs[w]))]
said["elsewhere"] = [ask(machine, identity.make_proof(secrets["right"], calls[machine], service))]
said["other method"] = [ask(machine, identity.make_proof(secrets["right"], calls[service], machine))]
try:
    stranger = join({**token, "key": "0" * 32}, 1, timeout=5)
    try:
        stranger.barrier()
        said["group"] = ["taken"]
    finally:
        stranger.close()
except PodrunError as error:
    said["group"] = [type(error).__name__]
print(json.dumps(said), flush=True)
member = join(token, 1, timeout=20)
sys.stdin.readline()
member.barrier()
member.close()
print("met", flush=True)
"""


@pytest.fixture
def hosts() -> Iterator[tuple[NamespaceHost, NamespaceHost]]:
    home = Path(tempfile.mkdtemp(prefix="h-"))
    try:
        with two_hosts(home) as made:
            yield made
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def program(host: NamespaceHost, code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program on a host; ended with the context."""
    env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PODRUN_RUNTIME_DIR": "/tmp/run"}
    words = host.words(sys.executable, "-c", code, *arguments, env=env, cwd=CHECKOUT)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_wrong_missing_and_repeated_proofs_between_hosts(hosts: tuple[NamespaceHost, NamespaceHost]) -> None:
    first, second = hosts
    with program(first, SERVE, first.address, SECRET) as server:
        where: list[Any] = json.loads(line(server))
        secrets = {"right": SECRET, "wrong": "another-secret-than-that", "missing": ""}
        with program(second, ASK, json.dumps([*where, secrets])) as client:
            said = json.loads(line(client))
            refused = "UNAUTHENTICATED"
            assert said["right"] == ["taken", "taken"]
            assert said["wrong"] == said["missing"] == [refused, refused]
            assert said["repeated"] == ["taken", refused, "taken", refused]
            assert said["elsewhere"] == said["other method"] == [refused]
            assert said["group"] == ["RankLostError"]
            for process in (server, client):
                assert process.stdin is not None
                process.stdin.write("barrier\n")
                process.stdin.flush()
            assert line(client) == "met\n"
