"""Two hosts in network namespaces of their own: servers, machines and groups take a member of the other host, and
nobody who knows no secret, another one, or repeats what a member has said."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import MISSING, Authority
from tests.system.namespaces import CHECKOUT, NamespaceHost, needs, two_hosts

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(needs()), reason=f"needs {needs()}"),
]
SECRET = "a-secret-that-both-hosts-know"

SERVE = """
import json, sys
from podrun.collectives import create
from podrun.core.cluster_file import load_cluster
from podrun.device.service.server import MachineServer
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.server.service import Service
from podrun.partition.state.store import Store
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
from podrun.collectives import join_group
from podrun.core.access import PROOF_KEY
from podrun.core.errors import PodrunError
from tests.proofs import greet, proof_for
service, machine, token, secrets = json.loads(sys.argv[1])
calls = {service: "/podrun.vipu.v1.UserService/ListPartitions", machine: "/podrun.ipuof.MachineControl/Telemetry"}

def ask(where, proof):
    with grpc.insecure_channel(where) as channel:
        try:
            call = channel.unary_unary(calls[where])
            call(b"", timeout=10, metadata=() if proof is None else ((PROOF_KEY, proof.text),))
            return "taken"
        except grpc.RpcError as error:
            return error.code().name

def proof(secret, where, method="", named=""):
    with grpc.insecure_channel(where) as channel:
        return proof_for(secret, method or calls[where], named or where, greet(channel, where))

said = {}
for name, secret in secrets.items():
    said[name] = [ask(w, proof(secret, w) if secret else None) for w in calls]
proofs = {w: proof(secrets["right"], w) for w in calls}
said["repeated"] = [answer for w in calls for answer in (ask(w, proofs[w]), ask(w, proofs[w]))]
said["elsewhere"] = [ask(machine, proof(secrets["right"], machine, named=service))]
said["other method"] = [ask(machine, proof(secrets["right"], machine, calls[service]))]
try:
    stranger = join_group({**token, "key": "0" * 32}, 1, timeout=5)
    try:
        stranger.barrier()
        said["group"] = ["taken"]
    finally:
        stranger.close()
except PodrunError as error:
    said["group"] = [type(error).__name__]
print(json.dumps(said), flush=True)
member = join_group(token, 1, timeout=20)
sys.stdin.readline()
member.barrier()
member.close()
print("met", flush=True)
"""
MEET = """
import json, os, sys
from podrun.collectives import join_group
from podrun.core.errors import PodrunError
from podrun.device.service.control import MachineControl
from podrun.partition.client.vipu_client import VipuClient
service, machine, token, secret = json.loads(sys.argv[1])
os.environ["PODRUN_TOKEN"] = secret
host, port = service.rsplit(":", 1)

def group():
    member = join_group(token, 1, timeout=8)
    try:
        member.barrier()
    finally:
        member.close()

def said(ask):
    try:
        ask()
        return "taken"
    except PodrunError as error:
        return error.message

calls = [
    lambda: VipuClient(host, int(port), 8).list_partitions(),
    lambda: MachineControl(machine, token=secret).telemetry(),
]
if sys.argv[2] != "calls":
    calls.append(group)
print(json.dumps([said(ask) for ask in calls]), flush=True)
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
def program(
    host: NamespaceHost, code: str, *arguments: str, tls: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A Python program on a host; ended with the context."""
    env = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PODRUN_RUNTIME_DIR": "/tmp/run", **(tls or {})}
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


@pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}")
def test_only_hosts_with_a_certificate_of_the_authority_meet(
    hosts: tuple[NamespaceHost, NamespaceHost],
) -> None:
    first, second = hosts
    # Both hosts have a /tmp of their own: each finds its files where the variables say.
    directory = Path(tempfile.mkdtemp(prefix="tls-", dir=CHECKOUT / ".venv"))
    try:
        ours, others = Authority(directory / "a"), Authority(directory / "b")
        here = ours.host("first", f"IP:{first.address}")
        good = ours.host("second", f"IP:{second.address}")
        wanted = {
            "none": (None, "speaks TLS, and this process has no certificate"),
            "expired": (ours.host("old", f"IP:{second.address}", days=-1), "has expired: make a new one"),
            "other": (others.host("other", f"IP:{second.address}"), "is not of the authority in"),
        }
        with program(first, SERVE, first.address, SECRET, tls=here) as server:
            where = json.dumps([*json.loads(line(server)), SECRET])
            for tls, said in wanted.values():
                with program(second, MEET, where, "calls", tls=tls) as client:
                    answers = json.loads(line(client))
                    assert [said in answer for answer in answers] == [True, True], answers
            assert server.stdin is not None
            server.stdin.write("barrier\n")
            server.stdin.flush()
            with program(second, MEET, where, "all", tls=good) as client:
                assert json.loads(line(client)) == ["taken"] * 3
        with program(first, SERVE, first.address, SECRET, tls=ours.host("misnamed", "IP:10.1.1.1")) as server:
            where = json.dumps([*json.loads(line(server)), SECRET])
            with program(second, MEET, where, "all", tls=good) as client:
                answers = json.loads(line(client))
                assert all(
                    "is for other names: make one with the address that is dialled" in a for a in answers
                )
                assert all(f"(expected: {first.address})" in a for a in answers)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
