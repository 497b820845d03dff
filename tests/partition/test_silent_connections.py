"""Connections that say nothing: closed soon, and not more than a number; watchers are not among them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import pytest

from podrun.collectives import registrar
from podrun.core.gate import GREETING, SILENT_SECONDS, connection_limits
from podrun.device.service import wire
from podrun.device.service.server import MachineServer
from podrun.partition.machines.endpoint_watch import EndpointWatcher
from podrun.partition.server import grpc_listen

from .conftest import Pod

WAIT = 60.0
SOON = 0.3


def connect(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
    connection.sendall(data)
    return connection


def wait_closed(connection: socket.socket) -> None:
    """Wait until the other side closes. Raises TimeoutError if it does not."""
    connection.settimeout(WAIT)
    with connection, contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


def limited(monkeypatch: pytest.MonkeyPatch, seconds: float, most: int) -> None:
    limits = connection_limits(seconds, most)
    monkeypatch.setattr(grpc_listen, "connection_limits", lambda: limits)
    changed = dict(limits)
    options = tuple((name, changed.get(name, value)) for name, value in wire.SERVER_OPTIONS)
    assert changed.items() <= dict(options).items(), "a machine has no such limits"
    monkeypatch.setattr(wire, "SERVER_OPTIONS", options)


def serve_both(make_pod: Callable[..., Pod], check: Callable[[int], None]) -> None:
    """Run a check at the port of a partition service and at that of a machine."""
    pod = make_pod()
    check(pod.port)
    assert pod.client.list_partitions() == []
    machine = MachineServer(token="t" * 64)
    try:
        check(int(machine.start().rpartition(":")[2]))
    finally:
        machine.stop()


def test_silent_connections_are_closed_soon(
    make_pod: Callable[..., Pod], monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, SOON, 512)

    def check(port: int) -> None:
        silent = [connect(port, data) for _ in range(30) for data in (b"", GREETING[:9])]
        for connection in silent:
            wait_closed(connection)

    serve_both(make_pod, check)
    assert SILENT_SECONDS <= 10


def test_connections_beyond_the_most_are_closed_at_once(
    make_pod: Callable[..., Pod], monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 600.0, 8)

    def check(port: int) -> None:
        connections = [connect(port) for _ in range(20)]
        gone = threading.Semaphore(0)
        threads = [
            threading.Thread(target=lambda c=c: (wait_closed(c), gone.release()), daemon=True)
            for c in connections
        ]
        for thread in threads:
            thread.start()
        for _ in range(12):
            assert gone.acquire(timeout=WAIT)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(WAIT)

    machine = MachineServer(token="t" * 64)
    pod = make_pod()
    try:
        for port in (pod.port, int(machine.start().rpartition(":")[2])):
            check(port)
    finally:
        machine.stop()


def test_idle_connections_without_a_call_are_closed(
    make_pod: Callable[..., Pod], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_listen, "IDLE_SECONDS", SOON)
    pod = make_pod()
    wait_closed(connect(pod.port, GREETING))
    for _ in range(2):
        assert pod.client.list_partitions() == []  # A client connects again.


def test_a_watcher_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, SOON, 512)
    machine = MachineServer(token="t" * 64)
    endpoint = machine.start()
    watcher, ended = EndpointWatcher(), threading.Event()
    stop = watcher.watch(endpoint, ended.set)
    try:
        (entry,) = watcher._watched
        first = entry.connection
        wait_closed(connect(int(endpoint.rpartition(":")[2])))  # By now the watcher's would be closed, too.
        assert entry.connection is first
        assert not ended.is_set()
    finally:
        machine.stop()
    assert ended.wait(WAIT)
    stop()


def test_strangers_at_the_registrar_are_closed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrar, "STRANGER_SECONDS", SOON)
    meeting = registrar.Registrar("127.0.0.1", 0, 2, "key")
    try:
        for connection in [connect(meeting.port) for _ in range(5)]:
            wait_closed(connection)
    finally:
        meeting.close()
