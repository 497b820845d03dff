"""Garbage at every port: servers, machines, groups and the metrics page go on, and keep nothing of it."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from podrun.collectives import create, join_group
from podrun.core import tls
from podrun.core.cluster_file import load_cluster
from podrun.device.service.control import MachineControl
from podrun.device.service.server import MachineServer
from podrun.monitor.exporter import make_server
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.server.service import Service
from podrun.partition.state.store import Store
from tests.certificates import MISSING, Authority

SECRET = "a-secret-of-this-user"
OPENINGS = (
    b"",
    b"GET /metrics HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nAuthorization: Bearer " + b"x" * 500 + b"\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b'{"number": "1"}\n{"rank": 1, "proof": ""}\n',
    b"[" * 5000 + b"\n",
)


def throw(port: int, count: int, seed: int) -> None:
    """Open connections, a few at a time, each with garbage; half of them say nothing more and stay for a while."""
    rng = random.Random(seed)
    held: list[socket.socket] = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", port), timeout=60)
            held.append(sock)
            sock.sendall(rng.choice(OPENINGS) + rng.randbytes(rng.randrange(200)))
        while len(held) > 100:
            held.pop(rng.randrange(len(held))).close()
    for sock in held:
        sock.close()


@pytest.fixture(
    params=["plain", pytest.param("tls", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING))]
)
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether all connections use TLS."""
    for name in tls.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if request.param == "tls":
        for name, value in Authority(tmp_path).host("here").items():
            monkeypatch.setenv(name, value)
    return str(request.param)


@pytest.mark.parametrize("count", [10, *(pytest.param(n, marks=pytest.mark.slow) for n in (40, 2000))])
def test_garbage_at_every_port_changes_nothing(way: str, count: int) -> None:
    cluster = load_cluster("pod16")
    service = Service(cluster, Store(None, "pod16"), LocalMachinePool(cluster))
    machine = MachineServer(token=SECRET)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: service.stop(grace=0))
        stack.callback(machine.stop)
        port = service.start("127.0.0.1", 0)
        endpoint = machine.start()
        client = stack.enter_context(VipuClient("127.0.0.1", port, 30, own=True))
        page = stack.enter_context(make_server(client, "127.0.0.1", 0, "key"))
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(page.shutdown)
        first, token = create(2, address="127.0.0.1", timeout=60, host="A")
        stack.callback(first.close)
        listener = int(first._client.listener.getsockname()[1])  # type: ignore[attr-defined]
        ports = (port, int(endpoint.rpartition(":")[2]), page.server_address[1], token["port"], listener)
        before = _held()
        for seed, each in enumerate(ports):
            # A rank takes the connections at its own port when its group meets: until then the kernel holds a thousand.
            throw(each, min(count, 800) if each == listener else count, seed)
            assert client.server_version().port == port
        control = MachineControl(endpoint, token=SECRET, timeout=30)
        assert control.telemetry().partition == ""
        control.close()
        _settle(before)
        second = join_group(token, 1, host="B")
        stack.callback(second.close)
        other = threading.Thread(target=second.barrier)
        other.start()
        first.barrier()
        other.join(60)
        assert not other.is_alive()


def _held() -> tuple[int, int, int]:
    """Threads, file descriptors and bytes of memory of this process."""
    process = psutil.Process()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), process.memory_info().rss


def _settle(before: tuple[int, int, int]) -> None:
    """Wait until the resources that garbage took are given back, except for those that a server keeps ready."""
    end = time.monotonic() + 45
    while True:
        gc.collect()
        threads, files, memory = (now - then for now, then in zip(_held(), before, strict=True))
        # A group listens to its newest strangers until it meets: 256 and those of its members at each port.
        if threads < 80 and files < 700 and memory < 200 << 20:
            return
        assert time.monotonic() < end, (
            f"{threads} threads, {files} files, {memory >> 20} MiB more than before"
        )
        time.sleep(0.05)
